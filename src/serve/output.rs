//! From engine events to text: one [`Assembler`] for each choice of an answer.

use std::sync::Arc;
use std::time::Instant;

use super::engine::request::SpeculationStats;
use super::engine::{EngineError, Event, FinishReason, TokenScore};
use super::metrics::{Ended, EngineMetrics};
use super::stop::StopFilter;
use crate::model::Tokenizer;
use crate::model::tokenizer::TokenStream;

/// What one event adds to a choice.
#[derive(Debug, Default)]
pub(super) struct Increment {
    pub text: String,
    pub ids: Vec<u32>,
    pub scores: Vec<TokenScore>,
    pub prompt_scores: Vec<TokenScore>,
    pub finish: Option<Finish>,
}

/// How a choice ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Finish {
    /// `stop` or `length`.
    pub reason: &'static str,
    pub stop: Stop,
    pub speculation: SpeculationStats,
}

/// What stopped a choice, as `stop_reason` reports it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Stop {
    /// The end-of-sequence token or the length: reported as null.
    Natural,
    Token(u32),
    Text(String),
}

/// What the answer to one choice needs to know of its request.
#[derive(Debug, Clone)]
pub(super) struct OutputSettings {
    pub stops: Vec<String>,
    pub min_tokens: usize,
    pub eos_ids: Arc<[u32]>,
    pub skip_special_tokens: bool,
}

/// Turns one sequence's events into text. Counts the sequence as ended when it is dropped.
pub(super) struct Assembler {
    tokenizer: Arc<Tokenizer>,
    stream: TokenStream,
    filter: StopFilter,
    settings: OutputSettings,
    count: usize,
    speculation: SpeculationStats,
    ended: Option<Ended>,
    metrics: Arc<EngineMetrics>,
    started: Instant,
}

impl Assembler {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        settings: OutputSettings,
        metrics: Arc<EngineMetrics>,
    ) -> Self {
        Self {
            tokenizer,
            stream: TokenStream::new(settings.skip_special_tokens),
            filter: StopFilter::new(settings.stops.clone()),
            settings,
            count: 0,
            speculation: SpeculationStats::default(),
            ended: None,
            metrics,
            started: Instant::now(),
        }
    }

    /// Takes the next event. After an increment with `finish` nothing more must be pushed.
    pub fn push(&mut self, event: Event) -> Result<Increment, EngineError> {
        match event {
            Event::PromptScores(prompt_scores) => {
                Ok(Increment { prompt_scores, ..Increment::default() })
            }
            Event::Tokens { ids, scores, verified } => {
                if let Some(verified) = verified {
                    self.speculation.record(verified);
                }
                self.tokens(ids, scores)
            }
            Event::Finished(reason) => self.finish(reason),
            Event::Failed(error) => {
                self.ended = Some(Ended::Error);
                Err(error)
            }
        }
    }

    fn tokens(&mut self, ids: Vec<u32>, scores: Vec<TokenScore>) -> Result<Increment, EngineError> {
        let mut increment = Increment { ids, scores, ..Increment::default() };
        for index in 0..increment.ids.len() {
            let id = increment.ids[index];
            self.count += 1;
            let text = self.stream.push(&self.tokenizer, id).map_err(decode_error)?;
            let armed = self.count > self.settings.min_tokens;
            let filtered = self.filter.push(&text, armed);
            increment.text += &filtered.text;
            if let Some(stop) = filtered.stop {
                // Tokens that came in the same step, behind the stop string, never happened.
                increment.ids.truncate(index + 1);
                increment.scores.truncate(index + 1);
                self.ended = Some(Ended::Stop);
                let speculation = std::mem::take(&mut self.speculation);
                increment.finish =
                    Some(Finish { reason: "stop", stop: Stop::Text(stop), speculation });
                break;
            }
        }
        Ok(increment)
    }

    fn finish(&mut self, reason: FinishReason) -> Result<Increment, EngineError> {
        let rest = self.stream.finish(&self.tokenizer).map_err(decode_error)?;
        let filtered = self.filter.push(&rest, self.count > self.settings.min_tokens);
        let mut text = filtered.text;
        let (ended, name, mut stop) = match reason {
            FinishReason::Length => (Ended::Length, "length", Stop::Natural),
            FinishReason::Stop(id) if self.settings.eos_ids.contains(&id) => {
                (Ended::Stop, "stop", Stop::Natural)
            }
            FinishReason::Stop(id) => (Ended::Stop, "stop", Stop::Token(id)),
        };
        match filtered.stop {
            Some(found) => stop = Stop::Text(found),
            None => text += &self.filter.finish(),
        }
        let reason = if matches!(stop, Stop::Text(_)) { "stop" } else { name };
        self.ended = Some(ended);
        let speculation = std::mem::take(&mut self.speculation);
        let finish = Some(Finish { reason, stop, speculation });
        Ok(Increment { text, finish, ..Increment::default() })
    }
}

impl Drop for Assembler {
    fn drop(&mut self) {
        self.metrics.ended(self.ended.unwrap_or(Ended::Abort), self.started);
    }
}

fn decode_error(error: crate::model::tokenizer::TokenizerError) -> EngineError {
    EngineError::Model(format!("cannot decode its tokens: {error}"))
}
