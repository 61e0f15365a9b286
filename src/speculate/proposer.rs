//! The seam between the engine and whoever drafts.

use rand_chacha::ChaCha8Rng;

use crate::model::runtime::RuntimeError;

/// What the engine asks for one sequence in one step.
pub struct DraftRequest<'a> {
    /// Names the sequence until [`Proposer::forget`].
    pub sequence: u64,
    /// Prompt and output so far, the newest token last. May differ from what was drafted: the
    /// proposer finds out itself which of its tokens were refused.
    pub tokens: &'a [u32],
    /// Most tokens to draft. 0 only asks the proposer to keep its state in step.
    pub max_tokens: usize,
    /// Temperature of the request; 0 is greedy.
    pub temperature: f32,
    pub rng: &'a mut ChaCha8Rng,
}

/// Drafted tokens of one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Proposal {
    pub tokens: Vec<u32>,
    /// The distribution that each token was sampled from, or empty when every token was chosen
    /// deterministically.
    pub probabilities: Vec<Vec<f32>>,
}

/// Drafts continuations that the target then verifies.
pub trait Proposer: Send {
    /// Begins an engine step. A draft that was swapped takes effect here and nowhere else.
    /// Returns whether it did.
    fn begin_step(&mut self) -> bool;

    /// Drafts for every request, in order. A proposal may be shorter than asked for, or empty.
    ///
    /// # Errors
    /// When the draft cannot run. The engine then goes on without drafts.
    fn propose(&mut self, requests: &mut [DraftRequest<'_>])
    -> Result<Vec<Proposal>, RuntimeError>;

    /// Drops what is held for a sequence that ended.
    fn forget(&mut self, sequence: u64);

    /// Bytes held for all sequences.
    fn bytes(&self) -> usize;
}
