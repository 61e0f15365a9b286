//! Publish, roll back, pin and pause.
//!
//! Each writes its intention into the ledger before it touches folders or the server, so that a
//! kill at any point leaves something that the next start can complete.

use super::{
    Candidate, Published, Release, ReleaseError, RollbackCause, VersionRecord, VersionState,
    blocking,
};
use crate::sidecar::draft_sink::SinkError;
use crate::sidecar::publish::unix_ms;
use crate::sidecar::versions::LiveCounters;

impl Release {
    pub(super) async fn publish(
        &mut self,
        candidate: Candidate,
    ) -> Result<Published, ReleaseError> {
        let version = candidate.version.clone();
        self.check_publishable(&candidate)?;
        let previous = self.ledger.running.clone();
        self.ledger.next += 1;
        self.ledger.versions.push(VersionRecord {
            version: version.clone(),
            parent: Some(candidate.parent),
            state: VersionState::Publishing,
            checksum: String::new(),
            created_unix: unix_ms() / 1000,
            gate: Some(candidate.scores),
            live: LiveCounters::default(),
            stage_ms: None,
            swap_stall_ms: None,
            reason: None,
            on_disk: true,
        });
        if let Err(error) = self.put_in_place(&version, &previous).await {
            // Nothing is under the final name, or it equals what runs: the version never was.
            self.ledger.versions.retain(|record| record.version != version);
            self.ledger.running = previous;
            if !self.work.version(&version).exists() {
                self.ledger.next -= 1;
            }
            self.save_or_log().await;
            return Err(error);
        }
        let outcome = self.swap(&version, "publish", Some(previous.clone())).await;
        let published = match outcome {
            Ok(stall_ms) => Published { delivered: true, stall_ms },
            Err(SinkError::Unavailable(reason)) => {
                tracing::warn!(version, reason, "published, and swapped once the server answers");
                Published { delivered: false, stall_ms: 0.0 }
            }
            Err(error) => {
                let reason = error.to_string();
                self.withdraw(&version, &previous, &reason).await?;
                return Err(ReleaseError::Refused { version, reason });
            }
        };
        self.ledger.refusals = 0;
        self.retain(candidate.trainer_base).await;
        self.save_or_log().await;
        Ok(published)
    }

    fn check_publishable(&self, candidate: &Candidate) -> Result<(), ReleaseError> {
        let superseded = |reason: &str| Err(ReleaseError::Superseded(reason.to_owned()));
        if self.ledger.paused {
            return superseded("learning was paused in the meantime");
        }
        if self.ledger.pinned.is_some() {
            return superseded("a version was pinned in the meantime");
        }
        if self.ledger.restart_from.is_some() || candidate.parent != self.ledger.running {
            return superseded("another version has come to run in the meantime");
        }
        if candidate.version != self.ledger.next_version() {
            return superseded("another version has this number");
        }
        Ok(())
    }

    /// Ledger, folder, ledger, link, in the order that a kill between any two can be completed.
    async fn put_in_place(&mut self, version: &str, previous: &str) -> Result<(), ReleaseError> {
        self.save().await?;
        let staged = self.work.staged(version);
        let manifest = crate::model::DraftManifest::read(&staged)
            .map_err(crate::sidecar::publish::FolderError::from)?;
        let checksum = manifest.checksum();
        if self.ledger.find(previous).is_some_and(|record| record.checksum == checksum) {
            return Err(ReleaseError::Unchanged { version: version.to_owned() });
        }
        let (work, name) = (self.work.clone(), version.to_owned());
        blocking(move || work.place(&name)).await?;
        if let Some(record) = self.ledger.find_mut(version) {
            record.state = VersionState::Published;
            record.checksum = checksum;
        }
        self.ledger.running = version.to_owned();
        self.save_or_log().await;
        if let Err(error) = self.work.point_current(version) {
            tracing::error!(%error, "cannot move the link to the current version");
        }
        Ok(())
    }

    /// Undoes a publication that the server refused. The server still runs the version before.
    async fn withdraw(
        &mut self,
        version: &str,
        previous: &str,
        reason: &str,
    ) -> Result<(), ReleaseError> {
        if let Some(record) = self.ledger.find_mut(version) {
            record.state = VersionState::Rejected;
            record.reason = Some(reason.to_owned());
        }
        self.ledger.running = previous.to_owned();
        self.save().await?;
        self.work.point_current(previous)?;
        self.sync().await;
        Ok(())
    }

