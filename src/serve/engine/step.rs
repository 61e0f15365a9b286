//! One step over the running sequences: draft, one forward of the target, verify.

use std::time::Instant;

use super::Engine;
use super::request::{EngineError, Event, FinishReason, TokenScore, Verified};
use super::sequence::{Sequence, score};
use crate::model::runtime::{LogitsOf, RuntimeError};
use crate::speculate::decode::{Decoder, Rows};
use crate::speculate::verify::Drafted;
use crate::speculate::{DraftRequest, Proposal, Verifier};

/// What one sequence does in this step.
struct Plan {
    /// Tokens of the sequence that the target has not read, as many as fit this step.
    take: usize,
    /// Whether these are all of them, so that a next token can be chosen.
    complete: bool,
    /// What the draft adds behind them.
    proposal: Proposal,
}

/// What one sequence got out of this step.
#[derive(Default)]
struct Outcome {
    ids: Vec<u32>,
    scores: Vec<TokenScore>,
    accepted: usize,
    end: Option<Result<FinishReason, EngineError>>,
}

impl<D: Decoder> Engine<D> {
    /// Advances every running sequence.
    pub(super) fn step(&mut self) {
        if self.running.is_empty() {
            return;
        }
        self.begin_step();
        let mut plans = self.plan();
        self.draft(&mut plans);
        match self.forward(&plans) {
            Ok(logits) => self.verify(&plans, &logits),
            Err(error) => self.fail_all(&EngineError::Model(error.to_string())),
        }
    }

    /// Shares the step among the sequences: each that decodes takes its newest token, those that
    /// still read their prompt share a budget in order of arrival.
    fn plan(&self) -> Vec<Plan> {
        let unread = |s: &Sequence<D::Cache>| s.tokens.len() - D::cached(&s.cache);
        let busy = self.running.iter().any(|sequence| unread(sequence) == 1);
        let settings = &self.settings;
        let mut budget =
            if busy { settings.prefill_chunk_busy } else { settings.prefill_chunk }.max(1);
        self.running
            .iter()
            .map(|sequence| {
                let unread = unread(sequence);
                let take = if unread == 1 { 1 } else { unread.min(budget) };
                if unread > 1 {
                    budget -= take;
                }
                Plan { take, complete: take == unread, proposal: Proposal::default() }
            })
            .collect()
    }

    /// Asks the proposer for drafts of the sequences that decode, and lets it read along with
    /// those that still read their prompt.
    fn draft(&mut self, plans: &mut [Plan]) {
        let Some(proposer) = &mut self.proposer else { return };
        let decodes = |plan: &Plan| plan.complete && plan.take == 1;
        let decoding = plans.iter().filter(|plan| decodes(plan)).count();
        // A step that only reads prompts must not use up a probe.
        let k = if decoding > 0 {
            self.length.next_step(decoding)
        } else {
            self.length.preferred(self.running.len())
        };
        if k == 0 {
            return;
        }
        let mut asked = Vec::with_capacity(plans.len());
        let mut requests = Vec::with_capacity(plans.len());
        for (index, (sequence, plan)) in self.running.iter_mut().zip(plans.iter()).enumerate() {
            let room = sequence.draft_room();
            if room == 0 {
                continue;
            }
            let seen = D::cached(&sequence.cache) + plan.take;
            asked.push(index);
            requests.push(DraftRequest {
                sequence: sequence.id,
                tokens: &sequence.tokens[..seen],
                max_tokens: if decodes(plan) { k.min(room) } else { 0 },
                temperature: sequence.request.sampling.temperature,
                rng: &mut sequence.rng,
            });
        }
        if requests.is_empty() {
            return;
        }
        match proposer.propose(&mut requests) {
            Ok(proposals) => {
                for (index, proposal) in asked.into_iter().zip(proposals) {
                    plans[index].proposal = proposal;
                }
            }
            // Drafts are an optimisation: without them the step is merely slower.
            Err(error) => tracing::warn!(%error, "the draft failed, decoding without it"),
        }
    }

