//! Text to token ids, the way the target's server does it.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::chat::{ChatError, ChatTemplate};
use crate::model::tokenizer::{Tokenizer, TokenizerError};

/// Why a text could not be rendered or tokenised.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("cannot read {path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("there is no tokenizer\nhint: requests that ask for `return_token_ids` need none")]
    NoTokenizer,
    #[error(
        "the model has no chat template\nhint: only completions can be captured, or chats that ask for `return_token_ids`"
    )]
    NoTemplate,
    #[error(transparent)]
    Template(#[from] ChatError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Tokenizer and chat template of a draft folder, which are the target's byte for byte.
#[derive(Default)]
pub struct Renderer {
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
    eos: Option<u32>,
}

impl Renderer {
    /// Renders nothing: then only exchanges with reported token ids can be captured.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads `tokenizer.json` and the chat template: from `chat_template.jinja`, else from
    /// `tokenizer_config.json`. Base models have no template, which is not an error here.
    ///
    /// # Errors
    /// When the tokenizer is missing, or a file is there but cannot be used.
    pub fn from_draft_folder(folder: &Path) -> Result<Self, RenderError> {
        let tokenizer = Tokenizer::from_bytes(&read(&folder.join("tokenizer.json"))?)?;
        let config = read_json(&folder.join("tokenizer_config.json"))?;
        let bos = special(&config, "bos_token");
        let eos = special(&config, "eos_token");
        let jinja = folder.join("chat_template.jinja");
        let source = if jinja.exists() {
            let bytes = read(&jinja)?;
            Some(
                String::from_utf8(bytes)
                    .map_err(|e| RenderError::File { path: jinja, reason: e.to_string() })?,
            )
        } else {
            template_in(&config)
        };
        let template = source.map(|source| ChatTemplate::new(&source, &bos, &eos)).transpose()?;
        let generation = read_json(&folder.join("generation_config.json"))?;
        let model = read_json(&folder.join("config.json"))?;
        let eos = end_id(&tokenizer, &eos, [&generation, &model]);
        Ok(Self { tokenizer: Some(tokenizer), template, eos })
    }

    /// Ids of a chat, with the header of the answer that follows. Special tokens come from the
    /// template alone, so that there is never a second BOS.
    ///
    /// # Errors
    /// Without tokenizer or template, or when the template raises an exception.
    pub fn chat(&self, messages: &Value) -> Result<Vec<u32>, RenderError> {
        let tokenizer = self.tokenizer.as_ref().ok_or(RenderError::NoTokenizer)?;
        let template = self.template.as_ref().ok_or(RenderError::NoTemplate)?;
        let text = template.render(messages, None, true)?;
        Ok(tokenizer.encode(&text, false)?)
    }

    /// Ids of a plain text.
    ///
    /// # Errors
    /// Without tokenizer, or when it refuses.
    pub fn text(&self, text: &str, add_special: bool) -> Result<Vec<u32>, RenderError> {
        let tokenizer = self.tokenizer.as_ref().ok_or(RenderError::NoTokenizer)?;
        Ok(tokenizer.encode(text, add_special)?)
    }

    /// The token that ends an answer.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
}

/// The end token: the tokenizer's own, which chat templates end an answer with; else the first that
/// the configuration names.
fn end_id(tokenizer: &Tokenizer, eos: &str, configs: [&Map<String, Value>; 2]) -> Option<u32> {
    let named = configs.iter().find_map(|config| config.get("eos_token_id"));
    let first = match named {
        Some(Value::Array(list)) => list.first(),
        other => other,
    };
    let first = first.and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    tokenizer.token_id(eos).or(first)
}

/// A special token's text: a string, or an object that has it as `content`.
fn special(config: &Map<String, Value>, name: &str) -> String {
    let value = config.get(name).unwrap_or(&Value::Null);
    value.as_str().or(value["content"].as_str()).unwrap_or_default().to_owned()
}

/// The template in `tokenizer_config.json`: a string, or a list of named ones.
fn template_in(config: &Map<String, Value>) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(list) => {
            let default = list.iter().find(|entry| entry["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

fn read(path: &Path) -> Result<Vec<u8>, RenderError> {
    fs::read(path).map_err(|e| RenderError::File { path: path.into(), reason: e.to_string() })
}

/// The object in a file; empty when there is no such file.
fn read_json(path: &Path) -> Result<Map<String, Value>, RenderError> {
    if !path.exists() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&read(path)?)
        .map_err(|e| RenderError::File { path: path.into(), reason: e.to_string() })
}
