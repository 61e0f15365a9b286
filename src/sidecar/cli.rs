//! The command line of `da-sidecar`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, Parser, Subcommand};

use super::control::client::Ask;
use super::run::Launch;
use super::trainer_process::ProcessOptions;
use crate::config::sidecar::{ENV_PREFIX, SidecarSettings};
use crate::config::{ConfigError, Layers, assignment};
use crate::distill::trainer::TrainSettings;

/// Keeps a draft model fitted to the traffic of a vLLM or da-serve server beside it.
#[derive(Debug, Parser)]
#[command(name = "da-sidecar", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Configuration file (TOML)
    #[arg(long, global = true, env = "DA_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Folder for draft versions, training state and the control socket [key: work_dir]
    #[arg(long, global = true, value_name = "DIR")]
    pub work_dir: Option<PathBuf>,
    /// Sets any key of the configuration; may be given several times
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the sidecar
    Run(RunArgs),
    /// Show the effective configuration, or the reference of all keys
    Config(ConfigArgs),
    /// What a running sidecar is doing
    Status(Output),
    /// The draft versions with their scores
    Versions(Output),
    /// Take the running version back
    Rollback(RollbackArgs),
    /// Keep one version running whatever is learned
    Pin(PinArgs),
    /// Stop learning; the running version stays
    Pause(Output),
    /// Go on learning
    Resume(Output),
    /// Delete all captured samples
    Purge(Output),
    /// The training process; started by `run`
    #[command(hide = true)]
    Trainer(TrainerArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// URL of the server [key: upstream.url]
    #[arg(long, value_name = "URL")]
    pub upstream: Option<String>,
    /// Address for clients [key: proxy.listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<String>,
    /// Address of metrics, probes and status [key: admin.listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub admin: Option<String>,
    /// Draft folder to begin with [key: draft]
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Where samples are kept, memory or disk [key: store.kind]
    #[arg(long, value_name = "KIND")]
    pub store: Option<String>,
}

#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Print the effective values and where each came from
    #[arg(long)]
    pub show: bool,
    /// Print the documentation of all keys
    #[arg(long, conflicts_with = "show")]
    pub reference: bool,
}

#[derive(Debug, Args)]
pub struct Output {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// Version to go back to; without it, the one before
    pub version: Option<String>,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct PinArgs {
    /// Version to keep running
    #[arg(required_unless_present = "clear")]
    pub version: Option<String>,
    /// Unpin
    #[arg(long, conflicts_with = "version")]
    pub clear: bool,
    #[command(flatten)]
    pub output: Output,
}

#[derive(Debug, Args)]
pub struct TrainerArgs {
    #[arg(long)]
    pub socket: PathBuf,
    #[arg(long)]
    pub draft: PathBuf,
    #[arg(long)]
    pub state: PathBuf,
    /// Training settings as JSON
    #[arg(long, default_value = "{}")]
    pub settings: String,
    #[arg(long, default_value_t = 0)]
    pub nice: i32,
    #[arg(long, default_value_t = 0)]
    pub memory_limit_bytes: u64,
    #[arg(long, default_value = "info")]
    pub log: String,
}

impl Cli {
    /// The layers that the command line, the environment and the file make.
    ///
    /// # Errors
    /// When a `--set` has no `=`.
    pub fn layers(&self, env: Vec<(String, String)>) -> Result<Layers, ConfigError> {
        let path = |path: &PathBuf| path.to_string_lossy().into_owned();
        let mut flags = Vec::new();
        let mut put = |flag: &str, key: &str, value: Option<String>| {
            if let Some(value) = value {
                flags.push((flag.to_owned(), key.to_owned(), value));
            }
        };
        put("--work-dir", "work_dir", self.common.work_dir.as_ref().map(path));
        if let Command::Run(run) = &self.command {
            put("--upstream", "upstream.url", run.upstream.clone());
            put("--listen", "proxy.listen", run.listen.clone());
            put("--admin", "admin.listen", run.admin.clone());
            put("--draft", "draft", run.draft.as_ref().map(path));
            put("--store", "store.kind", run.store.clone());
        }
        for argument in &self.common.set {
            flags.push(assignment(argument)?);
        }
        Ok(Layers { file: self.common.config.clone(), env, env_prefix: ENV_PREFIX, flags })
    }
}

impl Command {
    /// What a client command asks, and whether it wants JSON; none for the other commands.
    pub fn ask(&self) -> Option<(Ask, bool)> {
        Some(match self {
            Self::Status(output) => (Ask::Status, output.json),
            Self::Versions(output) => (Ask::Versions, output.json),
            Self::Rollback(args) => (Ask::Rollback(args.version.clone()), args.output.json),
            Self::Pin(args) => (Ask::Pin(args.version.clone()), args.output.json),
            Self::Pause(output) => (Ask::Pause, output.json),
            Self::Resume(output) => (Ask::Resume, output.json),
            Self::Purge(output) => (Ask::Purge, output.json),
            Self::Run(_) | Self::Config(_) | Self::Trainer(_) => return None,
        })
    }
}

impl TrainerArgs {
    /// # Errors
    /// When the settings are not those of this build.
    pub fn options(&self) -> Result<ProcessOptions, serde_json::Error> {
        let settings: TrainSettings = serde_json::from_str(&self.settings)?;
        Ok(ProcessOptions {
            socket: self.socket.clone(),
            draft: self.draft.clone(),
            state: self.state.clone(),
            settings,
            nice: self.nice,
            memory_limit_bytes: self.memory_limit_bytes,
        })
    }
}

/// Starts `program trainer` as the training process, with what [`TrainerArgs`] reads.
///
/// # Errors
/// When the training settings cannot be written as JSON.
pub fn trainer_launch(
    program: PathBuf,
    settings: &SidecarSettings,
    work_dir: &Path,
) -> Result<Launch, serde_json::Error> {
    let train = serde_json::to_string(&settings.train)?;
    let (keys, log) = (settings.trainer.clone(), settings.log.clone());
    let (socket, state) = (work_dir.join("trainer.sock"), work_dir.join("trainer"));
    Ok(Arc::new(move |draft| {
        let mut command = tokio::process::Command::new(&program);
        command.arg("trainer");
        command.arg("--socket").arg(&socket);
        command.arg("--state").arg(&state);
        command.arg("--draft").arg(draft);
        command.arg("--settings").arg(&train);
        command.arg("--log").arg(&log);
        command.args(["--nice", &keys.nice.to_string()]);
        command.args(["--memory-limit-bytes", &keys.memory_limit_bytes.to_string()]);
        // The tensor library's own helper threads wait by spinning, on a core that the server wants.
        command.env("CANDLE_NUM_THREADS", "1");
        if keys.threads > 0 {
            command.env("RAYON_NUM_THREADS", keys.threads.to_string());
        }
        command
    }))
}
