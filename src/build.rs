//! From a target to a draft: inspect, calibrate, slice, prune, heal, export.

pub mod calibrate;
pub mod corpus;
pub mod examine;
pub mod export;
pub mod generate;
pub mod heal;
pub mod inspect;
pub mod linalg;
pub mod pipeline;
pub mod plan;
pub mod prompts;
pub mod prune;
pub mod report;
pub mod search;
pub mod settings;
mod shrink;
pub mod slice;
pub mod story;
pub mod stream;
pub mod teach;
pub mod trim;
pub mod verify;
pub mod work;

pub use pipeline::run;
pub use plan::{Plan, Request};
pub use settings::{Init, Settings};
pub use story::{Made, Progress, Report, Story, Tried};

/// What can go wrong on the way to a draft.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    #[error(transparent)]
    Runtime(#[from] crate::model::runtime::RuntimeError),
    #[error(transparent)]
    Tokenizer(#[from] crate::model::tokenizer::TokenizerError),
    #[error("tensor computation failed: {0}")]
    Tensor(#[from] candle_core::Error),
    #[error("cannot solve: {0}\nhint: calibrate on more or other text")]
    Solve(String),
    #[error("{flag} got {got}, expected {expected}")]
    Request { flag: &'static str, got: String, expected: &'static str },
    #[error(
        "no draft of {asked:.3} of the target's parameters can be made: the smallest shape comes to {smallest:.3}, most of it the two tables of {vocab_size} rows\nhint: ask for a larger --target-size"
    )]
    TooSmall { asked: f64, smallest: f64, vocab_size: usize },
    #[error(
        "no draft takes {asked:.3} of the target's time for a step: the fastest shape takes {fastest:.3} under this cost model\nhint: ask for a larger --latency-ratio, or give --layer-cost 0 for a CPU"
    )]
    TooFast { asked: f64, fastest: f64 },
    #[error(
        "the plan does not fit the target: {0}\nhint: take a plan that da-build printed for this target"
    )]
    Plan(String),
    #[error("cannot read the plan {}: {reason}\nhint: give what --dry-run --json prints, or a draft's da_manifest.json", path.display())]
    PlanFile { path: std::path::PathBuf, reason: String },
    #[error("cannot read calibration text {path}: {reason}")]
    Calibration { path: String, reason: String },
    #[error(
        "calibration text holds {tokens} tokens, at least {needed} are needed\nhint: add text, or use --calibration builtin"
    )]
    TooLittleText { tokens: usize, needed: usize },
    #[error(transparent)]
    Write(#[from] crate::model::draft_folder::WriteError),
    #[error(
        "the target has {target} rows of vocabulary, the draft {draft}, expected the same\nhint: da-build inspect MODEL DRAFT says more about the pair"
    )]
    Vocabulary { target: usize, draft: usize },
    #[error("the vocabulary cannot be trimmed: {0}\nhint: leave --vocab out")]
    Trim(String),
    #[error(transparent)]
    Table(#[from] crate::vocab::TokenMapError),
    #[error("cannot distil: {0}")]
    Train(#[from] crate::distill::trainer::TrainError),
    #[error(
        "the target's answers leave nothing to learn from\nhint: add prompts; each is answered by the target until its end token"
    )]
    NothingToLearn,
    #[error("cannot write {}: {source}\nhint: check the permissions and the free space there", path.display())]
    Work { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot create a chat prompt: {0}")]
    Chat(#[from] crate::model::chat::ChatError),
}

impl BuildError {
    /// Whether the same command may succeed later, so that what was done so far is worth keeping.
    fn may_be_resumed(&self) -> bool {
        matches!(self, Self::Write(_) | Self::Work { .. } | Self::Train(_))
    }
}
