//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::token_ids;
use super::{App, JsonBody, chat};

pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    JsonBody(fields): JsonBody,
) -> Result<Json<Value>, ApiError> {
    app.check_model(&fields)?;
    let ids = if fields.get("messages").is_some() {
        chat::encode_messages(&app, &fields).await?
    } else {
        let Some(text) = fields.text("prompt")? else {
            return Err(ApiError::field("prompt", "prompt or messages is required"));
        };
        app.encode(text.to_owned(), fields.flag("add_special_tokens", true)?).await?
    };
    let strings = fields.flag("return_token_strs", false)?.then(|| {
        ids.iter().map(|&id| app.tokenizer.piece(id).unwrap_or_default()).collect::<Vec<_>>()
    });
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": app.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    })))
}

pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    JsonBody(fields): JsonBody,
) -> Result<Json<Value>, ApiError> {
    app.check_model(&fields)?;
    let Some(tokens) = fields.get("tokens") else {
        return Err(ApiError::field("tokens", "tokens is required"));
    };
    let ids = token_ids("tokens", tokens, app.vocab_size)?;
    let text = app
        .tokenizer
        .decode(&ids, false)
        .map_err(|error| ApiError::field("tokens", format!("cannot decode: {error}")))?;
    Ok(Json(json!({"prompt": text})))
}
