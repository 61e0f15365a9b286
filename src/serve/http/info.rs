//! What the server is and how it does.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;

/// `GET /v1/models`.
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if id == app.model_name {
        return Ok(Json(card(&app)));
    }
    let message = format!("The model `{id}` does not exist.");
    Err(ApiError::new(StatusCode::NOT_FOUND, message))
}

fn card(app: &App) -> Value {
    json!({
        "id": app.model_name,
        "object": "model",
        "created": app.created,
        "owned_by": "draft-adapter",
        "root": app.root,
        "parent": null,
        "max_model_len": app.max_model_len,
    })
}

/// `GET /health`: 200 while the engine's thread lives.
pub(super) async fn health(State(app): State<Arc<App>>) -> StatusCode {
    if app.engine.is_alive() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// `GET /version`.
pub(super) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION"), "engine": "da-serve"}))
}

/// `GET /metrics`.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app
        .metrics
        .encode()
        .map_err(|error| ApiError::internal(format!("cannot write the metrics: {error}")))?;
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
