//! How many tokens to draft: a fixed number, or whatever pays at the current acceptance.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::decode::{Decoder, Rows};
use crate::model::runtime::{LogitsOf, RuntimeError};

/// Largest draft length that `auto` considers.
pub const MAX_AUTO: usize = 8;
/// Rows of the measured curves: a verification of [`MAX_AUTO`] drafted tokens and one more.
const ROWS: usize = MAX_AUTO + 1;
const WARM_CONTEXT: usize = 64;

/// What forwards cost on this machine, measured at start-up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CostCurve {
    /// Milliseconds of the target's forward for 1, 2, … rows; never falls.
    pub verify_ms: Vec<f64>,
    /// Milliseconds of one draft step for 1, 2, … rows, likewise; empty without a draft.
    pub draft_ms: Vec<f64>,
}

impl CostCurve {
    /// Times both models in turns on a short context, `runs` times for each size: a draft's
    /// weights are then no more in the processor's cache than they are when it serves.
    pub(crate) fn measure<T: Decoder, D: Decoder>(
        target: &T,
        draft: Option<&D>,
        runs: usize,
    ) -> Result<Self, RuntimeError> {
        let mut target = Stopwatch::new(target)?;
        let mut draft = draft.map(Stopwatch::new).transpose()?;
        // Sizes take turns, so that a burst of foreign load does not fall on one of them alone.
        for run in 0..=runs {
            for rows in 1..=ROWS {
                target.time(rows, run > 0)?;
                if let Some(draft) = &mut draft {
                    draft.time(rows, run > 0)?;
                }
            }
        }
        Ok(Self {
            verify_ms: rising(&target.fastest),
            draft_ms: draft.map_or(Vec::new(), |draft| rising(&draft.fastest)),
        })
    }

    /// Milliseconds of the target's forward over `rows` rows.
    fn verify(&self, rows: usize) -> f64 {
        interpolate(&self.verify_ms, rows)
    }

    /// Milliseconds of one draft step over `rows` rows.
    fn draft(&self, rows: usize) -> f64 {
        interpolate(&self.draft_ms, rows)
    }

    /// Tokens per second of each of `sequences` when `k` tokens are drafted at acceptance `a`.
    pub fn tokens_per_second(&self, a: f64, k: usize, sequences: usize) -> f64 {
        let sequences = sequences.max(1);
        let mut time = self.verify(sequences * (k + 1));
        if k > 0 {
            time += k as f64 * self.draft(sequences);
        }
        1000.0 * expected_tokens(a, k) / time.max(1e-6)
    }

    /// The draft length in `0..=limit` that gives the most tokens per second.
    pub fn best_length(&self, a: f64, sequences: usize, limit: usize) -> usize {
        let limit = if self.draft_ms.is_empty() { 0 } else { limit };
        let speed = |k: usize| self.tokens_per_second(a, k, sequences);
        (0..=limit).max_by(|&x, &y| speed(x).total_cmp(&speed(y)).then(y.cmp(&x))).unwrap_or(0)
    }

    /// The acceptance above which drafting pays at all, for one sequence.
    pub fn break_even(&self) -> Option<f64> {
        (0..=100)
            .map(|step| f64::from(step) / 100.0)
            .find(|&a| self.best_length(a, 1, MAX_AUTO) > 0)
    }
}

/// Tokens that one verification of `k` drafted tokens yields on average, the target's own token
/// included, when each is accepted with probability `a`.
pub fn expected_tokens(a: f64, k: usize) -> f64 {
    (0..=k).map(|power| a.powi(power as i32)).sum()
}

/// Value for `rows` rows; beyond the curve its mean slope goes on.
fn interpolate(curve: &[f64], rows: usize) -> f64 {
    match curve {
        [] => f64::INFINITY,
        [only] => *only * rows as f64,
        [first, .., last] => curve.get(rows.max(1) - 1).copied().unwrap_or_else(|| {
            let slope = ((last - first) / (curve.len() - 1) as f64).max(0.0);
            last + slope * (rows - curve.len()) as f64
        }),
    }
}

/// Times one model's forwards behind a short context.
struct Stopwatch<'a, D: Decoder> {
    model: &'a D,
    context: Vec<u32>,
    cache: D::Cache,
    /// Milliseconds for 1, 2, … rows. Whatever else the machine does only ever adds to a run, so
    /// the fastest one tells most about the model.
    fastest: Vec<f64>,
}

impl<'a, D: Decoder> Stopwatch<'a, D> {
    fn new(model: &'a D) -> Result<Self, RuntimeError> {
        let context = WARM_CONTEXT.min(model.context().saturating_sub(ROWS)).max(1);
        let token = |index: usize| (index % model.vocab_size()) as u32;
        let context: Vec<u32> = (0..context).map(token).collect();
        let mut cache = model.new_cache();
        let warm = Rows { tokens: &context, cache: &mut cache, logits: LogitsOf::None };
        model.forward(&mut [warm])?;
        Ok(Self { model, context, cache, fastest: vec![f64::INFINITY; ROWS] })
    }

    fn time(&mut self, rows: usize, counts: bool) -> Result<(), RuntimeError> {
        let started = Instant::now();
        let tokens = &self.context[..rows.min(self.context.len())];
        let piece = Rows { tokens, cache: &mut self.cache, logits: LogitsOf::All };
        self.model.forward(&mut [piece])?;
        if counts {
            let fastest = &mut self.fastest[rows - 1];
            *fastest = fastest.min(started.elapsed().as_secs_f64() * 1e3);
        }
        D::truncate(&mut self.cache, self.context.len());
        Ok(())
    }
}

