//! From proxied exchanges to samples, off the request path.
//!
//! The proxy's side is [`CaptureSender`], which never waits: what does not fit into the queue or
//! the memory budget is dropped and counted. The other side is [`run`], which turns exchanges into
//! token ids and stores them. Text is never logged, at any level.

mod answer;
mod counts;
mod question;
mod sample;

use std::future::Future;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use tokio::sync::{Notify, mpsc};
use tracing::warn;

use super::exchange::{Budget, Exchange};
use super::render::Renderer;
use super::store::{SampleStore, StoreError};
use counts::Counts;

pub use counts::DropReason;
pub use sample::to_sample;

/// Memory for bodies that are being collected or wait in the queue.
const DEFAULT_BUDGET_BYTES: usize = 64 << 20;

/// Told what became of the traffic. `reason` is one of [`DropReason`]'s names.
pub trait CaptureObserver: Send + Sync {
    fn captured(&self, domain: &str);
    fn dropped(&self, reason: &'static str);
    fn opted_out(&self);
}

/// The draft version that serves now; `None` inside when it is not known.
pub type DraftVersion = Arc<ArcSwap<Option<String>>>;

/// What becomes a sample.
#[derive(Debug, Clone)]
pub struct CaptureSettings {
    /// One in this many samples is held out, chosen by a hash of the prompt, so that equal prompts
    /// are all on the same side. 0 holds out none.
    pub held_out_every: u64,
    pub max_prompt_tokens: usize,
    pub min_output_tokens: usize,
    pub max_output_tokens: usize,
    /// Used where a request sets none. The server may have another default for its model.
    pub default_temperature: f32,
    /// Share of the exchanges that is looked at, evenly spread; 1.0 for all.
    pub sample_rate: f64,
    /// Whether log-probabilities that a client asked for become teacher rows. Only right when the
    /// server reports them before temperature and top-p (vLLM's `raw_logprobs`, its default).
    pub use_live_logprobs: bool,
    /// Live rows with fewer candidates than this are not used.
    pub min_live_top_k: usize,
    /// Model names that are the target itself; requests for others (LoRA adapters) are skipped.
    /// Empty: all are taken to be the target. May be filled in later, when the server is up.
    pub models: Arc<ArcSwap<Vec<String>>>,
}

impl Default for CaptureSettings {
    fn default() -> Self {
        Self {
            held_out_every: 10,
            max_prompt_tokens: 4096,
            min_output_tokens: 2,
            max_output_tokens: 4096,
            default_temperature: 1.0,
            sample_rate: 1.0,
            use_live_logprobs: false,
            min_live_top_k: 5,
            models: Arc::default(),
        }
    }
}

#[derive(Debug)]
struct Shared {
    budget: Arc<Budget>,
    counts: Counts,
    /// Wakes the receiver for counts that come without an exchange.
    counted: Notify,
    draft_version: OnceLock<DraftVersion>,
}

/// The proxy's end of the capture queue. Nothing here waits.
#[derive(Debug, Clone)]
pub struct CaptureSender {
    queue: mpsc::Sender<Exchange>,
    shared: Arc<Shared>,
}

/// The capture task's end of the queue; dropping it turns capture off.
#[derive(Debug)]
pub struct CaptureReceiver {
    queue: mpsc::Receiver<Exchange>,
    shared: Arc<Shared>,
}

/// A queue for `capacity` exchanges, with bodies of at most 64 MiB together.
pub fn channel(capacity: usize) -> (CaptureSender, CaptureReceiver) {
    channel_with_budget(capacity, DEFAULT_BUDGET_BYTES)
}

/// Like [`channel`], with its own bound on the bytes of all bodies that are collected or queued.
pub fn channel_with_budget(
    capacity: usize,
    budget_bytes: usize,
) -> (CaptureSender, CaptureReceiver) {
    let (sender, receiver) = mpsc::channel(capacity.max(1));
    let shared = Arc::new(Shared {
        budget: Budget::new(budget_bytes),
        counts: Counts::default(),
        counted: Notify::new(),
        draft_version: OnceLock::new(),
    });
    let sender = CaptureSender { queue: sender, shared: shared.clone() };
    (sender, CaptureReceiver { queue: receiver, shared })
}

impl CaptureSender {
    /// Whether anyone takes exchanges; when not, nothing need be collected.
    pub fn is_open(&self) -> bool {
        !self.queue.is_closed()
    }

