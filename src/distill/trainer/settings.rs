//! What training is told, and what it tells of itself.

use std::path::PathBuf;

use crate::distill::loss::Loss;

/// Everything that shapes training.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainSettings {
    /// `forward_kl`, `reverse_kl`, `total_variation`, `log_alpha` or `jensen_shannon`. The first is
    /// the default: from a healed draft it gains acceptance fastest (docs/log.md).
    pub loss: Loss,
    pub learning_rate: f64,
    /// Optimizer steps over which the rate rises to its value.
    pub warmup_steps: usize,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// Largest gradient norm; 0 turns clipping off.
    pub clip: f64,
    /// Longest window, prompt and output together; the prompt is cut from the left.
    pub window: usize,
    /// Samples in one optimizer step.
    pub batch: usize,
    pub seed: u64,
    /// Rank of the updates of the blocks' projections; 0 trains every parameter whole.
    pub lora_rank: usize,
    /// Draft length that mean accepted lengths are reported for.
    pub num_speculative_tokens: usize,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            loss: Loss::ForwardKl,
            learning_rate: 1.5e-4,
            warmup_steps: 10,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            clip: 1.0,
            window: 512,
            batch: 2,
            seed: 0,
            lora_rank: 0,
            num_speculative_tokens: 4,
        }
    }
}

/// Where training stands, over all resumes.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TrainState {
    /// Draft folder that training started from.
    pub base: PathBuf,
    pub step: u64,
    /// Output tokens learned from.
    pub tokens: u64,
    /// Spent in optimizer steps.
    pub seconds: f64,
    /// Trainable parameters, and trainable tensors without a gradient (0 after the start-up check).
    pub parameters: u64,
    pub parameters_without_gradient: u64,
}

/// One optimizer step's outcome.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    pub step: u64,
    pub loss: f32,
    pub tokens: u64,
    pub seconds: f64,
    /// The loss or the gradient was not finite, and the step was dropped.
    pub skipped: bool,
}
