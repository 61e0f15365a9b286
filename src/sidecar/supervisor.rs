//! Starts the trainer child, connects to it, and starts it again when it dies.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Uri};

use super::metrics::Metrics;
use super::trainer_process::MAX_MESSAGE_BYTES;
use crate::proto::trainer::trainer_client::TrainerClient;

mod handle;

pub use handle::{TrainerError, TrainerHandle, TrainerInfo};

const FIRST_BACKOFF: Duration = Duration::from_millis(500);
/// A child that lived this long was healthy: the next one starts without much delay.
const HEALTHY_AFTER: Duration = Duration::from_secs(60);
const CONNECT_EVERY: Duration = Duration::from_millis(50);

/// Makes the command that starts a child on a draft folder.
pub type Launch = Arc<dyn Fn(&Path) -> Command + Send + Sync>;
/// Draft folder of the version that runs now.
pub type CurrentDraft = Arc<dyn Fn() -> PathBuf + Send + Sync>;

/// What a supervisor needs.
pub struct SupervisorOptions {
    pub launch: Launch,
    pub draft: CurrentDraft,
    pub socket: PathBuf,
    pub start_timeout: Duration,
    pub restart_max: Duration,
    /// How long a child may take to save its state when asked to end.
    pub grace: Duration,
    pub metrics: Arc<Metrics>,
}

/// The line to the child as the handles see it.
#[derive(Clone, Default)]
struct Line {
    client: Option<TrainerClient<Channel>>,
    pid: Option<u32>,
    restarts: u64,
    ended: Option<String>,
}

/// Keeps one trainer child running.
pub struct Supervisor {
    options: SupervisorOptions,
    line: watch::Sender<Line>,
    kills: mpsc::Receiver<()>,
}

enum End {
    Stopped,
    Died(String),
}

impl Supervisor {
    pub fn new(options: SupervisorOptions) -> (Self, TrainerHandle) {
        let (line, reader) = watch::channel(Line::default());
        let (kill, kills) = mpsc::channel(1);
        (Self { options, line, kills }, TrainerHandle::new(reader, kill))
    }

    /// Runs until `shutdown`; the child then ends before this returns.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let first_backoff = FIRST_BACKOFF.min(self.options.restart_max);
        let mut backoff = first_backoff;
        loop {
            let started = Instant::now();
            let end = self.run_child(&shutdown).await;
            self.options.metrics.trainer_up.set(0);
            let End::Died(reason) = end else {
                self.line.send_modify(|line| {
                    *line = Line { restarts: line.restarts, ..Line::default() }
                });
                return;
            };
            if started.elapsed() >= HEALTHY_AFTER {
                backoff = first_backoff;
            }
            tracing::warn!(reason, retry_in = ?backoff, "the trainer process ended");
            self.options.metrics.trainer_restarts.inc();
            self.line.send_modify(|line| {
                *line =
                    Line { restarts: line.restarts + 1, ended: Some(reason), ..Line::default() };
            });
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(backoff) => {}
            }
            backoff = (backoff * 2).min(self.options.restart_max);
        }
    }

    async fn run_child(&mut self, shutdown: &CancellationToken) -> End {
        // A stale socket of a killed predecessor must not be taken for the new child's.
        std::fs::remove_file(&self.options.socket).ok();
        let draft = (self.options.draft)();
        let mut command = (self.options.launch)(&draft);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // Ctrl-C at a terminal is for the parent, which ends the child in order.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return End::Died(format!("cannot start it: {error}")),
        };
        // A kill that was asked for while no child ran is not meant for this one.
        while self.kills.try_recv().is_ok() {}
        let pid = child.id();
        // Held here: `Child::wait` would close it, and the child ends when it is closed.
        let stdin = child.stdin.take();
        tokio::select! {
            () = shutdown.cancelled() => return self.end(child, stdin).await,
            status = child.wait() => return End::Died(describe(status)),
            client = self.connect() => match client {
                Some(client) => {
                    tracing::info!(pid, "the trainer process is ready");
                    self.options.metrics.trainer_up.set(1);
                    self.line.send_modify(|line| {
                        line.client = Some(client);
                        line.pid = pid;
                    });
                }
                None => {
                    child.kill().await.ok();
                    return End::Died("it did not answer in time".into());
                }
            },
        }
        tokio::select! {
            () = shutdown.cancelled() => self.end(child, stdin).await,
            status = child.wait() => End::Died(describe(status)),
            _ = self.kills.recv() => {
                child.kill().await.ok();
                End::Died("it made no progress and was killed".into())
            }
        }
    }

    /// Waits until the child listens. None after the start timeout.
    async fn connect(&self) -> Option<TrainerClient<Channel>> {
        let deadline = Instant::now() + self.options.start_timeout;
        while Instant::now() < deadline {
            let path = self.options.socket.clone();
            let connector = tower::service_fn(move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            });
            // The address is not used; the connector always takes the socket.
            let endpoint = Endpoint::from_static("http://trainer.local");
            if let Ok(channel) = endpoint.connect_with_connector(connector).await {
                let client = TrainerClient::new(channel)
                    .max_decoding_message_size(MAX_MESSAGE_BYTES)
                    .max_encoding_message_size(MAX_MESSAGE_BYTES);
                return Some(client);
            }
            tokio::time::sleep(CONNECT_EVERY).await;
        }
        None
    }

    /// Closes the child's standard input, which asks it to save its state and end.
    async fn end(&self, mut child: Child, stdin: Option<ChildStdin>) -> End {
        self.line.send_modify(|line| line.client = None);
        drop(stdin);
        if tokio::time::timeout(self.options.grace, child.wait()).await.is_err() {
            tracing::warn!("the trainer process did not end in time and is killed");
            child.kill().await.ok();
        }
        End::Stopped
    }
}

fn describe(status: std::io::Result<ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status {
        Err(error) => format!("cannot wait for it: {error}"),
        Ok(status) => match (status.signal(), status.code()) {
            (Some(9), _) => "killed by signal 9 (out of memory?)".into(),
            (Some(6), _) => "aborted by signal 6 (over trainer.memory_limit_bytes?)".into(),
            (Some(signal), _) => format!("killed by signal {signal}"),
            (None, Some(code)) => format!("exit code {code}, see its log lines above"),
            (None, None) => "ended for an unknown reason".into(),
        },
    }
}
