//! Puts the sidecar together and takes it apart in order.
//!
//! Everything that can fail at the start is done in [`Sidecar::start`], cheapest check first, so
//! that a sidecar that cannot run has changed nothing. It never waits for the server.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::control::{self, ControlAddress, ControlListener, ControlService, SOCKET_NAME};
use super::draft_sink::{DraftSink, FolderSink, UpstreamSink};
use super::learn::{Learn, Progress};
use super::metrics::Metrics;
use super::publish::{FolderError, WorkDir};
use super::release::{Release, ReleaseHandle, ReleaseParts};
use super::scoring::Scoring;
use super::status::{self, StatusSource};
use super::store::{SampleStore, StoreError};
use super::supervisor::{Supervisor, SupervisorOptions, TrainerHandle};
use super::upstream::{ConfiguredTeacher, TargetNames, learn_names};
use super::versions::{FIRST_VERSION, LEDGER_FILE, Ledger};
use super::watch::Watch;
use super::{capture, proxy};
use crate::config::sidecar::{SidecarSettings, SinkKind, seconds};
use crate::vllm::{Client, ClientError};

mod parts;
mod upkeep;

use parts::{api_key, bind, capture_settings, open_ledger, open_store, proxy_settings};

pub use super::supervisor::Launch;

/// Why a sidecar cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(
        "cannot listen on {address} ({key}): {reason}\nhint: another program may use the port; choose another one"
    )]
    Bind { key: &'static str, address: String, reason: std::io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Proxy(#[from] proxy::ProxyError),
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl RunError {
    /// The exit code of the program.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Folder(error) if error.is_usage() => crate::config::ConfigError::EXIT_CODE,
            Self::Proxy(_) | Self::Client(_) => crate::config::ConfigError::EXIT_CODE,
            _ => 1,
        }
    }
}

/// Where a started sidecar listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses {
    pub proxy: SocketAddr,
    pub admin: SocketAddr,
    pub control: ControlAddress,
}

/// A sidecar that has bound its ports and opened its folders, and does nothing yet.
pub struct Sidecar {
    settings: Arc<SidecarSettings>,
    launch: Launch,
    addresses: Addresses,
    proxy: TcpListener,
    admin: TcpListener,
    control: ControlListener,
    work: Arc<WorkDir>,
    ledger: Ledger,
    store: Arc<dyn SampleStore>,
    client: Client,
}

impl Sidecar {
    /// Checks, binds and opens everything. `launch` makes the command of the trainer child for a
    /// draft folder.
    ///
    /// # Errors
    /// See [`RunError`].
    pub async fn start(settings: SidecarSettings, launch: Launch) -> Result<Self, RunError> {
        let client = Client::new(&settings.upstream.url, api_key(&settings))?;
        let has_versions = settings.work_dir.join(LEDGER_FILE).is_file()
            || settings.work_dir.join("drafts").join(FIRST_VERSION).is_dir();
        if !has_versions {
            super::publish::check_draft(&settings.draft)?;
        }
        let (proxy, proxy_address) = bind("proxy.listen", &settings.proxy.listen).await?;
        let (admin, admin_address) = bind("admin.listen", &settings.admin.listen).await?;
        let tcp_control = match settings.control.listen.as_str() {
            "" => None,
            address => Some(bind("control.listen", address).await?),
        };
        let work = WorkDir::open(&settings.work_dir)?;
        let (control, control_address) = match tcp_control {
            Some((listener, address)) => {
                (ControlListener::Tcp(listener), ControlAddress::Tcp(address.to_string()))
            }
            None => {
                let path = work.root().join(SOCKET_NAME);
                let listener = control::bind_socket(&path)?;
                (ControlListener::Socket(listener), ControlAddress::Socket(path))
            }
        };
        let ledger = open_ledger(&work, &settings.draft)?;
        let store = open_store(&settings, &work)?;
        Ok(Self {
            addresses: Addresses {
                proxy: proxy_address,
                admin: admin_address,
                control: control_address,
            },
            settings: Arc::new(settings),
            launch,
            proxy,
            admin,
            control,
            work: Arc::new(work),
            ledger,
            store,
            client,
        })
    }

    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Runs until `shutdown`, then drains within the grace period and saves everything.
    ///
    /// # Errors
    /// When the settings of the proxy do not fit together.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        let settings = self.settings.clone();
        let grace = seconds(settings.grace_seconds);
        let metrics = Arc::new(Metrics::new());
        let draft_version = Arc::new(ArcSwap::from_pointee(None));
        let tasks = TaskTracker::new();
        // Ended one after the other, so that each finds what it reports to still there.
        let (learning, accepting, capturing, owning) = (
            CancellationToken::new(),
            CancellationToken::new(),
            CancellationToken::new(),
            CancellationToken::new(),
        );

