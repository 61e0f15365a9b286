//! Small recurring work on the store: expiry and gauges.

use std::sync::Arc;
use std::time::Duration;

use crate::sidecar::metrics::Metrics;
use crate::sidecar::publish::unix_ms;
use crate::sidecar::release::blocking;
use crate::sidecar::store::{SampleStore, StoreError, StoreStats};

const EVERY: Duration = Duration::from_secs(2);

/// Deletes samples that are older than `ttl_seconds` (0: none) and exports the store's size.
pub(super) async fn run(store: Arc<dyn SampleStore>, ttl_seconds: u64, metrics: Arc<Metrics>) {
    let mut tick = tokio::time::interval(EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        let shared = store.clone();
        match blocking(move || once(shared.as_ref(), ttl_seconds)).await {
            Ok(stats) => {
                metrics.store_samples.set(i64::try_from(stats.samples).unwrap_or(i64::MAX));
                metrics.store_bytes.set(i64::try_from(stats.bytes).unwrap_or(i64::MAX));
            }
            Err(error) => tracing::error!(%error, "cannot tend to the store"),
        }
    }
}

fn once(store: &dyn SampleStore, ttl_seconds: u64) -> Result<StoreStats, StoreError> {
    if ttl_seconds > 0 {
        let expired = store.expire(unix_ms().saturating_sub(ttl_seconds.saturating_mul(1000)))?;
        if expired > 0 {
            tracing::info!(expired, "deleted samples past their age");
        }
    }
    store.stats()
}
