//! One orthonormal write map for the whole residual stream, and the draft it gives before healing.
//!
//! Every writer (embeddings, o_proj, down_proj) writes with `Qᵀ`; every reader reads `W·diag(g)·Q`
//! with the norm's gain folded in, so that the draft's own gains are 1. A norm over the smaller
//! width k divides by another mean: for x in the span of Q, `n_d(x) = √(d/k)·Q·n_k(Qᵀx)` with
//! `eps' = eps·d/k`, and the factor goes into the reader. Query, key and value outputs live in
//! head space and are never projected; o_proj is projected on its output only.
//!
//! A norm that takes the mean off (StableLM) keeps doing so in the draft. The map is then made so
//! that what it writes has no mean: k − 1 directions of the centred residual, spread over k
//! channels by orthonormal rows that are orthogonal to (1, …, 1). Norms on both sides agree as
//! above. The direction (1, …, 1) is then free, and carries what the target's norms add.

use candle_core::{DType, Device, Tensor};
use faer::Mat;

use super::BuildError;
use super::calibrate::Statistics;
use super::linalg::{to_tensor, top_eigenvectors};
use super::plan::Plan;
use super::prune::{Selection, Source};
use crate::model::decoder::{Decoder, DecoderLayer, Linear, Norm};
use crate::model::{ModelConfig, NormKind};

/// The write map and how much of the normalised residual it keeps.
pub struct WriteMap {
    /// `(D, K)`: orthonormal columns, or such columns times orthonormal rows without a mean.
    pub q: Mat<f64>,
    /// The same, as f32.
    pub tensor: Tensor,
    /// Share of the energy of the RMS-normalised residual inside the span.
    pub kept: f64,
}

impl WriteMap {
    /// The leading directions of the RMS-normalised residual over all norm sites. The raw residual
    /// would be the wrong thing to look at: a few tokens of enormous norm own its covariance.
    ///
    /// # Errors
    /// When the decomposition fails.
    pub fn new(
        statistics: &Statistics,
        k: usize,
        norm: NormKind,
        device: &Device,
    ) -> Result<Self, BuildError> {
        let d = statistics.covariances[0].nrows();
        if k == d {
            let q = Mat::<f64>::identity(d, d);
            return Ok(Self { tensor: to_tensor(&q, device)?, q, kept: 1.0 });
        }
        let mut sum = Mat::<f64>::zeros(d, d);
        for covariance in &statistics.covariances {
            let trace: f64 = (0..d).map(|i| covariance[(i, i)]).sum();
            sum += covariance * faer::Scale(1.0 / trace.max(f64::MIN_POSITIVE));
        }
        let directions = match norm {
            NormKind::Rms | NormKind::RmsOffset => k,
            NormKind::Layer => k - 1,
        };
        let (directions, kept) = top_eigenvectors(&sum, directions)?;
        Self::along(directions, kept, norm, device)
    }

    /// The map that writes along orthonormal `directions`, `(D, K)`, or `(D, K − 1)` without a
    /// mean for norms that take it off.
    ///
    /// # Errors
    /// When the tensor cannot be made.
    pub fn along(
        directions: Mat<f64>,
        kept: f64,
        norm: NormKind,
        device: &Device,
    ) -> Result<Self, BuildError> {
        let q = match norm {
            NormKind::Rms | NormKind::RmsOffset => directions,
            NormKind::Layer => {
                let spread = without_mean(directions.ncols() + 1);
                directions * spread
            }
        };
        Ok(Self { tensor: to_tensor(&q, device)?, q, kept })
    }

    /// What a reader decodes with before healing: `√(d/k)·Qᵀ`, `(K, D)`.
    pub fn prior(&self) -> Mat<f64> {
        let factor = (self.q.nrows() as f64 / self.q.ncols() as f64).sqrt();
        self.q.transpose() * faer::Scale(factor)
    }
}

/// `k − 1` orthonormal rows of width `k`, each of which sums to zero (Helmert's).
fn without_mean(k: usize) -> Mat<f64> {
    Mat::from_fn(k - 1, k, |row, column| {
        let n = (row + 1) as f64;
        let scale = 1.0 / (n * (n + 1.0)).sqrt();
        match column.cmp(&(row + 1)) {
            std::cmp::Ordering::Less => scale,
            std::cmp::Ordering::Equal => -n * scale,
            std::cmp::Ordering::Greater => 0.0,
        }
    })
}

/// Turns a target's readers and writers into those of a draft over a smaller residual.
pub struct Projection<'a> {
    pub target: &'a ModelConfig,
    pub draft: &'a ModelConfig,
    pub map: &'a WriteMap,
}

