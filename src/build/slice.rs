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
use super::linalg::{Spectrum, to_tensor};
use super::plan::Plan;
use super::prune::Selection;
use super::stream::Streamed;
use crate::model::decoder::{Decoder, DecoderLayer, Linear, Norm};
use crate::model::{ModelConfig, NormKind, ops};

/// The write map and how much of the normalised residual it keeps.
pub struct WriteMap {
    /// `(D, K)`: orthonormal columns, or such columns times orthonormal rows without a mean.
    pub q: Mat<f64>,
    /// The same, as f32, and its transpose `(K, D)`.
    pub tensor: Tensor,
    pub transposed: Tensor,
    /// Share of the energy of the RMS-normalised residual inside the span.
    pub kept: f64,
}

impl WriteMap {
    /// The leading directions of the RMS-normalised residual over all norm sites, from the spectrum
    /// of its covariance. The raw residual would be the wrong thing to look at: a few tokens of
    /// enormous norm own its covariance.
    ///
    /// # Errors
    /// When the tensor cannot be made.
    pub fn new(
        spectrum: &Spectrum,
        k: usize,
        norm: NormKind,
        device: &Device,
    ) -> Result<Self, BuildError> {
        let d = spectrum.values.len();
        if k == d {
            return Self::from_matrix(Mat::identity(d, d), 1.0, device);
        }
        let directions = match norm {
            NormKind::Rms | NormKind::RmsOffset => k,
            NormKind::Layer => k - 1,
        };
        let (directions, kept) = spectrum.top(directions);
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
        Self::from_matrix(q, kept, device)
    }

    fn from_matrix(q: Mat<f64>, kept: f64, device: &Device) -> Result<Self, BuildError> {
        let tensor = to_tensor(&q, device)?;
        Ok(Self { transposed: tensor.t()?.contiguous()?, tensor, q, kept })
    }

    /// States `(.., D)` as the draft's residual would hold them: `(.., K)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn project(&self, states: &Tensor) -> Result<Tensor, BuildError> {
        Ok(ops::linear(states, &self.transposed)?)
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

    /// Makes the projections before attention read through a decoder.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn read_attention(
        &self,
        layer: &mut DecoderLayer,
        source: &DecoderLayer,
        decoder: &Tensor,
    ) -> Result<(), BuildError> {
        let norm = &source.input_layernorm;
        layer.q_proj = self.head_reader(&source.q_proj, norm, decoder)?;
        layer.k_proj = self.head_reader(&source.k_proj, norm, decoder)?;
        layer.v_proj = self.reader(&source.v_proj, norm, decoder)?;
        Ok(())
    }

    /// Makes the projections of the MLP read through a decoder.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn read_mlp(
        &self,
        layer: &mut DecoderLayer,
        source: &DecoderLayer,
        decoder: &Tensor,
    ) -> Result<(), BuildError> {
        let norm = source.mlp_norm();
        layer.gate_proj = self.reader(&source.gate_proj, norm, decoder)?;
        layer.up_proj = self.reader(&source.up_proj, norm, decoder)?;
        Ok(())
    }

    /// The draft around its blocks; its head reads through a decoder, unless the family must stay
    /// tied and keeps its width.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn finish(
        &self,
        target: Streamed<'_>,
        layers: Vec<DecoderLayer>,
        decoder: &Tensor,
    ) -> Result<Decoder, BuildError> {
        let config = self.draft.clone();
        if config.anatomy.post_norms {
            let embed_tokens = target.embed_tokens()?;
            let (norm, lm_head) = (target.norm()?, embed_tokens.clone());
            return Ok(Decoder { config, embed_tokens, layers, norm, lm_head });
        }
        let norm = target.norm()?;
        Ok(Decoder {
            config,
            embed_tokens: target.map_embeddings(&|rows| self.map.project(rows))?,
            layers,
            norm: self.norm()?,
            lm_head: target.map_head(&|rows| self.read(rows, &norm, decoder))?,
        })
    }

    /// A writer: `Qᵀ·W`, and `Qᵀ·b`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn writer(&self, writer: &Linear) -> Result<Linear, BuildError> {
        let transposed = &self.map.transposed;
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
    Ok(ops::linear(&reader.broadcast_mul(gain)?, decoder)?)
}

/// The draft with nothing repaired: selected layers, heads and channels, projected by `map`.
///
/// # Errors
/// When the target cannot be read or a tensor computation fails.
pub fn slice(
    target: Streamed<'_>,
    plan: &Plan,
    selection: &Selection,
    map: &WriteMap,
) -> Result<Decoder, BuildError> {
    let config = plan.config(target.config);
    let mut layers = Vec::with_capacity(selection.layers.len());
    let project = Projection { target: target.config, draft: &config, map };
    let decoder = to_tensor(&map.prior(), &target.device())?;
    for (kept, index) in selection.layers.iter().enumerate() {
        let source = selection.pruned(&target.layer(*index)?, kept, target.config)?;
        let mut layer = project.layer(&source, kept)?;
        project.read_attention(&mut layer, &source, &decoder)?;
        layer.o_proj = project.writer(&source.o_proj)?;
        project.read_mlp(&mut layer, &source, &decoder)?;
        layer.down_proj = project.writer(&source.down_proj)?;
        layers.push(layer);
    }
    project.finish(target, layers, &decoder)
}
