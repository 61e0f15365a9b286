//! The trainer child process: `da-sidecar trainer`, a small service around one trainer.
//!
//! It is a process of its own so that it may be slow, run out of memory or crash without any
//! request noticing. It lowers its own priority, and it ends when its standard input closes,
//! which the kernel does when the parent dies, however that happens. (`PR_SET_PDEATHSIG` would
//! fire as soon as the *thread* that started the child ends, which an async runtime may do.)

use std::fs::File;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;

use crate::distill::Acceptance;
use crate::distill::Sample;
use crate::distill::trainer::{TrainError, TrainSettings, TrainState, Trainer, Update};
use crate::proto::trainer::trainer_server::TrainerServer;

pub(super) mod convert;
mod service;

/// Largest message on the socket. A round of a few hundred scored samples is a few megabytes.
pub const MAX_MESSAGE_BYTES: usize = 256 << 20;

/// What the service drives: [`Trainer`], or a stand-in where tests need one.
pub trait TrainerBackend {
    fn state(&self) -> TrainState;

    /// As [`Trainer::train`].
    ///
    /// # Errors
    /// See [`TrainError`].
    fn train(
        &mut self,
        samples: &[Sample],
        epochs: usize,
        on_update: &mut dyn FnMut(Update) -> bool,
    ) -> Result<(), TrainError>;

    /// Acceptance of a draft folder, or of the weights being trained.
    ///
    /// # Errors
    /// See [`TrainError`].
    fn evaluate(
        &mut self,
        draft: Option<&Path>,
        samples: &[Sample],
    ) -> Result<Acceptance, TrainError>;

    /// As [`Trainer::export`].
    ///
    /// # Errors
    /// See [`TrainError`].
    fn export(
        &mut self,
        directory: &Path,
        manifest: serde_json::Value,
    ) -> Result<String, TrainError>;

    /// As [`Trainer::restart`].
    ///
    /// # Errors
    /// See [`TrainError`].
    fn restart(&mut self, draft: &Path) -> Result<(), TrainError>;
}

impl TrainerBackend for Trainer {
    fn state(&self) -> TrainState {
        Trainer::state(self).clone()
    }

    fn train(
        &mut self,
        samples: &[Sample],
        epochs: usize,
        on_update: &mut dyn FnMut(Update) -> bool,
    ) -> Result<(), TrainError> {
        Trainer::train(self, samples, epochs, on_update)
    }

    fn evaluate(
        &mut self,
        draft: Option<&Path>,
        samples: &[Sample],
    ) -> Result<Acceptance, TrainError> {
        match draft {
            Some(draft) => Trainer::evaluate_folder(self, draft, samples),
            None => Trainer::evaluate(self, samples),
        }
    }

    fn export(
        &mut self,
        directory: &Path,
        manifest: serde_json::Value,
    ) -> Result<String, TrainError> {
        Trainer::export(self, directory, manifest)
    }

    fn restart(&mut self, draft: &Path) -> Result<(), TrainError> {
        Trainer::restart(self, draft)
    }
}

/// What the child is started with.
#[derive(Debug, Clone)]
pub struct ProcessOptions {
    pub socket: PathBuf,
    pub draft: PathBuf,
    pub state: PathBuf,
    pub settings: TrainSettings,
    pub nice: i32,
    /// 0: no limit.
    pub memory_limit_bytes: u64,
}

/// Why the child ended.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("cannot {what}: {reason}")]
    System { what: String, reason: std::io::Error },
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error("the trainer's socket failed: {0}")]
    Transport(#[from] tonic::transport::Error),
}

fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> ProcessError {
    let what = what.into();
    |reason| ProcessError::System { what, reason }
}

/// Lowers the priority and sets the memory limit of this process. Must be called before any
/// thread is started: both are inherited, not shared.
///
/// # Errors
/// When the kernel refuses.
pub fn restrain(options: &ProcessOptions) -> Result<(), ProcessError> {
    let failed = |what: &str, errno: rustix::io::Errno| system(what)(errno.into());
    rustix::process::nice(options.nice).map_err(|errno| failed("lower the priority", errno))?;
    if options.memory_limit_bytes > 0 {
        let limit = rustix::process::Rlimit {
            current: Some(options.memory_limit_bytes),
            maximum: Some(options.memory_limit_bytes),
        };
        // Private writable memory: mapped weight files do not count, the heap does.
        rustix::process::setrlimit(rustix::process::Resource::Data, limit)
            .map_err(|errno| failed("limit the memory", errno))?;
    }
    Ok(())
}

/// Serves until standard input closes. `open` makes the trainer, on the thread that will own it;
/// the socket appears only when that has succeeded.
///
/// # Errors
/// When the trainer cannot be opened or the socket cannot be made.
pub async fn serve<B: TrainerBackend + 'static>(
    options: &ProcessOptions,
    open: impl FnOnce() -> Result<B, TrainError> + Send + 'static,
) -> Result<(), ProcessError> {
    let _lock = lock_state(&options.state)?;
    let stop = CancellationToken::new();
    end_with_parent(stop.clone());
    let (service, thread) = service::Service::start(open, stop.clone()).await?;
    // A killed predecessor leaves its socket; the lock above says that it is gone.
    std::fs::remove_file(&options.socket).ok();
    let listener = UnixListener::bind(&options.socket)
        .map_err(system(format!("listen on {}", options.socket.display())))?;
    let server = TrainerServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    tonic::transport::Server::builder()
        .add_service(server)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
        .await?;
    // An abandoned round still writes its checkpoint; leaving earlier would lose it.
    let joined = tokio::task::spawn_blocking(move || thread.join()).await;
    match joined {
        Ok(Ok(())) => Ok(()),
        _ => Err(system("train")(std::io::Error::other("the trainer's thread panicked"))),
    }
}

/// Waits until no other trainer uses the state folder: one whose parent was killed may still be
/// writing its last checkpoint.
fn lock_state(state: &Path) -> Result<File, ProcessError> {
    std::fs::create_dir_all(state).map_err(system(format!("make {}", state.display())))?;
    let path = state.join("lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(system(format!("write to {}", path.display())))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|errno| system(format!("lock {}", path.display()))(errno.into()))?;
    Ok(file)
}

/// Stops training after the current step once standard input closes, and the process soon after.
fn end_with_parent(stop: CancellationToken) {
    std::thread::spawn(move || {
        let mut sink = [0u8; 64];
        let mut input = std::io::stdin().lock();
        while matches!(std::io::Read::read(&mut input, &mut sink), Ok(read) if read > 0) {}
        stop.cancel();
        // A step and its checkpoint end well within this; a process without a parent must not
        // outlive it whatever it hangs in.
        std::thread::sleep(std::time::Duration::from_secs(30));
        std::process::exit(1);
    });
}
