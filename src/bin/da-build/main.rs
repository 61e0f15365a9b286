//! `da-build`: target in, draft out.

// A program talks to its user on stdout, and of its errors on stderr.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use draft_adapter::build::BuildError;
use draft_adapter::config::build::{BuildArgs, Command};

mod looking;
mod making;

/// Usage and configuration errors (`EX_USAGE`).
const USAGE: u8 = 64;

/// Threads of the tensor library. Windows of text are worked on side by side here; its own threads
/// would meet at a barrier in every small operation.
const TENSOR_THREADS: &str = "CANDLE_NUM_THREADS";

fn main() -> ExitCode {
    if std::env::var_os(TENSOR_THREADS).is_none()
        && let Ok(program) = std::env::current_exe()
    {
        // The library reads it once, and setting it in a running process is not safe. When this
        // returns, the program could not be started again, and goes on as it is.
        let _ = std::process::Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(TENSOR_THREADS, "1")
            .exec();
    }
    let args = match BuildArgs::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    match run(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if is_usage(&error) { USAGE } else { 1 })
        }
    }
}

fn run(args: &BuildArgs) -> Result<ExitCode, BuildError> {
    match &args.command {
        None => making::make(args).map(|()| ExitCode::SUCCESS),
        Some(Command::Inspect { model, draft, json }) => {
            looking::inspect(model, draft.as_deref(), *json)
        }
        Some(Command::Verify { folder, json }) => Ok(looking::check(folder, *json)),
        Some(Command::Eval(args)) => looking::eval(args).map(|()| ExitCode::SUCCESS),
        Some(Command::Completions { shell }) => {
            let mut command = BuildArgs::command();
            clap_complete::generate(*shell, &mut command, "da-build", &mut std::io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn is_usage(error: &BuildError) -> bool {
    matches!(
        error,
        BuildError::Request { .. }
            | BuildError::TooSmall { .. }
            | BuildError::TooFast { .. }
            | BuildError::Plan(_)
            | BuildError::PlanFile { .. }
            | BuildError::Calibration { .. }
    )
}
