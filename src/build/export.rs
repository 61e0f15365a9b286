//! The draft folder: configuration, model card, report, manifest, and the line that serves it.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::DType;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::pipeline::LONGEST_DRAFT;
use super::search::best_length;
use super::{BuildError, Made, Report, Settings, report, trim};
use crate::distill::Sample;
use crate::hub::Target;
use crate::model::decoder::Decoder;
use crate::model::draft_folder::DraftFolder;
use crate::model::manifest::{DraftManifest, sha256_bytes};
use crate::model::{Family, ModelConfig};
use crate::vocab::VOCAB_FILE;

/// Writes the finished draft to `settings.output`.
///
/// # Errors
/// When it cannot be written; nothing is left behind then.
pub fn export(
    target: &Target,
    settings: &Settings,
    made: &Made,
    calibration: &[Sample],
) -> Result<Report, BuildError> {
    let story = &made.story;
    let draft = made.trimmed.as_ref().map_or(&made.draft, |trimmed| &trimmed.draft);
    let alpha = story.steps.last().map_or(0.0, |(_, scores)| scores.alpha);
    let latency_ratio = settings.cost.latency_ratio(&draft.config, &target.config);
    let (length, speedup) = best_length(alpha, latency_ratio, LONGEST_DRAFT);
    let mut report = Report {
        story: story.clone(),
        target_parameters: target.config.parameters(),
        draft_parameters: draft.config.parameters(),
        latency_ratio,
        num_speculative_tokens: length,
        expected_speedup: speedup,
        checksum: String::new(),
        vllm_command: vllm_command(target, settings, made, length),
    };
    let mut extra = vec![
        ("README.md".to_string(), report::card(target, draft, &report).into_bytes()),
        ("report.html".to_string(), report::page(target, draft, &report)?.into_bytes()),
    ];
    let manifest = DraftManifest {
        data_hash: data_hash(calibration),
        seed: settings.seed,
        settings: json!({
            "request": settings.request,
            "cost": settings.cost,
            "plan": story.plan,
            "layers": story.selection.layers,
            "calibration": settings.calibration.as_ref().map(|p| p.display().to_string()),
            "calibration_tokens": settings.calibration_tokens,
            "temperature": settings.temperature,
            "ridge": settings.ridge,
            "init": settings.init,
            "distill": settings.distill,
            "prompts": settings.prompts.as_ref().map(|p| p.display().to_string()),
            "vocab": settings.vocab,
        }),
        scores: json!({
            "steps": story.steps.iter().map(|(step, scores)| {
                let mut object = json!(scores);
                object["step"] = json!(step);
                object
            }).collect::<Vec<Value>>(),
            "latency_ratio": latency_ratio,
            "num_speculative_tokens": length,
            "expected_speedup": speedup,
        }),
        ..blank(target)?
    };
    let mut config = config_json(&target.config, &draft.config, dtype_name(settings.dtype));
    if let Some(trimmed) = &made.trimmed {
        trimmed.renumber(&mut config);
        extra.extend(trimmed.companions.iter().cloned());
        let ids = serde_json::to_vec(&trimmed.ids).unwrap_or_default();
        extra.push((VOCAB_FILE.into(), ids));
    }
    let mut manifest = manifest;
    if let Some((_, tokenizer)) = extra.iter().find(|(name, _)| name == "tokenizer.json") {
        manifest.tokenizer_hash = sha256_bytes(tokenizer);
    }
    let written = write(target, draft, &config, settings.dtype, &settings.output, extra, manifest)?;
    report.checksum = written.checksum();
    Ok(report)
}

/// The manifest of a first version, of which only the target is known.
fn blank(target: &Target) -> Result<DraftManifest, BuildError> {
    let tokenizer = target.companions.iter().find(|(name, _)| name == "tokenizer.json");
    Ok(DraftManifest {
        schema: 1,
        version: "v000000".into(),
        parent: None,
        created_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
        target: target.name.clone(),
        target_hash: target.hash()?,
        tokenizer_hash: tokenizer.map(|(_, bytes)| sha256_bytes(bytes)).unwrap_or_default(),
        data_hash: String::new(),
        seed: 0,
        settings: Value::Null,
        scores: Value::Null,
        files: Default::default(),
    })
}

/// Writes a draft of which nothing but its values is of interest, in full precision.
///
/// # Errors
/// When it cannot be written.
pub fn keep(target: &Target, draft: &Decoder, folder: &Path) -> Result<(), BuildError> {
    let config = config_json(&target.config, &draft.config, dtype_name(DType::F32));
    write(target, draft, &config, DType::F32, folder, Vec::new(), blank(target)?).map(drop)
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    }
}

fn write(
    target: &Target,
    draft: &Decoder,
    config: &Map<String, Value>,
    dtype: DType,
    folder: &Path,
    extra: Vec<(String, Vec<u8>)>,
    manifest: DraftManifest,
) -> Result<DraftManifest, BuildError> {
    let mut companions = target.companions.clone();
    let trimmed = extra.iter().any(|(name, _)| name == VOCAB_FILE);
    companions.retain(|(name, _)| {
        let replaced = extra.iter().any(|(other, _)| other == name);
        let contradicts = trimmed && trim::CONTRADICTING.contains(&name.as_str());
        !replaced && !contradicts
    });
    companions.extend(extra);
    let tensors = draft.tensors();
    let written =
        DraftFolder { config, tensors: &tensors, dtype, companions: &companions, manifest };
    Ok(written.write(folder)?)
}

fn data_hash(samples: &[Sample]) -> String {
    let mut hasher = Sha256::new();
    for sample in samples {
        for id in sample.prompt_ids.iter().chain(&sample.output_ids) {
            hasher.update(id.to_le_bytes());
        }
        hasher.update(u32::MAX.to_le_bytes());
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

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
fn vllm_command(target: &Target, settings: &Settings, made: &Made, length: usize) -> String {
    let mut speculative = json!({
        "method": "draft_model",
        "model": settings.output.display().to_string(),
        "num_speculative_tokens": length,
    });
    if made.trimmed.is_some() {
        speculative["use_heterogeneous_vocab"] = json!(true);
    }
    format!("vllm serve {} --speculative-config '{speculative}'", target.name)
}
