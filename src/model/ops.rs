//! Tensor operations that both run fast and have a backward.
//!
//! candle's fused `rms_norm`, `softmax_last_dim` and `rope` return tensors without a gradient, and
//! nothing warns about it. Training must use the forms here.

use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::kernels;

/// `x / sqrt(mean(x²) + eps) * gain` over the last dimension, differentiable in both arguments.
///
/// `x` is `(.., D)`, `gain` is `(D)`.
///
/// # Errors
/// When the shapes do not fit.
pub fn rms_norm(x: &Tensor, gain: &Tensor, eps: f64) -> Result<Tensor> {
    if x.device().is_cpu() {
        return x.contiguous()?.apply_op2(gain, RmsNorm { eps });
    }
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(gain)
}

struct RmsNorm {
    eps: f64,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gain: &CpuStorage,
        gain_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = contiguous(x.as_slice::<f32>()?, x_layout)?;
        let gain = contiguous(gain.as_slice::<f32>()?, gain_layout)?;
        let width = gain.len();
        if x.len() % width != 0 {
            bail!("rms norm of {} values with a gain of {width}", x.len());
        }
        let mut out = vec![0f32; x.len()];
        out.par_chunks_mut(width).zip(x.par_chunks(width)).with_min_len(16).for_each(|(o, x)| {
            kernels::rms_norm(x, gain, self.eps as f32, o);
        });
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }

    /// With n = x·r, r = (mean(x²) + eps)^-½ and G the gradient: dgain = Σ G·n over rows, and
    /// dx = r·(G·gain − n·mean(G·gain·n)).
    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = gain.elem_count();
        let x = x.reshape(((), width))?;
        let gradient = gradient.reshape(((), width))?;
        let inverse = (x.sqr()?.mean_keepdim(1)? + self.eps)?.sqrt()?.recip()?;
        let normed = x.broadcast_mul(&inverse)?;
        let d_gain = (&gradient * &normed)?.sum(0)?;
        let scaled = gradient.broadcast_mul(gain)?;
        let along = (&scaled * &normed)?.mean_keepdim(1)?;
        let d_x = (scaled - normed.broadcast_mul(&along)?)?.broadcast_mul(&inverse)?;
        Ok((Some(d_x.reshape(result.shape())?), Some(d_gain)))
    }
}

fn contiguous<'a, T>(values: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&values[from..to]),
        None => bail!("expected a contiguous tensor, got strides {:?}", layout.stride()),
    }
}
