//! `da-build`: target in, draft out.

// A program talks to its user on stdout.
#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use draft_adapter::build::{self, BuildError, Plan, Progress, Report};
use draft_adapter::config::build::BuildArgs;
use draft_adapter::hub::Target;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

/// Usage and configuration errors (`EX_USAGE`).
const USAGE: u8 = 64;

fn main() -> ExitCode {
    let args = match BuildArgs::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { USAGE } else { 0 });
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let usage = matches!(
                error,
                BuildError::Request { .. }
                    | BuildError::TooSmall { .. }
                    | BuildError::Calibration { .. }
            );
            report_error(&error);
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}

#[allow(clippy::print_stderr)]
fn report_error(error: &BuildError) {
    eprintln!("error: {error}");
}

fn run(args: &BuildArgs) -> Result<(), BuildError> {
    let settings = args.settings()?;
    let target = Target::open(&args.model)?;
    let plan = Plan::new(&target.config, &settings.request)?;
    if args.dry_run {
        print_plan(args, &target, &plan);
        return Ok(());
    }
    if !args.json {
        print_plan(args, &target, &plan);
    }
    let started = Instant::now();
    let mut bar = ProgressBar::hidden();
    let report = build::run(&target, &settings, &mut |progress| {
        show(&mut bar, args, started, progress);
    })?;
    print_report(args, &report, started.elapsed().as_secs_f64());
    Ok(())
}

fn show(bar: &mut ProgressBar, args: &BuildArgs, started: Instant, progress: Progress<'_>) {
    match progress {
        Progress::Started { step, total } => {
            *bar =
                if total > 0 { ProgressBar::new(total as u64) } else { ProgressBar::new_spinner() };
            if let Ok(style) = ProgressStyle::with_template("{msg:12} {bar:30} {pos}/{len} {eta}") {
                bar.set_style(style);
            }
            bar.set_message(step);
        }
        Progress::Advanced { units } => bar.inc(units as u64),
        Progress::Finished { step, detail, acceptance } => {
            bar.finish_and_clear();
            let scores = acceptance.map_or(String::new(), |a| {
                format!(
                    "acceptance {:.3}  alpha {:.3}  mean accepted length {:.2}  ",
                    a.acceptance_rate, a.alpha, a.mean_accepted_length
                )
            });
            if !args.json {
                let seconds = started.elapsed().as_secs();
                println!("{step:<10} {scores}({detail}; {seconds} s)");
            }
        }
    }
}

fn print_plan(args: &BuildArgs, target: &Target, plan: &Plan) {
    let draft = plan.config(&target.config);
    if args.json {
        let document = json!({
            "target": target.name,
            "target_parameters": target.config.parameters(),
            "plan": plan,
            "draft_parameters": draft.parameters(),
            "draft_parameters_per_step": draft.parameters_per_step(),
        });
        println!("{document:#}");
        return;
    }
    let of = target.config.parameters() as f64;
    println!("target     {} ({:.1} M parameters)", target.name, of / 1e6);
    println!(
        "plan       hidden {}, MLP {}, {} layers, {} heads in {} groups",
        draft.hidden_size,
        draft.intermediate_size,
        draft.num_hidden_layers,
        draft.num_attention_heads,
        draft.num_key_value_heads
    );
    println!(
        "draft      {:.1} M parameters ({:.1} %), {:.1} M read for each drafted token ({:.1} %)",
        draft.parameters() as f64 / 1e6,
        100.0 * draft.parameters() as f64 / of,
        draft.parameters_per_step() as f64 / 1e6,
        100.0 * draft.parameters_per_step() as f64 / target.config.parameters_per_step() as f64
    );
}

fn print_report(args: &BuildArgs, report: &Report, seconds: f64) {
    if args.json {
        let steps: Vec<_> = report
            .steps
            .iter()
            .map(|(step, acceptance)| json!({"step": step, "acceptance": acceptance}))
            .collect();
        let document = json!({
            "output": args.output,
            "checksum": report.checksum,
            "plan": report.plan,
            "layers": report.selection.layers(),
            "target_parameters": report.target_parameters,
            "draft_parameters": report.draft_parameters,
            "steps": steps,
            "seconds": seconds,
            "vllm_command": report.vllm_command,
        });
        println!("{document:#}");
        return;
    }
    let output = args.output.clone().unwrap_or_default();
    let output = output.display();
    println!("\n{output} written in {seconds:.0} s. Serve it with");
    println!("  {}", report.vllm_command);
    println!("or with");
    println!("  da-serve --model {} --draft {output}", args.model);
}
