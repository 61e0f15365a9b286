//! Which version runs: the one owner of the ledger, the `current` link and every swap.
//!
//! Publications, roll-backs, pins and the repair after a server's restart all pass through this
//! task, so two swaps never overlap. Readers see snapshots. It never waits for training.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::draft_sink::{DraftSink, SinkError};
use super::metrics::Metrics;
use super::publish::{FolderError, WorkDir};
use super::versions::{
    GateScores, Ledger, LiveCounters, TrainingTotals, VersionRecord, VersionState,
};
use crate::config::sidecar::PublishSettings;

mod actions;
mod delivery;
mod handle;

pub use handle::ReleaseHandle;

/// How often counters that changed are written to disk. After a kill this much is forgotten.
const SAVE_EVERY: Duration = Duration::from_secs(20);
/// Longest wait before a server that refuses the current version is asked again.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Why an action was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    #[error("{0}")]
    Superseded(String),
    #[error("{version} was refused and the version before stays: {reason}")]
    Refused { version: String, reason: String },
    #[error("{version} has the weights of the running version")]
    Unchanged { version: String },
    #[error("no version {version}\nhint: `da-sidecar versions` lists them")]
    NoSuchVersion { version: String },
    #[error("{0}")]
    NotPossible(String),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("the sidecar is stopping")]
    Stopping,
}

/// A gated draft, staged in its folder.
#[derive(Debug, Clone)]
pub struct Candidate {
    pub version: String,
    /// The version that the gate compared it with.
    pub parent: String,
    pub scores: GateScores,
    /// Version that the trainer's state refers to; retention spares it.
    pub trainer_base: Option<String>,
}

/// What became of a candidate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Published {
    /// False when the server could not be reached: it is swapped as soon as it answers.
    pub delivered: bool,
    pub stall_ms: f64,
}

/// Who takes a version back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RollbackCause {
    Watch,
    Operator,
}

/// What every other task may know.
#[derive(Debug, Clone)]
pub struct Snapshot {
    pub ledger: Arc<Ledger>,
    /// What the server was last seen to run; none while it is down.
    pub serving: Option<String>,
    /// Counts swaps begun; counters read under two different numbers span a swap.
    pub generation: u64,
    pub swapping: bool,
    /// End of the last swap.
    pub swapped_at: Option<Instant>,
    pub swapped_unix_ms: u64,
    pub upstream_error: Option<String>,
}

enum Command {
    Publish(Box<Candidate>, oneshot::Sender<Result<Published, ReleaseError>>),
    Rollback {
        version: Option<String>,
        cause: RollbackCause,
        reason: String,
        reply: oneshot::Sender<Result<String, ReleaseError>>,
    },
    Pin(Option<String>, oneshot::Sender<Result<String, ReleaseError>>),
    Pause(bool, oneshot::Sender<Result<String, ReleaseError>>),
    /// A round was learned: what it cost and the hash of everything learned so far.
    Learned(TrainingTotals, String, oneshot::Sender<Result<(), ReleaseError>>),
    /// The gate refused; the reply is the number of refusals in a row.
    GateRefused(oneshot::Sender<u32>),
    /// The trainer has started again from a version.
    Restarted {
        version: String,
        data_hash: String,
        reply: oneshot::Sender<Result<(), ReleaseError>>,
    },
    Live(String, LiveCounters),
}

/// The owner task's state.
pub struct Release {
    work: Arc<WorkDir>,
    ledger: Ledger,
    sink: Arc<dyn DraftSink>,
    settings: PublishSettings,
    swap_timeout: Duration,
    poll: Duration,
    metrics: Arc<Metrics>,
    /// Version that captured samples are labelled with.
    draft_version: Arc<ArcSwap<Option<String>>>,
    snapshot: watch::Sender<Snapshot>,
    commands: mpsc::Receiver<Command>,
    saved_at: Instant,
    unsaved: bool,
    backoff: Duration,
    not_before: Instant,
}

/// What [`Release::new`] needs.
pub struct ReleaseParts {
    pub work: Arc<WorkDir>,
    /// As recovered from disk.
    pub ledger: Ledger,
    pub sink: Arc<dyn DraftSink>,
    pub settings: PublishSettings,
    pub swap_timeout: Duration,
    pub poll: Duration,
    pub metrics: Arc<Metrics>,
    pub draft_version: Arc<ArcSwap<Option<String>>>,
}

impl Release {
    pub fn new(parts: ReleaseParts) -> (Self, ReleaseHandle) {
        let (sender, commands) = mpsc::channel(64);
        let (snapshot, reader) = watch::channel(Snapshot {
            ledger: Arc::new(parts.ledger.clone()),
            serving: None,
            generation: 0,
            swapping: false,
            swapped_at: None,
            swapped_unix_ms: 0,
            upstream_error: None,
        });
        for record in &parts.ledger.versions {
            parts.metrics.set_live(&record.version, &record.live);
        }
        parts.metrics.paused.set(i64::from(parts.ledger.paused));
        let release = Self {
            work: parts.work,
            ledger: parts.ledger,
            sink: parts.sink,
            settings: parts.settings,
            swap_timeout: parts.swap_timeout,
            poll: parts.poll,
            metrics: parts.metrics,
            draft_version: parts.draft_version,
            snapshot,
            commands,
            saved_at: Instant::now(),
            unsaved: false,
            backoff: Duration::ZERO,
            not_before: Instant::now(),
        };
        (release, ReleaseHandle::new(sender, reader))
    }

