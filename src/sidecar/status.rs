//! The status document, and the admin listener: `/metrics`, `/livez`, `/readyz`, `/status`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::learn::Progress;
use super::metrics::Metrics;
use super::release::{ReleaseHandle, blocking};
use super::store::SampleStore;
use super::supervisor::{TrainerHandle, TrainerInfo};
use super::versions::{Ledger, VersionRecord};

/// Where the document's parts come from.
#[derive(Clone)]
pub struct StatusSource {
    pub upstream: String,
    pub release: ReleaseHandle,
    pub trainer: TrainerHandle,
    pub progress: watch::Receiver<Progress>,
    pub store: Arc<dyn SampleStore>,
    pub metrics: Arc<Metrics>,
}

#[derive(Serialize)]
struct TrainerPart {
    #[serde(flatten)]
    process: TrainerInfo,
    #[serde(flatten)]
    progress: Progress,
}

impl StatusSource {
    /// The document that `GET /status` and `da-sidecar status --json` give.
    pub async fn document(&self) -> Value {
        let snapshot = self.release.snapshot();
        let ledger = &snapshot.ledger;
        let store = self.store.clone();
        let stats = match blocking(move || store.stats()).await {
            Ok(stats) => json!(stats),
            Err(error) => json!({ "error": error.to_string() }),
        };
        let trainer =
            TrainerPart { process: self.trainer.info(), progress: self.progress.borrow().clone() };
        json!({
            "sidecar": env!("CARGO_PKG_VERSION"),
            "running": ledger.running,
            "serving": snapshot.serving,
            "pinned": ledger.pinned,
            "paused": ledger.paused,
            "upstream": {
                "url": self.upstream,
                "up": snapshot.upstream_error.is_none() && snapshot.serving.is_some(),
                "error": snapshot.upstream_error,
            },
            "trainer": trainer,
            "training": ledger.training,
            "refusals_in_a_row": ledger.refusals,
            "versions": ledger.versions.iter().map(|record| version(ledger, record)).collect::<Vec<_>>(),
            "swaps": ledger.swaps,
            "store": stats,
            "counters": self.metrics.counts(),
        })
    }
}

/// The word for a version's state: `running` for the one that should run.
pub fn state_word(ledger: &Ledger, record: &VersionRecord) -> &'static str {
    if record.version == ledger.running { "running" } else { record.state.word() }
}

fn version(ledger: &Ledger, record: &VersionRecord) -> Value {
    json!({
        "version": record.version,
        "parent": record.parent,
        "state": state_word(ledger, record),
        "checksum": record.checksum,
        "created_unix": record.created_unix,
        "gate": record.gate,
        "live": {
            "drafts": record.live.drafts,
            "drafted": record.live.drafted,
            "accepted": record.live.accepted,
            "accepted_per_position": record.live.accepted_per_position,
            "acceptance_rate": record.live.acceptance_rate(),
            "mean_accepted_length": record.live.mean_accepted_length(),
        },
        "stage_ms": record.stage_ms,
        "swap_stall_ms": record.swap_stall_ms,
        "reason": record.reason,
        "on_disk": record.on_disk,
    })
}

/// The admin routes. Readiness means that requests are accepted: it never depends on the server,
/// or a sidecar would keep its own server from starting.
pub fn router(source: StatusSource) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(|| async { "ok\n" }))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .with_state(source)
}

async fn metrics(State(source): State<StatusSource>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], source.metrics.render())
}

async fn status(State(source): State<StatusSource>) -> Json<Value> {
    Json(source.document().await)
}
