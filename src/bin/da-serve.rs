//! `da-serve`: the embedded engine over HTTP.

// A program talks to its user on stdout and stderr.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use draft_adapter::config::serve::ServeConfig;
use draft_adapter::serve::{self, ServeError};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::task::TaskTracker;
use tracing_subscriber::EnvFilter;

/// Usage and configuration errors (`EX_USAGE`).
const USAGE: u8 = 64;
/// Threads for HTTP; computation has its own.
const HTTP_THREADS: usize = 2;

fn main() -> ExitCode {
    let config = match ServeConfig::try_parse() {
        Ok(config) => config,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "da-serve");
    match start(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if error.is_usage() { USAGE } else { 1 })
        }
    }
}

fn start(config: ServeConfig) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .enable_all()
        .build()?;
    let result = runtime.block_on(run(config));
    // Blocking work that was cut off must not keep the process alive.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

async fn run(config: ServeConfig) -> Result<(), ServeError> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut shutdown = Box::pin(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    });
    let listener = serve::bind(config.host, config.port).await?;
    let address = listener.local_addr()?;
    let grace = Duration::from_secs(config.grace_seconds);
    let tasks = TaskTracker::new();
    let loading = {
        let tasks = tasks.clone();
        tokio::task::spawn_blocking(move || serve::load(&config, &tasks))
    };
    let app = tokio::select! {
        app = loading => app.map_err(std::io::Error::other)??,
        () = &mut shutdown => return Ok(()),
    };
    tracing::info!(%address, "listening");
    println!("listening on http://{address}");
    std::io::stdout().flush()?;
    serve::run(app, tasks, listener, grace, shutdown).await
}
