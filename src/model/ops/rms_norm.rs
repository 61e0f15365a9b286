//! Normalisation by the root mean square, and by mean and variance.

use candle_core::{CpuStorage, CustomOp2, D, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{ROWS_PER_TASK, Values, slice};
use crate::model::kernels;

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
    composed(x, gain, eps)
}

/// The same in elementary steps.
pub(super) fn composed(x: &Tensor, gain: &Tensor, eps: f64) -> Result<Tensor> {
    let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(gain)
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * gain + bias` over the last dimension (Ba et al. 2016).
///
/// # Errors
/// When the shapes do not fit.
pub fn layer_norm(x: &Tensor, gain: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    // The variance is the mean square of what is left when the mean is gone.
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let normed = rms_norm(&centred, gain, eps)?;
    match bias {
        Some(bias) => normed.broadcast_add(bias),
        None => Ok(normed),
    }
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
        let x = slice(x, x_layout)?;
        let gain = slice(gain, gain_layout)?;
        let width = gain.len();
        if width == 0 || !x.len().is_multiple_of(width) {
            bail!("rms norm of {} values with a gain of {width}", x.len());
        }
        let mut out = vec![0f32; x.len()];
        out.par_chunks_mut(width)
            .zip(x.par_chunks(width))
            .with_min_len(ROWS_PER_TASK)
            .for_each(|(o, x)| kernels::rms_norm(x, gain, self.eps as f32, o));
        Ok((CpuStorage::F32(out), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = gain.elem_count();
        let gradient = gradient.contiguous()?;
        let (g, values, gains) = (Values::of(&gradient)?, Values::of(x)?, Values::of(gain)?);
        let mut d_x = vec![0f32; values.len()];
        let task = ROWS_PER_TASK * width;
        let partial: Vec<Vec<f32>> = d_x
            .par_chunks_mut(task)
            .zip(values.par_chunks(task))
            .zip(g.par_chunks(task))
            .map(|((d_x, x), g)| {
                let mut d_gain = vec![0f32; width];
                for ((d_x, x), g) in d_x.chunks_mut(width).zip(x.chunks(width)).zip(g.chunks(width))
                {
                    kernels::rms_norm_backward(x, &gains, g, self.eps as f32, d_x, &mut d_gain);
                }
                d_gain
            })
            .collect();
        let mut d_gain = vec![0f32; width];
        for partial in &partial {
            kernels::add_scaled(&mut d_gain, 1.0, partial);
        }
        let d_x = Tensor::from_vec(d_x, x.shape(), x.device())?;
        Ok((Some(d_x), Some(Tensor::from_vec(d_gain, gain.shape(), gain.device())?)))
    }
}
