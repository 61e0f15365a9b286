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
    let messages = match fields.get("messages") {
        Some(Value::Array(messages)) if messages.is_empty() => {
            return Err(ApiError::field("messages", "messages must hold at least one message"));
        }
        Some(messages) => messages,
        None => return Err(ApiError::field("messages", "messages is required")),
    };
    let prompt = fields.flag("add_generation_prompt", true)?;
    // The template writes the special tokens itself.
    let special = fields.flag("add_special_tokens", false)?;
    let text = template
        .render(messages, None, prompt)
        .map_err(|error| ApiError::field("messages", error.to_string()))?;
    app.encode(text, special).await
}
