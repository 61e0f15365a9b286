//! Gradients of one step, gathered from autograd, the head and the embedding table.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, Tensor, Var};

use crate::distill::head::Head;
use crate::distill::optimizer::Gradient;
use crate::model::kernels;
use crate::model::ops::Values;

const EMBEDDING: &str = "model.embed_tokens.weight";
const LM_HEAD: &str = "lm_head.weight";

/// Gradients of everything but the head.
#[derive(Default)]
pub(super) struct BodyGradients {
    pub tensors: BTreeMap<String, Tensor>,
    /// Tokens of the batch, each once, and the gradients of their rows in the embedding table.
    pub ids: Vec<u32>,
    pub rows: Vec<f32>,
}

impl BodyGradients {
    /// Adds up the gradients `(B, T, D)` of the positions `(B, T)` that show the same token, for
    /// a table whose rows are multiplied by `scale`.
    pub fn add_embedding(&mut self, ids: &Tensor, gradient: &Tensor, scale: f64) -> Result<()> {
        let ids: Vec<u32> = ids.flatten_all()?.to_vec1()?;
        let gradient = gradient.contiguous()?;
        let gradient = Values::of(&gradient)?;
        let width = gradient.len() / ids.len().max(1);
        let unique: BTreeSet<u32> = ids.iter().copied().collect();
        self.ids = unique.into_iter().collect();
        self.rows = vec![0f32; self.ids.len() * width];
        for (id, row) in ids.iter().zip(gradient.chunks_exact(width)) {
            if let Ok(at) = self.ids.binary_search(id) {
                kernels::add_scaled(&mut self.rows[at * width..][..width], scale as f32, row);
            }
        }
        Ok(())
    }
}

/// Calls `visit` with every parameter that has a gradient.
pub(super) fn visit_gradients(
    parameters: &BTreeMap<String, Var>,
    head: &Head,
    body: &BodyGradients,
    mut visit: impl FnMut(&str, &Var, Gradient<'_>) -> Result<()>,
) -> Result<()> {
    let tied = !parameters.contains_key(LM_HEAD);
    for (name, var) in parameters {
        match name.as_str() {
            LM_HEAD => visit(name, var, Gradient::Whole(head.gradient()))?,
            EMBEDDING if tied => visit(name, var, Gradient::Whole(head.gradient()))?,
            EMBEDDING => visit(name, var, Gradient::Rows { ids: &body.ids, values: &body.rows })?,
            _ => {
                if let Some(gradient) = body.tensors.get(name) {
                    visit(name, var, Gradient::Whole(&Values::of(gradient)?))?;
                }
            }
        }
    }
    Ok(())
}
