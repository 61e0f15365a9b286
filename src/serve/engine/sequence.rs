//! One sequence that the engine works on.

use std::time::Instant;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::request::{Event, FinishReason, GenerateRequest, TokenScore};
use crate::speculate::logits::{log_sum_exp, rank, top_k};

/// Invariant: between steps the cache holds a prefix of `tokens`, and all but the last of them
/// once the prompt has been read.
pub(super) struct Sequence<C> {
    pub id: u64,
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub cache: C,
    pub request: GenerateRequest,
    pub rng: ChaCha8Rng,
    pub arrived: Instant,
    pub last_token: Option<Instant>,
}

impl<C> Sequence<C> {
    pub fn new(
        id: u64,
        seed: u64,
        mut request: GenerateRequest,
        arrived: Instant,
        cache: C,
    ) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            id,
            prompt_len: tokens.len(),
            tokens,
            cache,
            rng: ChaCha8Rng::seed_from_u64(request.seed.unwrap_or(seed)),
            request,
            arrived,
            last_token: None,
        }
    }

    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens that drafting could still bring: the target adds one of its own.
    pub fn draft_room(&self) -> usize {
        // Scoring requests would only blur the acceptance that clients see.
        if self.request.prompt_logprobs.is_some() {
            return 0;
        }
        (self.request.max_tokens - self.output_len()).saturating_sub(1)
    }

    /// Appends a token; returns why the sequence ends with it, if it does.
    pub fn push(&mut self, token: u32) -> Option<FinishReason> {
        self.tokens.push(token);
        if self.request.stop_ids.contains(&token) {
            return Some(FinishReason::Stop(token));
        }
        (self.output_len() >= self.request.max_tokens).then_some(FinishReason::Length)
    }

    /// Ids that must not be chosen next.
    pub fn banned(&self) -> &[u32] {
        if self.output_len() < self.request.min_tokens { &self.request.stop_ids } else { &[] }
    }

    /// Whether anyone still listens.
    pub fn is_wanted(&self) -> bool {
        !self.request.events.is_closed()
    }

    /// Sends an event; whether it arrives is seen by [`Sequence::is_wanted`].
    pub fn send(&self, event: Event) {
        let _ = self.request.events.send(event);
    }
}

/// Scores `id` in one row of raw logits without padding columns.
pub(super) fn score(row: &[f32], id: u32, k: usize) -> TokenScore {
    let normaliser = log_sum_exp(row);
    let mut top = top_k(row, k);
    for (_, value) in &mut top {
        *value -= normaliser;
    }
    match row.get(id as usize) {
        Some(value) => TokenScore { id, logprob: value - normaliser, rank: rank(row, id), top },
        // A prompt may hold a padding id; no token is less likely.
        None => TokenScore { id, logprob: f32::NEG_INFINITY, rank: row.len() as u32 + 1, top },
    }
}
