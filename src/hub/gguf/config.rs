//! GGUF metadata as the `config.json` that the same model would have on the hub.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::header::{Header, Metadata};
use crate::hub::HubError;
use crate::model::config::{ConfigError, RopeScaling, architecture};
use crate::model::{Family, ModelConfig};

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
    let Some(family) = Family::of_model_type(name).filter(|family| *family != Family::Mistral)
    else {
        return Err(architecture::refuse(name));
    };
    let keys = Prefixed { metadata, prefix: name };
    let experts = keys.optional("expert_count").unwrap_or(0);
    if experts > 0 {
        return Err(architecture::refuse_experts(name, experts));
    }
    let hidden_size = keys.unsigned("embedding_length")?;
    let heads = keys.unsigned("attention.head_count")?;
    let key_value_heads = match metadata.get(&keys.name("attention.head_count_kv")) {
        None => heads,
        Some(_) => keys.unsigned("attention.head_count_kv")?,
    };
    let head_dim = match keys.optional("attention.key_length") {
        Some(length) => length,
        None => hidden_size
            .checked_div(heads)
            .ok_or_else(|| missing(&keys.name("attention.head_count")))?,
    };
    let rotated = check_head(&keys, family, head_dim)?;
    let theta = keys.float("rope.freq_base").unwrap_or(10_000.0);
    let mut document = Map::new();
    let mut put = |key: &str, value: Value| document.insert(key.to_string(), value);
    put("architectures", json!([family.architecture()]));
    put("bos_token_id", json!(metadata.unsigned("tokenizer.ggml.bos_token_id")));
    put("eos_token_id", eos(metadata));
    if !matches!(family, Family::Qwen2 | Family::StableLm) {
        put("head_dim", json!(head_dim));
    }
    put("hidden_size", json!(hidden_size));
    put("intermediate_size", json!(keys.unsigned("feed_forward_length")?));
    put("max_position_embeddings", json!(keys.unsigned("context_length")?));
    put("model_type", json!(family.model_type()));
    put("num_attention_heads", json!(heads));
    put("num_hidden_layers", json!(keys.unsigned("block_count")?));
    put("num_key_value_heads", json!(key_value_heads));
    put("pad_token_id", json!(metadata.unsigned("tokenizer.ggml.padding_token_id")));
    let eps_key = match family {
        Family::StableLm => "attention.layer_norm_epsilon",
        _ => "attention.layer_norm_rms_epsilon",
    };
    let eps = keys.float(eps_key).ok_or_else(|| missing(&keys.name(eps_key)))?;
    put(family.norm_eps_key(), json!(eps));
    put("rope_scaling", rope_scaling(&keys, rope_factors, theta, head_dim)?);
    put("rope_theta", json!(theta));
    let has = |name: &str| header.tensors.iter().any(|tensor| tensor.name == name);
    put("tie_word_embeddings", json!(!has("output.weight")));
    put("vocab_size", json!(vocabulary_size(header)?));
    match family {
        Family::Gemma2 => {
            put("hidden_activation", json!("gelu_pytorch_tanh"));
            put("attn_logit_softcapping", json!(keys.float("attn_logit_softcapping")));
            put("final_logit_softcapping", json!(keys.float("final_logit_softcapping")));
            put("sliding_window", json!(keys.unsigned("attention.sliding_window")?));
            // llama.cpp keeps no such key and derives it as the published models do: by head,
            // except that the 27B divides the hidden size by its heads.
            let layers = keys.unsigned("block_count")?;
            let scalar = if layers == 46 { hidden_size / heads } else { head_dim };
            put("query_pre_attn_scalar", json!(scalar));
        }
        Family::StableLm => {
            put("hidden_act", json!("silu"));
            put("use_qkv_bias", json!(has("blk.0.attn_q.bias")));
            put("partial_rotary_factor", json!(rotated as f64 / head_dim as f64));
            let parallel = metadata.flag(&keys.name("use_parallel_residual")).unwrap_or(false);
            // llama.cpp tells by the second norm, which parallel blocks lack.
            put("use_parallel_residual", json!(parallel && !has("blk.0.ffn_norm.weight")));
            put("qk_layernorm", json!(has("blk.0.attn_q_norm.weight")));
        }
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => {
            put("hidden_act", json!("silu"));
            put("attention_bias", json!(has("blk.0.attn_q.bias") && family != Family::Qwen2));
            put("mlp_bias", json!(has("blk.0.ffn_gate.bias")));
        }
    }
    Ok(document)
}

/// Metadata keys of one architecture.
struct Prefixed<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
}

impl Prefixed<'_> {
    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    fn optional(&self, key: &str) -> Option<u64> {
        self.metadata.unsigned(&self.name(key))
    }

    fn float(&self, key: &str) -> Option<f64> {
        self.metadata.float(&self.name(key))
    }

    fn unsigned(&self, key: &str) -> Result<u64, ConfigError> {
        unsigned(self.metadata, &self.name(key))
    }
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

/// Dimensions of each head that are rotated, when this version can rotate them.
fn check_head(keys: &Prefixed<'_>, family: Family, head_dim: u64) -> Result<u64, ConfigError> {
    let rotated = keys.optional("rope.dimension_count").unwrap_or(head_dim);
    let value = keys.optional("attention.value_length").unwrap_or(head_dim);
    if rotated != head_dim && family != Family::StableLm {
        return Err(ConfigError::Unsupported {
            what: format!("partial rotary embedding ({rotated} of {head_dim} dimensions)"),
            hint: "models of this family rotate whole heads".to_string(),
        });
    }
    if value != head_dim {
        return Err(ConfigError::Unsupported {
            what: format!("value heads of {value} beside key heads of {head_dim}"),
            hint: "this version reads models whose heads have one size".to_string(),
        });
    }
    Ok(rotated)
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
    keys: &Prefixed<'_>,
    factors: Option<Vec<f32>>,
    theta: f64,
    head_dim: u64,
) -> Result<Value, ConfigError> {
    let kind_key = keys.name("rope.scaling.type");
    let kind = keys.metadata.text(&kind_key).unwrap_or("none");
    match (kind, factors) {
        ("none", None) => Ok(Value::Null),
        ("none", Some(factors)) => llama3_scaling(&factors, theta, head_dim),
        ("linear", None) => {
            let factor = keys.float("rope.scaling.factor");
            let factor = factor.ok_or_else(|| missing(&keys.name("rope.scaling.factor")))?;
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
