//! The training loop: one owner of the draft's weights, optimizer and random state.

use std::path::{Path, PathBuf};

use super::sample::Sample;

/// What can go wrong in training.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error("cannot read the draft: {0}")]
    Draft(String),
    #[error("cannot save or resume training state in {path}: {reason}")]
    State { path: String, reason: String },
    #[error(
        "{count} tensors receive no gradient, the first is {first}\nhint: this is a defect of this build; training would silently do nothing"
    )]
    NoGradient { count: usize, first: String },
    #[error("tensor computation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// Everything that shapes training.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainSettings {
    /// `forward_kl`, `reverse_kl`, `total_variation` or `log_alpha`.
    pub loss: String,
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
    /// Draft length that mean accepted lengths are reported for.
    pub num_speculative_tokens: usize,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self {
            loss: "log_alpha".into(),
            learning_rate: 1.5e-4,
            warmup_steps: 10,
            weight_decay: 0.0,
            beta1: 0.9,
            beta2: 0.95,
            clip: 1.0,
            window: 512,
            batch: 4,
            seed: 0,
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

/// How well a draft predicts what the server would accept.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Acceptance {
    pub positions: u64,
    /// Mean over positions, under the greedy-draft rule: at temperature 0 whether the draft's
    /// most likely token is the answer's, above it the target's probability of that token.
    pub acceptance_rate: f64,
    /// Expected tokens of a verification step, bonus token included.
    pub mean_accepted_length: f64,
    pub finite: bool,
    /// Mean acceptance of each sample, in the order given.
    pub per_sample: Vec<f64>,
}

/// Trains one draft. Not `Sync`: it belongs to one thread.
pub struct Trainer {}

impl Trainer {
    /// Opens training on a draft folder. When `state` holds a checkpoint, training resumes from
    /// it, whatever `draft` says; [`Trainer::restart`] starts over. Runs the gradient check.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn open(
        _draft: &Path,
        _state: &Path,
        _settings: TrainSettings,
    ) -> Result<Self, TrainError> {
        todo!()
    }

    pub fn state(&self) -> &TrainState {
        todo!()
    }

    /// Trains `epochs` passes over scored samples; unscored ones are skipped. `on_update` is
    /// called after every step and may return `false` to stop early. Saves a checkpoint at the
    /// end and every few hundred steps.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn train(
        &mut self,
        _samples: &[Sample],
        _epochs: usize,
        _on_update: &mut dyn FnMut(Update) -> bool,
    ) -> Result<(), TrainError> {
        todo!()
    }

    /// Acceptance of the weights being trained.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn evaluate(&self, _samples: &[Sample]) -> Result<Acceptance, TrainError> {
        todo!()
    }

    /// Acceptance of a draft folder, leaving the weights being trained alone.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn evaluate_folder(
        &self,
        _draft: &Path,
        _samples: &[Sample],
    ) -> Result<Acceptance, TrainError> {
        todo!()
    }

    /// Writes the weights being trained as a draft folder with a manifest made of `manifest`
    /// and the checksums; the folder appears whole or not at all. Returns the checksum.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn export(
        &self,
        _directory: &Path,
        _manifest: serde_json::Value,
    ) -> Result<String, TrainError> {
        todo!()
    }

    /// Drops the training state and starts from a draft folder.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn restart(&mut self, _draft: &Path) -> Result<(), TrainError> {
        todo!()
    }
}
