//! The routes about the engine itself: models, metrics, and the draft that runs.

use std::path::Path;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{MODEL, Shared, error};

pub async fn models(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let max_model_len = shared.inner.lock().max_model_len;
    Json(json!({"object": "list", "data": [
        {"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL, "parent": null,
         "max_model_len": max_model_len},
        {"id": "an-adapter", "object": "model", "owned_by": "vllm", "root": "/adapters/a",
         "parent": MODEL, "max_model_len": max_model_len}
    ]}))
}

pub async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let inner = shared.inner.lock();
    let c = &inner.counters;
    let labels = format!("engine=\"0\",model_name=\"{MODEL}\"");
    let mut text = String::new();
    let mut put = |kind: &str, name: &str, extra: &str, value: u64| {
        let series = name.strip_suffix("_total").unwrap_or(name);
        text += &format!("# HELP {name} Of the fake engine.\n# TYPE {name} {kind}\n");
        text += &format!("{name}{{{labels}{extra}}} {value}.0\n");
        if kind == "counter" {
            text += &format!("{series}_created{{{labels}{extra}}} 1.7e+09\n");
        }
    };
    if inner.speculates {
        put("counter", "vllm:spec_decode_num_drafts_total", "", c.drafts);
        put("counter", "vllm:spec_decode_num_draft_tokens_total", "", c.draft_tokens);
        put("counter", "vllm:spec_decode_num_accepted_tokens_total", "", c.accepted_tokens);
        for (position, value) in c.per_pos.iter().enumerate() {
            let extra = format!(",position=\"{position}\"");
            put("counter", "vllm:spec_decode_num_accepted_tokens_per_pos_total", &extra, *value);
        }
    }
    put("gauge", "vllm:num_requests_running", "", inner.active);
    put("gauge", "vllm:num_requests_waiting", "", inner.requests_waiting);
    put("counter", "vllm:generation_tokens_total", "", c.generation_tokens);
    put("counter", "vllm:prompt_tokens_total", "", c.prompt_tokens);
    put("counter", "vllm:request_success_total", ",finished_reason=\"stop\"", c.requests_finished);
    ([("content-type", "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

pub async fn draft(State(shared): State<Arc<Shared>>) -> Response {
    let inner = shared.inner.lock();
    if !inner.has_draft_route {
        return error(404, "Not Found");
    }
    Json(json!({
        "version": inner.draft_version, "checksum": inner.draft_checksum,
        "path": inner.draft_path, "state": "ready"
    }))
    .into_response()
}

pub async fn swap(State(shared): State<Arc<Shared>>, Json(body): Json<Value>) -> Response {
    let delay = shared.inner.lock().swap_delay;
    tokio::time::sleep(delay).await;
    let mut inner = shared.inner.lock();
    if !inner.has_draft_route {
        return error(404, "Not Found");
    }
    let conflict =
        |detail: String| (StatusCode::CONFLICT, Json(json!({"detail": detail}))).into_response();
    if let Some(detail) = &inner.fail_swaps {
        return conflict(detail.clone());
    }
    let (Some(path), Some(version)) = (body["path"].as_str(), body["version"].as_str()) else {
        return conflict("path and version are required".into());
    };
    if !Path::new(path).is_dir() {
        return conflict(format!("no such folder: {path}"));
    }
    let manifest = std::fs::read(Path::new(path).join("da_manifest.json")).unwrap_or_default();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
    let checksum = manifest["checksum"].as_str().map(str::to_owned);
    let (mut stage_ms, mut commit_ms) = (0.0, 0.0);
    if inner.draft_version != version {
        inner.draft_version = version.into();
        inner.draft_checksum = checksum.clone();
        inner.draft_path = Some(path.into());
        inner.swaps.push(version.into());
        (stage_ms, commit_ms) = (12.5, 0.5);
    }
    Json(json!({
        "version": version, "checksum": checksum, "stage_ms": stage_ms, "commit_ms": commit_ms
    }))
    .into_response()
}
