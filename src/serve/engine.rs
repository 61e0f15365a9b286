//! The scheduler: one thread owns every sequence, its cache and the proposer.
//!
//! Each step reads a piece of the prompts that are new, and verifies every running sequence's
//! draft, in one forward of the target. Scoring work (`prompt_logprobs`) runs between such steps,
//! and only as much of it as [`EngineSettings::scoring_share`] allows while streams run.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

use super::metrics::EngineMetrics;
use crate::speculate::decode::Decoder;
use crate::speculate::{DraftLength, Proposer, Verifier};
use request::Command;
use scoring::Scoring;
use sequence::Sequence;
use status::StatusCell;

pub mod request;
mod scoring;
mod sequence;
pub mod status;
mod step;

pub use request::{EngineError, Event, FinishReason, GenerateRequest, TokenScore};
pub use status::EngineStatus;

/// Limits and shares of the scheduler.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineSettings {
    /// Sequences that run at the same time.
    pub max_num_seqs: usize,
    /// Longest sequence, prompt and output together.
    pub max_model_len: usize,
    /// Requests that may wait.
    pub max_queued: usize,
    /// Prompt tokens read in one step when nothing else runs.
    pub prefill_chunk: usize,
    /// Prompt tokens read in one step while other sequences decode.
    pub prefill_chunk_busy: usize,
    /// Prompt tokens scored in one step when nothing else runs.
    pub scoring_chunk: usize,
    /// The same while streams run.
    pub scoring_chunk_busy: usize,
    /// Share of the time that scoring may take while streams run, between 0 and 1.
    pub scoring_share: f64,
    /// Ids that exist; columns of the logits from here on are padding.
    pub vocab_size: usize,
    /// Seeds the requests that bring no seed.
    pub seed: u64,
}

impl EngineSettings {
    /// Settings for a model length and a number of sequences, everything else at its default.
    pub fn new(max_num_seqs: usize, max_model_len: usize, vocab_size: usize) -> Self {
        Self {
            max_num_seqs,
            max_model_len,
            max_queued: 1024,
            prefill_chunk: 256,
            prefill_chunk_busy: 64,
            scoring_chunk: 64,
            scoring_chunk_busy: 8,
            scoring_share: 0.3,
            vocab_size,
            seed: 0,
        }
    }
}

/// The way to the engine's thread. Cheap to clone; the thread ends when all handles are gone and
/// the requests that were sent are answered.
#[derive(Clone)]
pub struct EngineHandle {
    commands: mpsc::UnboundedSender<Command>,
    pub(super) waiting: Arc<AtomicUsize>,
    max_queued: usize,
    pub(super) status: StatusCell,
    /// Its helpers would leave with it while the engine still computes.
    pool: Arc<rayon::ThreadPool>,
}

impl EngineHandle {
    /// Queues a sequence; its events arrive on the request's channel.
    ///
    /// # Errors
    /// When too many wait already, or the engine has stopped.
    pub fn generate(&self, request: GenerateRequest) -> Result<(), EngineError> {
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting >= self.max_queued {
            return Err(EngineError::Overloaded { waiting });
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.commands.send(Command::Generate(Box::new(request))).map_err(|_| EngineError::Stopped)
    }

    /// Waits until the engine has begun a step with the draft that is current now.
    ///
    /// # Errors
    /// When the engine has stopped.
    pub async fn await_draft(&self) -> Result<(), EngineError> {
        let (reply, done) = oneshot::channel();
        self.commands.send(Command::AwaitDraft(reply)).map_err(|_| EngineError::Stopped)?;
        done.await.map_err(|_| EngineError::Stopped)
    }

    /// Whether the engine's thread lives.
    pub fn is_alive(&self) -> bool {
        !self.commands.is_closed()
    }

    /// What the engine did last.
    pub fn status(&self) -> Arc<EngineStatus> {
        self.status.load_full()
    }
}

/// Threads for an engine and its computation; 0 takes one for each core.
///
/// # Errors
/// When the system refuses the threads.
pub fn pool(threads: usize) -> Result<Arc<rayon::ThreadPool>, rayon::ThreadPoolBuildError> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
    builder.thread_name(|index| format!("engine-{index}")).build().map(Arc::new)
}

/// Everything that the engine's thread owns.
pub(super) struct Engine<D: Decoder> {
    settings: EngineSettings,
    target: Arc<D>,
    proposer: Option<Box<dyn Proposer>>,
    length: DraftLength,
    metrics: Arc<EngineMetrics>,
    status: StatusCell,
    commands: mpsc::UnboundedReceiver<Command>,
    /// Requests sent and not yet admitted, shared with the handles.
    queued: Arc<AtomicUsize>,
    /// By priority, then by order of arrival.
    waiting: BTreeMap<(i64, u64), Queued>,
    running: Vec<Sequence<D::Cache>>,
    scoring: Scoring<D::Cache>,
    verifier: Verifier,
    next_id: u64,
    swaps: u64,
}

struct Queued {
    request: GenerateRequest,
    arrived: Instant,
}

