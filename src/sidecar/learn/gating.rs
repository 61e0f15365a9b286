//! After a round: measure the candidate, and publish it when it passes.

use serde_json::json;

use super::{Learn, LearnError, Phase};
use crate::model::DraftManifest;
use crate::sidecar::gate::{Verdict, judge, too_few};
use crate::sidecar::publish::unix_ms;
use crate::sidecar::release::{Candidate, ReleaseError, blocking};
use crate::sidecar::versions::{GateScores, Ledger};

impl Learn {
    /// Decides about the weights being trained, and publishes them when they pass.
    pub(super) async fn gate(&self, round: u64) -> Result<(), LearnError> {
        self.set_phase(Phase::Gating { round });
        let snapshot = self.release.snapshot();
        let running = snapshot.ledger.running.clone();
        let (store, limit) = (self.store.clone(), self.settings.gate.samples);
        let samples = blocking(move || store.held_out(limit)).await?;
        let status = self.trainer.status().await?;
        self.show_status(&status);
        let positions: usize = samples.iter().map(|sample| sample.output_ids.len()).sum();
        let (verdict, scores) = if (positions as u64) < self.settings.gate.min_positions {
            (too_few(positions as u64, &self.settings.gate), None)
        } else {
            let folder = self.work.version(&running);
            let before = self.trainer.evaluate(Some(&folder), &samples).await?;
            let after = self.trainer.evaluate(None, &samples).await?;
            let (verdict, scores) = judge(&self.settings.gate, &samples, &before, &after);
            (verdict, Some(scores))
        };
        self.metrics.gate_verdicts.with_label_values(&[verdict.word()]).inc();
        if let Some(scores) = &scores {
            self.metrics.gate_score.with_label_values(&["before"]).set(scores.before);
            self.metrics.gate_score.with_label_values(&["after"]).set(scores.after);
        }
        self.progress.send_modify(|progress| {
            progress.last_verdict = Some(verdict.clone());
            progress.last_scores = scores.clone();
        });
        tracing::info!(
            verdict = verdict.word(),
            reason = verdict.reason(),
            before = scores.as_ref().map(|scores| scores.before),
            after = scores.as_ref().map(|scores| scores.after),
            positions,
            "the gate has decided"
        );
        match (verdict, scores) {
            (Verdict::Hold { .. }, _) | (_, None) => Ok(()),
            (Verdict::Refuse { .. }, _) => self.refused(&running).await,
            (Verdict::Publish, Some(scores)) => {
                let base = std::path::Path::new(&status.base)
                    .file_name()
                    .map(|name| name.to_string_lossy().into_owned());
                self.publish(&snapshot.ledger, scores, base).await
            }
        }
    }

    /// Counts a refusal; after several in a row the trainer has gone astray and starts again.
    async fn refused(&self, running: &str) -> Result<(), LearnError> {
        let refusals = self.release.gate_refused().await?;
        if refusals >= self.settings.gate.refusals_before_restart {
            tracing::warn!(refusals, running, "training has not helped for a while");
            self.restart_from(running).await?;
        }
        Ok(())
    }

    async fn publish(
        &self,
        ledger: &Ledger,
        scores: GateScores,
        trainer_base: Option<String>,
    ) -> Result<(), LearnError> {
        let version = ledger.next_version();
        self.set_phase(Phase::Publishing { version: version.clone() });
        let manifest = self.manifest(ledger, &version, &scores)?;
        let staged = self.work.staged(&version);
        let work = self.work.clone();
        blocking(move || work.remove_leftovers()).await?;
        self.trainer.export(&staged, &manifest).await?;
        let parent = ledger.running.clone();
        let candidate = Candidate { version: version.clone(), parent, scores, trainer_base };
        match self.release.publish(candidate).await {
            Ok(published) => {
                tracing::info!(
                    version,
                    delivered = published.delivered,
                    stall_ms = published.stall_ms,
                    "published"
                );
                Ok(())
            }
            Err(error @ (ReleaseError::Superseded(_) | ReleaseError::Unchanged { .. })) => {
                tracing::info!(%error, "not published");
                self.discard_staged().await
            }
            Err(error @ ReleaseError::Refused { .. }) => {
                tracing::error!(%error, "the server refused a gated draft");
                self.progress.send_modify(|shown| shown.last_error = Some(error.to_string()));
                self.refused(&ledger.running).await
            }
            Err(error) => {
                self.discard_staged().await?;
                Err(error.into())
            }
        }
    }

    async fn discard_staged(&self) -> Result<(), LearnError> {
        let work = self.work.clone();
        blocking(move || work.remove_leftovers()).await?;
        Ok(())
    }

    /// Everything that the version was made from; the trainer adds the files' hashes.
    fn manifest(
        &self,
        ledger: &Ledger,
        version: &str,
        scores: &GateScores,
    ) -> Result<serde_json::Value, LearnError> {
        let running = ledger
            .find(&ledger.running)
            .ok_or_else(|| LearnError::NoVersion(ledger.running.clone()))?;
        let parent = DraftManifest::read(&self.work.version(&running.version))?;
        Ok(json!({
            "schema": parent.schema,
            "version": version,
            "parent": running.version,
            "created_unix": unix_ms() / 1000,
            "target": parent.target,
            "target_hash": parent.target_hash,
            "tokenizer_hash": parent.tokenizer_hash,
            "data_hash": ledger.data_hash,
            "seed": self.settings.train.seed,
            "settings": {
                "train": self.settings.train,
                "learn": self.settings.learn,
                "gate": self.settings.gate,
            },
            "scores": { "gate": scores, "training": ledger.training },
            "files": {},
        }))
    }
}