    /// Queues an exchange, or drops and counts it.
    pub fn send(&self, exchange: Exchange) {
        match self.queue.try_send(exchange) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(_)) => self.dropped(DropReason::QueueFull),
        }
    }

    /// Counts an exchange that could not be collected.
    pub fn dropped(&self, reason: DropReason) {
        self.shared.counts.dropped(reason);
        self.shared.counted.notify_one();
    }

    /// Counts a request whose client did not want it used.
    pub fn opted_out(&self) {
        self.shared.counts.opted_out();
        self.shared.counted.notify_one();
    }

    pub(super) fn budget(&self) -> Arc<Budget> {
        self.shared.budget.clone()
    }

    pub(super) fn draft_version(&self) -> Option<String> {
        self.shared.draft_version.get().and_then(|version| version.load().as_ref().clone())
    }
}

/// Turns exchanges into samples until `shutdown`; then what is queued is still stored.
///
/// One exchange at a time, on the blocking pool: tokenisers and disks block.
pub async fn run(
    mut receiver: CaptureReceiver,
    renderer: Arc<Renderer>,
    store: Arc<dyn SampleStore>,
    settings: CaptureSettings,
    observer: Arc<dyn CaptureObserver>,
    draft_version: DraftVersion,
    shutdown: impl Future<Output = ()>,
) {
    // A receiver is consumed by `run`, so this is the first and only time.
    let _ = receiver.shared.draft_version.set(draft_version);
    let shared = receiver.shared.clone();
    let settings = Arc::new(settings);
    let mut shutdown = std::pin::pin!(shutdown);
    let mut closing = false;
    let mut share = 0.0;
    loop {
        let exchange = tokio::select! {
            exchange = receiver.queue.recv() => exchange,
            () = shared.counted.notified() => {
                shared.counts.report(&*observer);
                continue;
            }
            () = &mut shutdown, if !closing => {
                // Nothing more comes in; what is in the queue is still handed out.
                receiver.queue.close();
                closing = true;
                continue;
            }
        };
        let Some(exchange) = exchange else { break };
        share += settings.sample_rate;
        if share < 1.0 {
            continue;
        }
        share -= share.floor();
        let (renderer, store, settings) = (renderer.clone(), store.clone(), settings.clone());
        let stored =
            tokio::task::spawn_blocking(move || keep(exchange, &renderer, &*store, &settings));
        match stored.await {
            Ok(Ok(domain)) => observer.captured(&domain),
            Ok(Err(reason)) => observer.dropped(reason.name()),
            Err(panicked) => {
                // A defect, but one exchange must not end capture for all that follow.
                warn!(error = %panicked, "turning an exchange into a sample panicked");
                observer.dropped(DropReason::Internal.name());
            }
        }
    }
    shared.counts.report(&*observer);
}

fn keep(
    exchange: Exchange,
    renderer: &Renderer,
    store: &dyn SampleStore,
    settings: &CaptureSettings,
) -> Result<String, DropReason> {
    let sample = to_sample(&exchange, renderer, settings)?;
    drop(exchange);
    let domain = sample.domain.clone();
    match store.append(sample) {
        Ok(_) => Ok(domain),
        Err(StoreError::TooLarge { .. }) => Err(DropReason::TooLarge),
        Err(error) => {
            warn!(%error, "cannot store a sample");
            Err(DropReason::Store)
        }
    }
}