impl<D: Decoder> Engine<D> {
    /// Starts the engine as a worker of `pool`: what it computes in parallel it then begins at
    /// once by itself, and a helper that the system does not run delays nothing.
    pub fn start(
        pool: Arc<rayon::ThreadPool>,
        settings: EngineSettings,
        target: Arc<D>,
        proposer: Option<Box<dyn Proposer>>,
        length: DraftLength,
        metrics: Arc<EngineMetrics>,
    ) -> EngineHandle {
        let (sender, commands) = mpsc::unbounded_channel();
        let queued = Arc::new(AtomicUsize::new(0));
        let status = StatusCell::default();
        let handle = EngineHandle {
            commands: sender,
            waiting: Arc::clone(&queued),
            max_queued: settings.max_queued,
            status: Arc::clone(&status),
            pool,
        };
        let mut engine = Self {
            scoring: Scoring::default(),
            settings,
            target,
            proposer,
            length,
            metrics,
            status,
            commands,
            queued,
            waiting: BTreeMap::new(),
            running: Vec::new(),
            verifier: Verifier::default(),
            next_id: 0,
            swaps: 0,
        };
        engine.publish();
        handle.pool.spawn(move || {
            // A panic closes the channels: requests fail at once and /health turns red.
            let run = AssertUnwindSafe(|| engine.run());
            if std::panic::catch_unwind(run).is_err() {
                tracing::error!("the engine's thread panicked; every request fails from now on");
            }
        });
        handle
    }

    fn run(&mut self) {
        while self.receive() {
            self.drop_unwanted();
            self.admit();
            self.step();
            self.score_step();
            self.publish();
        }
    }

    /// Takes what was sent; sleeps when there is nothing to do. Returns `false` at the end.
    fn receive(&mut self) -> bool {
        if self.is_idle() {
            match self.commands.blocking_recv() {
                Some(command) => self.take(command),
                None => return false,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return true,
                // Work that is under way is finished first.
                Err(TryRecvError::Disconnected) => return !self.is_idle(),
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.scoring.is_idle()
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::AwaitDraft(reply) => {
                self.begin_step();
                let _ = reply.send(());
            }
            Command::Generate(request) => {
                let queued = Queued { request: *request, arrived: Instant::now() };
                let key = (queued.request.priority, self.next_id);
                self.next_id += 1;
                if queued.request.prompt_logprobs.is_some() {
                    self.scoring.waiting.insert(key, queued);
                } else {
                    self.waiting.insert(key, queued);
                }
            }
        }
    }

    /// Lets a swapped draft take effect.
    fn begin_step(&mut self) {
        if self.proposer.as_mut().is_some_and(|proposer| proposer.begin_step()) {
            self.length.draft_changed();
            self.swaps += 1;
        }
    }

    fn drop_unwanted(&mut self) {
        let before = self.waiting.len() + self.scoring.waiting.len();
        self.waiting.retain(|_, queued| !queued.request.events.is_closed());
        self.scoring.waiting.retain(|_, queued| !queued.request.events.is_closed());
        let dropped = before - self.waiting.len() - self.scoring.waiting.len();
        self.queued.fetch_sub(dropped, Ordering::Relaxed);
        let proposer = &mut self.proposer;
        self.running.retain(|sequence| {
            let wanted = sequence.is_wanted();
            if let (false, Some(proposer)) = (wanted, proposer.as_mut()) {
                proposer.forget(sequence.id);
            }
            wanted
        });
        self.scoring.drop_unwanted();
    }

    fn admit(&mut self) {
        while self.running.len() < self.settings.max_num_seqs {
            let Some(((_, id), queued)) = self.waiting.pop_first() else { return };
            let sequence = self.new_sequence(id, queued);
            self.running.push(sequence);
        }
    }

    fn new_sequence(&mut self, id: u64, queued: Queued) -> Sequence<D::Cache> {
        self.queued.fetch_sub(1, Ordering::Relaxed);
        self.metrics.admitted(queued.request.prompt.len(), queued.arrived.elapsed());
        // Different for every request, the same after every start.
        let seed = self.settings.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(id);
        Sequence::new(id, seed, queued.request, queued.arrived, self.target.new_cache())
    }

    /// Publishes what readers outside of the thread see.
    fn publish(&mut self) {
        let held: usize = self.running.iter().map(|sequence| D::cached(&sequence.cache)).sum();
        let capacity = self.settings.max_num_seqs * self.settings.max_model_len;
        let waiting = self.waiting.len() + self.scoring.waiting.len();
        let running = self.running.len() + usize::from(self.scoring.current.is_some());
        self.metrics.load(running, waiting, held as f64 / capacity.max(1) as f64);
        let caches: usize = self.running.iter().map(|s| D::cache_bytes(&s.cache)).sum();
        self.status.store(Arc::new(EngineStatus {
            running,
            waiting,
            cache_bytes: caches + self.proposer.as_ref().map_or(0, |proposer| proposer.bytes()),
            swaps: self.swaps,
            ..EngineStatus::of(&self.length, self.running.len())
        }));
    }
}

#[cfg(test)]
mod tests;
