//! `x · wᵀ`.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::{Values, slice};
use crate::model::kernels::{Matrix, MatrixMut, Write, matmul};

/// `x · wᵀ` for `x` of `(.., in)` and `w` of `(out, in)`.
///
/// # Errors
/// When the shapes do not fit.
pub fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (out, width) = w.dims2()?;
    let mut dims = x.dims().to_vec();
    match dims.last_mut() {
        Some(last) if *last == width => *last = out,
        _ => bail!("linear: input of shape {:?} and weights of {out} x {width}", x.shape()),
    }
    let flat = x.reshape(((), width))?;
    let product = if x.device().is_cpu() {
        flat.contiguous()?.apply_op2(&w.contiguous()?, Linear)?
    } else {
        flat.matmul(&w.t()?)?
    };
    product.reshape(dims)
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = x_layout.shape().dims2()?;
        let out = w_layout.dims()[0];
        let x = Matrix::new(slice(x, x_layout)?, rows, width, width);
        let w = Matrix::new(slice(w, w_layout)?, out, width, width);
        let mut result = vec![0f32; rows * out];
        matmul(&mut MatrixMut::new(&mut result, rows, out, out), x, w.t(), Write::Replace);
        Ok((CpuStorage::F32(result), Shape::from((rows, out))))
    }

    /// dx = G·w and dw = Gᵀ·x. An argument that nothing is learned for gets none.
    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let ((rows, width), out) = (x.dims2()?, w.dim(0)?);
        let gradient = gradient.contiguous()?;
        let values = Values::of(&gradient)?;
        let g = Matrix::new(&values, rows, out, out);
        let d_x = if x.track_op() {
            let w_values = Values::of(w)?;
            let mut d_x = vec![0f32; rows * width];
            let w = Matrix::new(&w_values, out, width, width);
            matmul(&mut MatrixMut::new(&mut d_x, rows, width, width), g, w, Write::Replace);
            Some(Tensor::from_vec(d_x, (rows, width), x.device())?)
        } else {
            None
        };
        let d_w = if w.track_op() {
            let x_values = Values::of(x)?;
            let mut d_w = vec![0f32; out * width];
            let x = Matrix::new(&x_values, rows, width, width);
            matmul(&mut MatrixMut::new(&mut d_w, out, width, width), g.t(), x, Write::Replace);
            Some(Tensor::from_vec(d_w, (out, width), w.device())?)
        } else {
            None
        };
        Ok((d_x, d_w))
    }
}
