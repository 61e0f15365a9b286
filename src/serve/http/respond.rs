//! Answers of both generating routes, whole or as a stream of server-sent events.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::App;
use super::choices::{Choices, Finished, Prompt};
use super::error::ApiError;
use super::logprobs::{self, PromptLogprobs};
use super::params::Params;
use crate::serve::engine::TokenScore;
use crate::serve::engine::request::SpeculationStats;
use crate::serve::output::{Finish, Increment, Stop};

/// Which layout an answer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// A request on its way to an answer.
pub(super) struct Answer {
    app: Arc<App>,
    kind: Kind,
    params: Params,
    prompts: Vec<Prompt>,
    /// Most likely tokens to report with each output token.
    logprobs: Option<usize>,
    id: String,
    created: u64,
}

#[derive(Serialize)]
struct Full<'a> {
    #[serde(flatten)]
    head: Map<String, Value>,
    choices: Vec<FullChoice<'a>>,
    usage: Value,
    #[serde(flatten)]
    tail: Map<String, Value>,
    /// Of a chat; a text completion has them in its choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Option<PromptLogprobs<'a>>>,
}

#[derive(Serialize)]
struct FullChoice<'a> {
    #[serde(flatten)]
    fields: Map<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Option<PromptLogprobs<'a>>>,
}