    async fn retain(&mut self, trainer_base: Option<String>) {
        let keep = self.settings.keep_versions;
        let (work, mut ledger) = (self.work.clone(), self.ledger.clone());
        let protect: Vec<String> = trainer_base.into_iter().collect();
        let kept = blocking(move || {
            work.retain(&mut ledger, keep, &protect);
            ledger
        })
        .await;
        for record in kept.versions.iter().filter(|record| !record.on_disk) {
            self.metrics.forget(&record.version);
        }
        self.ledger = kept;
    }

    pub(super) async fn roll_back(
        &mut self,
        version: Option<String>,
        cause: RollbackCause,
        reason: String,
    ) -> Result<String, ReleaseError> {
        if let Some(pinned) = &self.ledger.pinned {
            let message =
                format!("{pinned} is pinned\nhint: unpin it first, `da-sidecar pin --clear`");
            return Err(ReleaseError::NotPossible(message));
        }
        let from = self.ledger.running.clone();
        let to = match version {
            Some(version) => version,
            None => match self.ledger.parent_of_running() {
                Some(parent) => parent.version.clone(),
                None => {
                    let message = format!("{from} has no version before it that could run");
                    return Err(ReleaseError::NotPossible(message));
                }
            },
        };
        self.check_runnable(&to)?;
        if to == from {
            return Err(ReleaseError::NotPossible(format!("{to} runs already")));
        }
        let label = match cause {
            RollbackCause::Watch => "watch",
            RollbackCause::Operator => "operator",
        };
        tracing::warn!(from, to, cause = label, reason, "rolling back");
        if let Some(record) = self.ledger.find_mut(&from) {
            record.state = VersionState::RolledBack;
            record.reason = Some(reason);
        }
        self.ledger.running = to.clone();
        self.ledger.restart_from = Some(to.clone());
        self.metrics.rollbacks.with_label_values(&[label]).inc();
        let message = self.bring_to(&to, "rollback", from).await?;
        Ok(format!("rolled back to {message}"))
    }

    pub(super) async fn pin(&mut self, version: Option<String>) -> Result<String, ReleaseError> {
        let Some(version) = version else {
            self.ledger.pinned = None;
            self.save().await?;
            return Ok("unpinned; learning publishes again".into());
        };
        self.check_runnable(&version)?;
        let from = self.ledger.running.clone();
        self.ledger.pinned = Some(version.clone());
        self.ledger.running = version.clone();
        if from == version {
            self.save().await?;
            return Ok(format!("pinned {version}, which runs already"));
        }
        let message = self.bring_to(&version, "pin", from).await?;
        Ok(format!("pinned {message}"))
    }

    pub(super) async fn pause(&mut self, paused: bool) -> Result<String, ReleaseError> {
        self.ledger.paused = paused;
        self.metrics.paused.set(i64::from(paused));
        self.save().await?;
        Ok(if paused { "learning is paused" } else { "learning goes on" }.into())
    }

    fn check_runnable(&self, version: &str) -> Result<(), ReleaseError> {
        let Some(record) = self.ledger.find(version) else {
            return Err(ReleaseError::NoSuchVersion { version: version.to_owned() });
        };
        if !record.on_disk {
            let message = format!("{version} is no longer on disk (publish.keep_versions)");
            return Err(ReleaseError::NotPossible(message));
        }
        if !self.ledger.can_run(record) {
            let state = record.state.word();
            return Err(ReleaseError::NotPossible(format!(
                "{version} is {state} and never runs again"
            )));
        }
        Ok(())
    }

    /// Makes folder and server follow a ledger that already names `version` as running.
    async fn bring_to(
        &mut self,
        version: &str,
        cause: &str,
        from: String,
    ) -> Result<String, ReleaseError> {
        // Safety before bookkeeping: a full disk must not keep a bad draft in service.
        self.save_or_log().await;
        if let Err(error) = self.work.point_current(version) {
            tracing::error!(%error, "cannot move the link to the current version");
        }
        Ok(match self.swap(version, cause, Some(from)).await {
            Ok(stall_ms) => format!("{version} (requests stood still for {stall_ms:.0} ms)"),
            Err(error) => format!("{version}; the server follows when it can: {error}"),
        })
    }
}
