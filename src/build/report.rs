//! What a person is shown of a build: the model card and a page with pictures.

use minijinja::Environment;
use minijinja::value::Serde;
use serde_json::{Value, json};

use super::pipeline::NUM_SPECULATIVE_TOKENS;
use super::{BuildError, Report};
use crate::distill::Comparison;
use crate::hub::Target;
use crate::model::decoder::Decoder;

/// The model card.
pub fn card(target: &Target, draft: &Decoder, report: &Report) -> String {
    let (config, name) = (&draft.config, &target.name);
    let rows: String = report
        .story
        .steps
        .iter()
        .map(|(step, s)| {
            format!(
                "| {step} | {:.3} | {:.3} | {:.2} | {:.1} |\n",
                s.acceptance_rate, s.alpha, s.mean_accepted_length, s.perplexity
            )
        })
        .collect();
    format!(
        "---\nlibrary_name: transformers\ntags:\n- speculative-decoding\n- draft-model\n---\n\n\
         # Draft for {name}\n\n\
         Made by `da-build` out of the target itself, to be served as its draft in speculative \
         decoding. It is not meant to answer on its own.\n\n\
         - Parameters: {:.1} M stored, {:.1} M read for each drafted token\n\
         - Shape: {}; the target's layers {:?}\n\
         - Tokenizer, position limits and rotary settings are the target's\n\
         - Expected speed-up {:.2} at draft length {}, if a step of the draft takes {:.3} of the \
         target's\n\n\
         Measured on {} positions of held-out answers: how often the most likely tokens agree, \
         alpha (the mean of Σ min(p, q) at temperature 1), mean accepted length with \
         {NUM_SPECULATIVE_TOKENS} drafted tokens (bonus token included, greedy rule), and the \
         draft's perplexity.\n\n\
         | after | acceptance | alpha | mean accepted length | perplexity |\n\
         |---|---|---|---|---|\n{rows}\n```\n{}\n```\n",
        config.parameters() as f64 / 1e6,
        config.parameters_per_step() as f64 / 1e6,
        report.story.plan,
        report.story.selection.layers,
        report.expected_speedup,
        report.num_speculative_tokens,
        report.latency_ratio,
        report.story.steps.last().map_or(0, |(_, scores)| scores.positions),
        report.vllm_command,
    )
}

const PAGE: &str = include_str!("report.html.j2");
/// Size of a chart and its margins, in pixels of the picture.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 190.0;
const LEFT: f64 = 40.0;
const BASE: f64 = 160.0;
const TOP: f64 = 14.0;
/// Room that a layer's number takes.
const LABEL: f64 = 18.0;

/// A self-contained page: scores after each step, layer influence, spectrum, and what was learned
/// and tried.
///
/// # Errors
/// When the template fails, which would be a defect.
pub fn page(target: &Target, draft: &Decoder, report: &Report) -> Result<String, BuildError> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::Html);
    let story = &report.story;
    let scores = |s: &Comparison| {
        json!({
            "acceptance": s.acceptance_rate,
            "alpha": s.alpha,
            "length": s.mean_accepted_length,
            "perplexity": s.perplexity,
        })
    };
    let steps: Vec<Value> = story
        .steps
        .iter()
        .map(|(step, s)| {
            let mut row = scores(s);
            row["step"] = json!(step);
            row
        })
        .collect();
    let page = environment.render_str(
        PAGE,
        Serde(json!({
            "target": target.name,
            "plan": story.plan.to_string(),
            "target_millions": target.config.parameters() as f64 / 1e6,
            "draft_millions": draft.config.parameters() as f64 / 1e6,
            "share": 100.0 * report.draft_parameters as f64 / report.target_parameters as f64,
            "steps": steps,
            "positions": story.steps.last().map_or(0, |(_, s)| s.positions),
            "by_position": story.steps.last().map(|(_, s)| s.by_position.clone()),
            "latency_ratio": report.latency_ratio,
            "length": report.num_speculative_tokens,
            "speedup": report.expected_speedup,
            "command": report.vllm_command,
            "influence": influence(report),
            "spectrum": spectrum(report),
            "curve": curve(report),
            "tried": tried(report),
            "axis": json!({"left": LEFT, "base": BASE, "top": TOP, "width": WIDTH, "height": HEIGHT}),
        })),
    );
    page.map_err(|e| BuildError::Solve(format!("the report's template: {e}")))
}

