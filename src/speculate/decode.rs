//! What the engine needs of a model. Private: outside of tests, which use a fake whose every logit
//! is known, there is only [`Runtime`], and what translates a draft's ids around it.

use std::path::PathBuf;

use crate::model::kv_cache::KvCache;
use crate::model::runtime::{LogitsOf, Runtime, RuntimeError, Segment};

/// Consecutive new tokens of one sequence; see [`Segment`].
pub(crate) struct Rows<'a, C> {
    pub tokens: &'a [u32],
    pub cache: &'a mut C,
    pub logits: LogitsOf,
}

/// A causal language model with a cache for each sequence.
///
/// A row's logits must not depend on the other rows of the batch; the engine's promise of equal
/// greedy output with and without a draft rests on it.
pub(crate) trait Decoder: Send + Sync + 'static {
    type Cache: Send + 'static;

    fn new_cache(&self) -> Self::Cache;
    fn cached(cache: &Self::Cache) -> usize;
    fn truncate(cache: &mut Self::Cache, len: usize);
    fn cache_bytes(cache: &Self::Cache) -> usize;
    /// Columns of a logits row, padding included.
    fn vocab_size(&self) -> usize;
    /// Longest sequence it can hold.
    fn context(&self) -> usize;
    /// As [`Runtime::forward`].
    fn forward(&self, rows: &mut [Rows<'_, Self::Cache>]) -> Result<Vec<f32>, RuntimeError>;
}

impl Decoder for Runtime {
    type Cache = KvCache;

    fn new_cache(&self) -> KvCache {
        KvCache::new(self.config())
    }

    fn cached(cache: &KvCache) -> usize {
        cache.len()
    }

    fn truncate(cache: &mut KvCache, len: usize) {
        cache.truncate(len);
    }

    fn cache_bytes(cache: &KvCache) -> usize {
        cache.bytes()
    }

    fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    fn context(&self) -> usize {
        self.config().max_position_embeddings
    }

    fn forward(&self, rows: &mut [Rows<'_, KvCache>]) -> Result<Vec<f32>, RuntimeError> {
        let mut segments: Vec<Segment<'_>> = rows
            .iter_mut()
            .map(|row| Segment { tokens: row.tokens, cache: row.cache, logits: row.logits })
            .collect();
        Runtime::forward(self, &mut segments)
    }
}

/// A draft that serves, or is about to.
pub(crate) struct Draft<D> {
    pub model: D,
    /// `v000000` and up; `startup` when the folder has no manifest.
    pub version: String,
    /// Of its weights, when the folder's manifest gives one.
    pub checksum: Option<String>,
    pub path: PathBuf,
}
