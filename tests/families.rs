//! Every family against transformers, and what slicing and training make of it.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use candle_core::{DType, Device, Tensor};
use draft_adapter::build::calibrate::{statistics, windows};
use draft_adapter::build::heal::{Patient, Ridge, heal};
use draft_adapter::build::linalg::{Spectrum, to_matrix};
use draft_adapter::build::plan::Plan;
use draft_adapter::build::prune::Selection;
use draft_adapter::build::slice::{WriteMap, slice};
use draft_adapter::build::stream::Streamed;
use draft_adapter::build::{self, Request, Settings};
use draft_adapter::distill::Sample;
use draft_adapter::distill::trainer::{TrainSettings, Trainer};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::kv_cache::KvCache;
use draft_adapter::model::runtime::{LogitsOf, Runtime, Segment};
use draft_adapter::model::{Family, NormKind};
use golden::{expected, path, relative_error, target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Folders below `tests/golden`, written by `make_tiny_families.py`.
const MODELS: [&str; 6] =
    ["tiny_llama_bias", "tiny_mistral", "tiny_qwen2", "tiny_qwen3", "tiny_gemma2", "tiny_stablelm"];

fn decoder(target: &Target) -> Decoder {
    Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap()
}

fn logits(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let ids = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu).unwrap();
    decoder.logits(&ids).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn logits_match_transformers() {
    for model in MODELS {
        let tokens = expected(&format!("{model}/expected.safetensors"));
        let mut files = vec![model.to_string()];
        if path(&format!("{model}/tiny.gguf")).exists() {
            files.push(format!("{model}/tiny.gguf"));
        }
        for file in files {
            let target = target(&file);
            let got = logits(&decoder(&target), &tokens.tokens);
            // What a GGUF file cannot say makes another model of it.
            let own = format!("{model}/expected_gguf.safetensors");
            let expected = if file.ends_with("gguf") && path(&own).exists() {
                expected(&own).logits
            } else {
                tokens.logits.clone()
            };
            let error = relative_error(&got, &expected);
            assert!(error < 1e-4, "{file}: relative error {error:e}");
        }
    }
}

/// Every family that llama.cpp stores in a form of its own is read from it.
#[test]
fn four_families_have_a_gguf_file() {
    let files = MODELS.iter().filter(|model| path(&format!("{model}/tiny.gguf")).exists());
    assert_eq!(files.count(), 4);
}

#[test]
fn the_runtime_agrees_up_to_quantisation() {
    for model in MODELS {
        let (target, expected) =
            (target(model), expected(&format!("{model}/expected.safetensors")));
        let runtime = Runtime::load(&target.config, &target.weights).unwrap();
        // In two pieces, so that windows and rotations are continued from a cache.
        let mut cache = KvCache::new(&target.config);
        let (head, tail) = expected.tokens.split_at(5);
        let mut got = Vec::new();
        for tokens in [head, tail] {
            let segment = Segment { tokens, cache: &mut cache, logits: LogitsOf::All };
            got.extend(runtime.forward(&mut [segment]).unwrap());
        }
        let error = relative_error(&got, &expected.logits);
        assert!(error < 0.06, "{model}: relative error {error:e}");
    }
}

fn sample(id: u64, tokens: &[u32]) -> Sample {
    Sample { id, prompt_ids: tokens.to_vec(), temperature: 1.0, ..Sample::default() }
}

fn texts(rng: &mut ChaCha8Rng) -> Vec<Sample> {
    let text =
        |rng: &mut ChaCha8Rng| -> Vec<u32> { (0..12).map(|_| rng.random_range(3..250)).collect() };
    (0..24).map(|id| sample(id, &text(rng))).collect()
}

/// A map onto the whole residual in another basis. What a norm takes off is left out.
fn rotation(target: &Target, rng: &mut ChaCha8Rng) -> WriteMap {
    let d = target.config.hidden_size;
    let norm = target.config.anatomy.norm;
    let random: Vec<f32> = (0..d * d).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut random = Tensor::from_vec(random, (d, d), &Device::Cpu).unwrap();
    if norm == NormKind::Layer {
        random = random.broadcast_sub(&random.mean_keepdim(0).unwrap()).unwrap();
    }
    let symmetric = to_matrix(&random.matmul(&random.t().unwrap()).unwrap()).unwrap();
    let directions = if norm == NormKind::Layer { d - 1 } else { d };
    let (directions, _) = Spectrum::new(&symmetric).unwrap().top(directions);
    WriteMap::along(directions, 1.0, norm, &Device::Cpu).unwrap()
}

/// Folding, reading and writing are right when a change of basis changes nothing.
#[test]
fn rotating_the_residual_stream_reproduces_the_logits() {
    for model in ["tiny_llama", "tiny_llama_tied"].into_iter().chain(MODELS) {
        let (target, expected) =
            (target(model), expected(&format!("{model}/expected.safetensors")));
        let source = Streamed::new(&target);
        let config = &target.config;
        let plan = Plan {
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_key_value_heads: config.num_key_value_heads,
        };
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        let windows = windows(&texts(&mut rng), 4, 64, &Device::Cpu).unwrap();
        let statistics = statistics(source, &windows, None, &mut |_| ()).unwrap();
        let spectrum = Spectrum::new(&statistics.covariance).unwrap();
        let all: Vec<usize> = (0..config.num_hidden_layers).collect();
        let selection = Selection::new(&statistics, &plan, all);
        let map = if config.family == Family::Gemma2 {
            // Its width is never cut, and its basis stays.
            WriteMap::new(&spectrum, plan.hidden_size, config.anatomy.norm, &Device::Cpu).unwrap()
        } else {
            rotation(&target, &mut rng)
        };
        let rotated = slice(source, &plan, &selection, &map).unwrap();
        let error = relative_error(&logits(&rotated, &expected.tokens), &expected.logits);
        assert!(error < 1e-4, "{model} sliced: relative error {error:e}");

        // Healing what is not broken must leave it alone.
        let patient =
            Patient { plan: &plan, selection: &selection, map: &map, ridge: Ridge::default() };
        let healed = heal(source, &windows, &[patient], &mut |_| ()).unwrap().swap_remove(0);
        let error = relative_error(&logits(&healed, &expected.tokens), &expected.logits);
        let limit = if MODELS.contains(&model) { 2e-3 } else { 1e-3 };
        assert!(error < limit, "{model} healed: relative error {error:e}");
    }
}

fn build(model: &str, output: &std::path::Path, request: Request) -> build::Report {
    let settings = Settings {
        request,
        output: output.into(),
        calibration_tokens: 2000,
        seed: 1,
        dtype: DType::F32,
        ..Settings::default()
    };
    build::run(&target(model), &settings, &mut |_| ()).unwrap()
}

#[test]
fn the_identity_build_reproduces_the_logits() {
    let folder = tempfile::tempdir().unwrap();
    for model in MODELS {
        let output = folder.path().join(model);
        let one = Some(1.0);
        build(model, &output, Request { embedding: one, layers: one, ..Request::default() });
        let draft = Target::open(output.to_str().unwrap()).unwrap();
        let expected = expected(&format!("{model}/expected.safetensors"));
        let error = relative_error(&logits(&decoder(&draft), &expected.tokens), &expected.logits);
        assert!(error < 1e-3, "{model}: relative error {error:e}");
    }
}

/// A cut draft is read back as what it was, in the architecture that can carry it, and every one
/// of its parameters can be trained.
#[test]
fn drafts_are_read_back_and_can_be_trained() {
    let folder = tempfile::tempdir().unwrap();
    for model in MODELS {
        let family = target(model).config.family;
        let output = folder.path().join(model);
        let embedding = (family != Family::Gemma2).then_some(0.5);
        let request =
            Request { embedding, layers: Some(0.5), mlp: Some(1.0), ..Request::default() };
        build(model, &output, request);
        let draft = Target::open(output.to_str().unwrap()).unwrap();
        let config = &draft.config;
        assert_eq!(config.num_hidden_layers, 1, "{model}");
        assert_eq!(config.tie_word_embeddings, family == Family::Gemma2, "{model}");
        let carrier = match family {
            // Of 32 channels and heads of 8 nothing else has a head size of its own.
            Family::Qwen2 if config.hidden_size != config.query_size() => Family::Mistral,
            family => family,
        };
        assert_eq!(config.family, carrier, "{model}");
        if family == Family::StableLm {
            assert_eq!(config.hidden_size, config.query_size(), "vLLM derives the head size");
        }

        let state = folder.path().join(format!("{model}-state"));
        let trainer = Trainer::open(&output, &state, TrainSettings::default()).unwrap();
        assert_eq!(trainer.state().parameters_without_gradient, 0, "{model}");

        let runtime = Runtime::load(config, &draft.weights).unwrap();
        let tokens: Vec<u32> = (5..17).collect();
        let mut cache = KvCache::new(config);
        let segment = Segment { tokens: &tokens, cache: &mut cache, logits: LogitsOf::All };
        let got = runtime.forward(&mut [segment]).unwrap();
        let error = relative_error(&got, &logits(&decoder(&draft), &tokens));
        assert!(error < 0.1, "{model}: relative error {error:e}");
    }
}