/// One bar for each block of the target.
fn influence(report: &Report) -> Vec<Value> {
    let values = &report.story.influence;
    let most = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let step = (WIDTH - LEFT) / values.len().max(1) as f64;
    let last = values.len().saturating_sub(1);
    let mut labelled = f64::NEG_INFINITY;
    values
        .iter()
        .enumerate()
        .map(|(layer, value)| {
            let x = LEFT + layer as f64 * step;
            let kept = report.story.selection.layers.contains(&layer);
            // Numbers that would run into each other are left to the bars' titles.
            let label = (kept || layer == 0 || layer == last) && x - labelled >= LABEL;
            if label {
                labelled = x;
            }
            // The last block's influence dwarfs the others; the root keeps them visible.
            let height = (BASE - TOP) * (value.max(0.0) / most).sqrt();
            json!({
                "layer": layer,
                "value": value,
                "kept": kept,
                "label": label,
                "x": x,
                "y": BASE - height,
                "width": 0.8 * step,
                "height": height,
            })
        })
        .collect()
}

/// Share of the normalised residual's energy by width, and where the draft's width lies.
fn spectrum(report: &Report) -> Option<Value> {
    let values = &report.story.spectrum;
    let total: f64 = values.iter().sum();
    if values.is_empty() || total <= 0.0 {
        return None;
    }
    let mut sum = 0.0;
    let shares: Vec<f64> = values
        .iter()
        .map(|value| {
            sum += value.max(0.0);
            sum / total
        })
        .collect();
    let width = report.story.plan.hidden_size;
    let x = |k: usize| LEFT + (WIDTH - LEFT) * k as f64 / shares.len() as f64;
    let y = |share: f64| BASE - (BASE - TOP) * share;
    let points = shares.iter().enumerate().map(|(at, share)| (x(at + 1), y(*share)));
    let kept = shares.get(width.saturating_sub(1)).copied().unwrap_or(1.0);
    Some(json!({
        "points": polyline(points),
        "x": x(width),
        "y": y(kept),
        "kept": 100.0 * kept,
        "hidden_size": width,
        "width": shares.len(),
    }))
}

/// Alpha by answer tokens learned.
fn curve(report: &Report) -> Option<Value> {
    let curve = &report.story.curve;
    let last = curve.last().filter(|(tokens, _)| *tokens > 0)?.0 as f64;
    let most = curve.iter().map(|(_, s)| s.alpha).fold(0.0, f64::max).max(0.1);
    let place = |(tokens, s): &(u64, Comparison)| {
        let x = LEFT + (WIDTH - LEFT - 8.0) * *tokens as f64 / last;
        (x, BASE - (BASE - TOP) * s.alpha / most)
    };
    let dots: Vec<Value> = curve
        .iter()
        .map(|point| {
            let (x, y) = place(point);
            json!({"x": x, "y": y, "tokens": point.0, "alpha": point.1.alpha})
        })
        .collect();
    Some(json!({
        "points": polyline(curve.iter().map(place)),
        "dots": dots,
        "tokens": last,
        "most": most,
    }))
}

fn tried(report: &Report) -> Vec<Value> {
    let rows = report.story.tried.iter();
    rows.map(|tried| {
        json!({
            "plan": tried.plan.to_string(),
            "millions": tried.parameters as f64 / 1e6,
            "latency_ratio": tried.latency_ratio,
            "alpha": tried.alpha,
            "length": tried.num_speculative_tokens,
            "speedup": tried.expected_speedup,
            "taken": tried.plan == report.story.plan,
        })
    })
    .collect()
}

fn polyline(points: impl Iterator<Item = (f64, f64)>) -> String {
    points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
}
