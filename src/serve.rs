//! The embedded engine: an OpenAI-compatible speculative decoder in one process.
//!
//! [`engine`] is one thread that owns every sequence; [`http`] turns requests into sequences and
//! their events into answers; [`drafts`] swaps the draft between two of the engine's steps.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub mod drafts;
pub mod engine;
pub mod http;
mod load;
pub mod metrics;
mod output;
mod stage;
pub mod stop;

pub use load::load;

use crate::hub::HubError;
use crate::model::runtime::RuntimeError;
use drafts::DraftError;
use http::App;

/// Why the server cannot start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("cannot open the target: {0}")]
    Target(#[source] HubError),
    #[error("cannot load the target: {0}")]
    Load(#[source] RuntimeError),
    #[error("cannot use the draft: {0}")]
    Draft(#[source] DraftError),
    #[error("{0}")]
    Setting(String),
    #[error(
        "cannot listen on {address}: {source}\nhint: another program has the port, or it is reserved; choose another --port, or 0 for a free one"
    )]
    Bind { address: String, source: std::io::Error },
    #[error("measuring the models failed: {0}")]
    Measure(#[source] RuntimeError),
    #[error("cannot start the engine's threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    #[error("cannot set up metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("the server failed: {0}")]
    Io(#[from] std::io::Error),
}

impl ServeError {
    /// Whether the settings are at fault rather than the machine.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Target(_) | Self::Draft(_) | Self::Setting(_))
    }
}

/// Opens the port, so that a port in use is reported before minutes of loading.
///
/// # Errors
/// When the port cannot be had.
pub async fn bind(host: std::net::IpAddr, port: u16) -> Result<TcpListener, ServeError> {
    TcpListener::bind((host, port)).await.map_err(|source| ServeError::Bind {
        address: std::net::SocketAddr::from((host, port)).to_string(),
        source,
    })
}

/// Serves until `shutdown` completes, then lets running requests finish for up to `grace`.
///
/// # Errors
/// When accepting connections fails.
pub async fn run(
    app: App,
    tasks: TaskTracker,
    listener: TcpListener,
    grace: Duration,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let draining = CancellationToken::new();
    let begun = draining.clone();
    let signal = async move {
        shutdown.await;
        tracing::info!(grace_seconds = grace.as_secs(), "draining");
        begun.cancel();
    };
    let router = http::router(Arc::new(app));
    let serving = axum::serve(listener, router).with_graceful_shutdown(signal);
    let deadline = async {
        draining.cancelled().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        result = serving => result?,
        () = deadline => tracing::warn!("requests that still run are cut off"),
    }
    tasks.close();
    if tokio::time::timeout(Duration::from_secs(5), tasks.wait()).await.is_err() {
        tracing::warn!("a draft swap is still under way");
    }
    tracing::info!("stopped");
    Ok(())
}
