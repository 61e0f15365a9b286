//! Opening targets: folders, shards, GGUF files; and what is said about those that do not open.
#![allow(clippy::unwrap_used)] // helpers of tests may stop the test

#[path = "support/golden.rs"]
mod golden;

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::Device;
use draft_adapter::hub::{HubError, Target};
use draft_adapter::model::manifest::sha256_file;
use serde_json::{Value, json};

/// A copy of a golden folder that a test may damage.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden::path(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn open(path: &Path) -> Result<Target, HubError> {
    Target::open(path.to_str().unwrap())
}

/// The message of the refusal; the test fails when the model opens.
fn refusal(path: &Path) -> String {
    match open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    }
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    assert!(message.contains("\nhint: "), "{message:?} gives no way out");
}

fn edit_config(folder: &Path, change: impl FnOnce(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let Value::Object(fields) = &mut config else { panic!("config is an object") };
    change(fields);
    std::fs::write(&path, config.to_string()).unwrap();
}

fn values(target: &Target, name: &str) -> Vec<f32> {
    let tensor = target.weights.tensor(name, &Device::Cpu).unwrap();
    assert_eq!(tensor.dims(), target.weights.shape(name).unwrap());
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Rewrites `model.safetensors` of a folder as two shards with an index.
fn split_into_shards(folder: &Path) {
    let single = folder.join("model.safetensors");
    let bytes = std::fs::read(&single).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut map = BTreeMap::new();
    for shard in 0..2 {
        let file = format!("model-0000{}-of-00002.safetensors", shard + 1);
        let part: Vec<_> = tensors.tensors().into_iter().skip(shard).step_by(2).collect::<Vec<_>>();
        map.extend(part.iter().map(|(name, _)| (name.clone(), file.clone())));
        let metadata = Some([("format".to_string(), "pt".to_string())].into());
        safetensors::serialize_to_file(part, metadata, &folder.join(file)).unwrap();
    }
    let index = json!({"metadata": {"total_size": bytes.len()}, "weight_map": map});
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
    std::fs::remove_file(single).unwrap();
}

#[test]
fn gguf_and_folder_hold_the_same_tensors() {
    let folder = golden::target("tiny_llama");
    let gguf = golden::target("tiny_llama/tiny_llama.gguf");
    assert_eq!(gguf.weights.names(), folder.weights.names());
    for name in folder.weights.names() {
        assert_eq!(gguf.weights.shape(&name), folder.weights.shape(&name), "{name}");
        assert_eq!(values(&gguf, &name), values(&folder, &name), "{name}");
    }
    let stored = |target: &Target| target.weights.stored_as("lm_head.weight").unwrap();
    assert_eq!((stored(&folder), stored(&gguf)), ("f32".to_string(), "bf16".to_string()));
}

#[test]
fn gguf_and_folder_have_the_same_configuration() {
    let mut folder = golden::target("tiny_llama").config;
    let mut gguf = golden::target("tiny_llama/tiny_llama.gguf").config;
    // generation_config.json of the folder adds an id; GGUF has no place for it.
    assert_eq!(folder.eos_token_ids, [2, 0]);
    assert_eq!(gguf.eos_token_ids, [2]);
    folder.eos_token_ids = gguf.eos_token_ids.clone();
    folder.raw.clear();
    gguf.raw.clear();
    assert_eq!(gguf, folder);
    assert_eq!((folder.head_dim, folder.query_size(), folder.hidden_size), (16, 64, 32));
}

#[test]
fn parameters_are_counted_as_stored() {
    for name in ["tiny_llama", "tiny_llama_tied"] {
        let target = golden::target(name);
        let names = target.weights.names();
        let stored: usize = names
            .iter()
            .map(|name| target.weights.shape(name).unwrap().iter().product::<usize>())
            .sum();
        assert_eq!(target.config.parameters(), stored, "{name}");
    }
}

#[test]
fn gguf_and_folder_tokenize_as_transformers_does() {
    let expected: Value = serde_json::from_slice(
        &std::fs::read(golden::path("tiny_llama/expected_text.json")).unwrap(),
    )
    .unwrap();
    for name in ["tiny_llama", "tiny_llama/tiny_llama.gguf"] {
        let target = golden::target(name);
        for case in expected["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let ids = target.tokenizer.encode(text, false).unwrap();
            assert_eq!(json!(ids), case["ids"], "{name}: {text:?}");
            assert_eq!(target.tokenizer.decode(&ids, false).unwrap(), text);
        }
        let chat = target.chat_template.unwrap();
        let text = chat.render(&expected["messages"], None, true).unwrap();
        assert_eq!(json!(text), expected["chat"], "{name}");
        assert_eq!(json!(target.tokenizer.encode(&text, false).unwrap()), expected["chat_ids"]);
    }
}

#[test]
fn shards_hold_what_the_single_file_held() {
    let folder = copy("tiny_llama");
    split_into_shards(folder.path());
    let (shards, single) = (open(folder.path()).unwrap(), golden::target("tiny_llama"));
    assert_eq!(shards.weights.names(), single.weights.names());
    assert_eq!(shards.weights.files().len(), 2);
    for name in single.weights.names() {
        assert_eq!(values(&shards, &name), values(&single, &name), "{name}");
    }
    assert_ne!(shards.hash().unwrap(), single.hash().unwrap());
}

#[test]
fn hash_of_one_file_is_its_sha256() {
    let expected = sha256_file(&golden::path("tiny_llama/model.safetensors")).unwrap();
    assert_eq!(golden::target("tiny_llama").hash().unwrap(), expected);
}

#[test]
fn companions_are_the_targets_files_byte_for_byte() {
    let target = golden::target("tiny_llama");
    let names: Vec<_> = target.companions.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]);
    for (name, content) in &target.companions {
        let file = std::fs::read(golden::path("tiny_llama").join(name)).unwrap();
        assert!(*content == file, "{name} differs");
    }
}

