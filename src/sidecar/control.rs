//! The control service: what an operator may ask of a running sidecar.

use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::publish::FolderError;
use super::release::{ReleaseError, ReleaseHandle, RollbackCause, blocking};
use super::status::{StatusSource, state_word};
use crate::proto::control as wire;
use crate::proto::control::control_server::{Control, ControlServer};

pub mod client;

/// Name of the socket in the work folder.
pub const SOCKET_NAME: &str = "control.sock";

/// Where the service listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlAddress {
    Socket(PathBuf),
    Tcp(String),
}

impl ControlAddress {
    /// The address that the settings name.
    pub fn from_settings(settings: &crate::config::sidecar::SidecarSettings) -> Self {
        if settings.control.listen.is_empty() {
            Self::Socket(settings.work_dir.join(SOCKET_NAME))
        } else {
            Self::Tcp(settings.control.listen.clone())
        }
    }
}

impl std::fmt::Display for ControlAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// A bound listener.
pub enum ControlListener {
    Socket(UnixListener),
    Tcp(TcpListener),
}

/// Binds a Unix socket that only this user can reach. A stale one is replaced, which is safe
/// because the work folder is locked.
///
/// # Errors
/// When the path is too long for a socket or cannot be made.
pub fn bind_socket(path: &Path) -> Result<UnixListener, FolderError> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::remove_file(path).ok();
    let listener = UnixListener::bind(path)
        .map_err(|error| FolderError::io("make the socket", path, error))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|error| FolderError::io("set permissions of", path, error))?;
    Ok(listener)
}

/// The service.
pub struct ControlService {
    pub source: StatusSource,
    pub release: ReleaseHandle,
}

/// Serves until `shutdown`.
pub async fn serve(
    listener: ControlListener,
    service: ControlService,
    shutdown: CancellationToken,
) {
    let server = tonic::transport::Server::builder().add_service(ControlServer::new(service));
    let stop = shutdown.cancelled_owned();
    let served = match listener {
        ControlListener::Socket(listener) => {
            server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop).await
        }
        ControlListener::Tcp(listener) => {
            server.serve_with_incoming_shutdown(TcpListenerStream::new(listener), stop).await
        }
    };
    if let Err(error) = served {
        tracing::error!(%error, "the control service failed");
    }
}

fn refused(error: ReleaseError) -> Status {
    let message = error.to_string();
    match error {
        ReleaseError::NoSuchVersion { .. } => Status::not_found(message),
        ReleaseError::Stopping => Status::unavailable(message),
        ReleaseError::Folder(_) => Status::internal(message),
        _ => Status::failed_precondition(message),
    }
}

fn action(outcome: Result<String, ReleaseError>) -> Result<Response<wire::ActionReply>, Status> {
    outcome.map(|message| Response::new(wire::ActionReply { message })).map_err(refused)
}

fn named(version: String) -> Option<String> {
    (!version.is_empty()).then_some(version)
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn status(
        &self,
        _request: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusReply>, Status> {
        let json = self.source.document().await.to_string();
        Ok(Response::new(wire::StatusReply { json }))
    }

    async fn versions(
        &self,
        _request: Request<wire::VersionsRequest>,
    ) -> Result<Response<wire::VersionsReply>, Status> {
        let ledger = self.release.snapshot().ledger;
        let versions = ledger.versions.iter().map(|record| wire::Version {
            version: record.version.clone(),
            parent: record.parent.clone().unwrap_or_default(),
            state: state_word(&ledger, record).to_owned(),
            checksum: record.checksum.clone(),
            created_unix: record.created_unix,
            gate_before: record.gate.as_ref().map_or(0.0, |gate| gate.before),
            gate_after: record.gate.as_ref().map_or(0.0, |gate| gate.after),
            swap_stall_ms: record.swap_stall_ms.unwrap_or(0.0),
            live_acceptance: record.live.acceptance_rate(),
        });
        Ok(Response::new(wire::VersionsReply { versions: versions.collect() }))
    }

    async fn rollback(
        &self,
        request: Request<wire::RollbackRequest>,
    ) -> Result<Response<wire::ActionReply>, Status> {
        let version = named(request.into_inner().version);
        let reason = "an operator asked for it".to_owned();
        action(self.release.roll_back(version, RollbackCause::Operator, reason).await)
    }

    async fn pin(
        &self,
        request: Request<wire::PinRequest>,
    ) -> Result<Response<wire::ActionReply>, Status> {
        action(self.release.pin(named(request.into_inner().version)).await)
    }

    async fn pause(
        &self,
        _request: Request<wire::PauseRequest>,
    ) -> Result<Response<wire::ActionReply>, Status> {
        action(self.release.pause(true).await)
    }

    async fn resume(
        &self,
        _request: Request<wire::ResumeRequest>,
    ) -> Result<Response<wire::ActionReply>, Status> {
        action(self.release.pause(false).await)
    }

    async fn purge(
        &self,
        _request: Request<wire::PurgeRequest>,
    ) -> Result<Response<wire::ActionReply>, Status> {
        let store = self.source.store.clone();
        let removed = blocking(move || store.purge())
            .await
            .map_err(|error| Status::internal(error.to_string()))?;
        let message =
            format!("deleted {removed} samples; what was learned from them stays in the drafts");
        Ok(Response::new(wire::ActionReply { message }))
    }
}