    fn forward(&mut self, plans: &[Plan]) -> Result<Vec<f32>, RuntimeError> {
        let inputs: Vec<Vec<u32>> = self
            .running
            .iter()
            .zip(plans)
            .map(|(sequence, plan)| {
                let start = D::cached(&sequence.cache);
                let unread = &sequence.tokens[start..start + plan.take];
                [unread, plan.proposal.tokens.as_slice()].concat()
            })
            .collect();
        let mut rows: Vec<Rows<'_, D::Cache>> = self
            .running
            .iter_mut()
            .zip(plans)
            .zip(&inputs)
            .filter(|(_, tokens)| !tokens.is_empty())
            .map(|((sequence, plan), tokens)| Rows {
                tokens,
                cache: &mut sequence.cache,
                logits: match (plan.complete, plan.take) {
                    (false, _) => LogitsOf::None,
                    (true, 1) => LogitsOf::All,
                    (true, _) => LogitsOf::Last,
                },
            })
            .collect();
        let logits = self.target.forward(&mut rows)?;
        self.metrics.forward(inputs.iter().map(Vec::len).sum());
        Ok(logits)
    }

    fn verify(&mut self, plans: &[Plan], logits: &[f32]) {
        let columns = self.target.vocab_size();
        let vocab_size = self.settings.vocab_size.min(columns);
        let mut next_row = 0;
        let now = Instant::now();
        let mut ended = Vec::new();
        for (index, (sequence, plan)) in self.running.iter_mut().zip(plans).enumerate() {
            if !plan.complete {
                continue;
            }
            let drafted = plan.proposal.tokens.len();
            let own = &logits[next_row * columns..(next_row + drafted + 1) * columns];
            next_row += drafted + 1;
            let own = own.chunks_exact(columns).map(|row| &row[..vocab_size]);
            let outcome = verify_one(sequence, &plan.proposal, own, &mut self.verifier);
            D::truncate(&mut sequence.cache, sequence.tokens.len() - 1);
            let verified =
                (drafted > 0).then_some(Verified { drafted, accepted: outcome.accepted });
            if drafted > 0 {
                self.length.observe(drafted, outcome.accepted);
                self.metrics.verified(drafted, outcome.accepted);
            }
            if !outcome.ids.is_empty() {
                let previous = sequence.last_token.replace(now);
                self.metrics.tokens(outcome.ids.len(), sequence.arrived, previous, now);
                let Outcome { ids, scores, .. } = outcome;
                sequence.send(Event::Tokens { ids, scores, verified });
            }
            if let Some(end) = outcome.end {
                ended.push(index);
                sequence.send(end.map_or_else(Event::Failed, Event::Finished));
            }
        }
        for index in ended.into_iter().rev() {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: usize) {
        let sequence = self.running.remove(index);
        if let Some(proposer) = &mut self.proposer {
            proposer.forget(sequence.id);
        }
    }

    fn fail_all(&mut self, error: &EngineError) {
        tracing::error!(%error, "a step failed");
        while !self.running.is_empty() {
            self.running[0].send(Event::Failed(error.clone()));
            self.remove(0);
        }
    }
}

/// Decides the tokens that follow, one row after the other, until a draft is refused or the
/// sequence ends.
fn verify_one<'a, C>(
    sequence: &mut Sequence<C>,
    proposal: &Proposal,
    rows: impl Iterator<Item = &'a [f32]>,
    verifier: &mut Verifier,
) -> Outcome {
    let mut outcome = Outcome::default();
    for (position, row) in rows.enumerate() {
        let drafted = proposal.tokens.get(position).map(|&token| Drafted {
            token,
            probabilities: proposal.probabilities.get(position).map(Vec::as_slice),
        });
        let sampling = sequence.request.sampling;
        let choice = if sequence.banned().is_empty() {
            verifier.choose(row, &sampling, drafted, &mut sequence.rng)
        } else {
            let mut masked = row.to_vec();
            for &id in sequence.banned() {
                if let Some(logit) = masked.get_mut(id as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            verifier.choose(&masked, &sampling, drafted, &mut sequence.rng)
        };
        let Some(choice) = choice else {
            outcome.end = Some(Err(EngineError::NonFinite));
            return outcome;
        };
        if let Some(k) = sequence.request.logprobs {
            outcome.scores.push(score(row, choice.token, k));
        }
        outcome.ids.push(choice.token);
        outcome.accepted += usize::from(choice.accepted);
        if let Some(reason) = sequence.push(choice.token) {
            outcome.end = Some(Ok(reason));
            return outcome;
        }
        if !choice.accepted {
            return outcome;
        }
    }
    outcome
}