#[test]
fn companions_of_a_gguf_open_as_a_folder() {
    let gguf = golden::target("tiny_llama/tiny_llama.gguf");
    let folder = copy("tiny_llama");
    for (name, content) in &gguf.companions {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    std::fs::write(folder.path().join("config.json"), json!(gguf.config.raw).to_string()).unwrap();
    let again = open(folder.path()).unwrap();
    assert_eq!(again.config, gguf.config);
    let text = "the train <|im_end|> 12";
    let ids = |target: &Target| target.tokenizer.encode(text, false).unwrap();
    assert_eq!(ids(&again), ids(&gguf));
    assert!(again.chat_template.is_some());
}

#[test]
fn missing_shard_is_named() {
    let folder = copy("tiny_llama");
    split_into_shards(folder.path());
    std::fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert_says(&refusal(folder.path()), &["model-00002-of-00002.safetensors", "has no"]);
}

#[test]
fn index_that_lists_a_tensor_its_shard_lacks_is_refused() {
    let folder = copy("tiny_llama");
    split_into_shards(folder.path());
    let path = folder.path().join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index["weight_map"]["model.extra.weight"] = json!("model-00001-of-00002.safetensors");
    std::fs::write(&path, index.to_string()).unwrap();
    assert_says(&refusal(folder.path()), &["model-00001-of-00002", "model.extra.weight"]);
    index["weight_map"]["model.extra.weight"] = json!("../elsewhere.safetensors");
    std::fs::write(&path, index.to_string()).unwrap();
    assert_says(&refusal(folder.path()), &["model.extra.weight", "../elsewhere"]);
}

#[test]
fn truncated_and_corrupt_safetensors_are_named() {
    let folder = copy("tiny_llama");
    let path = folder.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    assert_says(&refusal(folder.path()), &["model.safetensors is damaged", "size"]);
    std::fs::write(&path, &whole[..100]).unwrap();
    assert_says(&refusal(folder.path()), &["model.safetensors is damaged", "100 bytes"]);
    std::fs::write(&path, b"").unwrap();
    assert_says(&refusal(folder.path()), &["model.safetensors is damaged", "empty"]);
    let mut corrupt = whole.clone();
    corrupt[8] = b'x';
    std::fs::write(&path, &corrupt).unwrap();
    assert_says(&refusal(folder.path()), &["model.safetensors is damaged", "header"]);
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    std::fs::write(&path, pointer).unwrap();
    assert_says(&refusal(folder.path()), &["Git LFS pointer"]);
}

#[test]
fn truncated_and_foreign_gguf_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let whole = std::fs::read(golden::path("tiny_llama/tiny_llama.gguf")).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 64]).unwrap();
    assert_says(&refusal(&path), &["model.gguf is damaged", "tensor ", "bytes"]);
    std::fs::write(&path, &whole[..1000]).unwrap();
    assert_says(&refusal(&path), &["model.gguf is damaged", "ends early"]);
    std::fs::write(&path, b"PK\x03\x04 and so on").unwrap();
    assert_says(&refusal(&path), &["not a GGUF file"]);
    let mut old = whole;
    old[4] = 1;
    std::fs::write(&path, &old).unwrap();
    assert_says(&refusal(&path), &["GGUF version 1"]);
}

