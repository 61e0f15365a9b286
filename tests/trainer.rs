//! From a target to a trained draft on a tiny model: build, train, resume, export.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use draft_adapter::build::generate::{Generation, answer};
use draft_adapter::build::{self, BuildError, Request, Settings};
use draft_adapter::distill::select::select;
use draft_adapter::distill::trainer::{TrainSettings, Trainer};
use draft_adapter::distill::{Loss, Sample, TopK};
use draft_adapter::hub::Target;
use draft_adapter::model::DraftManifest;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::runtime::Runtime;
use golden::{expected, relative_error, target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn settings(output: &Path, request: Request, dtype: DType) -> Settings {
    Settings {
        request,
        output: output.into(),
        calibration_tokens: 3000,
        seed: 1,
        dtype,
        ..Settings::default()
    }
}

fn shares(embedding: f64, layers: f64) -> Request {
    Request { embedding: Some(embedding), layers: Some(layers), ..Request::default() }
}

/// A draft of half the depth of the tiny target, in `folder/v0`.
fn small_draft(folder: &Path) -> PathBuf {
    let output = folder.join("v0");
    let settings = settings(&output, shares(0.5, 0.67), DType::F32);
    build::run(&target("tiny_llama"), &settings, &mut |_| ()).unwrap();
    output
}

/// Answers of the tiny target, with its whole distribution as the teacher's.
fn samples(count: usize, temperature: f32) -> Vec<Sample> {
    let target = target("tiny_llama");
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let prompts: Vec<Vec<u32>> =
        (0..count).map(|_| (0..6).map(|_| rng.random_range(5..90)).collect()).collect();
    let generation = Generation { temperature, max_tokens: 16, top_k: 20 };
    answer(&runtime, &prompts, generation, &mut rng, &mut |_| ()).unwrap()
}

fn open(draft: &Path, state: &Path) -> Trainer {
    let settings = TrainSettings { learning_rate: 3e-3, ..TrainSettings::default() };
    Trainer::open(draft, state, settings).unwrap()
}

fn train(trainer: &mut Trainer, samples: &[Sample], epochs: usize) -> Vec<f32> {
    let mut losses = Vec::new();
    trainer
        .train(samples, epochs, &mut |update| {
            assert!(!update.skipped);
            losses.push(update.loss);
            true
        })
        .unwrap();
    losses
}

#[test]
fn an_identity_build_reproduces_the_target() {
    for model in ["tiny_llama", "tiny_llama_tied"] {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("draft");
        let settings = settings(&output, shares(1.0, 1.0), DType::F32);
        let report = build::run(&target(model), &settings, &mut |_| ()).unwrap();
        // Judged on quantised answers of a random model, whose near-ties may fall either way.
        assert!(report.story.steps[0].1.alpha > 0.99, "{model}: {:?}", report.story.steps[0].1);

        let draft = Target::open(output.to_str().unwrap()).unwrap();
        let decoder =
            Decoder::new(&draft.config, |name| draft.weights.tensor(name, &Device::Cpu)).unwrap();
        let expected = expected(&format!("{model}/expected.safetensors"));
        let shape = (1, expected.tokens.len());
        let ids = Tensor::from_slice(&expected.tokens, shape, &Device::Cpu).unwrap();
        let logits = decoder.logits(&ids).unwrap().flatten_all().unwrap();
        let error = relative_error(&logits.to_vec1().unwrap(), &expected.logits);
        assert!(error < 1e-3, "{model}: relative error {error:e}");
    }
}

#[test]
fn a_built_folder_is_complete_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let manifest = DraftManifest::read(&draft).unwrap();
    manifest.verify(&draft).unwrap();
    assert_eq!((manifest.version.as_str(), manifest.parent), ("v000000", None));
    for name in ["config.json", "model.safetensors", "tokenizer.json", "README.md", "report.html"] {
        assert!(manifest.files.contains_key(name), "{name} is missing");
    }
    let weights = std::fs::read(draft.join("model.safetensors")).unwrap();
    let header = String::from_utf8_lossy(&weights[..200]).into_owned();
    assert!(header.contains(r#""format":"pt""#), "{header}");

    let settings = settings(&draft, shares(0.5, 0.67), DType::F32);
    let error = build::run(&target("tiny_llama"), &settings, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("exists already"), "{error}");
    manifest_is_unchanged(&draft);
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "nothing half-written is left behind: {names:?}");
}

fn manifest_is_unchanged(draft: &Path) {
    DraftManifest::read(draft).unwrap().verify(draft).unwrap();
}

#[test]
fn impossible_requests_are_refused_with_the_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let target = target("tiny_llama");
    let too_small = Request { target_size: Some(0.001), ..Request::default() };
    let wrong = settings(&folder.path().join("a"), too_small, DType::F32);
    let error = build::run(&target, &wrong, &mut |_| ()).unwrap_err();
    assert!(matches!(error, BuildError::TooSmall { .. }), "{error}");
    let wrong = settings(&folder.path().join("b"), shares(1.5, 1.0), DType::F32);
    let error = build::run(&target, &wrong, &mut |_| ()).unwrap_err();
    assert!(error.to_string().contains("--es"), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn training_fits_the_draft_with_every_loss() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let samples = samples(24, 0.0);
    for loss in [
        Loss::ForwardKl,
        Loss::ReverseKl,
        Loss::TotalVariation,
        Loss::LogAlpha,
        Loss::JensenShannon,
    ] {
        let state = tempfile::tempdir().unwrap();
        let settings = TrainSettings { learning_rate: 3e-3, loss, ..TrainSettings::default() };
        let mut trainer = Trainer::open(&draft, state.path(), settings).unwrap();
        assert_eq!(trainer.state().parameters_without_gradient, 0);
        let before = trainer.evaluate(&samples).unwrap();
        train(&mut trainer, &samples, 12);
        let after = trainer.evaluate(&samples).unwrap();
        assert!(after.alpha > before.alpha + 0.05, "{loss:?}: {} to {}", before.alpha, after.alpha);
        assert!(after.finite);
    }
}

/// Updates of low rank start from what the draft was, leave the rest alone, and come out merged.
#[test]
fn low_rank_updates_train_and_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let samples = samples(24, 0.0);
    let settings = TrainSettings { learning_rate: 1e-2, lora_rank: 4, ..TrainSettings::default() };
    let state = folder.path().join("state");
    let mut trainer = Trainer::open(&draft, &state, settings.clone()).unwrap();
    let whole = Trainer::open(&draft, &folder.path().join("other"), TrainSettings::default());
    let whole = whole.unwrap();
    assert!(trainer.state().parameters < whole.state().parameters / 2);
    let before = trainer.evaluate(&samples).unwrap();
    assert_eq!(before, whole.evaluate(&samples).unwrap(), "nothing has changed yet");
    train(&mut trainer, &samples, 12);
    let after = trainer.evaluate(&samples).unwrap();
    assert!(after.alpha > before.alpha + 0.02, "{} to {}", before.alpha, after.alpha);

    let (start, end) = (whole.decoder().unwrap(), trainer.decoder().unwrap());
    let same = |a: &Tensor, b: &Tensor| {
        let values = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values(a) == values(b)
    };
    assert!(same(&start.embed_tokens, &end.embed_tokens) && same(&start.lm_head, &end.lm_head));
    assert!(!same(&start.layers[0].q_proj.weight, &end.layers[0].q_proj.weight));
    drop(trainer);
    let resumed = Trainer::open(&draft, &state, settings).unwrap();
    assert_eq!(resumed.evaluate(&samples).unwrap(), after);
    let output = folder.path().join("v1");
    resumed.export(&output, serde_json::json!({"version": "v000001"})).unwrap();
    let exported = Target::open(output.to_str().unwrap()).unwrap();
    assert!(exported.weights.names().iter().all(|name| !name.contains("lora")));
}