        let names: TargetNames = Arc::default();
        tasks.spawn(learn_names(self.client.clone(), names.clone(), learning.clone()));
        let (release, release_handle) = self.release(&metrics, &draft_version);
        let owner = tasks.spawn(release.run(owning.clone()));
        let (supervisor, trainer) = self.supervisor(&metrics, &release_handle, grace);
        let trainer_task = tasks.spawn(supervisor.run(learning.clone()));
        let (progress, progress_reader) = watch::channel(Progress::default());
        let (questions, inbox) = mpsc::channel(4);
        let learn = self.learn(&metrics, &release_handle, &trainer, progress, inbox);
        let learn_task = tasks.spawn(learn.run(learning.clone()));
        let watch = self.watch(&metrics, &release_handle, questions);
        tasks.spawn(watch.run(learning.clone()));
        let scoring = Scoring {
            teacher: ConfiguredTeacher::new(&settings, self.client.clone(), names.clone()),
            store: self.store.clone(),
            backlog: settings.teacher.backlog,
            metrics: metrics.clone(),
        };
        tasks.spawn(scoring.run(learning.clone()));
        let upkeep = upkeep::run(self.store.clone(), settings.store.ttl_seconds, metrics.clone());
        tasks.spawn(until(learning.clone(), upkeep));

        let (sender, receiver) =
            capture::channel_with_budget(settings.capture.queue, settings.capture.budget_bytes);
        let captured = if settings.capture.enabled {
            tasks.spawn(capture::run(
                receiver,
                Arc::new(self.renderer()),
                self.store.clone(),
                capture_settings(&settings, names),
                metrics.clone(),
                draft_version,
                capturing.clone().cancelled_owned(),
            ))
        } else {
            // Dropping the receiver is what turns capture off.
            drop(receiver);
            tasks.spawn(std::future::ready(()))
        };
        let routes = proxy::router(proxy_settings(&settings)?, sender, metrics.clone())?;
        let proxied =
            tasks.spawn(proxy::serve(self.proxy, routes, accepting.clone().cancelled_owned()));

        let source = StatusSource {
            upstream: settings.upstream.url.clone(),
            release: release_handle.clone(),
            trainer,
            progress: progress_reader,
            store: self.store.clone(),
            metrics,
        };
        let admin = axum::serve(self.admin, status::router(source.clone()));
        tasks.spawn(until(owning.clone(), async move {
            if let Err(error) = admin.await {
                tracing::error!(%error, "the admin listener failed");
            }
        }));
        let service = ControlService { source, release: release_handle };
        tasks.spawn(control::serve(self.control, service, owning.clone()));