#[test]
fn configuration_that_contradicts_the_weights_names_the_tensor() {
    let cases = [
        ("num_key_value_heads", json!(4), "k_proj.weight"),
        ("head_dim", json!(8), "q_proj.weight"),
        ("vocab_size", json!(300), "embed_tokens.weight"),
        ("intermediate_size", json!(48), "gate_proj.weight"),
        ("num_hidden_layers", json!(4), "model.layers.3."),
        ("num_hidden_layers", json!(2), "model.layers.2."),
        ("hidden_size", json!(64), "embed_tokens.weight"),
    ];
    for (key, value, tensor) in cases {
        let folder = copy("tiny_llama");
        edit_config(folder.path(), |config| {
            config.insert(key.to_string(), value);
        });
        assert_says(&refusal(folder.path()), &[tensor, "not of the same model"]);
    }
    let folder = copy("tiny_llama_tied");
    edit_config(folder.path(), |config| {
        config.remove("tie_word_embeddings");
    });
    assert_says(&refusal(folder.path()), &["lm_head.weight", "missing"]);
}

#[test]
fn quantised_checkpoints_are_refused_by_their_tensors_too() {
    let folder = copy("tiny_llama");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let mut tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap().tensors();
    let scale = [0u8; 4];
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1], &scale);
    let name = "model.layers.0.self_attn.q_proj.weight_scale_inv".to_string();
    tensors.push((name, view.unwrap()));
    let changed = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(&path, changed).unwrap();
    assert_says(&refusal(folder.path()), &["weight_scale_inv", "unquantised"]);
}

#[test]
fn folder_that_lacks_a_file_says_which() {
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = copy("tiny_llama");
        std::fs::remove_file(folder.path().join(name)).unwrap();
        assert_says(&refusal(folder.path()), &["has no", name]);
    }
    let folder = copy("tiny_llama");
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    std::fs::write(folder.path().join("tokenizer.model"), b"x").unwrap();
    assert_says(&refusal(folder.path()), &["SentencePiece", "save_pretrained"]);
}

#[test]
fn unknown_names_are_explained() {
    for spec in ["no-such-model", "/no/such/folder", "./none.gguf", ""] {
        assert_says(&refusal(Path::new(spec)), &["neither a path"]);
    }
}

#[test]
fn template_beside_the_settings_wins() {
    let folder = copy("tiny_llama");
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ eos_token }}!").unwrap();
    let target = open(folder.path()).unwrap();
    let text = target.chat_template.unwrap().render(&json!([]), None, false).unwrap();
    assert_eq!(text, "<|im_end|>!");
    assert!(target.companions.iter().any(|(name, _)| name == "chat_template.jinja"));
}

#[test]
fn template_may_be_one_of_several_or_none() {
    let folder = copy("tiny_llama");
    let path = folder.path().join("tokenizer_config.json");
    let named = json!([
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]);
    std::fs::write(&path, json!({"chat_template": named}).to_string()).unwrap();
    let chat = open(folder.path()).unwrap().chat_template.unwrap();
    assert_eq!(chat.render(&json!([]), None, false).unwrap(), "plain");
    std::fs::write(&path, "{}").unwrap();
    assert!(open(folder.path()).unwrap().chat_template.is_none());
    std::fs::write(&path, r#"{"chat_template": "{% if %}"}"#).unwrap();
    assert_says(&refusal(folder.path()), &["tokenizer_config.json", "does not compile"]);
}