/// The nearest curve that never falls, in least squares: neighbours that are out of order share
/// their mean (pool adjacent violators). More rows are never less work, and a dip in the curve
/// would make one draft length look better than it is.
fn rising(curve: &[f64]) -> Vec<f64> {
    let mut pools: Vec<(f64, usize)> = Vec::new();
    for &value in curve {
        pools.push((value, 1));
        while let [.., (before, n), (after, m)] = pools[..]
            && before > after
        {
            pools.truncate(pools.len() - 2);
            let mean = (before * n as f64 + after * m as f64) / (n + m) as f64;
            pools.push((mean, n + m));
        }
    }
    pools.into_iter().flat_map(|(mean, count)| std::iter::repeat_n(mean, count)).collect()
}

/// Live estimate of the probability that a drafted token is accepted, given that the ones before
/// it were: accepted tokens over tokens that were judged, older ones fading out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AcceptanceEstimate {
    accepted: f64,
    judged: f64,
}

impl AcceptanceEstimate {
    /// Judged tokens after which an observation has lost half of its weight.
    const HALF_LIFE: f64 = 150.0;
    /// Weight of what was known before a swap, in judged tokens.
    const AFTER_SWAP: f64 = 8.0;

    /// Starts from a guess that weighs little.
    pub fn new(guess: f64) -> Self {
        Self { accepted: guess * Self::AFTER_SWAP, judged: Self::AFTER_SWAP }
    }

    pub fn value(&self) -> f64 {
        self.accepted / self.judged
    }

    /// Takes the outcome of one verification.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        // Tokens after a refused one were never judged.
        let judged = (accepted + 1).min(drafted) as f64;
        let fade = 0.5f64.powf(judged / Self::HALF_LIFE);
        self.accepted = self.accepted * fade + accepted as f64;
        self.judged = self.judged * fade + judged;
    }

    /// Another draft serves: what is known is now a weak guess.
    pub fn draft_changed(&mut self) {
        let keep = (Self::AFTER_SWAP / self.judged).min(1.0);
        self.accepted *= keep;
        self.judged *= keep;
    }
}

/// Chooses the draft length of each step.
#[derive(Debug, Clone)]
pub struct DraftLength {
    /// None chooses by the costs.
    fixed: Option<usize>,
    curve: Option<Arc<CostCurve>>,
    break_even: Option<f64>,
    acceptance: AcceptanceEstimate,
    steps: u64,
    probe_left: u64,
}

impl DraftLength {
    /// A guess until something was measured; optimistic, so that a good draft shows at once.
    const GUESS: f64 = 0.6;
    /// While nothing is drafted, one step in so many begins a probe …
    const PROBE_EVERY: u64 = 192;
    /// … of so many steps with one drafted token each.
    const PROBE_STEPS: u64 = 8;
    const PROBE_AFTER_SWAP: u64 = 24;

    /// Always `k`. The costs, when they were measured, are only shown.
    pub fn fixed(k: usize, curve: Option<CostCurve>) -> Self {
        Self::new(Some(k), curve)
    }

    /// Whatever pays on these costs.
    pub fn auto(curve: CostCurve) -> Self {
        Self::new(None, Some(curve))
    }

    fn new(fixed: Option<usize>, curve: Option<CostCurve>) -> Self {
        let acceptance = AcceptanceEstimate::new(Self::GUESS);
        let break_even = curve.as_ref().and_then(CostCurve::break_even);
        let curve = curve.map(Arc::new);
        // Where drafting looks too dear from the start, the draft is tried once all the same.
        let probe_left = Self::PROBE_AFTER_SWAP;
        Self { fixed, curve, break_even, acceptance, steps: 0, probe_left }
    }

    /// Draft length of the next step, in which `sequences` sequences decode.
    pub fn next_step(&mut self, sequences: usize) -> usize {
        if let Some(k) = self.fixed {
            return k;
        }
        self.steps += 1;
        let best = self.preferred(sequences);
        if best > 0 || self.curve.as_ref().is_none_or(|curve| curve.draft_ms.is_empty()) {
            self.probe_left = self.probe_left.saturating_sub(1);
            return best;
        }
        if self.steps.is_multiple_of(Self::PROBE_EVERY) {
            self.probe_left = self.probe_left.max(Self::PROBE_STEPS);
        }
        if self.probe_left == 0 {
            return 0;
        }
        self.probe_left -= 1;
        1
    }

    /// Takes the outcome of one sequence's verification.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        if drafted > 0 {
            self.acceptance.observe(drafted, accepted);
        }
    }

    /// Another draft serves.
    pub fn draft_changed(&mut self) {
        self.acceptance.draft_changed();
        self.probe_left = Self::PROBE_AFTER_SWAP;
    }

    /// Current estimate of the acceptance of one drafted token.
    pub fn acceptance(&self) -> f64 {
        self.acceptance.value()
    }

    /// The length in use, probes aside.
    pub fn preferred(&self, sequences: usize) -> usize {
        self.fixed.unwrap_or_else(|| {
            self.curve
                .as_ref()
                .map_or(0, |curve| curve.best_length(self.acceptance.value(), sequences, MAX_AUTO))
        })
    }

    /// The measured costs.
    pub fn curve(&self) -> Option<&Arc<CostCurve>> {
        self.curve.as_ref()
    }

    /// The acceptance from which on drafting pays for one sequence.
    pub fn break_even(&self) -> Option<f64> {
        self.break_even
    }

    /// Expected speed against no speculation, for one sequence at the estimated acceptance.
    pub fn speed_up(&self) -> Option<f64> {
        let curve = self.curve.as_ref()?;
        let speed = |k| curve.tokens_per_second(self.acceptance.value(), k, 1);
        Some(speed(self.preferred(1)) / speed(0))
    }
}

#[cfg(test)]
mod tests;
