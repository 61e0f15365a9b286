//! The learning loop: round after round of train, gate, publish. The one user of the trainer.
//!
//! A sample is marked as learned only after the trainer has saved its state, so a kill at any
//! point means at worst that a round is repeated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::metrics::Metrics;
use super::publish::WorkDir;
use super::release::{ReleaseError, ReleaseHandle, Snapshot, blocking};
use super::store::{SampleStore, StoreError};
use super::supervisor::{TrainerError, TrainerHandle};
use crate::config::sidecar::SidecarSettings;
use crate::distill::Sample;
use crate::model::DraftManifest;

mod compare;
mod gating;
mod round;

pub use compare::{CompareRequest, Comparison};

/// How often the store is asked for new samples.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A backlog is learned in rounds of at most this many times `round_samples`.
const MAX_BACKLOG_FACTOR: usize = 4;
/// Deaths of the trainer on one round before the round is made smaller: one sample may be what
/// kills it.
const DEATHS_BEFORE_SHRINKING: u32 = 3;
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// What the loop is doing.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum Phase {
    /// Waiting for the trainer process.
    #[default]
    Starting,
    /// Waiting for samples.
    Waiting,
    Training {
        round: u64,
        new_samples: usize,
        samples: usize,
        steps: u64,
        loss: Option<f32>,
    },
    Gating {
        round: u64,
    },
    Publishing {
        version: String,
    },
    Comparing,
    Restarting {
        version: String,
    },
    Paused,
    Off,
    Stopped,
}

/// What the loop shows to `/status`.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Progress {
    #[serde(flatten)]
    pub phase: Phase,
    /// The last gate decision.
    pub last_verdict: Option<super::gate::Verdict>,
    pub last_scores: Option<super::versions::GateScores>,
    pub last_error: Option<String>,
    /// The trainer's own count, since it last started from a draft.
    pub step: u64,
    pub parameters: u64,
    pub parameters_without_gradient: u64,
}

/// What the loop needs.
pub struct Learn {
    pub trainer: TrainerHandle,
    pub release: ReleaseHandle,
    pub store: Arc<dyn SampleStore>,
    pub work: Arc<WorkDir>,
    pub settings: Arc<SidecarSettings>,
    pub metrics: Arc<Metrics>,
    pub progress: watch::Sender<Progress>,
    /// Questions of the watch, which must not wait for a round to end.
    pub questions: mpsc::Receiver<CompareRequest>,
}

