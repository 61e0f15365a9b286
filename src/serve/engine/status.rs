//! What the engine shows of itself.

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::speculate::{CostCurve, DraftLength};

pub(super) type StatusCell = Arc<ArcSwap<EngineStatus>>;

/// A snapshot, taken after every step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EngineStatus {
    pub running: usize,
    pub waiting: usize,
    /// Bytes of all caches, the draft's included.
    pub cache_bytes: usize,
    /// Live estimate of the probability that one drafted token is accepted.
    pub acceptance_estimate: f64,
    /// Drafts that took effect since the start.
    pub swaps: u64,
    /// The draft length in use, probes aside.
    pub num_speculative_tokens: usize,
    /// What forwards cost on this machine; none without a draft.
    pub cost_curve: Option<Arc<CostCurve>>,
    /// The acceptance from which on drafting pays; none when it never does or was not measured.
    pub break_even_acceptance: Option<f64>,
    /// Expected speed against no speculation, for one sequence at the estimated acceptance.
    pub estimated_speed_up: Option<f64>,
}

impl EngineStatus {
    /// What the draft length knows, for `sequences` running ones.
    pub(super) fn of(length: &DraftLength, sequences: usize) -> Self {
        Self {
            acceptance_estimate: length.acceptance(),
            num_speculative_tokens: length.preferred(sequences.max(1)),
            cost_curve: length.curve().map(Arc::clone),
            break_even_acceptance: length.break_even(),
            estimated_speed_up: length.speed_up(),
            ..Self::default()
        }
    }
}
