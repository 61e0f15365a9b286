//! The gate of the feed-forward network.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{Values, slice};
use crate::model::Activation;
use crate::model::kernels;

/// Elements that one task works on.
const TASK: usize = 1 << 14;

/// `activation(gate) * up`.
///
/// # Errors
/// When the shapes differ.
pub fn gated(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    match activation {
        Activation::Silu => silu_mul(gate, up),
        Activation::GeluTanh => gate.gelu()? * up,
    }
}

/// `silu(gate) * up`, element by element (Shazeer 2020, SwiGLU).
///
/// # Errors
/// When the shapes differ.
pub fn silu_mul(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.device().is_cpu() {
        return gate.contiguous()?.apply_op2(&up.contiguous()?, SiluMul);
    }
    gate.silu()? * up
}

struct SiluMul;

impl CustomOp2 for SiluMul {
    fn name(&self) -> &'static str {
        "silu-mul"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        if gate_layout.shape() != up_layout.shape() {
            bail!("gate of {:?} and up of {:?}", gate_layout.shape(), up_layout.shape());
        }
        let up = slice(up, up_layout)?;
        let mut out = slice(gate, gate_layout)?.to_vec();
        out.par_chunks_mut(TASK)
            .zip(up.par_chunks(TASK))
            .for_each(|(gate, up)| kernels::silu_mul(gate, up));
        Ok((CpuStorage::F32(out), gate_layout.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let (gates, ups, g) = (Values::of(gate)?, Values::of(up)?, Values::of(&gradient)?);
        let (mut d_gate, mut d_up) = (vec![0f32; gates.len()], vec![0f32; gates.len()]);
        d_gate
            .par_chunks_mut(TASK)
            .zip(d_up.par_chunks_mut(TASK))
            .zip(gates.par_chunks(TASK).zip(ups.par_chunks(TASK)).zip(g.par_chunks(TASK)))
            .for_each(|((d_gate, d_up), ((gate, up), g))| {
                kernels::silu_mul_backward(gate, up, g, d_gate, d_up);
            });
        let tensor = |values| Tensor::from_vec(values, gate.shape(), gate.device());
        Ok((Some(tensor(d_gate)?), Some(tensor(d_up)?)))
    }
}