impl Answer {
    pub fn new(
        app: Arc<App>,
        kind: Kind,
        params: Params,
        prompts: Vec<Prompt>,
        logprobs: Option<usize>,
    ) -> Self {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:032x}", rand::random::<u128>());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let created = now.map_or(0, |since| since.as_secs());
        Self { app, kind, params, prompts, logprobs, id, created }
    }

    pub async fn respond(self) -> Result<Response, ApiError> {
        let choices = Choices::start(&self.app, &self.params, &self.prompts, self.logprobs)?;
        if self.params.stream {
            return Ok(self.stream(choices));
        }
        let finished = choices.finish().await?;
        // Thousands of scored positions take milliseconds to write out.
        let body = tokio::task::spawn_blocking(move || self.full(&finished))
            .await
            .map_err(|error| ApiError::internal(format!("cannot write the answer: {error}")))??;
        Ok((StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], body).into_response())
    }

    fn head(&self, object: &str) -> Map<String, Value> {
        let mut head = Map::new();
        head.insert("id".into(), self.id.as_str().into());
        head.insert("object".into(), object.into());
        head.insert("created".into(), self.created.into());
        head.insert("model".into(), self.app.model_name.as_str().into());
        head
    }

    fn prompt_of(&self, choice: usize) -> &Prompt {
        &self.prompts[choice / self.params.n]
    }

    fn full(&self, finished: &[Finished]) -> Result<Vec<u8>, ApiError> {
        let texts = &self.app.texts;
        let scored = |index: usize| -> Option<PromptLogprobs<'_>> {
            self.params.prompt_logprobs?;
            // The first choice of each prompt has its scores.
            let first = &finished[index / self.params.n * self.params.n];
            Some(PromptLogprobs { scores: &first.prompt_scores, texts })
        };
        let choices = finished
            .iter()
            .enumerate()
            .map(|(index, choice)| FullChoice {
                fields: self.full_choice(index, choice),
                prompt_logprobs: (self.kind == Kind::Completion).then(|| scored(index)),
            })
            .collect();
        let generated = finished.iter().map(|choice| choice.ids.len()).sum();
        let chat = self.kind == Kind::Chat;
        let mut tail = Map::new();
        if chat && self.params.return_token_ids {
            tail.insert("prompt_token_ids".into(), json!(*self.prompts[0].ids));
        }
        if let Some(metrics) = self.speculation(finished[0].finish.as_ref()) {
            tail.insert("metrics".into(), metrics);
        }
        let full = Full {
            head: self.head(if chat { "chat.completion" } else { "text_completion" }),
            choices,
            usage: self.usage(generated),
            tail,
            prompt_logprobs: chat.then(|| scored(0)),
        };
        serde_json::to_vec(&full)
            .map_err(|error| ApiError::internal(format!("cannot write the answer: {error}")))
    }

    fn full_choice(&self, index: usize, choice: &Finished) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("index".into(), index.into());
        if self.kind == Kind::Chat {
            let message = json!({"role": "assistant", "content": choice.text, "tool_calls": []});
            fields.insert("message".into(), message);
        } else {
            fields.insert("text".into(), choice.text.as_str().into());
        }
        fields.insert("logprobs".into(), self.scores(&choice.scores, &mut 0));
        finish_fields(&mut fields, choice.finish.as_ref());
        if self.params.return_token_ids {
            fields.insert("token_ids".into(), json!(choice.ids));
            if self.kind == Kind::Completion {
                fields.insert("prompt_token_ids".into(), json!(*self.prompt_of(index).ids));
            }
        }
        fields
    }

    fn scores(&self, scores: &[TokenScore], offset: &mut usize) -> Value {
        let (texts, as_ids) = (&self.app.texts, self.params.tokens_as_ids);
        match (self.logprobs, self.kind) {
            (None, _) => Value::Null,
            (Some(_), Kind::Completion) => logprobs::completion(scores, texts, as_ids, offset),
            (Some(_), Kind::Chat) => logprobs::chat(scores, texts, as_ids),
        }
    }

    fn usage(&self, generated: usize) -> Value {
        let prompt: usize = self.prompts.iter().map(|prompt| prompt.ids.len()).sum();
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        })
    }

    /// vLLM's per-request summary, for answers with one choice.
    fn speculation(&self, finish: Option<&Finish>) -> Option<Value> {
        if !self.app.request_speculation_metrics || self.params.n * self.prompts.len() != 1 {
            return None;
        }
        let SpeculationStats { steps, drafted, accepted, histogram } = &finish?.speculation;
        let ratio = |a: u64, b: u64| if b == 0 { Value::Null } else { json!(a as f64 / b as f64) };
        Some(json!({"speculative_decoding": {
            "mean_acceptance_length": ratio(accepted + steps, *steps),
            "draft_acceptance_rate": ratio(*accepted, *drafted),
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
        }}))
    }

    fn stream(self, choices: Choices) -> Response {
        let mut stream = Stream {
            offsets: vec![0; self.params.n * self.prompts.len()],
            begun: vec![false; self.params.n * self.prompts.len()],
            generated: 0,
            speculation: None,
            pending: VecDeque::new(),
            done: false,
            choices,
            answer: self,
        };
        stream.open();
        let frames = futures::stream::unfold(stream, |mut stream| async move {
            let frame = stream.next().await?;
            Some((Ok::<_, std::convert::Infallible>(frame), stream))
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (StatusCode::OK, headers, Body::from_stream(frames)).into_response()
    }
}

fn finish_fields(fields: &mut Map<String, Value>, finish: Option<&Finish>) {
    fields.insert("finish_reason".into(), finish.map_or(Value::Null, |f| f.reason.into()));
    let stop = match finish.map(|finish| &finish.stop) {
        None | Some(Stop::Natural) => Value::Null,
        Some(Stop::Token(id)) => (*id).into(),
        Some(Stop::Text(text)) => text.as_str().into(),
    };
    fields.insert("stop_reason".into(), stop);
}

/// An answer that is being streamed. Dropping it, as a disconnect does, aborts its sequences.
struct Stream {
    answer: Answer,
    choices: Choices,
    /// Characters that each choice has sent, for `text_offset`.
    offsets: Vec<usize>,
    /// Whether a choice has sent its first text.
    begun: Vec<bool>,
    generated: usize,
    /// Goes into the usage chunk, as in vLLM.
    speculation: Option<Value>,
    pending: VecDeque<Bytes>,
    done: bool,
}

impl Stream {
    /// A chat begins with a chunk for each choice that says whose turn it is.
    fn open(&mut self) {
        if self.answer.kind == Kind::Completion {
            return;
        }
        for index in 0..self.begun.len() {
            let mut fields = Map::new();
            fields.insert("index".into(), index.into());
            fields.insert("delta".into(), json!({"role": "assistant", "content": ""}));
            fields.insert("logprobs".into(), Value::Null);
            fields.insert("finish_reason".into(), Value::Null);
            let mut chunk = self.chunk(vec![fields.into()]);
            if index == 0 && self.answer.params.return_token_ids {
                chunk["prompt_token_ids"] = json!(*self.answer.prompts[0].ids);
            }
            self.frame(&chunk);
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(frame) = self.pending.pop_front() {
                return Some(frame);
            }
            if self.done {
                return None;
            }
            match self.choices.next().await {
                Some(Ok((index, increment))) => self.push(index, increment),
                Some(Err(error)) => {
                    self.frame(&ApiError::from(error).body());
                    self.close();
                }
                None => self.close(),
            }
        }
    }

    fn push(&mut self, index: usize, increment: Increment) {
        let params = &self.answer.params;
        self.generated += increment.ids.len();
        let counts = params.return_token_ids || self.answer.logprobs.is_some();
        let silent = increment.text.is_empty() && increment.finish.is_none();
        let counted = counts && !increment.ids.is_empty();
        if silent && !counted {
            return;
        }
        let mut fields = Map::new();
        fields.insert("index".into(), index.into());
        if self.answer.kind == Kind::Chat {
            fields.insert("delta".into(), json!({"content": increment.text}));
        } else {
            fields.insert("text".into(), increment.text.into());
        }
        let scores = if increment.scores.is_empty() {
            Value::Null
        } else {
            self.answer.scores(&increment.scores, &mut self.offsets[index])
        };
        fields.insert("logprobs".into(), scores);
        finish_fields(&mut fields, increment.finish.as_ref());
        if params.return_token_ids {
            fields.insert("token_ids".into(), json!(increment.ids));
            if self.answer.kind == Kind::Completion && !self.begun[index] {
                let prompt = self.answer.prompt_of(index);
                fields.insert("prompt_token_ids".into(), json!(*prompt.ids));
            }
        }
        self.begun[index] = true;
        if let Some(metrics) = self.answer.speculation(increment.finish.as_ref()) {
            self.speculation = Some(metrics);
        }
        let chunk = self.chunk(vec![fields.into()]);
        self.frame(&chunk);
    }

    fn close(&mut self) {
        if self.answer.params.include_usage {
            let mut chunk = self.chunk(Vec::new());
            chunk["usage"] = self.answer.usage(self.generated);
            if let Some(speculation) = self.speculation.take() {
                chunk["metrics"] = speculation;
            }
            self.frame(&chunk);
        }
        self.pending.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        self.done = true;
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let chat = self.answer.kind == Kind::Chat;
        let object = if chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = self.answer.head(object);
        chunk.insert("choices".into(), choices.into());
        if self.answer.params.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        chunk.into()
    }

    fn frame(&mut self, chunk: &Value) {
        self.pending.push_back(format!("data: {chunk}\n\n").into());
    }
}
