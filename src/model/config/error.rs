//! What can be wrong with a configuration.

/// What can be wrong with a `config.json`, by itself or beside its weights.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("not valid JSON: {0}\nhint: download or copy config.json again")]
    Syntax(serde_json::Error),
    #[error(
        "key {key} is missing\nhint: the configuration is incomplete; take it from the same \
             place as the weights"
    )]
    Missing { key: String },
    #[error("key {key}: expected {expected}, got {got}")]
    WrongType { key: String, expected: String, got: String },
    #[error("key {key} is {got}, which is not {expected}")]
    OutOfRange { key: String, expected: String, got: String },
    #[error("{what}\nhint: {hint}")]
    Contradiction { what: String, hint: String },
    #[error("architecture {name} is {kind}\nhint: {hint}")]
    Architecture { name: String, kind: &'static str, hint: String },
    #[error("{what} is not supported\nhint: {hint}")]
    Unsupported { what: String, hint: String },
    #[error(
        "tensor {name} is missing, expected {expected}\nhint: the weights and the \
             configuration are not of the same model, or a shard was left out"
    )]
    MissingTensor { name: String, expected: String },
    #[error(
        "tensor {name} has shape {got:?}, expected {expected:?} from {from}\nhint: the \
             weights and the configuration are not of the same model"
    )]
    Shape { name: String, expected: Vec<usize>, got: Vec<usize>, from: &'static str },
    #[error(
        "tensor {name} is stored as {stored_as}, which this version cannot read\nhint: use \
             the unquantised model (f32, f16 or bf16) or a GGUF file in Q4_0 to Q8_0 or Q2_K to \
             Q6_K; a draft made from it also serves the quantised server"
    )]
    Encoding { name: String, stored_as: String },
}

impl ConfigError {
    pub(crate) fn rope_scaling(kind: &str) -> Self {
        Self::Unsupported {
            what: format!("rope scaling {kind:?}"),
            hint: "this version computes plain, linear and llama3 rotary frequencies".to_string(),
        }
    }
}
