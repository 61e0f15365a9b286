//! The service: a mailbox in front of the one thread that owns the trainer.

use std::path::PathBuf;
use std::thread::JoinHandle;

use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{ProcessError, TrainerBackend, convert, system};
use crate::distill::Acceptance;
use crate::distill::Sample;
use crate::distill::trainer::{TrainError, TrainState};
use crate::proto::trainer as wire;
use crate::proto::trainer::trainer_server::Trainer as TrainerService;

type Reply<T> = oneshot::Sender<Result<T, TrainError>>;
type Progress = mpsc::Sender<Result<wire::TrainProgress, Status>>;

enum Command {
    Status(oneshot::Sender<TrainState>),
    Train { samples: Vec<Sample>, epochs: usize, progress: Progress },
    Evaluate { draft: Option<PathBuf>, samples: Vec<Sample>, reply: Reply<Acceptance> },
    Export { directory: PathBuf, manifest: serde_json::Value, reply: Reply<String> },
    Restart { draft: PathBuf, reply: Reply<TrainState> },
}

/// The front of the mailbox. Calls are carried out one after the other.
pub(super) struct Service {
    commands: mpsc::Sender<Command>,
}

impl Service {
    /// Opens the trainer on its thread and waits for that.
    pub(super) async fn start<B: TrainerBackend + 'static>(
        open: impl FnOnce() -> Result<B, TrainError> + Send + 'static,
        stop: CancellationToken,
    ) -> Result<(Self, JoinHandle<()>), ProcessError> {
        let (commands, mut inbox) = mpsc::channel(4);
        let (opened, outcome) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("trainer".into())
            .spawn(move || {
                // A panic in here must end the process, so that it is started again.
                let _ends_process = stop.clone().drop_guard();
                match open() {
                    Ok(mut backend) => {
                        // Nobody waits any more when the process is ending.
                        opened.send(Ok(())).ok();
                        while let Some(command) = inbox.blocking_recv() {
                            carry_out(&mut backend, command, &stop);
                        }
                    }
                    Err(error) => {
                        opened.send(Err(error)).ok();
                    }
                }
            })
            .map_err(system("start the trainer's thread"))?;
        match outcome.await {
            Ok(outcome) => outcome?,
            Err(_) => return Err(system("open the trainer")(std::io::Error::other("it panicked"))),
        }
        Ok((Self { commands }, thread))
    }

    async fn call<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        let gone = || Status::unavailable("the trainer's thread has ended");
        self.commands.send(command(reply)).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())
    }
}

fn carry_out(backend: &mut impl TrainerBackend, command: Command, stop: &CancellationToken) {
    // Replies that nobody waits for any more are dropped: the caller has gone.
    match command {
        Command::Status(reply) => {
            reply.send(backend.state()).ok();
        }
        Command::Train { samples, epochs, progress } => {
            let outcome = backend.train(&samples, epochs, &mut |update| {
                let heard = progress.blocking_send(Ok(convert::progress(update)));
                heard.is_ok() && !stop.is_cancelled()
            });
            let end = match outcome {
                Err(error) => Some(failed(&error)),
                // Stopped early: the round is not done, although what it has learned is saved.
                Ok(()) if stop.is_cancelled() => Some(Status::aborted("the trainer is stopping")),
                Ok(()) => None,
            };
            if let Some(status) = end {
                progress.blocking_send(Err(status)).ok();
            }
        }
        Command::Evaluate { draft, samples, reply } => {
            reply.send(backend.evaluate(draft.as_deref(), &samples)).ok();
        }
        Command::Export { directory, manifest, reply } => {
            reply.send(backend.export(&directory, manifest)).ok();
        }
        Command::Restart { draft, reply } => {
            let outcome = backend.restart(&draft).map(|()| backend.state());
            reply.send(outcome).ok();
        }
    }
}

fn failed(error: &TrainError) -> Status {
    Status::failed_precondition(error.to_string())
}

fn samples(wire: Vec<wire::Sample>) -> Vec<Sample> {
    wire.into_iter().map(convert::from_wire).collect()
}

#[tonic::async_trait]
impl TrainerService for Service {
    type TrainStream = ReceiverStream<Result<wire::TrainProgress, Status>>;

    async fn status(
        &self,
        _request: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusReply>, Status> {
        let state = self.call(Command::Status).await?;
        Ok(Response::new(convert::status(&state)))
    }

    async fn train(
        &self,
        request: Request<wire::TrainRequest>,
    ) -> Result<Response<Self::TrainStream>, Status> {
        let request = request.into_inner();
        // Small: a client that stops reading stops training, which is how a round is abandoned.
        let (progress, stream) = mpsc::channel(16);
        let epochs = usize::try_from(request.epochs).unwrap_or(usize::MAX);
        let command = Command::Train { samples: samples(request.samples), epochs, progress };
        let gone = |_| Status::unavailable("the trainer's thread has ended");
        self.commands.send(command).await.map_err(gone)?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn evaluate(
        &self,
        request: Request<wire::EvaluateRequest>,
    ) -> Result<Response<wire::EvaluateReply>, Status> {
        let request = request.into_inner();
        let draft = (!request.draft.is_empty()).then(|| PathBuf::from(request.draft));
        let samples = samples(request.samples);
        let outcome = self.call(|reply| Command::Evaluate { draft, samples, reply }).await?;
        let acceptance = outcome.map_err(|error| failed(&error))?;
        Ok(Response::new(convert::evaluation(acceptance)))
    }

    async fn export(
        &self,
        request: Request<wire::ExportRequest>,
    ) -> Result<Response<wire::ExportReply>, Status> {
        let request = request.into_inner();
        let manifest = serde_json::from_str(&request.manifest_json)
            .map_err(|error| Status::invalid_argument(format!("manifest: {error}")))?;
        let directory = PathBuf::from(request.directory);
        let outcome = self.call(|reply| Command::Export { directory, manifest, reply }).await?;
        let checksum = outcome.map_err(|error| failed(&error))?;
        Ok(Response::new(wire::ExportReply { checksum }))
    }

    async fn restart(
        &self,
        request: Request<wire::RestartRequest>,
    ) -> Result<Response<wire::StatusReply>, Status> {
        let draft = PathBuf::from(request.into_inner().draft);
        let outcome = self.call(|reply| Command::Restart { draft, reply }).await?;
        let state = outcome.map_err(|error| failed(&error))?;
        Ok(Response::new(convert::status(&state)))
    }
}
