//! `GET` and `POST /v1/draft_adapter/draft`, `GET /v1/draft_adapter/engine`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::{App, JsonBody};
use crate::serve::drafts::DraftError;
use crate::speculate::policy::MAX_AUTO;

/// The draft that serves.
pub(super) async fn show(State(app): State<Arc<App>>) -> Json<Value> {
    Json(match app.drafts.current() {
        None => json!({"version": null, "checksum": null, "path": null, "state": "none"}),
        Some(draft) => json!({
            "version": draft.version,
            "checksum": draft.checksum,
            "path": draft.path.display().to_string(),
            "state": "ready",
        }),
    })
}

/// Swaps another draft in, or says with 409 why not.
pub(super) async fn swap(
    State(app): State<Arc<App>>,
    JsonBody(fields): JsonBody,
) -> Result<Response, ApiError> {
    let Some(path) = fields.text("path")? else {
        return Err(ApiError::field("path", "path is required: the draft folder to serve"));
    };
    let version = fields.text("version")?.map(str::to_owned);
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    match app.drafts.swap(PathBuf::from(path), version).await {
        Ok(swapped) => Ok(Json(json!({
            "version": swapped.version,
            "checksum": swapped.checksum,
            "stage_ms": ms(swapped.stage),
            "commit_ms": ms(swapped.commit),
        }))
        .into_response()),
        Err(DraftError::Engine(error)) => Err(error.into()),
        Err(error) => {
            let body = Json(json!({"detail": error.to_string()}));
            Ok((StatusCode::CONFLICT, body).into_response())
        }
    }
}

/// What drafting costs and brings, as the engine sees it.
pub(super) async fn engine(State(app): State<Arc<App>>) -> Json<Value> {
    let status = app.engine.status();
    let curve = status.cost_curve.as_ref();
    let speeds = curve.map(|curve| {
        let speed = |k| curve.tokens_per_second(status.acceptance_estimate, k, 1);
        (0..=MAX_AUTO).map(speed).filter(|speed| speed.is_finite()).collect::<Vec<_>>()
    });
    Json(json!({
        "running": status.running,
        "waiting": status.waiting,
        "cache_bytes": status.cache_bytes,
        "swaps": status.swaps,
        "num_speculative_tokens": status.num_speculative_tokens,
        "acceptance_estimate": status.acceptance_estimate,
        "cost_curve": curve.map(|curve| json!({
            "verify_ms": curve.verify_ms,
            "draft_ms": curve.draft_ms,
        })),
        "expected_tokens_per_second": speeds,
        "break_even_acceptance": status.break_even_acceptance,
        "estimated_speed_up": status.estimated_speed_up,
    }))
}
