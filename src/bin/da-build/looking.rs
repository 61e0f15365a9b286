//! What there is to know of models, drafts and pairs of them.

use std::path::Path;
use std::process::ExitCode;

use draft_adapter::build::examine::{Row, examine};
use draft_adapter::build::inspect::{Fit, describe, fit};
use draft_adapter::build::{BuildError, verify};
use draft_adapter::config::build::EvalArgs;
use draft_adapter::hub::Target;
use indicatif::ProgressBar;
use serde_json::{Value, json};

use super::making::progress_bar;

/// A pair that does not fit, or a folder that is not good.
const NOT_GOOD: u8 = 1;

pub fn inspect(model: &str, draft: Option<&str>, as_json: bool) -> Result<ExitCode, BuildError> {
    let target = Target::open(model)?;
    let draft = draft.map(Target::open).transpose()?;
    let mut document = describe(&target)?;
    let findings = draft.as_ref().map(|draft| fit(&target, draft));
    let worst = findings.iter().flatten().map(|finding| finding.verdict).max();
    if as_json {
        if let (Some(draft), Some(findings)) = (&draft, &findings) {
            document["pair"] = json!({"draft": draft.name, "fit": worst, "findings": findings});
        }
        println!("{document:#}");
    } else {
        print_model(&document);
        if let (Some(draft), Some(findings)) = (&draft, &findings) {
            println!("\n{} as its draft", draft.name);
            for finding in findings {
                let mark = match finding.verdict {
                    Fit::Good => "good",
                    Fit::Mind => "mind",
                    Fit::Bad => "BAD",
                };
                println!("  {mark:<5} {}", finding.what);
            }
        }
    }
    Ok(if worst == Some(Fit::Bad) { ExitCode::from(NOT_GOOD) } else { ExitCode::SUCCESS })
}

fn print_model(model: &Value) {
    let number = |key: &str| model[key].as_f64().unwrap_or_default();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), String::from);
    println!("{}", text(&model["name"]));
    println!(
        "  is        {} ({}), {:.1} M parameters, {:.1} M read for each token",
        text(&model["family"]),
        text(&model["architecture"]),
        number("parameters") / 1e6,
        number("parameters_per_step") / 1e6
    );
    println!(
        "  stored    as {}, {:.1} MB in {} files, embeddings {}",
        text(&model["stored_as"]),
        number("bytes") / 1e6,
        model["files"],
        if model["tie_word_embeddings"] == json!(true) { "tied" } else { "untied" }
    );
    println!(
        "  shape     hidden {}, MLP {}, {} layers, {} heads of {} in {} groups",
        model["hidden_size"],
        model["intermediate_size"],
        model["num_hidden_layers"],
        model["num_attention_heads"],
        model["head_dim"],
        model["num_key_value_heads"]
    );
    println!(
        "  sees      {} tokens, rotary base {}{}, a sliding window in {} layers",
        model["max_position_embeddings"],
        model["rope_theta"],
        model["rope_scaling"].as_str().map_or(String::new(), |scaling| format!(" ({scaling})")),
        model["sliding_window_layers"]
    );
    println!(
        "  speaks    {} tokens in {} rows, ends with {}, {} chat template",
        model["tokens"],
        model["vocab_size"],
        model["eos_token_ids"],
        if model["chat_template"] == json!(true) { "with a" } else { "without a" }
    );
    let draft = &model["draft"];
    println!(
        "  becomes   hidden {}, MLP {}, {} layers: {:.1} M parameters ({:.1} %), a step about \
         {:.3} of the target's",
        draft["plan"]["hidden_size"],
        draft["plan"]["intermediate_size"],
        draft["plan"]["num_hidden_layers"],
        draft["parameters"].as_f64().unwrap_or_default() / 1e6,
        100.0 * draft["share"].as_f64().unwrap_or_default(),
        draft["latency_ratio"].as_f64().unwrap_or_default()
    );
    println!("            loaded by vLLM as {}", text(&draft["architecture"]));
    for note in draft["notes"].as_array().into_iter().flatten() {
        println!("            {}", text(note));
    }
}

pub fn check(folder: &Path, as_json: bool) -> ExitCode {
    let verdict = verify::verify(folder);
    if as_json {
        println!("{:#}", json!(verdict));
    } else {
        for good in &verdict.good {
            println!("good  {good}");
        }
        for problem in &verdict.problems {
            println!("BAD   {problem}");
        }
        if let (Some(version), Some(target)) = (&verdict.version, &verdict.target) {
            println!("      {version} for {target}");
        }
    }
    if verdict.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(NOT_GOOD) }
}

pub fn eval(args: &EvalArgs) -> Result<(), BuildError> {
    let settings = args.settings()?;
    let (target, draft) = (Target::open(&args.target)?, Target::open(&args.draft)?);
    let mut bar = ProgressBar::hidden();
    let found = examine(&target, &draft, &settings, &mut |made, total| {
        if made == 0 {
            bar = progress_bar("answers", total);
        }
        bar.inc(made as u64);
    })?;
    bar.finish_and_clear();
    if args.json {
        let mut document = json!(found);
        document["target"] = json!(target.name);
        document["draft"] = json!(draft.name);
        document["num_speculative_tokens"] = json!(args.num_speculative_tokens);
        println!("{document:#}");
        return Ok(());
    }
    println!(
        "{} under {}: {} answers, a step takes {:.3} of the target's\n",
        draft.name, target.name, found.answers, found.latency_ratio
    );
    print_rows(&found.rows, args.num_speculative_tokens);
    Ok(())
}

fn print_rows(rows: &[Row], k: usize) {
    let width = rows.iter().filter_map(|row| row.domain.as_ref()).map(String::len).max();
    let width = width.unwrap_or(0).max("domain".len());
    println!(
        "{:<width$}  temp  positions  acceptance  alpha  perplexity  length  speed-up  best k  by \
         position",
        "domain"
    );
    for row in rows {
        let by_position: Vec<String> =
            row.scores.by_position.iter().map(|chance| format!("{chance:.2}")).collect();
        println!(
            "{:<width$}  {:>4}  {:>9}  {:>10.3}  {:>5.3}  {:>10.1}  {:>6.2}  {:>8.2}  {:>6}  {}",
            row.domain.as_deref().unwrap_or("all"),
            row.temperature,
            row.scores.positions,
            row.scores.acceptance_rate,
            row.scores.alpha,
            row.scores.perplexity,
            row.scores.mean_accepted_length,
            row.expected_speedup,
            row.best_length,
            by_position.join(" "),
        );
    }
    println!("\nlength and speed-up are for {k} drafted tokens");
}
