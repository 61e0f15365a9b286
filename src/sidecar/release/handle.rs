//! How other tasks reach the owner.

use tokio::sync::{mpsc, oneshot, watch};

use super::{Candidate, Command, Published, ReleaseError, RollbackCause, Snapshot};
use crate::sidecar::versions::{LiveCounters, TrainingTotals};

/// Commands to the owner, and its snapshots. Cheap to clone.
#[derive(Clone)]
pub struct ReleaseHandle {
    commands: mpsc::Sender<Command>,
    snapshot: watch::Receiver<Snapshot>,
}

impl ReleaseHandle {
    pub(super) fn new(
        commands: mpsc::Sender<Command>,
        snapshot: watch::Receiver<Snapshot>,
    ) -> Self {
        Self { commands, snapshot }
    }

    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.borrow().clone()
    }

    /// For waiting until something changes from now on.
    pub fn watch(&self) -> watch::Receiver<Snapshot> {
        let mut receiver = self.snapshot.clone();
        // A clone knows only what its original has seen, which is nothing: without this its
        // first wait ends at once, and whoever waits in a loop never sleeps.
        receiver.mark_unchanged();
        receiver
    }

    /// Publishes a staged candidate, swaps and verifies.
    ///
    /// # Errors
    /// See [`ReleaseError`]; the version before then still runs.
    pub async fn publish(&self, candidate: Candidate) -> Result<Published, ReleaseError> {
        self.call(|reply| Command::Publish(Box::new(candidate), reply)).await?
    }

    /// Takes the running version back, for its parent or for the version given.
    ///
    /// # Errors
    /// When there is nothing to go back to, or a version is pinned.
    pub async fn roll_back(
        &self,
        version: Option<String>,
        cause: RollbackCause,
        reason: String,
    ) -> Result<String, ReleaseError> {
        self.call(|reply| Command::Rollback { version, cause, reason, reply }).await?
    }

    /// Keeps one version running whatever is learned; none unpins.
    ///
    /// # Errors
    /// When the version cannot run.
    pub async fn pin(&self, version: Option<String>) -> Result<String, ReleaseError> {
        self.call(|reply| Command::Pin(version, reply)).await?
    }

    /// Stops or resumes rounds.
    ///
    /// # Errors
    /// When the ledger cannot be saved.
    pub async fn pause(&self, paused: bool) -> Result<String, ReleaseError> {
        self.call(|reply| Command::Pause(paused, reply)).await?
    }

    /// Records a learned round.
    ///
    /// # Errors
    /// When the ledger cannot be saved.
    pub async fn learned(
        &self,
        cost: TrainingTotals,
        data_hash: String,
    ) -> Result<(), ReleaseError> {
        self.call(|reply| Command::Learned(cost, data_hash, reply)).await?
    }

    /// Counts a refusal and returns how many there were in a row.
    ///
    /// # Errors
    /// When the sidecar is stopping.
    pub async fn gate_refused(&self) -> Result<u32, ReleaseError> {
        self.call(Command::GateRefused).await
    }

    /// Records that the trainer has started again from a version.
    ///
    /// # Errors
    /// When the ledger cannot be saved.
    pub async fn restarted(&self, version: String, data_hash: String) -> Result<(), ReleaseError> {
        self.call(|reply| Command::Restarted { version, data_hash, reply }).await?
    }

    /// Adds a window of the server's counters to a version.
    pub async fn live(&self, version: String, window: LiveCounters) {
        // Only fails while stopping, when a window more or less does not matter.
        self.commands.send(Command::Live(version, window)).await.ok();
    }

    async fn call<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ReleaseError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| ReleaseError::Stopping)?;
        answer.await.map_err(|_| ReleaseError::Stopping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sidecar::versions::Ledger;

    #[test]
    fn a_watcher_waits_for_what_comes_after_it() {
        let (sender, reader) = watch::channel(Snapshot {
            ledger: std::sync::Arc::new(Ledger::first(String::new(), 0, String::new())),
            serving: None,
            generation: 0,
            swapping: false,
            swapped_at: None,
            swapped_unix_ms: 0,
            upstream_error: None,
        });
        let handle = ReleaseHandle::new(mpsc::channel(1).0, reader);
        for generation in 1..=2 {
            let early = handle.watch();
            sender.send_modify(|snapshot| snapshot.generation = generation);
            assert!(early.has_changed().unwrap());
            assert!(!handle.watch().has_changed().unwrap(), "an old change wakes a new watcher");
            assert_eq!(handle.snapshot().generation, generation);
        }
    }
}
