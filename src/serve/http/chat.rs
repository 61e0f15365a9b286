//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::Value;

use super::choices::Prompt;
use super::error::ApiError;
use super::fields::Fields;
use super::params::{Params, check_logprobs};
use super::respond::{Answer, Kind};
use super::{App, JsonBody};

pub(super) async fn handle(
    State(app): State<Arc<App>>,
    JsonBody(fields): JsonBody,
) -> Result<Response, ApiError> {
    app.check_model(&fields)?;
    let params = Params::read(&fields, &app)?;
    let logprobs = logprobs(&fields, &app)?;
    refuse_tools(&fields)?;
    let ids = encode_messages(&app, &fields).await?;
    let max_tokens = params.output_len(ids.len(), None, &app)?;
    let prompts = vec![Prompt { ids: ids.into(), max_tokens }];
    Answer::new(app, Kind::Chat, params, prompts, logprobs).respond().await
}

fn logprobs(fields: &Fields, app: &App) -> Result<Option<usize>, ApiError> {
    let top = fields.count("top_logprobs", 0)?;
    if !fields.flag("logprobs", false)? {
        return match top {
            None | Some(0) => Ok(None),
            Some(_) => {
                let message = "when using `top_logprobs`, `logprobs` must be set to true.";
                Err(ApiError::field("top_logprobs", message))
            }
        };
    }
    let k = top.unwrap_or(0);
    check_logprobs(k, "top_logprobs", "sample", app)?;
    Ok(Some(k))
}

/// Answers never hold tool calls, so only requests that do not want any are served.
fn refuse_tools(fields: &Fields) -> Result<(), ApiError> {
    let offered = fields.get("tools").and_then(Value::as_array).is_some_and(|t| !t.is_empty());
    match fields.get("tool_choice") {
        Some(Value::String(choice)) if choice == "none" => Ok(()),
        None if !offered => Ok(()),
        Some(Value::String(choice)) if choice == "auto" && !offered => Ok(()),
        _ => {
            let message = "tool calls are not supported by this engine; leave tools out, or set \
                           tool_choice to \"none\"";
            Err(ApiError::field("tool_choice", message))
        }
    }
}

/// Renders `messages` with the model's template and encodes the result.
pub(super) async fn encode_messages(app: &Arc<App>, fields: &Fields) -> Result<Vec<u32>, ApiError> {
    let Some(template) = &app.chat_template else {
        let message = "this model has no chat template; use /v1/completions";
        return Err(ApiError::bad_request(message));
    };
    let messages = read_messages(fields)?;
    let prompt = fields.flag("add_generation_prompt", true)?;
    // The template writes the special tokens itself.
    let special = fields.flag("add_special_tokens", false)?;
    let text = template.render(&messages, None, prompt).map_err(|error| {
        ApiError::field("messages", format!("the chat template refused the messages: {error}"))
    })?;
    app.encode(text, special).await
}

/// Checks the messages and turns lists of text parts into text.
fn read_messages(fields: &Fields) -> Result<Value, ApiError> {
    let invalid = |message: String| ApiError::field("messages", message);
    let Some(Value::Array(messages)) = fields.get("messages") else {
        return Err(invalid("messages must be a list of messages".into()));
    };
    if messages.is_empty() {
        return Err(invalid("messages must hold at least one message".into()));
    }
    let mut messages = messages.clone();
    for (index, message) in messages.iter_mut().enumerate() {
        let Value::Object(message) = message else {
            return Err(invalid(format!("messages[{index}] must be an object")));
        };
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(invalid(format!("messages[{index}].role must be a string")));
        }
        match message.get("content") {
            Some(Value::String(_)) => {}
            Some(Value::Array(parts)) => {
                let text = join_parts(parts, index)?;
                message.insert("content".into(), Value::String(text));
            }
            // An assistant's turn that only called tools.
            None | Some(Value::Null) if message.contains_key("tool_calls") => {}
            _ => return Err(invalid(format!("messages[{index}].content must be text"))),
        }
    }
    Ok(Value::Array(messages))
}

fn join_parts(parts: &[Value], index: usize) -> Result<String, ApiError> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        let text = match part.get("type").and_then(Value::as_str) {
            Some("text") | None => part.get("text").and_then(Value::as_str),
            Some(_) => None,
        };
        let Some(text) = text else {
            let message = format!("messages[{index}].content may hold parts of type text only");
            return Err(ApiError::field("messages", message));
        };
        texts.push(text);
    }
    Ok(texts.join("\n"))
}
