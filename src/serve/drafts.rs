//! Staging and swapping drafts while the engine runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use super::engine::{EngineError, EngineHandle};
use crate::speculate::decode::{Decoder, Draft};
use crate::vocab::TokenMapError;

/// Why a draft was not swapped in. The running one is untouched.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    #[error("this server was started without a draft\nhint: start it with --draft")]
    NoDraft,
    #[error("draft folder {path} cannot be opened: {reason}")]
    Missing { path: String, reason: String },
    #[error(
        "draft folder {path} is outside of {root}, the folder that drafts may come from\nhint: publish below it, or start the server with another --draft-root"
    )]
    OutsideRoot { path: String, root: String },
    #[error("draft does not fit: {what}: expected {expected}, got {got}")]
    Mismatch { what: String, expected: String, got: String },
    #[error("draft cannot be read: {0}")]
    Unreadable(String),
    #[error("draft does not fit: {0}")]
    Vocabulary(#[from] TokenMapError),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// The draft that serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftInfo {
    pub version: String,
    pub checksum: Option<String>,
    pub path: PathBuf,
}

/// The answer to a swap.
#[derive(Debug, Clone, PartialEq)]
pub struct Swapped {
    pub version: String,
    pub checksum: Option<String>,
    /// Reading, checking and quantising, while serving went on.
    pub stage: Duration,
    /// From the swap to the first engine step that uses the new draft.
    pub commit: Duration,
}

/// Loads and checks a draft folder; runs on a blocking thread.
pub(super) type Stage<D> =
    Arc<dyn Fn(&Path, Option<&str>) -> Result<Draft<D>, DraftError> + Send + Sync>;

struct SwapOrder {
    path: PathBuf,
    version: Option<String>,
    reply: oneshot::Sender<Result<Swapped, DraftError>>,
}

/// The way to the task that owns swapping. Swaps happen one after the other.
#[derive(Clone)]
pub struct DraftHandle {
    orders: Option<mpsc::Sender<SwapOrder>>,
    current: Arc<ArcSwap<Option<DraftInfo>>>,
}

impl DraftHandle {
    /// A server without a draft, which refuses every swap.
    pub fn none() -> Self {
        Self { orders: None, current: Arc::new(ArcSwap::from_pointee(None)) }
    }

    /// Starts the task.
    pub(super) fn start<D: Decoder>(
        shared: Arc<ArcSwap<Draft<D>>>,
        stage: Stage<D>,
        engine: EngineHandle,
        tasks: &TaskTracker,
    ) -> Self {
        let (sender, mut orders) = mpsc::channel::<SwapOrder>(4);
        let current = Arc::new(ArcSwap::from_pointee(Some(info(&shared.load()))));
        let shown = Arc::clone(&current);
        tasks.spawn(async move {
            while let Some(order) = orders.recv().await {
                let result = swap(&shared, &stage, &engine, order.path, order.version).await;
                shown.store(Arc::new(Some(info(&shared.load()))));
                match &result {
                    Ok(swapped) => tracing::info!(
                        version = swapped.version,
                        stage_ms = swapped.stage.as_millis() as u64,
                        commit_ms = swapped.commit.as_millis() as u64,
                        "draft serves"
                    ),
                    Err(error) => tracing::warn!(%error, "draft refused"),
                }
                let _ = order.reply.send(result);
            }
        });
        Self { orders: Some(sender), current }
    }

    /// The draft that serves; none without speculation.
    pub fn current(&self) -> Option<DraftInfo> {
        Option::clone(&self.current.load())
    }

    /// Swaps another draft in.
    ///
    /// # Errors
    /// See [`DraftError`]; the running draft is then untouched.
    pub async fn swap(
        &self,
        path: PathBuf,
        version: Option<String>,
    ) -> Result<Swapped, DraftError> {
        let orders = self.orders.as_ref().ok_or(DraftError::NoDraft)?;
        let (reply, result) = oneshot::channel();
        let stopped = |_| DraftError::Engine(EngineError::Stopped);
        orders.send(SwapOrder { path, version, reply }).await.map_err(|_| stopped(()))?;
        result.await.map_err(|_| stopped(()))?
    }
}

fn info<D>(draft: &Draft<D>) -> DraftInfo {
    DraftInfo {
        version: draft.version.clone(),
        checksum: draft.checksum.clone(),
        path: draft.path.clone(),
    }
}

async fn swap<D: Decoder>(
    shared: &Arc<ArcSwap<Draft<D>>>,
    stage: &Stage<D>,
    engine: &EngineHandle,
    path: PathBuf,
    version: Option<String>,
) -> Result<Swapped, DraftError> {
    let running = shared.load_full();
    let same_folder = std::fs::canonicalize(&path).is_ok_and(|path| path == running.path);
    if same_folder && version.as_ref().is_none_or(|version| *version == running.version) {
        return Ok(Swapped {
            version: running.version.clone(),
            checksum: running.checksum.clone(),
            stage: Duration::ZERO,
            commit: Duration::ZERO,
        });
    }
    let started = Instant::now();
    let stage = Arc::clone(stage);
    let staged = tokio::task::spawn_blocking(move || stage(&path, version.as_deref()))
        .await
        .map_err(|error| DraftError::Unreadable(format!("loading it panicked: {error}")))??;
    let stage = started.elapsed();
    let draft = Arc::new(staged);
    let committed = Instant::now();
    shared.store(Arc::clone(&draft));
    engine.await_draft().await?;
    Ok(Swapped {
        version: draft.version.clone(),
        checksum: draft.checksum.clone(),
        stage,
        commit: committed.elapsed(),
    })
}