/// Why a part of the loop stopped short.
#[derive(Debug, thiserror::Error)]
enum LearnError {
    #[error(transparent)]
    Trainer(#[from] TrainerError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Release(#[from] ReleaseError),
    #[error(transparent)]
    Manifest(#[from] crate::model::manifest::ManifestError),
    #[error(transparent)]
    Folder(#[from] super::publish::FolderError),
    #[error("no version {0}")]
    NoVersion(String),
}

/// State of the loop between rounds.
#[derive(Default)]
struct Memory {
    /// When the oldest of the waiting samples was first seen.
    waiting_since: Option<Instant>,
    /// A round was learned and its gate did not come to a verdict.
    gate_due: bool,
    deaths: u32,
    failures: u32,
    not_before: Option<Instant>,
}

impl Learn {
    /// Runs until `shutdown`; a round in work is abandoned after its current step.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut memory = Memory::default();
        while !shutdown.is_cancelled() {
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.trainer.ready() => {}
            }
            match self.turn(&mut memory, &shutdown).await {
                Ok(()) => {}
                Err(LearnError::Trainer(TrainerError::Down(reason))) => {
                    tracing::debug!(reason, "the trainer went away");
                    self.show_error(reason);
                    self.set_phase(Phase::Starting);
                    // The supervisor needs a moment to notice.
                    memory.not_before = Some(Instant::now() + LOOK_EVERY);
                }
                Err(LearnError::Release(ReleaseError::Stopping)) => break,
                Err(error) => {
                    memory.failures += 1;
                    let backoff = Duration::from_secs(1) * 2u32.pow(memory.failures.min(6));
                    let backoff = backoff.min(MAX_BACKOFF);
                    tracing::error!(%error, retry_in = ?backoff, "a round failed");
                    self.metrics.training_rounds.with_label_values(&["failed"]).inc();
                    self.show_error(error.to_string());
                    memory.not_before = Some(Instant::now() + backoff);
                }
            }
        }
        self.set_phase(Phase::Stopped);
    }

    /// Does the most urgent thing that there is to do, or waits a little.
    async fn turn(
        &mut self,
        memory: &mut Memory,
        shutdown: &CancellationToken,
    ) -> Result<(), LearnError> {
        if let Ok(question) = self.questions.try_recv() {
            return self.answer(question).await;
        }
        if memory.not_before.is_some_and(|time| Instant::now() < time) {
            return self.wait(shutdown).await;
        }
        let snapshot = self.release.snapshot();
        if let Some(version) = &snapshot.ledger.restart_from {
            memory.gate_due = false;
            return self.restart_from(version).await;
        }
        if snapshot.ledger.paused {
            self.set_phase(Phase::Paused);
            return self.wait(shutdown).await;
        }
        if memory.gate_due && snapshot.ledger.pinned.is_none() {
            self.gate(snapshot.ledger.training.rounds).await?;
            memory.gate_due = false;
            return Ok(());
        }
        let Some(new) = self.due(memory).await? else {
            self.set_phase(if self.settings.learn.enabled { Phase::Waiting } else { Phase::Off });
            return self.wait(shutdown).await;
        };
        let ids: Vec<u64> = new.iter().map(|sample| sample.id).collect();
        match self.round(new, shutdown).await {
            Ok(round::Outcome::Learned) => {
                *memory = Memory { gate_due: true, ..Memory::default() };
                Ok(())
            }
            Ok(round::Outcome::Interrupted) => Ok(()),
            Err(error) => {
                if matches!(error, LearnError::Trainer(TrainerError::Down(_))) {
                    memory.deaths += 1;
                    self.give_up_on_killer(memory, &ids).await?;
                }
                Err(error)
            }
        }
    }

    /// Drops a sample that the trainer has died of again and again, when it was alone in its round.
    async fn give_up_on_killer(&self, memory: &mut Memory, ids: &[u64]) -> Result<(), LearnError> {
        if let [id] = *ids
            && memory.deaths >= DEATHS_BEFORE_SHRINKING
            && memory.deaths.is_multiple_of(DEATHS_BEFORE_SHRINKING)
        {
            tracing::error!(id, "the trainer dies of this sample, which is dropped");
            self.metrics.samples_dropped.with_label_values(&["kills_trainer"]).inc();
            let store = self.store.clone();
            blocking(move || store.remove(id)).await?;
            memory.deaths = 0;
        }
        Ok(())
    }

    /// The new samples of the next round, when it is time for one.
    async fn due(&self, memory: &mut Memory) -> Result<Option<Vec<Sample>>, LearnError> {
        let settings = &self.settings.learn;
        if !settings.enabled {
            return Ok(None);
        }
        let most = settings.round_samples.saturating_mul(MAX_BACKLOG_FACTOR);
        let halvings = (memory.deaths / DEATHS_BEFORE_SHRINKING).min(usize::BITS - 1);
        let most = (most >> halvings).max(1);
        let store = self.store.clone();
        let new = blocking(move || store.unlearned(most)).await?;
        if new.is_empty() {
            memory.waiting_since = None;
            return Ok(None);
        }
        let since = *memory.waiting_since.get_or_insert_with(Instant::now);
        let waited = since.elapsed().as_secs_f64() >= settings.round_max_wait_seconds;
        let enough = new.len() >= settings.round_samples.min(most);
        Ok((enough || waited).then_some(new))
    }

    async fn restart_from(&self, version: &str) -> Result<(), LearnError> {
        self.set_phase(Phase::Restarting { version: version.to_owned() });
        let folder = self.work.version(version);
        let manifest = DraftManifest::read(&folder)?;
        let status = self.trainer.restart(&folder).await?;
        self.show_status(&status);
        self.release.restarted(version.to_owned(), manifest.data_hash).await?;
        tracing::info!(version, "training starts again");
        Ok(())
    }

    /// Waits for a change, a question, or time to look at the store again.
    async fn wait(&mut self, shutdown: &CancellationToken) -> Result<(), LearnError> {
        let mut changes = self.release.watch();
        tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            () = tokio::time::sleep(LOOK_EVERY) => Ok(()),
            changed = changes.changed() => {
                if changed.is_err() {
                    // The owner of the ledger has ended; so will this loop.
                    shutdown.cancelled().await;
                }
                Ok(())
            }
            question = self.questions.recv() => match question {
                Some(question) => self.answer(question).await,
                None => {
                    tokio::time::sleep(LOOK_EVERY).await;
                    Ok(())
                }
            }
        }
    }

    fn set_phase(&self, phase: Phase) {
        self.progress.send_if_modified(|progress| {
            let changed = progress.phase != phase;
            progress.phase = phase;
            changed
        });
    }

    fn show_error(&self, error: String) {
        self.progress.send_modify(|progress| progress.last_error = Some(error));
    }

    fn show_status(&self, status: &crate::proto::trainer::StatusReply) {
        let without = i64::try_from(status.parameters_without_gradient).unwrap_or(i64::MAX);
        self.metrics.params_without_grad.set(without);
        self.progress.send_modify(|progress| {
            progress.step = status.step;
            progress.parameters = status.parameters;
            progress.parameters_without_gradient = status.parameters_without_gradient;
        });
    }
}

/// Whether a round in work must be given up.
fn must_stop(snapshot: &Snapshot) -> bool {
    snapshot.ledger.paused || snapshot.ledger.restart_from.is_some()
}
