//! Which model families this version reads, and what the others are.

use super::ConfigError;

const THIS_VERSION: &str = "this version reads dense decoders of the families Llama, Mistral, \
                            Qwen2, Qwen3, Gemma 2 and StableLM";

/// What a family is when it is not a dense decoder. The first pattern that the name contains,
/// compared without case and punctuation, decides.
const KINDS: &[(&str, &[&str])] = &[
    (
        "a mixture of experts (MoE)",
        &["mixtral", "moe", "llama4", "dbrx", "gptoss", "grok", "arctic", "qwen3next", "olmoe"],
    ),
    (
        "a decoder with multi-head latent attention (MLA)",
        &["deepseek", "minicpm3", "kimi", "longcat"],
    ),
    (
        "a state-space or recurrent model (SSM)",
        &[
            "mamba",
            "jamba",
            "rwkv",
            "zamba",
            "bamba",
            "nemotronh",
            "recurrentgemma",
            "granitehybrid",
            "plamo2",
            "lfm2",
            "xlstm",
            "falconh1",
        ],
    ),
    (
        "an encoder or encoder-decoder",
        &[
            "bert", "t5", "bart", "electra", "xlm", "mpnet", "pegasus", "whisper", "m2m100",
            "marian", "clip", "siglip", "deberta", "encoder", "nomic",
        ],
    ),
    (
        "a multimodal wrapper",
        &[
            "vl",
            "vision",
            "llava",
            "conditionalgeneration",
            "idefics",
            "smolvlm",
            "paligemma",
            "mllama",
            "audio",
            "omni",
            "pixtral",
            "imagetext",
        ],
    ),
];

/// The refusal of an architecture, by its name in a `config.json` or in GGUF metadata.
pub(crate) fn refuse(name: &str) -> ConfigError {
    let plain: String =
        name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    for (kind, patterns) in KINDS {
        if patterns.iter().any(|pattern| plain.contains(pattern)) {
            return ConfigError::Architecture {
                name: name.to_string(),
                kind,
                hint: THIS_VERSION.to_string(),
            };
        }
    }
    let headless = plain.starts_with("llama") && !plain.contains("causallm");
    let kind = if headless && plain != "llama" {
        "a Llama without a language-model head"
    } else {
        "not yet supported"
    };
    ConfigError::Architecture { name: name.to_string(), kind, hint: THIS_VERSION.to_string() }
}

/// The refusal of a model whose layers hold several experts.
pub(crate) fn refuse_experts(name: &str, experts: u64) -> ConfigError {
    ConfigError::Architecture {
        name: format!("{name} with {experts} experts"),
        kind: "a mixture of experts (MoE)",
        hint: THIS_VERSION.to_string(),
    }
}

/// The refusal of a configuration that wraps a text model among others: one that is not there, or
/// that this version does not read.
pub(crate) fn refuse_wrapper(name: &str, text_type: Option<&str>) -> ConfigError {
    let hint = match text_type {
        None => format!("its configuration has no text_config to take; {THIS_VERSION}"),
        Some("") => format!("its text_config names no model_type; {THIS_VERSION}"),
        Some(text_type) => format!("its text model is of the type {text_type}; {THIS_VERSION}"),
    };
    ConfigError::Architecture { name: name.to_string(), kind: "a multimodal wrapper", hint }
}