    /// Runs until `shutdown`; what was accepted before that is carried out and saved.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut tick = tokio::time::interval(self.poll);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                command = self.commands.recv() => match command {
                    Some(command) => self.handle(command).await,
                    None => break,
                },
                _ = tick.tick() => self.sync().await,
            }
        }
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            // Counts and marks are kept; nothing new is swapped in on the way out.
            match command {
                Command::Live(..) | Command::Learned(..) | Command::Restarted { .. } => {
                    self.handle(command).await;
                }
                _ => drop(command),
            }
        }
        if let Err(error) = self.save().await {
            tracing::error!(%error, "cannot save the ledger");
        }
    }

    async fn handle(&mut self, command: Command) {
        // A caller that is gone does not want the answer, hence the ignored sends.
        match command {
            Command::Publish(candidate, reply) => {
                let _ = reply.send(self.publish(*candidate).await);
            }
            Command::Rollback { version, cause, reason, reply } => {
                let _ = reply.send(self.roll_back(version, cause, reason).await);
            }
            Command::Pin(version, reply) => {
                let _ = reply.send(self.pin(version).await);
            }
            Command::Pause(paused, reply) => {
                let _ = reply.send(self.pause(paused).await);
            }
            Command::Learned(cost, data_hash, reply) => {
                let totals = &mut self.ledger.training;
                totals.rounds += cost.rounds;
                totals.steps += cost.steps;
                totals.skipped_steps += cost.skipped_steps;
                totals.tokens += cost.tokens;
                totals.seconds += cost.seconds;
                self.ledger.data_hash = data_hash;
                let _ = reply.send(self.save().await.map_err(ReleaseError::from));
            }
            Command::GateRefused(reply) => {
                self.ledger.refusals += 1;
                self.save_or_log().await;
                let _ = reply.send(self.ledger.refusals);
            }
            Command::Restarted { version, data_hash, reply } => {
                if self.ledger.restart_from.as_deref() == Some(&version) {
                    self.ledger.restart_from = None;
                }
                self.ledger.refusals = 0;
                self.ledger.data_hash = data_hash;
                let _ = reply.send(self.save().await.map_err(ReleaseError::from));
            }
            Command::Live(version, window) => self.add_live(&version, &window).await,
        }
        self.show();
    }

    async fn add_live(&mut self, version: &str, window: &LiveCounters) {
        let Some(record) = self.ledger.find_mut(version) else { return };
        record.live.add(window);
        self.metrics.add_live(version, window);
        self.metrics.set_live(version, &record.live);
        self.metrics.acceptance_data.set(i64::from(record.live.drafted > 0));
        self.unsaved = true;
        if self.saved_at.elapsed() >= SAVE_EVERY {
            self.save_or_log().await;
        }
    }

    /// Brings the server in line with the ledger: after a start, and whenever it has restarted.
    async fn sync(&mut self) {
        if Instant::now() < self.not_before {
            return;
        }
        let wanted = self.ledger.running.clone();
        match self.ask().await {
            Ok(running) if self.matches(&running, &wanted) => {
                self.backoff = Duration::ZERO;
                self.set_serving(Some(running.version), None);
            }
            Ok(running) => {
                tracing::info!(
                    server = running.version,
                    version = wanted,
                    "bringing the server to our version"
                );
                match self.swap(&wanted, "sync", Some(running.version)).await {
                    Ok(_) => self.backoff = Duration::ZERO,
                    Err(error) => self.back_off(&error),
                }
            }
            Err(error @ SinkError::Unavailable(_)) => {
                self.set_serving(None, Some(error.to_string()));
            }
            Err(error) => self.back_off(&error),
        }
        self.show();
    }

    fn set_serving(&mut self, version: Option<String>, error: Option<String>) {
        let up = error.is_none();
        self.metrics.upstream_up.set(i64::from(up));
        self.metrics.set_serving(version.as_deref());
        self.draft_version.store(Arc::new(version.clone()));
        self.snapshot.send_if_modified(|snapshot| {
            let changed = snapshot.serving != version || snapshot.upstream_error != error;
            snapshot.serving = version;
            snapshot.upstream_error = error;
            changed
        });
    }

    /// Shows the ledger to the other tasks, when it has changed.
    fn show(&self) {
        self.snapshot.send_if_modified(|snapshot| {
            let changed = *snapshot.ledger != self.ledger;
            if changed {
                snapshot.ledger = Arc::new(self.ledger.clone());
            }
            changed
        });
    }

    async fn save(&mut self) -> Result<(), FolderError> {
        let (work, ledger) = (self.work.clone(), self.ledger.clone());
        blocking(move || ledger.save(work.root())).await?;
        self.saved_at = Instant::now();
        self.unsaved = false;
        Ok(())
    }

    async fn save_or_log(&mut self) {
        if let Err(error) = self.save().await {
            tracing::error!(%error, "cannot save the ledger");
        }
    }
}

/// Runs file work off the async threads.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is being torn down and nobody waits for this any more.
            Err(_) => std::future::pending().await,
        },
    }
}
