//! Builds with a search for the shape, a plan that is followed, and distillation, on a tiny target.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use std::path::Path;

use candle_core::DType;
use draft_adapter::build::plan::PlanFile;
use draft_adapter::build::search::CostModel;
use draft_adapter::build::teach::TeachSettings;
use draft_adapter::build::{self, BuildError, Init, Progress, Report, Request, Settings};
use draft_adapter::hub::Target;
use golden::target;

const MODEL: &str = "tiny_llama";

fn settings(output: &Path) -> Settings {
    Settings {
        output: output.into(),
        request: Request { embedding: Some(0.5), layers: Some(0.67), ..Request::default() },
        calibration_tokens: 3000,
        dtype: DType::F32,
        ..Settings::default()
    }
}

fn build(settings: &Settings) -> Report {
    build::run(&target(MODEL), settings, &mut |_| ()).unwrap()
}

fn teach(tokens: usize) -> TeachSettings {
    TeachSettings { tokens, learning_rate: 3e-3, answer_tokens: 24, ..TeachSettings::default() }
}

#[test]
fn a_limit_is_kept_and_the_fastest_shape_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("draft");
    let request = Request { latency_ratio: Some(0.7), ..Request::default() };
    let cost = CostModel { layer: 0.0 };
    let report = build(&Settings { request, cost, ..settings(&output) });
    let tried = &report.story.tried;
    assert!(tried.len() > 1, "{tried:?}");
    assert!(tried.iter().all(|shape| shape.latency_ratio <= 0.7), "{tried:?}");
    let best = tried.iter().map(|shape| shape.expected_speedup).fold(0.0, f64::max);
    let taken = tried.iter().find(|shape| shape.plan == report.story.plan).unwrap();
    assert_eq!(taken.expected_speedup, best);
    assert!(report.vllm_command.contains(&report.num_speculative_tokens.to_string()));
}

#[test]
fn a_manifest_is_a_plan_that_can_be_followed() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    let report = build(&settings(&first));
    let plan = PlanFile::read(&first.join("da_manifest.json")).unwrap();
    assert_eq!(plan.layers.as_ref(), Some(&report.story.selection.layers));
    let again = build(&Settings {
        plan: Some(plan.clone()),
        request: Request::default(),
        ..settings(&second)
    });
    assert_eq!(again.story.plan, report.story.plan);
    assert_eq!(again.story.selection, report.story.selection);
    let weights = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&second), "the same plan gives the same draft");

    let config = target(MODEL).config;
    for wrong in [
        PlanFile { layers: Some(vec![1, 0]), ..plan.clone() },
        PlanFile { plan: build::Plan { hidden_size: 1 << 20, ..plan.plan.clone() }, ..plan },
    ] {
        assert!(matches!(wrong.check(&config).unwrap_err(), BuildError::Plan(_)));
    }
}

#[test]
fn every_start_can_be_distilled() {
    let folder = tempfile::tempdir().unwrap();
    for (init, on_policy, select) in
        [(Init::Sliced, 0.5, None), (Init::Layers, 0.0, None), (Init::Random, 0.0, Some(0.4))]
    {
        let output = folder.path().join(format!("{init:?}"));
        let distill = Some(TeachSettings { on_policy, select, ..teach(4000) });
        let report = build(&Settings { init, distill, ..settings(&output) });
        let curve = &report.story.curve;
        let (start, best) =
            (curve[0].1.alpha, curve.iter().map(|(_, s)| s.alpha).fold(0.0, f64::max));
        // What was healed may be as good as it gets; what was not has to gain.
        assert!(best > start || init == Init::Sliced, "{init:?}: {curve:?}");
        let (last, scores) = report.story.steps.last().unwrap();
        assert_eq!((last.as_str(), scores.alpha), ("distil", best));
        Target::open(output.to_str().unwrap()).unwrap();
        let left = folder.path().join(format!("{init:?}.partial"));
        assert!(!left.exists(), "a finished build leaves nothing but its output");
    }
}

/// What was stopped while it distilled goes on from there, and ends as if it had not been stopped.
#[test]
fn a_stopped_build_is_taken_up_again() {
    struct Stop;
    let folder = tempfile::tempdir().unwrap();
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let distilling = |output: &Path| Settings {
        init: Init::Random,
        distill: Some(teach(3000)),
        ..settings(output)
    };
    let uninterrupted = build(&distilling(&whole));

    let mut advanced = 0;
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut distils = false;
        build::run(&target(MODEL), &distilling(&parts), &mut |progress| match progress {
            Progress::Started { step, .. } => distils = step == "distil",
            Progress::Advanced { units } if distils => {
                advanced += units;
                if advanced > 1000 {
                    std::panic::resume_unwind(Box::new(Stop));
                }
            }
            _ => {}
        })
    }));
    assert!(stopped.is_err());
    assert!(!parts.exists(), "nothing is at the output until it is whole");

    let mut steps = Vec::new();
    let resumed = build::run(&target(MODEL), &distilling(&parts), &mut |progress| {
        if let Progress::Started { step, .. } = progress {
            steps.push(step);
        }
    });
    assert_eq!(steps, ["distil"], "the earlier steps are not repeated");
    let resumed = resumed.unwrap();
    let looks = |report: &Report| -> Vec<u64> {
        report.story.curve.iter().map(|(tokens, _)| *tokens).collect()
    };
    assert_eq!(looks(&resumed), looks(&uninterrupted));
    let best = uninterrupted.story.steps.last().unwrap().1.alpha;
    assert!(best > uninterrupted.story.curve[0].1.alpha, "the draft that is kept has learned");
    assert_eq!(resumed.checksum, uninterrupted.checksum);
}
