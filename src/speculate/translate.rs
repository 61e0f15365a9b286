//! A draft of fewer tokens than its target, behind the target's ids.
//!
//! Whoever drafts sees an ordinary model over the target's vocabulary that gives what the draft
//! lacks no probability. Proposals and their distributions are then the target's own ids, and the
//! rules of [`super::verify`] stay exact as they are.

use super::decode::{Decoder, Rows};
use crate::model::runtime::RuntimeError;
use crate::vocab::TokenMap;

/// A model, and the table of its ids where they are not the target's.
pub(crate) struct Translated<D> {
    pub model: D,
    pub map: Option<TokenMap>,
}

impl<D: Decoder> Decoder for Translated<D> {
    type Cache = D::Cache;

    fn new_cache(&self) -> D::Cache {
        self.model.new_cache()
    }

    fn cached(cache: &D::Cache) -> usize {
        D::cached(cache)
    }

    fn truncate(cache: &mut D::Cache, len: usize) {
        D::truncate(cache, len);
    }

    fn cache_bytes(cache: &D::Cache) -> usize {
        D::cache_bytes(cache)
    }

    fn vocab_size(&self) -> usize {
        self.map.as_ref().map_or_else(|| self.model.vocab_size(), TokenMap::target_ids)
    }

    fn context(&self) -> usize {
        self.model.context()
    }

    fn forward(&self, rows: &mut [Rows<'_, D::Cache>]) -> Result<Vec<f32>, RuntimeError> {
        let Some(map) = &self.map else { return self.model.forward(rows) };
        let tokens: Vec<Vec<u32>> = rows
            .iter()
            .map(|row| row.tokens.iter().map(|id| map.to_draft(*id)).collect())
            .collect();
        let mut own: Vec<Rows<'_, D::Cache>> = rows
            .iter_mut()
            .zip(&tokens)
            .map(|(row, tokens)| Rows { tokens, cache: &mut *row.cache, logits: row.logits })
            .collect();
        let logits = self.model.forward(&mut own)?;
        Ok(map.spread(&logits, self.model.vocab_size()))
    }
}

#[cfg(test)]
mod tests;
