//! A draft model as the proposer.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rand::Rng;

use super::decode::{Decoder, Draft, Rows};
use super::logits::argmax;
use super::proposer::{DraftRequest, Proposal, Proposer};
use super::sampling::{Sampling, Scratch, probabilities, sample};
use crate::model::runtime::{LogitsOf, RuntimeError};

/// How the draft chooses its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DraftSampleMethod {
    /// Its most likely token, always.
    Greedy,
    /// Sampled at the request's temperature, as vLLM's draft does (`top_p` and `top_k` are the
    /// target's business).
    Probabilistic,
}

/// Drafts with a model, all sequences in one forward for each drafted position.
pub(crate) struct NeuralProposer<D: Decoder> {
    shared: Arc<ArcSwap<Draft<D>>>,
    draft: Arc<Draft<D>>,
    sequences: HashMap<u64, Held<D::Cache>>,
    method: DraftSampleMethod,
    /// Ids that exist; columns from here on are padding.
    vocab_size: usize,
    /// Most tokens that are read in one step to catch up with the sequences. What is left over
    /// waits for the next step, so a new draft never stalls the streams for a whole prompt.
    catch_up: usize,
    scratch: Scratch,
}

/// The draft's cache of one sequence: `confirmed` tokens of the sequence, then `drafted`.
struct Held<C> {
    cache: C,
    confirmed: usize,
    drafted: Vec<u32>,
}

/// One request's share of the running [`Proposer::propose`].
struct Work<C> {
    held: Held<C>,
    proposal: Proposal,
    /// Tokens still to draft.
    left: usize,
}

impl<D: Decoder> NeuralProposer<D> {
    pub fn new(
        shared: Arc<ArcSwap<Draft<D>>>,
        method: DraftSampleMethod,
        vocab_size: usize,
        catch_up: usize,
    ) -> Self {
        Self {
            draft: shared.load_full(),
            shared,
            sequences: HashMap::new(),
            method,
            vocab_size,
            catch_up: catch_up.max(1),
            scratch: Scratch::default(),
        }
    }

    /// Takes the sequence's state, rolled back to what the sequence really holds.
    fn take(&mut self, request: &DraftRequest<'_>) -> Held<D::Cache> {
        let mut held = self.sequences.remove(&request.sequence).unwrap_or_else(|| Held {
            cache: self.draft.model.new_cache(),
            confirmed: 0,
            drafted: Vec::new(),
        });
        held.confirmed = held.confirmed.min(request.tokens.len());
        let emitted = &request.tokens[held.confirmed..];
        held.confirmed += held.drafted.iter().zip(emitted).take_while(|(a, b)| a == b).count();
        held.drafted.clear();
        D::truncate(&mut held.cache, held.confirmed);
        held
    }

    /// Reads what the draft has not seen of every sequence; drafts the first token of those that
    /// are then up to date.
    fn catch_up(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        work: &mut [Work<D::Cache>],
    ) -> Result<(), RuntimeError> {
        let context = self.draft.model.context();
        let mut budget = self.catch_up;
        let mut rows = Vec::with_capacity(work.len());
        let mut drafting = Vec::with_capacity(work.len());
        for (index, (request, work)) in requests.iter().zip(work.iter_mut()).enumerate() {
            if request.tokens.len() > context {
                // Past its context a draft has nothing to say.
                work.left = 0;
                continue;
            }
            let new = &request.tokens[work.held.confirmed..];
            // One or two tokens are what every step brings; only more than that is a backlog.
            let take = if new.len() <= 2 { new.len() } else { new.len().min(budget) };
            if new.len() > 2 {
                budget -= take;
            }
            if take < new.len() {
                work.left = 0;
            }
            if take == 0 {
                work.left = 0;
                continue;
            }
            let logits = if work.left > 0 { LogitsOf::Last } else { LogitsOf::None };
            if work.left > 0 {
                drafting.push(index);
            }
            work.held.confirmed += take;
            rows.push(Rows { tokens: &new[..take], cache: &mut work.held.cache, logits });
        }
        if rows.is_empty() {
            return Ok(());
        }
        let logits = self.draft.model.forward(&mut rows)?;
        self.draft_one(&logits, &drafting, requests, work);
        Ok(())
    }

    /// Takes one token for each drafting sequence from its row of logits.
    fn draft_one(
        &mut self,
        logits: &[f32],
        drafting: &[usize],
        requests: &mut [DraftRequest<'_>],
        work: &mut [Work<D::Cache>],
    ) {
        let columns = self.draft.model.vocab_size();
        for (&index, row) in drafting.iter().zip(logits.chunks_exact(columns)) {
            let (request, work) = (&mut requests[index], &mut work[index]);
            let row = &row[..self.vocab_size.min(columns)];
            let sampling = Sampling { temperature: request.temperature, top_p: 1.0, top_k: 0 };
            work.left -= 1;
            if self.method == DraftSampleMethod::Greedy || sampling.is_greedy() {
                work.proposal.tokens.push(argmax(row));
                continue;
            }
            let mut q = Vec::new();
            if !probabilities(row, &sampling, &mut self.scratch, &mut q) {
                work.left = 0;
                continue;
            }
            work.proposal.tokens.push(sample(&q, request.rng.random()));
            work.proposal.probabilities.push(q);
        }
    }

    fn extend(
        &mut self,
        requests: &mut [DraftRequest<'_>],
        work: &mut [Work<D::Cache>],
    ) -> Result<(), RuntimeError> {
        loop {
            let mut drafting = Vec::new();
            let mut rows = Vec::new();
            for (index, work) in work.iter_mut().enumerate().filter(|(_, work)| work.left > 0) {
                let Some(&token) = work.proposal.tokens.last() else { continue };
                work.held.drafted.push(token);
                drafting.push(index);
                rows.push(Rows {
                    tokens: &work.proposal.tokens[work.proposal.tokens.len() - 1..],
                    cache: &mut work.held.cache,
                    logits: LogitsOf::Last,
                });
            }
            if rows.is_empty() {
                return Ok(());
            }
            let logits = self.draft.model.forward(&mut rows)?;
            self.draft_one(&logits, &drafting, requests, work);
        }
    }
}

impl<D: Decoder> Proposer for NeuralProposer<D> {
    fn begin_step(&mut self) -> bool {
        let current = self.shared.load();
        if Arc::ptr_eq(&current, &self.draft) {
            return false;
        }
        self.draft = Arc::clone(&current);
        // Keys and values of the old weights mean nothing to the new ones.
        self.sequences.clear();
        true
    }

    fn propose(
        &mut self,
        requests: &mut [DraftRequest<'_>],
    ) -> Result<Vec<Proposal>, RuntimeError> {
        let context = self.draft.model.context();
        let mut work = Vec::with_capacity(requests.len());
        for request in requests.iter() {
            // The newest drafted token is never read, hence one more than the context holds.
            let room = (context + 1).saturating_sub(request.tokens.len());
            let left = request.max_tokens.min(room);
            work.push(Work { held: self.take(request), proposal: Proposal::default(), left });
        }
        self.catch_up(requests, &mut work)?;
        self.extend(requests, &mut work)?;
        let mut proposals = Vec::with_capacity(work.len());
        for (request, work) in requests.iter().zip(work) {
            self.sequences.insert(request.sequence, work.held);
            proposals.push(work.proposal);
        }
        Ok(proposals)
    }

    fn forget(&mut self, sequence: u64) {
        self.sequences.remove(&sequence);
    }

    fn bytes(&self) -> usize {
        self.sequences.values().map(|held| D::cache_bytes(&held.cache)).sum()
    }
}

#[cfg(test)]
mod tests;
