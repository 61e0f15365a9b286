//! One orthonormal write map for the whole residual stream, and the draft it gives before healing.
//!
//! Every writer (embeddings, o_proj, down_proj) writes with `Qᵀ`; every reader reads `W·diag(g)·Q`
//! with the norm's gain folded in, so that the draft's own gains are 1. A norm over the smaller
//! width k divides by another mean: for x in the span of Q, `n_d(x) = √(d/k)·Q·n_k(Qᵀx)` with
//! `eps' = eps·d/k`, and the factor goes into the reader. Query, key and value outputs live in
//! head space and are never projected; o_proj is projected on its output only.

use candle_core::{Device, Tensor};
use faer::Mat;

use super::BuildError;
use super::calibrate::Statistics;
use super::linalg::{to_tensor, top_eigenvectors};
use super::plan::Plan;
use super::prune::Selection;
use crate::model::decoder::{Decoder, DecoderLayer};

/// The write map and how much of the normalised residual it keeps.
pub struct WriteMap {
    /// `(D, K)`, orthonormal columns.
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
    pub fn new(statistics: &Statistics, k: usize, device: &Device) -> Result<Self, BuildError> {
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
        let (q, kept) = top_eigenvectors(&sum, k)?;
        Ok(Self { tensor: to_tensor(&q, device)?, q, kept })
    }

    /// What a reader decodes with before healing: `√(d/k)·Qᵀ`, `(K, D)`.
    pub fn prior(&self) -> Mat<f64> {
        let factor = (self.q.nrows() as f64 / self.q.ncols() as f64).sqrt();
        self.q.transpose() * faer::Scale(factor)
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
    let device = target.embed_tokens.device();
    let q = &map.tensor;
    let decoder = to_tensor(&map.prior(), device)?;
    let ones = Tensor::ones(plan.hidden_size, candle_core::DType::F32, device)?;
    let writer = |w: &Tensor| -> Result<Tensor, BuildError> {
        Ok(q.t()?.contiguous()?.matmul(&w.contiguous()?)?)
    };
    let mut layers = Vec::with_capacity(selection.layers.len());
    for (kept, index) in selection.layers.iter().enumerate() {
        let layer = selection.pruned(&target.layers[*index], kept, target)?;
        let read = |w: &Tensor, gain: &Tensor| read_through(w, gain, &decoder);
        layers.push(DecoderLayer {
            input_layernorm: ones.clone(),
            q_proj: read(&layer.q_proj, &layer.input_layernorm)?,
            k_proj: read(&layer.k_proj, &layer.input_layernorm)?,
            v_proj: read(&layer.v_proj, &layer.input_layernorm)?,
            o_proj: writer(&layer.o_proj)?,
            post_attention_layernorm: ones.clone(),
            gate_proj: read(&layer.gate_proj, &layer.post_attention_layernorm)?,
            up_proj: read(&layer.up_proj, &layer.post_attention_layernorm)?,
            down_proj: writer(&layer.down_proj)?,
        });
    }
    Ok(Decoder {
        config: plan.config(&target.config),
        embed_tokens: target.embed_tokens.matmul(q)?,
        layers,
        norm: ones,
        lm_head: read_through(&target.lm_head, &target.norm, &decoder)?,
    })
}