impl Projection<'_> {
    /// A draft's norm: gain 1. Where this kind of norm has a bias, it is the unit vector along
    /// (1, …, 1), the one direction that the norm itself leaves empty.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn norm(&self) -> Result<Norm, BuildError> {
        let stored = match self.draft.anatomy.norm {
            NormKind::RmsOffset => 0.0,
            NormKind::Rms | NormKind::Layer => 1.0,
        };
        let weight = (self.ones()? * stored)?;
        let bias = match self.draft.anatomy.norm {
            NormKind::Layer => Some(self.mean_direction()?),
            NormKind::Rms | NormKind::RmsOffset => None,
        };
        Ok(Norm { weight, bias })
    }

    fn ones(&self) -> Result<Tensor, BuildError> {
        let device = self.map.tensor.device();
        Ok(Tensor::ones(self.draft.hidden_size, DType::F32, device)?)
    }

    /// `(1, …, 1) / √K`.
    fn mean_direction(&self) -> Result<Tensor, BuildError> {
        Ok((self.ones()? / (self.draft.hidden_size as f64).sqrt())?)
    }

    /// What reads `norm` through a decoder given as `(K, D)`: `W·diag(gain)·B`, and what the
    /// norm's bias comes to behind `W` on the direction along which the draft's norm has its own.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn read(
        &self,
        reader: &Tensor,
        norm: &Norm,
        decoder: &Tensor,
    ) -> Result<Tensor, BuildError> {
        let weight = read_through(reader, &norm.gain(self.target)?, decoder)?;
        let Some(bias) = &norm.bias else { return Ok(weight) };
        // (out, D) · (D, 1) · (1, K) -> (out, K)
        let constant = reader.matmul(&bias.unsqueeze(1)?)?;
        Ok((weight + constant.matmul(&self.mean_direction()?.unsqueeze(0)?)?)?)
    }

    /// A reader with its bias, which stands.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn reader(
        &self,
        reader: &Linear,
        norm: &Norm,
        decoder: &Tensor,
    ) -> Result<Linear, BuildError> {
        let weight = self.read(&reader.weight, norm, decoder)?;
        Ok(Linear { weight, bias: reader.bias.clone() })
    }

    /// A query or key reader. With a norm for each head, whose epsilon is the blocks' own and
    /// grows with them, the head's input grows by the same square root, which the norm takes out.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn head_reader(
        &self,
        reader: &Linear,
        norm: &Norm,
        decoder: &Tensor,
    ) -> Result<Linear, BuildError> {
        let mut read = self.reader(reader, norm, decoder)?;
        if self.draft.anatomy.qk_norm {
            let factor = (self.draft.norm_eps / self.target.norm_eps).sqrt();
            read.weight = (read.weight * factor)?;
            read.bias = read.bias.map(|bias| bias * factor).transpose()?;
        }
        Ok(read)
    }

    /// A block with the draft's norms and everything else still the target's; `kept` is its place
    /// in the draft. Norms of what a block gives stay as they are: their families keep the width.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn layer(&self, source: &DecoderLayer, kept: usize) -> Result<DecoderLayer, BuildError> {
        let mut layer = source.clone();
        layer.input_layernorm = self.norm()?;
        *layer.mlp_norm_mut() = self.norm()?;
        layer.window = self.draft.anatomy.windows.get(kept).copied().flatten();
        Ok(layer)
    }

    /// Makes the projections before attention those of the sources, side by side, each reading
    /// through its own decoder.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn read_attention(
        &self,
        layer: &mut DecoderLayer,
        sources: &[DecoderLayer],
        decoders: &[Tensor],
    ) -> Result<(), BuildError> {
        let (mut query, mut key, mut value) = (Vec::new(), Vec::new(), Vec::new());
        for (source, decoder) in sources.iter().zip(decoders) {
            let norm = &source.input_layernorm;
            query.push(self.head_reader(&source.q_proj, norm, decoder)?);
            key.push(self.head_reader(&source.k_proj, norm, decoder)?);
            value.push(self.reader(&source.v_proj, norm, decoder)?);
        }
        (layer.q_proj, layer.k_proj, layer.v_proj) = (stack(&query)?, stack(&key)?, stack(&value)?);
        Ok(())
    }

    /// Makes the projections of the MLP those of the sources, each reading through its own
    /// decoder.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn read_mlp(
        &self,
        layer: &mut DecoderLayer,
        sources: &[DecoderLayer],
        decoders: &[Tensor],
    ) -> Result<(), BuildError> {
        let (mut gate, mut up) = (Vec::new(), Vec::new());
        for (source, decoder) in sources.iter().zip(decoders) {
            gate.push(self.reader(&source.gate_proj, source.mlp_norm(), decoder)?);
            up.push(self.reader(&source.up_proj, source.mlp_norm(), decoder)?);
        }
        (layer.gate_proj, layer.up_proj) = (stack(&gate)?, stack(&up)?);
        Ok(())
    }

    /// The draft around its blocks; its head reads through a decoder, unless the family must stay
    /// tied and keeps its width.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn finish(
        &self,
        target: &Decoder,
        layers: Vec<DecoderLayer>,
        decoder: &Tensor,
    ) -> Result<Decoder, BuildError> {
        if self.draft.anatomy.post_norms {
            return Ok(Decoder {
                config: self.draft.clone(),
                embed_tokens: target.embed_tokens.clone(),
                layers,
                norm: target.norm.clone(),
                lm_head: target.embed_tokens.clone(),
            });
        }
        Ok(Decoder {
            config: self.draft.clone(),
            embed_tokens: target.embed_tokens.matmul(&self.map.tensor)?,
            layers,
            norm: self.norm()?,
            lm_head: self.read(&target.lm_head, &target.norm, decoder)?,
        })
    }

    /// A writer: `Qᵀ·W`, and `Qᵀ·b`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn writer(&self, writer: &Linear) -> Result<Linear, BuildError> {
        let transposed = self.map.tensor.t()?.contiguous()?;
        let bias = match &writer.bias {
            Some(bias) => Some(transposed.matmul(&bias.unsqueeze(1)?)?.squeeze(1)?),
            None => None,
        };
        Ok(Linear { weight: transposed.matmul(&writer.weight.contiguous()?)?, bias })
    }
}