/// The positions that are left are those of the largest gap; a sample without any is passed over.
#[test]
fn selected_positions_are_learned_and_the_others_read_past() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let all = samples(16, 0.0);
    let mut trainer = open(&draft, &folder.path().join("state"));
    let before = trainer.decoder().unwrap();
    train(&mut trainer, &all, 6);
    let reference = trainer.decoder().unwrap();

    let kept = |samples: &[Sample]| -> Vec<bool> {
        samples.iter().flat_map(|s| s.teacher.iter().map(|row| !row.ids.is_empty())).collect()
    };
    let (mut some, mut again) = (all.clone(), all.clone());
    select(&mut some, &before, &reference, 0.4, 512).unwrap();
    let positions = kept(&all).len();
    let chosen = kept(&some).iter().filter(|kept| **kept).count();
    assert_eq!(chosen, (positions as f64 * 0.4).round() as usize);
    // What is empty already is never chosen, and moves nothing else.
    again[0].teacher[0] = TopK::default();
    let lost = usize::from(kept(&some)[0]);
    select(&mut again, &before, &reference, chosen as f64 / positions as f64, 512).unwrap();
    let differ = kept(&some).iter().zip(kept(&again)).filter(|(a, b)| **a != *b).count();
    assert_eq!(differ, 2 * lost);
    // Against a draft that is no better anywhere, every gap is the same.
    let mut none = all.clone();
    select(&mut none, &before, &before, 1.0 / positions as f64, 512).unwrap();
    assert_eq!(kept(&none).iter().filter(|kept| **kept).count(), 1);

    let learned = trainer.state().tokens;
    train(&mut trainer, &some, 1);
    assert_eq!(trainer.state().tokens - learned, chosen as u64);
    // All but one sample have nothing left.
    let learned = trainer.state().tokens;
    let losses = train(&mut trainer, &none, 1);
    assert_eq!((trainer.state().tokens - learned, losses.len()), (1, 1));
}

