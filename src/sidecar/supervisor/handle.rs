//! Calls to the trainer child, whichever process that is at the moment.

use std::path::Path;

use tokio::sync::{mpsc, watch};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::Line;
use crate::distill::Acceptance;
use crate::distill::Sample;
use crate::proto::trainer as wire;
use crate::proto::trainer::trainer_client::TrainerClient;
use crate::sidecar::trainer_process::convert;

/// Why the trainer did not do what was asked.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TrainerError {
    /// It died or is being started: ask again once [`TrainerHandle::ready`] returns.
    #[error("the trainer process is down: {0}")]
    Down(String),
    /// It looked at the request and failed; asking again will not help by itself.
    #[error("the trainer failed: {0}")]
    Failed(String),
}

impl From<Status> for TrainerError {
    fn from(status: Status) -> Self {
        let message = status.message().to_owned();
        match status.code() {
            Code::FailedPrecondition | Code::InvalidArgument | Code::OutOfRange => {
                Self::Failed(message)
            }
            // Larger than the socket takes: it would be so the next time too.
            Code::ResourceExhausted => Self::Failed(message),
            _ => Self::Down(message),
        }
    }
}

/// What is known of the child.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct TrainerInfo {
    pub up: bool,
    pub pid: Option<u32>,
    pub restarts: u64,
    /// How the last process ended.
    pub ended: Option<String>,
}

/// The line to the trainer. Cheap to clone; calls are carried out one after the other.
#[derive(Clone)]
pub struct TrainerHandle {
    line: watch::Receiver<Line>,
    kill: mpsc::Sender<()>,
}

impl TrainerHandle {
    pub(super) fn new(line: watch::Receiver<Line>, kill: mpsc::Sender<()>) -> Self {
        Self { line, kill }
    }

    pub fn info(&self) -> TrainerInfo {
        let line = self.line.borrow();
        TrainerInfo {
            up: line.client.is_some(),
            pid: line.pid,
            restarts: line.restarts,
            ended: line.ended.clone(),
        }
    }

    /// Waits until a child listens; forever once the supervisor has stopped.
    pub async fn ready(&self) {
        let mut line = self.line.clone();
        if line.wait_for(|line| line.client.is_some()).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Kills a child that hangs; the supervisor starts another.
    pub fn kill(&self) {
        // Full means that a kill is under way already.
        self.kill.try_send(()).ok();
    }

    /// # Errors
    /// See [`TrainerError`].
    pub async fn status(&self) -> Result<wire::StatusReply, TrainerError> {
        Ok(self.client()?.status(wire::StatusRequest {}).await?.into_inner())
    }

    /// Starts a round. Dropping the stream ends it after the current step.
    ///
    /// # Errors
    /// See [`TrainerError`].
    pub async fn train(
        &self,
        samples: &[Sample],
        epochs: u32,
        round: u64,
    ) -> Result<Streaming<wire::TrainProgress>, TrainerError> {
        let samples = samples.iter().map(convert::to_wire).collect();
        let request = wire::TrainRequest { samples, epochs, round };
        Ok(self.client()?.train(request).await?.into_inner())
    }

    /// Acceptance of a draft folder, or of the weights being trained.
    ///
    /// # Errors
    /// See [`TrainerError`].
    pub async fn evaluate(
        &self,
        draft: Option<&Path>,
        samples: &[Sample],
    ) -> Result<Acceptance, TrainerError> {
        let request = wire::EvaluateRequest {
            draft: draft.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            samples: samples.iter().map(convert::to_wire).collect(),
        };
        Ok(convert::acceptance(self.client()?.evaluate(request).await?.into_inner()))
    }

    /// Writes the weights being trained to a folder that does not exist yet.
    ///
    /// # Errors
    /// See [`TrainerError`].
    pub async fn export(
        &self,
        directory: &Path,
        manifest: &serde_json::Value,
    ) -> Result<String, TrainerError> {
        let request = wire::ExportRequest {
            directory: directory.to_string_lossy().into_owned(),
            manifest_json: manifest.to_string(),
        };
        Ok(self.client()?.export(request).await?.into_inner().checksum)
    }

    /// Drops the weights being trained for those of a draft folder.
    ///
    /// # Errors
    /// See [`TrainerError`].
    pub async fn restart(&self, draft: &Path) -> Result<wire::StatusReply, TrainerError> {
        let request = wire::RestartRequest { draft: draft.to_string_lossy().into_owned() };
        Ok(self.client()?.restart(request).await?.into_inner())
    }

    fn client(&self) -> Result<TrainerClient<Channel>, TrainerError> {
        let line = self.line.borrow();
        line.client.clone().ok_or_else(|| {
            let reason = line.ended.clone().unwrap_or_else(|| "it is starting".into());
            TrainerError::Down(reason)
        })
    }
}
