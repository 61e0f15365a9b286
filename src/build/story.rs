//! What a build tells: while it runs, of how the draft came about, and of what came out.

use serde::{Deserialize, Serialize};

use super::plan::Plan;
use super::prune::Selection;
use super::trim::Trimmed;
use crate::distill::Comparison;
use crate::model::decoder::Decoder;

/// What a build tells while it runs.
#[derive(Debug, Clone)]
pub enum Progress<'a> {
    /// A step began; `total` units of work, 0 when that is not known.
    Started {
        step: &'static str,
        total: usize,
    },
    Advanced {
        units: usize,
    },
    /// A step ended, with what acceptance is now where that was measured.
    Finished {
        step: &'static str,
        detail: String,
        scores: Option<&'a Comparison>,
    },
}

/// A draft with how it came about.
pub struct Made {
    pub draft: Decoder,
    pub story: Story,
    /// The draft over a part of the vocabulary, where that was asked for.
    pub trimmed: Option<Trimmed>,
}

/// How a draft came about; what a stopped build keeps of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Story {
    pub plan: Plan,
    pub selection: Selection,
    /// Scores after each step, in order.
    pub steps: Vec<(String, Comparison)>,
    /// Shapes that were tried, with their scores.
    pub tried: Vec<Tried>,
    /// Scores by answer tokens learned.
    pub curve: Vec<(u64, Comparison)>,
    /// Block Influence of each of the target's blocks.
    pub influence: Vec<f64>,
    /// Eigenvalues of the covariance of the normalised residual, the largest first.
    pub spectrum: Vec<f64>,
    pub calibration_tokens: usize,
    /// Shares of texts' tokens that a trimmed vocabulary has: languages, and the calibration text.
    pub coverage: Vec<(String, f64)>,
}

/// A shape that the search tried.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    pub plan: Plan,
    pub parameters: usize,
    pub latency_ratio: f64,
    pub alpha: f64,
    pub num_speculative_tokens: usize,
    pub expected_speedup: f64,
}

/// What came out.
#[derive(Debug, Clone)]
pub struct Report {
    pub story: Story,
    pub target_parameters: usize,
    pub draft_parameters: usize,
    /// Of a step of the draft to one of the target, by the cost model.
    pub latency_ratio: f64,
    pub num_speculative_tokens: usize,
    pub expected_speedup: f64,
    pub checksum: String,
    pub vllm_command: String,
}

impl Story {
    /// Of which nothing is known yet but the shape.
    pub(super) fn new(plan: Plan, selection: Selection) -> Self {
        Self {
            plan,
            selection,
            steps: Vec::new(),
            tried: Vec::new(),
            curve: Vec::new(),
            influence: Vec::new(),
            spectrum: Vec::new(),
            calibration_tokens: 0,
            coverage: Vec::new(),
        }
    }
}
