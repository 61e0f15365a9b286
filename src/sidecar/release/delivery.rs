//! Bringing one version to the server, and proof that it runs there.

use std::time::Instant;

use super::{MAX_BACKOFF, Release};
use crate::sidecar::draft_sink::{Delivery, Running, SinkError};
use crate::sidecar::publish::unix_ms;
use crate::sidecar::versions::SwapRecord;

impl Release {
    pub(super) fn back_off(&mut self, error: &SinkError) {
        self.backoff = (self.backoff * 2).clamp(self.poll, MAX_BACKOFF.max(self.poll));
        self.not_before = Instant::now() + self.backoff;
        tracing::warn!(%error, retry_in = ?self.backoff, "the server does not run our version");
        self.set_serving(None, Some(error.to_string()));
    }

    pub(super) async fn ask(&self) -> Result<Running, SinkError> {
        match tokio::time::timeout(self.swap_timeout, self.sink.running()).await {
            Ok(answer) => answer,
            Err(_) => Err(SinkError::Unavailable("no answer in time".into())),
        }
    }

    pub(super) fn matches(&self, running: &Running, version: &str) -> bool {
        let expected = self.ledger.find(version).map(|record| record.checksum.as_str());
        running.version == version
            && running.checksum.as_deref().is_none_or(|got| Some(got) == expected)
    }

    /// Makes the server run a version and proves it. The `current` link is not touched.
    pub(super) async fn swap(
        &mut self,
        version: &str,
        cause: &str,
        from: Option<String>,
    ) -> Result<f64, SinkError> {
        self.show();
        self.snapshot.send_modify(|snapshot| {
            snapshot.generation += 1;
            snapshot.swapping = true;
        });
        let outcome = self.deliver_and_verify(version).await;
        self.snapshot.send_modify(|snapshot| {
            snapshot.generation += 1;
            snapshot.swapping = false;
            snapshot.swapped_at = Some(Instant::now());
            snapshot.swapped_unix_ms = unix_ms();
        });
        match outcome {
            Ok(delivery) => {
                self.metrics.swaps.inc();
                self.metrics.swap_stall.observe(delivery.commit_ms / 1000.0);
                let gate = self.ledger.find(version).and_then(|record| record.gate.clone());
                if let Some(record) = self.ledger.find_mut(version) {
                    record.stage_ms = Some(delivery.stage_ms);
                    record.swap_stall_ms = Some(delivery.commit_ms);
                }
                self.ledger.push_swap(SwapRecord {
                    version: version.to_owned(),
                    from,
                    unix_ms: unix_ms(),
                    stage_ms: delivery.stage_ms,
                    stall_ms: delivery.commit_ms,
                    gate_before: gate.as_ref().map(|gate| gate.before),
                    gate_after: gate.as_ref().map(|gate| gate.after),
                    cause: cause.to_owned(),
                });
                // In this order: whoever sees the version serve finds how it came about.
                self.show();
                self.set_serving(Some(version.to_owned()), None);
                self.save_or_log().await;
                tracing::info!(
                    version,
                    cause,
                    stall_ms = delivery.commit_ms,
                    "the server runs another draft"
                );
                Ok(delivery.commit_ms)
            }
            Err(error) => {
                self.metrics.swap_failures.inc();
                self.set_serving(None, Some(error.to_string()));
                Err(error)
            }
        }
    }

    async fn deliver_and_verify(&self, version: &str) -> Result<Delivery, SinkError> {
        let folder = self.work.version(version);
        let delivered =
            tokio::time::timeout(self.swap_timeout, self.sink.deliver(version, &folder)).await;
        let delivery =
            delivered.map_err(|_| SinkError::Unavailable("the swap took too long".into()))??;
        let running = self.ask().await?;
        if self.matches(&running, version) {
            return Ok(delivery);
        }
        Err(SinkError::Refused(format!(
            "after the swap to {version} it reports {} with checksum {}, expected {}",
            running.version,
            running.checksum.as_deref().unwrap_or("unknown"),
            self.ledger.find(version).map_or("unknown", |record| &record.checksum),
        )))
    }
}
