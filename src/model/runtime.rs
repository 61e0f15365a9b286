//! The serving form of the decoder: weights in Q8_0, one KV cache for each sequence.
//!
//! **Architecture invariant**: a row's result depends on its own sequence only, bit for bit,
//! never on how many other rows are in the batch. That is what makes greedy speculative output
//! equal to plain output rather than nearly equal.

use super::ModelConfig;
use super::kv_cache::KvCache;
use crate::hub::Weights;

/// What can go wrong while loading or running.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("cannot load the model: {0}")]
    Load(String),
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { id: u32, vocab_size: usize },
    #[error("sequence of {len} tokens is longer than the model's context of {limit}")]
    TooLong { len: usize, limit: usize },
}

/// Which rows of a segment need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    None,
    Last,
    All,
}

/// Consecutive new tokens of one sequence.
pub struct Segment<'a> {
    /// Tokens at positions `cache.len()..cache.len() + tokens.len()`.
    pub tokens: &'a [u32],
    /// Extended by `tokens.len()` on return.
    pub cache: &'a mut KvCache,
    pub logits: LogitsOf,
}

/// Immutable weights, shared between threads.
pub struct Runtime {
    config: ModelConfig,
}

impl Runtime {
    /// Loads and quantises a model.
    ///
    /// # Errors
    /// When a tensor is missing, has the wrong shape, or cannot be read.
    pub fn load(_config: &ModelConfig, _weights: &Weights) -> Result<Self, RuntimeError> {
        todo!()
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs all segments in one pass. Returns the logits of the rows asked for, in segment
    /// order, row-major `(rows, vocab_size)`. On an error no cache has changed its length.
    ///
    /// # Errors
    /// See [`RuntimeError`].
    pub fn forward(&self, _segments: &mut [Segment<'_>]) -> Result<Vec<f32>, RuntimeError> {
        todo!()
    }
}
