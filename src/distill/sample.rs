//! What the draft learns from: one answered request with the teacher's opinion of it.

use serde::{Deserialize, Serialize};

/// The teacher's most likely tokens at one output position.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TopK {
    /// Token ids, most likely first; the token that was sampled may stand last, outside the top K.
    pub ids: Vec<u32>,
    /// Natural log-probabilities at temperature 1, one for each id.
    pub logprobs: Vec<f32>,
}

/// One request and its answer, as token ids.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Unique within a store, increasing with time.
    pub id: u64,
    pub prompt_ids: Vec<u32>,
    pub output_ids: Vec<u32>,
    /// Temperature that the answer was sampled at.
    pub temperature: f32,
    /// Label for stratified replay and reports; empty when the traffic carries none.
    pub domain: String,
    /// When it was captured, in milliseconds since the epoch.
    pub captured_unix_ms: u64,
    /// Held-out samples are only ever used to judge a draft, never to train it.
    pub held_out: bool,
    /// Whether ids were re-tokenised from text rather than reported by the server.
    pub ids_estimated: bool,
    /// Draft version that was serving when the request began, where known.
    pub draft_version: Option<String>,
    /// One entry for each output position; empty until the teacher has scored it.
    pub teacher: Vec<TopK>,
}

impl Sample {
    /// Whether the teacher has scored every output position.
    pub fn is_scored(&self) -> bool {
        !self.output_ids.is_empty() && self.teacher.len() == self.output_ids.len()
    }
}