#[test]
fn a_resumed_training_is_the_same_training() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let samples = samples(12, 0.0);
    let [whole, parts] = [folder.path().join("whole"), folder.path().join("parts")];

    let mut uninterrupted = open(&draft, &whole);
    train(&mut uninterrupted, &samples, 2);
    let last = train(&mut uninterrupted, &samples, 1);

    let mut first = open(&draft, &parts);
    train(&mut first, &samples, 2);
    drop(first);
    let mut resumed = open(&draft, &parts);
    assert_eq!(resumed.state().step, 2 * 12 / TrainSettings::default().batch as u64);
    assert_eq!(train(&mut resumed, &samples, 1), last);
    assert_eq!(resumed.state().tokens, uninterrupted.state().tokens);
}

#[test]
fn a_torn_checkpoint_falls_back_to_the_draft() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let samples = samples(8, 0.0);
    let state = folder.path().join("state");
    let mut trainer = open(&draft, &state);
    let fresh = trainer.evaluate(&samples).unwrap();
    train(&mut trainer, &samples, 2);
    drop(trainer);
    let file = state.join("checkpoint/state.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let trainer = open(&draft, &state);
    assert_eq!(trainer.state().step, 0);
    assert_eq!(trainer.evaluate(&samples).unwrap(), fresh);
}

#[test]
fn an_exported_draft_is_what_was_trained() {
    let folder = tempfile::tempdir().unwrap();
    let draft = small_draft(folder.path());
    let samples = samples(12, 0.7);
    let mut trainer = open(&draft, &folder.path().join("state"));
    train(&mut trainer, &samples, 4);
    let trained = trainer.evaluate(&samples).unwrap();
    let output = folder.path().join("v1");
    let fields = serde_json::json!({"version": "v000001", "data_hash": "abc"});
    let checksum = trainer.export(&output, fields).unwrap();

    let manifest = DraftManifest::read(&output).unwrap();
    manifest.verify(&output).unwrap();
    assert_eq!(manifest.checksum(), checksum);
    assert_eq!(manifest.version, "v000001");
    assert_eq!(manifest.parent.as_deref(), Some("v000000"));
    assert_eq!(manifest.data_hash, "abc");
    let again = trainer.evaluate_folder(&output, &samples).unwrap();
    // Rounding to bf16 moves little.
    assert!((again.alpha - trained.alpha).abs() < 0.01, "{} {}", again.alpha, trained.alpha);
    assert!(trainer.export(&output, serde_json::json!({})).is_err(), "a version is immutable");

    trainer.restart(&output).unwrap();
    assert_eq!(trainer.state().step, 0);
    assert_eq!(trainer.state().base, output);
    assert!((trainer.evaluate(&samples).unwrap().alpha - again.alpha).abs() < 1e-6);
}

/// The acceptance identity: a draft that is the target is accepted at 1, token for token.
#[test]
fn the_target_as_its_own_draft_is_always_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("draft");
    let settings = settings(&output, shares(1.0, 1.0), DType::F32);
    build::run(&target("tiny_llama"), &settings, &mut |_| ()).unwrap();
    let trainer = open(&output, &folder.path().join("state"));

    let target = target("tiny_llama");
    let decoder =
        Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
    let mut samples = samples(6, 0.0);
    for sample in &mut samples {
        // The answer of the f32 decoder itself, not of the quantised runtime.
        let mut ids = sample.prompt_ids.clone();
        for _ in 0..sample.output_ids.len() {
            let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
            let last = decoder.logits(&input).unwrap().get(0).unwrap().get(ids.len() - 1).unwrap();
            ids.push(last.argmax(0).unwrap().to_scalar::<u32>().unwrap());
        }
        sample.output_ids = ids.split_off(sample.prompt_ids.len());
    }
    let acceptance = trainer.evaluate(&samples).unwrap();
    assert_eq!(acceptance.acceptance_rate, 1.0);
    let k = TrainSettings::default().num_speculative_tokens as f64;
    assert!(acceptance.mean_accepted_length > 1.0 + 0.8 * k, "{acceptance:?}");
}
