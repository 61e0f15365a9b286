//! GGUF metadata as the `config.json` that the same model would have on the hub.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::header::{Header, Metadata};
use crate::hub::HubError;
use crate::model::ModelConfig;
use crate::model::config::{ConfigError, RopeScaling, architecture};

/// Parameters of Llama 3's rope scaling in published models: factor, low and high frequency
/// factor, original context. A GGUF file has only the divisors that follow from them.
const LLAMA3_SCALINGS: [(f64, f64, f64, usize); 2] =
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)];

pub(super) fn read(
    header: &Header,
    path: &Path,
    rope_factors: Option<Vec<f32>>,
) -> Result<ModelConfig, HubError> {
    let document = document(header, rope_factors)
        .map_err(|source| HubError::Config { path: path.to_path_buf(), source })?;
    ModelConfig::from_map(document)
        .map_err(|source| HubError::Config { path: path.to_path_buf(), source })
}

fn document(
    header: &Header,
    rope_factors: Option<Vec<f32>>,
) -> Result<Map<String, Value>, ConfigError> {
    let metadata = &header.metadata;
    let name =
        metadata.text("general.architecture").ok_or_else(|| missing("general.architecture"))?;
    let experts = metadata.unsigned("llama.expert_count").unwrap_or(0);
    if experts > 0 {
        return Err(architecture::refuse_experts(name, experts));
    }
    if name != "llama" {
        return Err(architecture::refuse(name));
    }
    let hidden_size = unsigned(metadata, "llama.embedding_length")?;
    let heads = unsigned(metadata, "llama.attention.head_count")?;
    let key_value_heads = match metadata.get("llama.attention.head_count_kv") {
        None => heads,
        Some(_) => unsigned(metadata, "llama.attention.head_count_kv")?,
    };
    let head_dim = match metadata.unsigned("llama.attention.key_length") {
        Some(length) => length,
        None => {
            hidden_size.checked_div(heads).ok_or_else(|| missing("llama.attention.head_count"))?
        }
    };
    check_head(metadata, head_dim)?;
    let vocabulary = vocabulary_size(header)?;
    let theta = metadata.float("llama.rope.freq_base").unwrap_or(10_000.0);
    let mut document = Map::new();
    let mut put = |key: &str, value: Value| document.insert(key.to_string(), value);
    put("architectures", json!(["LlamaForCausalLM"]));
    put("attention_bias", json!(false));
    put("bos_token_id", json!(metadata.unsigned("tokenizer.ggml.bos_token_id")));
    put("eos_token_id", eos(metadata));
    put("head_dim", json!(head_dim));
    put("hidden_act", json!("silu"));
    put("hidden_size", json!(hidden_size));
    put("intermediate_size", json!(unsigned(metadata, "llama.feed_forward_length")?));
    put("max_position_embeddings", json!(unsigned(metadata, "llama.context_length")?));
    put("mlp_bias", json!(false));
    put("model_type", json!("llama"));
    put("num_attention_heads", json!(heads));
    put("num_hidden_layers", json!(unsigned(metadata, "llama.block_count")?));
    put("num_key_value_heads", json!(key_value_heads));
    put("pad_token_id", json!(metadata.unsigned("tokenizer.ggml.padding_token_id")));
    let eps = metadata.float("llama.attention.layer_norm_rms_epsilon");
    put(
        "rms_norm_eps",
        json!(eps.ok_or_else(|| missing("llama.attention.layer_norm_rms_epsilon"))?),
    );
    put("rope_scaling", rope_scaling(metadata, rope_factors, theta, head_dim)?);
    put("rope_theta", json!(theta));
    let untied = header.tensors.iter().any(|tensor| tensor.name == "output.weight");
    put("tie_word_embeddings", json!(!untied));
    put("vocab_size", json!(vocabulary));
    Ok(document)
}

