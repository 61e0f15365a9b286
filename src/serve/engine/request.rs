//! What the engine takes and gives.

use tokio::sync::{mpsc, oneshot};

use crate::speculate::Sampling;

/// One sequence to generate.
#[derive(Debug)]
pub struct GenerateRequest {
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    /// At least 1; prompt and output together must fit the model length.
    pub max_tokens: usize,
    /// The stop ids cannot be chosen before so many tokens.
    pub min_tokens: usize,
    /// Ids that end the sequence, the end-of-sequence ids included unless they are ignored.
    pub stop_ids: Vec<u32>,
    /// Seed of this sequence's random numbers; none draws one from the engine's.
    pub seed: Option<u64>,
    /// Most likely tokens to report at each output position; 0 reports the chosen one alone.
    pub logprobs: Option<usize>,
    /// Most likely tokens to report at each prompt position. Makes the request scoring work,
    /// which waits for everything else.
    pub prompt_logprobs: Option<usize>,
    /// Lower goes first.
    pub priority: i64,
    /// Dropping the receiver aborts the sequence.
    pub events: mpsc::UnboundedSender<Event>,
}

/// The log-probability of one token and its competitors, at temperature 1.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    pub id: u32,
    pub logprob: f32,
    /// Place among all tokens, counted from 1.
    pub rank: u32,
    /// The most likely tokens with their log-probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// What happens to a sequence.
#[derive(Debug)]
pub enum Event {
    /// Scores of the next prompt positions, from the second token on.
    PromptScores(Vec<TokenScore>),
    /// The next output tokens, with one score each when they were asked for.
    Tokens {
        ids: Vec<u32>,
        scores: Vec<TokenScore>,
        verified: Option<Verified>,
    },
    Finished(FinishReason),
    Failed(EngineError),
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// One of the stop ids, which is the last token.
    Stop(u32),
    Length,
}

/// Outcome of verifying one draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// At least 1.
    pub drafted: usize,
    pub accepted: usize,
}

/// What speculation did for one sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpeculationStats {
    /// Verifications that had at least one drafted token.
    pub steps: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Verifications by the number of tokens they accepted.
    pub histogram: Vec<u64>,
}

impl SpeculationStats {
    /// Adds one verification.
    pub fn record(&mut self, Verified { drafted, accepted }: Verified) {
        self.steps += 1;
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if self.histogram.len() <= accepted {
            self.histogram.resize(accepted + 1, 0);
        }
        self.histogram[accepted] += 1;
    }
}

/// Why a sequence could not be finished.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error("the model failed: {0}")]
    Model(String),
    #[error("the model gave no finite logit\nhint: its weights are damaged; load it again")]
    NonFinite,
    #[error("the engine has stopped")]
    Stopped,
    #[error("{waiting} requests wait already\nhint: try again later, or raise --max-queued")]
    Overloaded { waiting: usize },
}

pub(super) enum Command {
    Generate(Box<GenerateRequest>),
    /// Replies when the engine has begun a step with the draft that is current now.
    AwaitDraft(oneshot::Sender<()>),
}
