//! The sidecar's program: settings, logging, signals and exit codes around the library.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is the user interface")]

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use clap::error::ErrorKind;
use draft_adapter::config::sidecar::{self as settings, LogFormat, SECRET_KEYS, SidecarSettings};
use draft_adapter::config::{ConfigError, Loaded};
use draft_adapter::distill::trainer::Trainer;
use draft_adapter::sidecar::cli::{Cli, Command, TrainerArgs, trainer_launch};
use draft_adapter::sidecar::control::{ControlAddress, client};
use draft_adapter::sidecar::run::{RunError, Sidecar};
use draft_adapter::sidecar::trainer_process;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let wanted = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            // A closed pipe is no reason to fail.
            error.print().ok();
            return if wanted { ExitCode::SUCCESS } else { ConfigError::EXIT_CODE.into() };
        }
    };
    match execute(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<ConfigError>() {
                return ConfigError::EXIT_CODE.into();
            }
            error.downcast_ref::<RunError>().map_or(1, RunError::exit_code).into()
        }
    }
}

fn execute(cli: &Cli) -> anyhow::Result<()> {
    if let Command::Trainer(args) = &cli.command {
        return train(args);
    }
    if let Command::Config(args) = &cli.command
        && args.reference
    {
        print!("{}", settings::reference());
        return Ok(());
    }
    let env = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let loaded = settings::load(&cli.layers(env.collect())?)?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the runtime")?;
    if let Some((ask, json)) = cli.command.ask() {
        let address = ControlAddress::from_settings(&loaded.settings);
        println!("{}", runtime.block_on(client::ask(&address, ask, json))?);
        return Ok(());
    }
    if matches!(cli.command, Command::Config(_)) {
        print!("{}", loaded.render(SECRET_KEYS));
        return Ok(());
    }
    start_logging(&loaded)?;
    runtime.block_on(run(loaded.settings))
}

async fn run(settings: SidecarSettings) -> anyhow::Result<()> {
    // Installed first: a signal during the start must end it in order too.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "da-sidecar");
    let program = std::env::current_exe().context("cannot find this program")?;
    let work_dir = std::path::absolute(&settings.work_dir)?;
    let launch = trainer_launch(program, &settings, &work_dir)?;
    let sidecar = Sidecar::start(settings, launch).await?;
    let addresses = sidecar.addresses();
    tracing::info!(address = %addresses.proxy, "clients");
    tracing::info!(address = %addresses.admin, "metrics, probes, status");
    tracing::info!(address = %addresses.control, "control");
    sidecar
        .run(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        })
        .await?;
    Ok(())
}

fn start_logging(loaded: &Loaded<SidecarSettings>) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&loaded.settings.log)
        .map_err(|error| loaded.invalid("log", error.to_string()))?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match loaded.settings.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

fn train(args: &TrainerArgs) -> anyhow::Result<()> {
    let options = args.options().context("--settings")?;
    // Before any thread exists.
    trainer_process::restrain(&options)?;
    let filter = EnvFilter::try_new(&args.log)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    let (draft, state) = (options.draft.clone(), options.state.clone());
    let settings = options.settings.clone();
    let open = move || Trainer::open(&draft, &state, settings);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(trainer_process::serve(&options, open))?;
    Ok(())
}
