//! Scoring work: requests that ask for the log-probabilities of their prompt.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::request::{EngineError, Event};
use super::sequence::{Sequence, score};
use super::{Engine, Queued};
use crate::model::runtime::LogitsOf;
use crate::speculate::decode::{Decoder, Rows};

/// Scoring requests: one under way, the others waiting.
pub(super) struct Scoring<C> {
    pub waiting: BTreeMap<(i64, u64), Queued>,
    pub current: Option<Sequence<C>>,
    /// No chunk starts before this while streams run.
    not_before: Option<Instant>,
}

impl<C> Default for Scoring<C> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), current: None, not_before: None }
    }
}

impl<C> Scoring<C> {
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.current.is_none()
    }

    /// Drops the current request when nobody listens.
    pub fn drop_unwanted(&mut self) {
        self.current.take_if(|sequence| !sequence.is_wanted());
    }
}

impl<D: Decoder> Engine<D> {
    /// Scores one piece of the current request, if the streams leave room for it.
    pub(super) fn score_step(&mut self) {
        let busy = !self.running.is_empty() || !self.waiting.is_empty();
        let started = Instant::now();
        if busy && self.scoring.not_before.is_some_and(|time| started < time) {
            return;
        }
        if self.scoring.current.is_none() {
            let Some(((_, id), queued)) = self.scoring.waiting.pop_first() else { return };
            let sequence = self.new_sequence(id, queued);
            self.scoring.current = Some(sequence);
        }
        let Some(mut sequence) = self.scoring.current.take() else { return };
        let settings = &self.settings;
        let chunk = if busy { settings.scoring_chunk_busy } else { settings.scoring_chunk };
        match self.score_chunk(&mut sequence, chunk) {
            Err(error) => sequence.send(Event::Failed(error)),
            Ok(false) => self.scoring.current = Some(sequence),
            // The whole prompt is scored and the first token chosen.
            Ok(true) => self.running.push(sequence),
        }
        // Streams then have the time for themselves until scoring is back at its share.
        let share = self.settings.scoring_share.clamp(0.01, 1.0);
        let pause: Duration = started.elapsed().mul_f64((1.0 - share) / share);
        self.scoring.not_before = Some(Instant::now() + pause);
    }

    /// Returns whether the prompt is done and the sequence goes on as a running one.
    fn score_chunk(
        &mut self,
        sequence: &mut Sequence<D::Cache>,
        chunk: usize,
    ) -> Result<bool, EngineError> {
        let start = D::cached(&sequence.cache);
        // The last prompt token is left to the ordinary step, which chooses what follows it.
        let last = sequence.prompt_len - 1;
        let end = last.min(start + chunk.max(1));
        if start < end {
            let rows = Rows {
                tokens: &sequence.tokens[start..end],
                cache: &mut sequence.cache,
                logits: LogitsOf::All,
            };
            let logits = self
                .target
                .forward(&mut [rows])
                .map_err(|error| EngineError::Model(error.to_string()))?;
            let columns = self.target.vocab_size();
            let k = sequence.request.prompt_logprobs.unwrap_or(0);
            let scores = logits
                .chunks_exact(columns)
                .zip(&sequence.tokens[start + 1..=end])
                .map(|(row, &id)| score(&row[..self.settings.vocab_size.min(columns)], id, k))
                .collect();
            sequence.send(Event::PromptScores(scores));
        }
        Ok(end == last)
    }
}