/// `W·diag(gain)·B` for a reader `W` `(out, D)`, gain `(D)` and decoder `Bᵀ` given as `(K, D)`:
/// `(out, K)`.
///
/// # Errors
/// When the shapes do not fit.
pub fn read_through(
    reader: &Tensor,
    gain: &Tensor,
    decoder: &Tensor,
) -> Result<Tensor, BuildError> {
    Ok(reader.broadcast_mul(gain)?.matmul(&decoder.t()?.contiguous()?)?)
}

/// What a block of the draft is made of: blocks of the target without what is dropped.
pub struct Parts {
    /// The block's own, whose norms and window it has.
    pub own: DecoderLayer,
    /// Those that give heads, and which of the target's blocks they are.
    pub heads: Vec<DecoderLayer>,
    pub heads_of: Vec<usize>,
    /// Those that give MLP channels, and which of the target's blocks they are.
    pub mlps: Vec<DecoderLayer>,
    pub mlps_of: Vec<usize>,
}

impl Parts {
    /// Takes from the target what the sources keep.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn new(sources: &[Source], target: &Decoder) -> Result<Self, BuildError> {
        let own = target.layers[sources[0].layer].clone();
        let mut parts = Self {
            own,
            heads: Vec::new(),
            heads_of: Vec::new(),
            mlps: Vec::new(),
            mlps_of: Vec::new(),
        };
        for source in sources {
            let pruned = source.pruned(target)?;
            if !source.groups.is_empty() {
                parts.heads.push(pruned.clone());
                parts.heads_of.push(source.layer);
            }
            if !source.channels.is_empty() {
                parts.mlps.push(pruned);
                parts.mlps_of.push(source.layer);
            }
        }
        Ok(parts)
    }

    /// What writes the heads' outputs into the target's residual.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn o_proj(&self) -> Result<Linear, BuildError> {
        sum(self.heads.iter().map(|source| &source.o_proj))
    }

    /// What writes the MLP's channels into the target's residual.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn down_proj(&self) -> Result<Linear, BuildError> {
        sum(self.mlps.iter().map(|source| &source.down_proj))
    }
}

/// Projections of the same input as one: outputs side by side.
fn stack(parts: &[Linear]) -> Result<Linear, BuildError> {
    let weights: Vec<&Tensor> = parts.iter().map(|part| &part.weight).collect();
    let biases: Vec<&Tensor> = parts.iter().filter_map(|part| part.bias.as_ref()).collect();
    let bias = if biases.is_empty() { None } else { Some(Tensor::cat(&biases, 0)?) };
    Ok(Linear { weight: Tensor::cat(&weights, 0)?, bias })
}

/// The sum of projections of different inputs as one projection of these inputs side by side.
fn sum<'a>(parts: impl Iterator<Item = &'a Linear>) -> Result<Linear, BuildError> {
    let (mut weights, mut bias): (Vec<&Tensor>, Option<Tensor>) = (Vec::new(), None);
    for part in parts {
        weights.push(&part.weight);
        bias = match (bias, &part.bias) {
            (Some(sum), Some(other)) => Some((sum + other)?),
            (sum, other) => sum.or_else(|| other.clone()),
        };
    }
    Ok(Linear { weight: Tensor::cat(&weights, 1)?, bias })
}

/// The draft with nothing repaired: selected layers, heads and channels, projected by `map`.
///
/// # Errors
/// When a tensor computation fails.
pub fn slice(
    target: &Decoder,
    plan: &Plan,
    selection: &Selection,
    map: &WriteMap,
) -> Result<Decoder, BuildError> {
    let config = plan.config(&target.config);
    let mut layers = Vec::with_capacity(selection.blocks.len());
    let project = Projection { target: &target.config, draft: &config, map };
    let decoder = to_tensor(&map.prior(), target.embed_tokens.device())?;
    for (kept, sources) in selection.blocks.iter().enumerate() {
        let parts = Parts::new(sources, target)?;
        let mut layer = project.layer(&parts.own, kept)?;
        project.read_attention(
            &mut layer,
            &parts.heads,
            &vec![decoder.clone(); parts.heads.len()],
        )?;
        layer.o_proj = project.writer(&parts.o_proj()?)?;
        project.read_mlp(&mut layer, &parts.mlps, &vec![decoder.clone(); parts.mlps.len()])?;
        layer.down_proj = project.writer(&parts.down_proj()?)?;
        layers.push(layer);
    }
    project.finish(target, layers, &decoder)
}
