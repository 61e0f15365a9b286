//! Rotary position embedding over whole windows (Su et al. 2021, in Hugging Face's half-split
//! order).

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, D, Device, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{ROWS_PER_TASK, slice};
use crate::model::{ModelConfig, rope};

/// Cosines and sines of the positions of one window.
#[derive(Clone)]
pub struct RotaryTable {
    /// Each `(T, R/2)`.
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    time: usize,
    /// Half of the rotated dimensions R.
    half: usize,
    head_dim: usize,
}

impl RotaryTable {
    /// The table for positions `0..time`.
    pub fn new(config: &ModelConfig, time: usize) -> Self {
        let frequencies = rope::inverse_frequencies(config);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in 0..time {
            let (c, s) = rope::rotation(&frequencies, position);
            cos.extend(c);
            sin.extend(s);
        }
        Self {
            cos: cos.into(),
            sin: sin.into(),
            time,
            half: frequencies.len(),
            head_dim: config.head_dim,
        }
    }

    /// The rotation that undoes this one, which is also its transpose.
    fn inverse(&self) -> Self {
        Self { sin: self.sin.iter().map(|sin| -sin).collect(), ..self.clone() }
    }
}

/// Rotates the leading dimensions of every head of `(B, T, heads * E)` by its position's angles.
///
/// # Errors
/// When the window is longer than the table or the width is not a whole number of heads.
pub fn rotate(x: &Tensor, table: &RotaryTable) -> Result<Tensor> {
    let (_, time, width) = x.dims3()?;
    if time > table.time || !width.is_multiple_of(table.head_dim) {
        let (length, head) = (table.time, table.head_dim);
        bail!("rotary table of {length} positions and heads of {head} for {:?}", x.shape());
    }
    if x.device().is_cpu() {
        return x.contiguous()?.apply_op1(Rotate { table: table.clone() });
    }
    composed(x, table, x.device())
}

/// The same in elementary steps.
pub(super) fn composed(x: &Tensor, table: &RotaryTable, device: &Device) -> Result<Tensor> {
    let (b, t, width) = x.dims3()?;
    let half = table.half;
    let angles = |values: &[f32]| -> Result<Tensor> {
        Tensor::from_slice(&values[..t * half], (1, t, 1, half), device)
    };
    let (cos, sin) = (angles(&table.cos)?, angles(&table.sin)?);
    // (B, T, heads * E) -> (B, T, heads, E)
    let head_dim = table.head_dim;
    let x = x.reshape((b, t, width / head_dim, head_dim))?;
    let (low, high) = (x.narrow(D::Minus1, 0, half)?, x.narrow(D::Minus1, half, half)?);
    let first = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
    let second = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
    let rest = x.narrow(D::Minus1, 2 * half, head_dim - 2 * half)?;
    Tensor::cat(&[first, second, rest], D::Minus1)?.reshape((b, t, width))
}

struct Rotate {
    table: RotaryTable,
}

impl CustomOp1 for Rotate {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, time, width) = layout.shape().dims3()?;
        let half = self.table.half;
        let mut out = slice(x, layout)?.to_vec();
        out.par_chunks_mut(width).with_min_len(ROWS_PER_TASK).enumerate().for_each(|(row, x)| {
            let at = row % time * half..(row % time + 1) * half;
            for head in x.chunks_exact_mut(self.table.head_dim) {
                rope::rotate(
                    &mut head[..2 * half],
                    &self.table.cos[at.clone()],
                    &self.table.sin[at.clone()],
                );
            }
        });
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let back = Rotate { table: self.table.inverse() };
        gradient.contiguous()?.apply_op1_no_bwd(&back).map(Some)
    }
}
