//! A real model file: SmolLM2-135M-Instruct, where `DA_TEST_GGUF` says it lies.
#![allow(clippy::unwrap_used, clippy::print_stderr)] // helpers may stop a test, or say it is skipped

use candle_core::{Device, Tensor};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::kv_cache::KvCache;
use draft_adapter::model::runtime::{LogitsOf, Runtime, Segment};
use serde_json::json;

/// Opens the real file; none, with a message, where the variable is not set.
fn target() -> Option<Target> {
    let Ok(path) = std::env::var("DA_TEST_GGUF") else {
        eprintln!("skipped: set DA_TEST_GGUF to SmolLM2-135M-Instruct.Q4_1.gguf");
        return None;
    };
    Some(Target::open(&path).unwrap())
}

#[test]
fn configuration_is_that_of_the_hub() {
    let Some(target) = target() else { return };
    let config = &target.config;
    assert_eq!(config.family.architecture(), "LlamaForCausalLM");
    assert_eq!((config.vocab_size, config.hidden_size), (49152, 576));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads), (9, 3));
    assert_eq!((config.head_dim, config.num_hidden_layers), (64, 30));
    assert_eq!((config.rope_theta, config.norm_eps), (100_000.0, 1e-5));
    assert!(config.tie_word_embeddings);
    assert_eq!(config.bos_token_id, Some(1));
    assert_eq!(config.eos_token_ids, [2]);
    assert_eq!(config.parameters(), 134_515_008);
}

#[test]
fn every_tensor_is_there_and_finite() {
    let Some(target) = target() else { return };
    assert_eq!(target.weights.names().len(), 272);
    for name in ["model.embed_tokens.weight", "model.layers.29.self_attn.k_proj.weight"] {
        let tensor = target.weights.tensor(name, &Device::Cpu).unwrap();
        assert_eq!(Some(tensor.dims().to_vec()), target.weights.shape(name));
        let sum = tensor.abs().unwrap().mean_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(sum > 1e-3 && sum < 1.0, "{name}: mean magnitude {sum}");
    }
}

#[test]
fn text_and_chat_are_those_of_transformers() {
    let Some(target) = target() else { return };
    // python: AutoTokenizer.from_pretrained(folder, gguf_file=…).encode(text), transformers 5.24
    let text = "Hello world! 123 naïve\n\n  x";
    let ids = target.tokenizer.encode(text, false).unwrap();
    assert_eq!(ids, [19556, 905, 17, 216, 33, 34, 35, 15486, 46494, 8866, 1792]);
    assert_eq!(target.tokenizer.decode(&ids, false).unwrap(), text);
    let special = target.tokenizer.encode("<|im_start|>user\n", false).unwrap();
    assert_eq!(special[0], 1);
    assert!(target.tokenizer.is_special(2));
    assert_eq!(target.tokenizer.token_id("<|im_end|>"), Some(2));
    let chat = target.chat_template.unwrap();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    assert_eq!(
        chat.render(&messages, None, true).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
         Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
}

fn question(target: &Target) -> Vec<u32> {
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let text = target.chat_template.as_ref().unwrap().render(&messages, None, true).unwrap();
    target.tokenizer.encode(&text, false).unwrap()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

/// `(rows, vocab)` in f32.
fn decoder_logprobs(target: &Target, ids: &[u32]) -> Vec<Vec<f64>> {
    let decoder = Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu));
    let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
    let logits = decoder.unwrap().logits(&ids).unwrap().squeeze(0).unwrap();
    logits.to_vec2::<f32>().unwrap().iter().map(|row| log_softmax(row)).collect()
}

/// Values from transformers, in f32: `tests/golden/real_gguf.py`.
#[test]
fn next_token_distribution_is_that_of_transformers() {
    let Some(target) = target() else { return };
    let rows = decoder_logprobs(&target, &question(&target));
    let last = rows.last().unwrap();
    let golden =
        [(504, -1.8827), (60, -1.9648), (15319, -2.2657), (2219, -2.8064), (7026, -2.8935)];
    for (id, want) in golden {
        assert!((last[id] - want).abs() < 1e-3, "token {id}: {} instead of {want}", last[id]);
    }
}

/// The serving form rounds weights and activations to eight bits; that must stay small against
/// what distinguishes one draft from another.
#[test]
fn eight_bits_change_the_distribution_little() {
    let Some(target) = target() else { return };
    let text = "Plants make sugar from light, water and carbon dioxide. The light is caught by \
                chlorophyll, which is why leaves are green, and the sugar feeds the whole plant.";
    let mut ids = question(&target);
    ids.extend(target.tokenizer.encode(text, false).unwrap());
    let want = decoder_logprobs(&target, &ids);
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let mut cache = KvCache::new(&target.config);
    let segment = Segment { tokens: &ids, cache: &mut cache, logits: LogitsOf::All };
    let logits = runtime.forward(&mut [segment]).unwrap();
    let got = logits.chunks(target.config.vocab_size).map(log_softmax);
    let divergence: f64 = got
        .zip(&want)
        .map(|(got, want)| {
            got.iter().zip(want).map(|(got, want)| want.exp() * (want - got)).sum::<f64>()
        })
        .sum();
    let mean = divergence / ids.len() as f64;
    eprintln!("mean divergence {mean:.5} nats over {} positions", ids.len());
    assert!(mean < 0.02, "mean divergence of {mean} nats");
}
