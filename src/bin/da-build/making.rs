//! A build, shown while it runs and when it is done.

use std::time::Instant;

use draft_adapter::build::search::CostModel;
use draft_adapter::build::{self, BuildError, Plan, Progress, Report};
use draft_adapter::config::build::BuildArgs;
use draft_adapter::hub::Target;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

/// Builds a draft, or only says what it would be.
pub fn make(args: &BuildArgs) -> Result<(), BuildError> {
    let settings = args.settings()?;
    let target = Target::open(args.model.as_deref().unwrap_or_default())?;
    let plans = settings.plans(&target)?;
    if args.dry_run || !args.json {
        print_plans(args, &target, &plans);
    }
    if args.dry_run {
        return Ok(());
    }
    stop_with_a_word();
    let started = Instant::now();
    let mut bar = ProgressBar::hidden();
    let report = build::run(&target, &settings, &mut |progress| {
        show(&mut bar, args, started, progress);
    })?;
    print_report(args, &report, started.elapsed().as_secs_f64());
    Ok(())
}

/// Ends the program on Ctrl-C and says how to go on. Everything that is worth keeping has been
/// written by then.
fn stop_with_a_word() {
    std::thread::spawn(|| {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
            return;
        };
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            eprintln!("\nstopped; the same command goes on from here");
            std::process::exit(130);
        }
    });
}

/// A progress bar with rate and remaining time; hidden when nobody watches.
pub fn progress_bar(message: &'static str, total: usize) -> ProgressBar {
    let bar = if total > 0 { ProgressBar::new(total as u64) } else { ProgressBar::new_spinner() };
    let template = "{msg:10} {bar:30} {human_pos}/{human_len}  {per_sec}  {eta} left";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(message);
    bar
}

fn show(bar: &mut ProgressBar, args: &BuildArgs, started: Instant, progress: Progress<'_>) {
    match progress {
        Progress::Started { step, total } => *bar = progress_bar(step, total),
        Progress::Advanced { units } => bar.inc(units as u64),
        Progress::Finished { step, detail, scores } => {
            bar.finish_and_clear();
            let scores = scores.map_or(String::new(), |s| {
                format!(
                    "acceptance {:.3}  alpha {:.3}  mean accepted length {:.2}  perplexity {:.1}  ",
                    s.acceptance_rate, s.alpha, s.mean_accepted_length, s.perplexity
                )
            });
            if !args.json {
                let seconds = started.elapsed().as_secs();
                println!("{step:<10} {scores}({detail}; {seconds} s)");
            }
        }
    }
}

/// The shape, or the shapes of which measurement will choose one.
fn print_plans(args: &BuildArgs, target: &Target, plans: &[Plan]) {
    let cost = CostModel { layer: args.layer_cost.max(0.0) * 1e6 };
    if args.json {
        let shapes: Vec<Value> = plans
            .iter()
            .map(|plan| {
                let draft = plan.config(&target.config);
                json!({
                    "plan": plan,
                    "draft_parameters": draft.parameters(),
                    "draft_parameters_per_step": draft.parameters_per_step(),
                    "latency_ratio": cost.latency_ratio(&draft, &target.config),
                })
            })
            .collect();
        let mut document = match shapes.as_slice() {
            [only] => only.clone(),
            _ => json!({ "candidates": shapes }),
        };
        document["target"] = json!(target.name);
        document["target_parameters"] = json!(target.config.parameters());
        println!("{document:#}");
        return;
    }
    let of = target.config.parameters() as f64;
    println!("target     {} ({:.1} M parameters)", target.name, of / 1e6);
    for plan in plans {
        let draft = plan.config(&target.config);
        println!("{:<10} {plan}", if plans.len() == 1 { "plan" } else { "candidate" });
        println!(
            "           {:.1} M parameters ({:.1} %), {:.1} M read for each drafted token \
             ({:.1} %), latency ratio {:.3}",
            draft.parameters() as f64 / 1e6,
            100.0 * draft.parameters() as f64 / of,
            draft.parameters_per_step() as f64 / 1e6,
            100.0 * draft.parameters_per_step() as f64 / target.config.parameters_per_step() as f64,
            cost.latency_ratio(&draft, &target.config),
        );
    }
}

fn print_report(args: &BuildArgs, report: &Report, seconds: f64) {
    let story = &report.story;
    if args.json {
        let steps: Vec<Value> = story
            .steps
            .iter()
            .map(|(step, scores)| json!({"step": step, "scores": scores}))
            .collect();
        let curve: Vec<Value> = story
            .curve
            .iter()
            .map(|(tokens, scores)| json!({"tokens": tokens, "scores": scores}))
            .collect();
        let document = json!({
            "output": args.output,
            "checksum": report.checksum,
            "plan": story.plan,
            "layers": story.selection.layers,
            "target_parameters": report.target_parameters,
            "draft_parameters": report.draft_parameters,
            "latency_ratio": report.latency_ratio,
            "num_speculative_tokens": report.num_speculative_tokens,
            "expected_speedup": report.expected_speedup,
            "steps": steps,
            "tried": story.tried,
            "curve": curve,
            "seconds": seconds,
            "vllm_command": report.vllm_command,
        });
        println!("{document:#}");
        return;
    }
    println!(
        "\nexpected   {:.2} times the speed at draft length {}, if a step of the draft takes {:.3} \
         of the target's",
        report.expected_speedup, report.num_speculative_tokens, report.latency_ratio
    );
    let output = args.output.clone().unwrap_or_default();
    let output = output.display();
    println!("{output} written in {seconds:.0} s, with a report in report.html. Serve it with");
    println!("  {}", report.vllm_command);
    println!("or with");
    let model = args.model.as_deref().unwrap_or_default();
    println!("  da-serve --model {model} --draft {output}");
}
