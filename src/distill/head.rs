//! The language-model head and the loss in one step.
//!
//! Logits over a vocabulary are the largest tensor in training. Going through autograd would keep
//! five or six copies of it; here it exists once, is turned into its own gradient in place, and
//! both products with it are taken at once.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::TopK;
use super::loss::Loss;

/// The loss of some positions and its gradients.
pub struct HeadGradient {
    /// Sum over positions, in nats.
    pub loss: f32,
    /// `(N, D)`, of the mean loss with respect to the hidden states.
    pub hidden: Tensor,
    /// `(V, D)`, of the mean loss with respect to the head.
    pub lm_head: Tensor,
}

/// Loss and gradients for hidden states `(N, D)`, head `(V, D)` and one teacher row for each of
/// the N positions. Both arguments are detached: the caller chains the gradients.
///
/// # Errors
/// When the shapes do not fit or a teacher id is outside the vocabulary.
pub fn loss_and_gradient(
    hidden: &Tensor,
    lm_head: &Tensor,
    teacher: &[&TopK],
    loss: Loss,
) -> Result<HeadGradient> {
    let (hidden, lm_head) = (hidden.detach(), lm_head.detach());
    let (positions, vocab_size) = (hidden.dim(0)?, lm_head.dim(0)?);
    if teacher.len() != positions {
        bail!("{positions} positions but {} teacher rows", teacher.len());
    }
    if teacher.iter().any(|row| row.ids.iter().any(|id| *id as usize >= vocab_size)) {
        bail!("a teacher token is outside the vocabulary of {vocab_size}");
    }
    let logits = hidden.matmul(&lm_head.t()?)?;
    let op = RowGradients { teacher, loss, total: Mutex::new(0.0) };
    let gradient = apply(&logits, &op)?;
    drop(logits);
    Ok(HeadGradient {
        loss: op.total.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner),
        hidden: gradient.matmul(&lm_head)?,
        lm_head: gradient.t()?.matmul(&hidden)?,
    })
}

fn apply(logits: &Tensor, op: &RowGradients<'_>) -> Result<Tensor> {
    logits.apply_op1_no_bwd(op)
}

struct RowGradients<'a> {
    teacher: &'a [&'a TopK],
    loss: Loss,
    total: Mutex<f32>,
}

impl CustomOp1 for RowGradients<'_> {
    fn name(&self) -> &'static str {
        "distillation-loss"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, width) = layout.shape().dims2()?;
        let Some((from, to)) = layout.contiguous_offsets() else {
            bail!("expected contiguous logits");
        };
        let mut rows = storage.as_slice::<f32>()?[from..to].to_vec();
        let weight = 1.0 / self.teacher.len() as f32;
        let total: f32 = rows
            .par_chunks_mut(width)
            .zip(self.teacher)
            .map(|(row, teacher)| self.loss.gradient_in_place(teacher, row, weight))
            .collect::<Vec<_>>()
            .iter()
            .sum();
        if let Ok(mut sum) = self.total.lock() {
            *sum = total;
        }
        Ok((CpuStorage::F32(rows), layout.shape().clone()))
    }
}
