//! Models that hold a text model beside others: the text model is taken, or what is missing is said.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use std::collections::HashMap;
use std::path::Path;

use candle_core::{Device, Tensor};
use draft_adapter::hub::{HubError, Target};
use draft_adapter::model::decoder::Decoder;
use golden::{expected, path, relative_error};
use serde_json::{Value, json};

/// A wrapper around the tiny Llama; `rename` gives the text model's tensors their outer names.
fn wrap(folder: &Path, text_config: Value, rename: impl Fn(&str) -> String) {
    let source = path("tiny_llama");
    let tensors = candle_core::safetensors::load(source.join("model.safetensors"), &Device::Cpu);
    let mut outer: HashMap<String, Tensor> =
        tensors.unwrap().into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
    let patch = Tensor::zeros((4, 4), candle_core::DType::F32, &Device::Cpu).unwrap();
    outer.insert("vision_tower.patch.weight".into(), patch.clone());
    outer.insert("multi_modal_projector.linear.weight".into(), patch);
    candle_core::safetensors::save(&outer, folder.join("model.safetensors")).unwrap();
    std::fs::copy(source.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let config = json!({
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text_config,
        "vision_config": {"hidden_size": 4},
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

fn text_config() -> Value {
    let text = std::fs::read_to_string(path("tiny_llama/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config.as_object_mut().unwrap().remove("architectures");
    config
}

#[test]
fn the_text_model_is_taken_out_of_either_layout() {
    let golden = expected("tiny_llama/expected.safetensors");
    let layouts: [fn(&str) -> String; 2] = [
        |name| format!("language_model.{name}"),
        |name| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name.to_string(),
        },
    ];
    for rename in layouts {
        let folder = tempfile::tempdir().unwrap();
        wrap(folder.path(), text_config(), rename);
        let target = Target::open(folder.path().to_str().unwrap()).unwrap();
        let decoder =
            Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
        let shape = (1, golden.tokens.len());
        let ids = Tensor::from_slice(&golden.tokens, shape, &Device::Cpu).unwrap();
        let logits = decoder.logits(&ids).unwrap().flatten_all().unwrap();
        let error = relative_error(&logits.to_vec1().unwrap(), &golden.logits);
        assert!(error < 1e-4, "relative error {error:e}");
        assert!(target.weights.names().iter().all(|name| !name.contains("vision")));
    }
}

#[test]
fn a_text_model_of_another_kind_is_named() {
    for (text_type, named) in [("deepseek_v2", "deepseek_v2"), ("qwen3_moe", "qwen3_moe")] {
        let folder = tempfile::tempdir().unwrap();
        let mut config = text_config();
        config["model_type"] = text_type.into();
        wrap(folder.path(), config, |name| format!("language_model.{name}"));
        let error = Target::open(folder.path().to_str().unwrap()).err().unwrap();
        let said = error.to_string();
        assert!(matches!(error, HubError::Config { .. }) && said.contains(named), "{said}");
        assert!(said.contains("multimodal"), "{said}");
    }
}

/// Experts inside the text model are refused like those outside of one.
#[test]
fn experts_inside_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = text_config();
    config["num_local_experts"] = 8.into();
    wrap(folder.path(), config, |name| format!("language_model.{name}"));
    let said = Target::open(folder.path().to_str().unwrap()).err().unwrap().to_string();
    assert!(said.contains("8 experts"), "{said}");
}