/// The rows of the embedding decide: the metadata key is optional, and the token list may be
/// shorter than a padded table.
fn vocabulary_size(header: &Header) -> Result<u64, ConfigError> {
    let table = header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
    match table.and_then(|table| table.shape.first()) {
        Some(rows) => Ok(*rows as u64),
        None => Err(ConfigError::MissingTensor {
            name: "token_embd.weight".to_string(),
            expected: "a matrix of one row for each token".to_string(),
        }),
    }
}

fn check_head(metadata: &Metadata, head_dim: u64) -> Result<(), ConfigError> {
    let rotated = metadata.unsigned("llama.rope.dimension_count").unwrap_or(head_dim);
    let value = metadata.unsigned("llama.attention.value_length").unwrap_or(head_dim);
    if rotated != head_dim {
        return Err(ConfigError::Unsupported {
            what: format!("partial rotary embedding ({rotated} of {head_dim} dimensions)"),
            hint: "this version rotates whole heads, as Llama does".to_string(),
        });
    }
    if value != head_dim {
        return Err(ConfigError::Unsupported {
            what: format!("value heads of {value} beside key heads of {head_dim}"),
            hint: "this version reads models whose heads have one size".to_string(),
        });
    }
    Ok(())
}

/// Ids that end a generation: llama.cpp also stops at the end of a turn.
fn eos(metadata: &Metadata) -> Value {
    let mut ids: Vec<u64> = Vec::new();
    for key in ["eos_token_id", "eot_token_id"] {
        if let Some(id) = metadata.unsigned(&format!("tokenizer.ggml.{key}"))
            && !ids.contains(&id)
        {
            ids.push(id);
        }
    }
    match ids.as_slice() {
        [] => Value::Null,
        [id] => json!(id),
        _ => json!(ids),
    }
}

fn rope_scaling(
    metadata: &Metadata,
    factors: Option<Vec<f32>>,
    theta: f64,
    head_dim: u64,
) -> Result<Value, ConfigError> {
    let kind = metadata.text("llama.rope.scaling.type").unwrap_or("none");
    match (kind, factors) {
        ("none", None) => Ok(Value::Null),
        ("none", Some(factors)) => llama3_scaling(&factors, theta, head_dim),
        ("linear", None) => {
            let factor = metadata.float("llama.rope.scaling.factor");
            let factor = factor.ok_or_else(|| missing("llama.rope.scaling.factor"))?;
            Ok(json!({"rope_type": "linear", "factor": factor}))
        }
        (other, _) => Err(ConfigError::rope_scaling(other)),
    }
}

/// Finds the published parameters whose divisors are those of the file.
fn llama3_scaling(factors: &[f32], theta: f64, head_dim: u64) -> Result<Value, ConfigError> {
    for (factor, low, high, original) in LLAMA3_SCALINGS {
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        };
        let matches = factors.iter().enumerate().all(|(pair, divisor)| {
            let frequency = theta.powf(-2.0 * pair as f64 / head_dim as f64);
            let expected = frequency / scaling.scale(frequency);
            (f64::from(*divisor) / expected - 1.0).abs() < 1e-3
        });
        if matches && factors.len() as u64 == head_dim / 2 {
            return Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }));
        }
    }
    Err(ConfigError::Unsupported {
        what: "rope scaling by the divisors of tensor rope_freqs.weight".to_string(),
        hint: "they are not those of a published Llama 3; use the Hugging Face folder of this \
               model, whose config.json names the scaling"
            .to_string(),
    })
}

fn unsigned(metadata: &Metadata, key: &str) -> Result<u64, ConfigError> {
    match metadata.get(key) {
        None => Err(missing(key)),
        Some(value) => metadata.unsigned(key).ok_or_else(|| ConfigError::WrongType {
            key: key.to_string(),
            expected: "one whole number".to_string(),
            got: crate::hub::shorten(&format!("{value:?}")),
        }),
    }
}

fn missing(key: &str) -> ConfigError {
    ConfigError::Missing { key: key.to_string() }
}