        shutdown.await;
        tracing::info!(grace_seconds = settings.grace_seconds, "draining");
        // Training saves its state while requests in flight come to their end.
        learning.cancel();
        accepting.cancel();
        let proxied_abort = proxied.abort_handle();
        let (proxied, _, _) = tokio::join!(
            tokio::time::timeout(grace, proxied),
            wait(learn_task),
            // The supervisor keeps to the grace period itself.
            wait(trainer_task),
        );
        if proxied.is_err() {
            tracing::warn!("requests were still in flight after the grace period");
            proxied_abort.abort();
        }
        capturing.cancel();
        wait(captured).await;
        owning.cancel();
        wait(owner).await;
        tasks.close();
        // Only tasks that answer others are left; a client that hangs must not keep us.
        tokio::time::timeout(Duration::from_secs(2), tasks.wait()).await.ok();
        tracing::info!("stopped");
        Ok(())
    }

    fn release(
        &self,
        metrics: &Arc<Metrics>,
        draft_version: &Arc<ArcSwap<Option<String>>>,
    ) -> (Release, ReleaseHandle) {
        let settings = &self.settings;
        let sink: Arc<dyn DraftSink> = match settings.publish.sink {
            SinkKind::Folder => Arc::new(FolderSink::new(self.work.drafts())),
            SinkKind::Upstream => {
                let server_path = &settings.publish.server_path;
                let server_path = (!server_path.is_empty()).then(|| server_path.into());
                Arc::new(UpstreamSink::new(self.client.clone(), server_path))
            }
        };
        Release::new(ReleaseParts {
            work: self.work.clone(),
            ledger: self.ledger.clone(),
            sink,
            settings: settings.publish.clone(),
            swap_timeout: seconds(settings.upstream.swap_timeout_seconds),
            poll: seconds(settings.upstream.poll_seconds),
            metrics: metrics.clone(),
            draft_version: draft_version.clone(),
        })
    }

    fn supervisor(
        &self,
        metrics: &Arc<Metrics>,
        release: &ReleaseHandle,
        grace: Duration,
    ) -> (Supervisor, TrainerHandle) {
        let (work, release) = (self.work.clone(), release.clone());
        Supervisor::new(SupervisorOptions {
            launch: self.launch.clone(),
            draft: Arc::new(move || work.version(&release.snapshot().ledger.running)),
            socket: self.work.trainer_socket(),
            start_timeout: seconds(self.settings.trainer.start_timeout_seconds),
            restart_max: seconds(self.settings.trainer.restart_max_seconds),
            grace,
            metrics: metrics.clone(),
        })
    }

    fn learn(
        &self,
        metrics: &Arc<Metrics>,
        release: &ReleaseHandle,
        trainer: &TrainerHandle,
        progress: watch::Sender<Progress>,
        questions: mpsc::Receiver<super::learn::CompareRequest>,
    ) -> Learn {
        Learn {
            trainer: trainer.clone(),
            release: release.clone(),
            store: self.store.clone(),
            work: self.work.clone(),
            settings: self.settings.clone(),
            metrics: metrics.clone(),
            progress,
            questions,
        }
    }

    fn watch(
        &self,
        metrics: &Arc<Metrics>,
        release: &ReleaseHandle,
        questions: mpsc::Sender<super::learn::CompareRequest>,
    ) -> Watch {
        Watch {
            client: self.client.clone(),
            release: release.clone(),
            store: self.store.clone(),
            questions,
            settings: self.settings.watch.clone(),
            min_positions: self.settings.gate.min_positions,
            poll: seconds(self.settings.upstream.poll_seconds),
            metrics: metrics.clone(),
        }
    }

    /// The target's tokenizer and template, which every version carries unchanged.
    fn renderer(&self) -> super::render::Renderer {
        let folder = self.work.version(&self.ledger.running);
        super::render::Renderer::from_draft_folder(&folder).unwrap_or_else(|error| {
            tracing::warn!(%error, "only exchanges with reported token ids can be captured");
            super::render::Renderer::none()
        })
    }
}

async fn wait(task: tokio::task::JoinHandle<()>) {
    if let Err(error) = task.await {
        tracing::error!(%error, "a task ended badly");
    }
}

async fn until(stop: CancellationToken, work: impl Future<Output = ()>) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = work => {}
    }
}
