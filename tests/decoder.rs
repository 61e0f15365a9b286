//! The decoder against transformers, and the runtime against the decoder, on tiny Llamas.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use candle_core::{Device, Tensor, Var};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::kv_cache::KvCache;
use draft_adapter::model::runtime::{LogitsOf, Runtime, Segment};
use golden::{expected, path, relative_error, target};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn decoder(target: &Target) -> Decoder {
    Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap()
}

fn logits(decoder: &Decoder, tokens: &[u32]) -> Vec<f32> {
    let ids = Tensor::from_slice(tokens, (1, tokens.len()), &Device::Cpu).unwrap();
    decoder.logits(&ids).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn logits_match_transformers() {
    for (model, file) in [
        ("tiny_llama", "tiny_llama/expected.safetensors"),
        ("tiny_llama/tiny_llama.gguf", "tiny_llama/expected.safetensors"),
        ("tiny_llama_tied", "tiny_llama_tied/expected.safetensors"),
    ] {
        let (target, expected) = (target(model), expected(file));
        let error = relative_error(&logits(&decoder(&target), &expected.tokens), &expected.logits);
        // The GGUF holds some tensors in half precision.
        let limit = if model.ends_with("gguf") { 5e-3 } else { 1e-4 };
        assert!(error < limit, "{model}: relative error {error:e}");
    }
}

#[test]
fn llama3_rope_scaling_matches_transformers() {
    let mut target = target("tiny_llama_tied");
    let config = std::fs::read(path("tiny_llama_tied/config_llama3_rope.json")).unwrap();
    target.config = draft_adapter::model::ModelConfig::from_json(&config).unwrap();
    let expected = expected("tiny_llama_tied/expected_llama3_rope.safetensors");
    let error = relative_error(&logits(&decoder(&target), &expected.tokens), &expected.logits);
    assert!(error < 1e-4, "relative error {error:e}");
}

#[test]
fn the_runtime_agrees_with_transformers_up_to_quantisation() {
    for model in ["tiny_llama", "tiny_llama_tied"] {
        let (target, expected) =
            (target(model), expected(&format!("{model}/expected.safetensors")));
        let runtime = Runtime::load(&target.config, &target.weights).unwrap();
        let mut cache = KvCache::new(&target.config);
        let mut segments =
            [Segment { tokens: &expected.tokens, cache: &mut cache, logits: LogitsOf::All }];
        let error = relative_error(&runtime.forward(&mut segments).unwrap(), &expected.logits);
        // Two roundings to 8 bits a product, over only 64 channels: a few per cent at most.
        assert!(error < 0.05, "{model}: relative error {error:e}");
    }
}

/// The invariant that makes speculative output equal to plain output.
#[test]
fn a_row_does_not_depend_on_its_batch() {
    let target = target("tiny_llama");
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let tokens = expected("tiny_llama/expected.safetensors").tokens;
    let vocab = target.config.vocab_size;

    let mut cache = KvCache::new(&target.config);
    let mut alone = Vec::new();
    for token in &tokens {
        let mut segment = [Segment {
            tokens: std::slice::from_ref(token),
            cache: &mut cache,
            logits: LogitsOf::Last,
        }];
        alone.extend(runtime.forward(&mut segment).unwrap());
    }

    // All at once, beside another sequence, after a detour that is rolled back.
    let (mut first, mut second) = (KvCache::new(&target.config), KvCache::new(&target.config));
    let detour = [7, 7, 7, 7, 7];
    let (head, tail) = tokens.split_at(3);
    let mut run = |tokens: &[u32], cache: &mut KvCache| {
        let other = [5u32, 6];
        second.truncate(0);
        let mut segments = [
            Segment { tokens: &other, cache: &mut second, logits: LogitsOf::None },
            Segment { tokens, cache, logits: LogitsOf::All },
        ];
        runtime.forward(&mut segments).unwrap()
    };
    let mut together = run(head, &mut first);
    run(&detour, &mut first);
    first.truncate(head.len());
    together.extend(run(tail, &mut first));

    assert_eq!(together.len(), tokens.len() * vocab);
    let same = together.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
    assert!(same, "batched logits differ from those of single steps");
}

#[test]
fn bad_input_leaves_the_cache_alone() {
    let target = target("tiny_llama");
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let mut cache = KvCache::new(&target.config);
    for tokens in [vec![u32::MAX], vec![1; target.config.max_position_embeddings + 1]] {
        let mut segment = [Segment { tokens: &tokens, cache: &mut cache, logits: LogitsOf::Last }];
        assert!(runtime.forward(&mut segment).is_err());
        assert_eq!(cache.len(), 0);
    }
}

/// candle drops gradients silently where an operation lacks a backward; this would show it.
#[test]
fn gradients_match_finite_differences() {
    let target = target("tiny_llama");
    let tokens = expected("tiny_llama/expected.safetensors").tokens;
    let ids = Tensor::from_slice(&tokens, (1, tokens.len()), &Device::Cpu).unwrap();
    let weights = decoder(&target).tensors();
    // A fixed random projection of the logits as the loss, so that every logit matters.
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let count = tokens.len() * target.config.vocab_size;
    let random: Vec<f32> = (0..count).map(|_| rng.random_range(-1.0..1.0)).collect();
    let shape = (1, tokens.len(), target.config.vocab_size);
    let random = Tensor::from_vec(random, shape, &Device::Cpu).unwrap();
    let loss = |decoder: &Decoder| (decoder.logits(&ids).unwrap() * &random).unwrap().sum_all();
    for (name, tensor) in &weights {
        let var = Var::from_tensor(tensor).unwrap();
        let with = |tensor: &Tensor| {
            Decoder::new(&target.config, |other| {
                Ok::<_, ()>(if other == name { tensor.clone() } else { weights[other].clone() })
            })
            .unwrap()
        };
        let store = loss(&with(var.as_tensor())).unwrap().backward().unwrap();
        let gradient = store.get(&var).unwrap_or_else(|| panic!("{name} has no gradient"));
        let norm = gradient.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt();
        assert!(norm > 0.0 && norm.is_finite(), "{name}: gradient norm {norm}");
        // Along the gradient the loss must change by step * norm.
        let step = 2e-3f64;
        let direction = (gradient * (step / f64::from(norm))).unwrap();
        let up = loss(&with(&(tensor + &direction).unwrap())).unwrap();
        let down = loss(&with(&(tensor - &direction).unwrap())).unwrap();
        let change = (up - down).unwrap().to_scalar::<f32>().unwrap();
        let numeric = f64::from(change) / (2.0 * step);
        let error = (numeric / f64::from(norm) - 1.0).abs();
        assert!(error < 0.02, "{name}: gradient {norm}, numeric {numeric}");
    }
}
