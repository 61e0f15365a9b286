//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::Value;

use super::choices::Prompt;
use super::error::ApiError;
use super::fields::{Fields, token_ids};
use super::params::{Params, logprobs_count};
use super::respond::{Answer, Kind};
use super::{App, JsonBody};

/// What vLLM generates when `max_tokens` is left out.
const DEFAULT_MAX_TOKENS: usize = 16;
/// Prompts that one request may hold.
const MAX_PROMPTS: usize = 256;

pub(super) async fn handle(
    State(app): State<Arc<App>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response, ApiError> {
    app.check_model(&fields)?;
    let params = Params::read(&fields, &app)?;
    let logprobs = logprobs_count(&fields, "logprobs", "sample", &app)?;
    let mut prompts = Vec::new();
    for ids in read_prompts(&app, &mut fields).await? {
        let max_tokens = params.output_len(ids.len(), Some(DEFAULT_MAX_TOKENS), &app)?;
        prompts.push(Prompt { ids: ids.into(), max_tokens });
    }
    Answer::new(app, Kind::Completion, params, prompts, logprobs).respond().await
}

/// The prompts as token ids: a string, a list of strings, ids, or a list of lists of ids.
async fn read_prompts(app: &Arc<App>, fields: &mut Fields) -> Result<Vec<Vec<u32>>, ApiError> {
    let special = fields.flag("add_special_tokens", true)?;
    let Some(prompt) = fields.take("prompt") else {
        return Err(ApiError::field("prompt", "prompt is required"));
    };
    let texts = match prompt {
        Value::String(text) => vec![text],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            return Ok(vec![token_ids("prompt", &Value::Array(items), app.vocab_size)?]);
        }
        Value::Array(items) if items.first().is_some_and(Value::is_array) => {
            check_count(items.len())?;
            return items.iter().map(|ids| token_ids("prompt", ids, app.vocab_size)).collect();
        }
        Value::Array(items) if !items.is_empty() => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(text),
                _ => Err(ApiError::field("prompt", "prompt must not mix strings and token ids")),
            })
            .collect::<Result<_, _>>()?,
        _ => {
            let message = "prompt must be a string, token ids, or a non-empty list of either";
            return Err(ApiError::field("prompt", message));
        }
    };
    check_count(texts.len())?;
    let mut prompts = Vec::with_capacity(texts.len());
    for text in texts {
        prompts.push(app.encode(text, special).await?);
    }
    Ok(prompts)
}

fn check_count(count: usize) -> Result<(), ApiError> {
    if count <= MAX_PROMPTS {
        return Ok(());
    }
    let message = format!("prompt must hold at most {MAX_PROMPTS} prompts, got {count}");
    Err(ApiError::field("prompt", message))
}
