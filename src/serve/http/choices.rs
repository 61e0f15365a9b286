//! The sequences of one request, and what comes out of them.

use std::sync::Arc;

use tokio::sync::mpsc::unbounded_channel;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{StreamExt, StreamMap};

use super::App;
use super::error::ApiError;
use super::params::Params;
use crate::serve::engine::{EngineError, Event, TokenScore};
use crate::serve::output::{Assembler, Finish, Increment};

/// One prompt with the number of tokens that may follow it.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    pub ids: Arc<[u32]>,
    pub max_tokens: usize,
}

/// Running choices, numbered `prompt * n + choice`. Dropping it aborts what still runs.
pub(super) struct Choices {
    streams: StreamMap<usize, UnboundedReceiverStream<Event>>,
    assemblers: Vec<Option<Assembler>>,
}

/// Everything one choice gave.
#[derive(Debug, Default)]
pub(super) struct Finished {
    pub text: String,
    pub ids: Vec<u32>,
    pub scores: Vec<TokenScore>,
    pub prompt_scores: Vec<TokenScore>,
    pub finish: Option<Finish>,
}

impl Choices {
    /// Hands every choice of every prompt to the engine.
    pub fn start(
        app: &App,
        params: &Params,
        prompts: &[Prompt],
        logprobs: Option<usize>,
    ) -> Result<Self, ApiError> {
        let mut this = Self { streams: StreamMap::new(), assemblers: Vec::new() };
        for prompt in prompts {
            for choice in 0..params.n {
                let (events, receiver) = unbounded_channel();
                let request =
                    params.generate(&prompt.ids, prompt.max_tokens, logprobs, choice, events);
                app.engine.generate(request)?;
                this.streams.insert(this.assemblers.len(), UnboundedReceiverStream::new(receiver));
                this.assemblers.push(Some(Assembler::new(
                    Arc::clone(&app.tokenizer),
                    params.output_settings(app),
                    Arc::clone(&app.metrics),
                )));
            }
        }
        Ok(this)
    }

    /// The next increment and the choice it belongs to; none when all choices have finished.
    pub async fn next(&mut self) -> Option<Result<(usize, Increment), EngineError>> {
        while let Some((index, event)) = self.streams.next().await {
            let Some(assembler) = &mut self.assemblers[index] else { continue };
            let result = assembler.push(event);
            if !matches!(&result, Ok(increment) if increment.finish.is_none()) {
                // Also stops a sequence whose text met a stop string.
                self.streams.remove(&index);
                self.assemblers[index] = None;
            }
            return Some(result.map(|increment| (index, increment)));
        }
        // A channel that closed without a last event: the engine is gone.
        let lost = self.assemblers.iter_mut().find_map(Option::take);
        lost.map(|_| Err(EngineError::Stopped))
    }

    /// Waits for all choices.
    pub async fn finish(mut self) -> Result<Vec<Finished>, EngineError> {
        let mut all: Vec<Finished> = Vec::new();
        all.resize_with(self.assemblers.len(), Finished::default);
        while let Some(next) = self.next().await {
            let (index, increment) = next?;
            let finished = &mut all[index];
            finished.text += &increment.text;
            finished.ids.extend(increment.ids);
            finished.scores.extend(increment.scores);
            finished.prompt_scores.extend(increment.prompt_scores);
            finished.finish = increment.finish.or(finished.finish.take());
        }
        Ok(all)
    }
}
