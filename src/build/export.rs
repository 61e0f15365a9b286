//! The draft folder's contents: configuration, model card, and the line that serves it.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::plan::Plan;
use super::prune::Selection;
use crate::model::{Family, ModelConfig};

/// Keys that describe the target's files rather than its mathematics.
const STALE: [&str; 4] =
    ["quantization_config", "auto_map", "_name_or_path", "transformers_version"];

/// The draft's `config.json`: the target's with the sizes replaced. Position limits and rotary
/// settings stay the target's, else vLLM would index past the draft's tables.
pub fn config_json(target: &ModelConfig, draft: &ModelConfig, dtype: &str) -> Map<String, Value> {
    let mut config = target.raw.clone();
    for key in STALE {
        config.remove(key);
    }
    let rope = json!({"rope_type": "default", "rope_theta": draft.rope_theta});
    for (key, value) in [
        ("architectures", json!([draft.family.architecture()])),
        ("model_type", json!(draft.family.model_type())),
        ("vocab_size", json!(draft.vocab_size)),
        ("hidden_size", json!(draft.hidden_size)),
        ("intermediate_size", json!(draft.intermediate_size)),
        ("num_hidden_layers", json!(draft.num_hidden_layers)),
        ("num_attention_heads", json!(draft.num_attention_heads)),
        ("num_key_value_heads", json!(draft.num_key_value_heads)),
        ("head_dim", json!(draft.head_dim)),
        ("max_position_embeddings", json!(draft.max_position_embeddings)),
        (draft.family.norm_eps_key(), json!(draft.norm_eps)),
        ("tie_word_embeddings", json!(draft.tie_word_embeddings)),
        ("rope_theta", json!(draft.rope_theta)),
        ("torch_dtype", json!(dtype)),
    ] {
        config.insert(key.into(), value);
    }
    config.remove("dtype");
    // Old and new readers look in different places; both must find the same number.
    config.entry("rope_parameters").or_insert(rope);
    windows(target, draft, &mut config);
    match draft.family {
        // These derive it.
        Family::StableLm | Family::Qwen2 => {
            config.remove("head_dim");
        }
        Family::Mistral if target.family == Family::Qwen2 => {
            config.insert("qkv_bias".into(), json!(true));
            config.remove("use_sliding_window");
        }
        _ => {}
    }
    config
}

/// What the layers see, in the keys of the draft's family.
fn windows(target: &ModelConfig, draft: &ModelConfig, config: &mut Map<String, Value>) {
    let windows = &draft.anatomy.windows;
    if *windows == target.anatomy.windows {
        return;
    }
    config.remove("max_window_layers");
    match windows.iter().flatten().next() {
        Some(window) => {
            config.insert("sliding_window".into(), json!(window));
            config.insert("layer_types".into(), json!(vec!["sliding_attention"; windows.len()]));
        }
        None => {
            let sliding = target.anatomy.windows.iter().any(Option::is_some);
            if config.contains_key("sliding_window") && draft.family != Family::Gemma2 {
                config.insert("sliding_window".into(), Value::Null);
            }
            if config.contains_key("use_sliding_window") {
                config.insert("use_sliding_window".into(), json!(false));
            }
            if sliding || config.contains_key("layer_types") {
                config.insert("layer_types".into(), json!(vec!["full_attention"; windows.len()]));
            }
        }
    }
}

/// The command that serves the draft with vLLM.
pub fn vllm_command(target: &str, draft: &Path) -> String {
    let speculative = json!({
        "method": "draft_model",
        "model": draft.display().to_string(),
        "num_speculative_tokens": 4,
    });
    format!("vllm serve {target} --speculative-config '{speculative}'")
}

/// The model card.
pub fn model_card(
    target: &str,
    draft: &ModelConfig,
    plan: &Plan,
    selection: &Selection,
    scores: &Value,
    command: &str,
) -> String {
    let rows: String = scores
        .get("steps")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|step| {
            let number = |key: &str| step.get(key).and_then(Value::as_f64).unwrap_or_default();
            let name = step.get("step").and_then(Value::as_str).unwrap_or_default();
            format!(
                "| {name} | {:.3} | {:.3} | {:.2} |\n",
                number("acceptance_rate"),
                number("alpha"),
                number("mean_accepted_length"),
            )
        })
        .collect();
    format!(
        "---\nlibrary_name: transformers\ntags:\n- speculative-decoding\n- draft-model\n---\n\n\
         # Draft for {target}\n\n\
         Made by `da-build` out of the target itself, to be served as its draft in speculative \
         decoding. It is not meant to answer on its own.\n\n\
         - Parameters: {:.1} M stored, {:.1} M read for each drafted token\n\
         - Shape: hidden {}, MLP {}, {} heads of {}, {} layers (the target's {:?})\n\
         - Tokenizer, position limits and rotary settings are the target's\n\n\
         Acceptance on the target's own held-out answers (greedy rule; alpha is the mean of \
         Σ min(p, q); mean accepted length with 4 drafted tokens, bonus token included):\n\n\
         | after | acceptance | alpha | mean accepted length |\n|---|---|---|---|\n{rows}\n\
         ```\n{command}\n```\n",
        draft.parameters() as f64 / 1e6,
        draft.parameters_per_step() as f64 / 1e6,
        plan.hidden_size,
        plan.intermediate_size,
        draft.num_attention_heads,
        draft.head_dim,
        draft.num_hidden_layers,
        selection.layers(),
    )
}
