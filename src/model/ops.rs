//! Tensor operations that both run fast and have a backward.
//!
//! candle's fused `rms_norm`, `softmax_last_dim` and `rope` return tensors without a gradient, and
//! nothing warns about it; its composed forms have one, and pay for it with a tensor for every
//! elementary step. On the CPU the operations here are single passes with a backward of their
//! own; elsewhere they fall back to the composed forms, which also are what the tests compare
//! with.

use std::ops::Deref;

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, bail};
use parking_lot::RwLockReadGuard;

mod attention;
mod gated;
mod linear;
mod rms_norm;
mod rotary;

pub use attention::{AttentionShape, attention};
pub use gated::{gated, silu_mul};
pub use linear::linear;
pub use rms_norm::{layer_norm, rms_norm};
pub use rotary::{RotaryTable, rotate};

/// The values of a contiguous f32 tensor on the CPU, borrowed.
pub struct Values<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    range: (usize, usize),
}

impl<'a> Values<'a> {
    /// Borrows the values of `tensor`.
    ///
    /// # Errors
    /// When the tensor is on another device, of another type, or not contiguous.
    pub fn of(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = range(layout)?;
        match &*storage {
            Storage::Cpu(CpuStorage::F32(_)) => Ok(Self { storage, range }),
            _ => bail!("expected an f32 tensor on the cpu, got {:?}", tensor.dtype()),
        }
    }
}

impl Deref for Values<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => &values[self.range.0..self.range.1],
            // `of` lets nothing else in.
            _ => &[],
        }
    }
}

fn range(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(range) => Ok(range),
        None => bail!("expected a contiguous tensor, got strides {:?}", layout.stride()),
    }
}

/// The part of an argument's storage that its layout covers.
fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (from, to) = range(layout)?;
    Ok(&storage.as_slice::<f32>()?[from..to])
}

/// Rows that one task of an elementwise pass works on.
const ROWS_PER_TASK: usize = 16;

#[cfg(test)]
mod tests;
