//! The files beside the weights in a Hugging Face folder.

use std::path::Path;

use serde_json::Value;

use super::HubError;
use crate::model::chat::ChatTemplate;
use crate::model::{ModelConfig, Tokenizer};

/// Files that a draft carries over byte for byte, where the target has them.
pub(super) const COMPANIONS: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
];

/// Reads `config.json`; ids that end a generation come from `generation_config.json` too, since
/// instruction models list the end of a turn only there.
pub(super) fn config(folder: &Path) -> Result<ModelConfig, HubError> {
    let path = folder.join("config.json");
    let text = required(folder, "config.json", "give the folder of a Hugging Face model")?;
    let mut config =
        ModelConfig::from_json(&text).map_err(|source| HubError::Config { path, source })?;
    if let Some(generation) = json(folder, "generation_config.json")? {
        let ids = match generation.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.clone(),
            Some(id) => vec![id.clone()],
            None => Vec::new(),
        };
        for id in ids.iter().filter_map(Value::as_u64) {
            match u32::try_from(id) {
                Ok(id) if !config.eos_token_ids.contains(&id) => config.eos_token_ids.push(id),
                _ => {}
            }
        }
    }
    Ok(config)
}

pub(super) fn tokenizer(folder: &Path) -> Result<Tokenizer, HubError> {
    let hint = if folder.join("tokenizer.model").is_file() {
        "it has a SentencePiece tokenizer.model only; save the fast tokenizer with transformers \
         (AutoTokenizer.from_pretrained(…).save_pretrained(…))"
    } else {
        "download or copy tokenizer.json from the model's repository"
    };
    let text = required(folder, "tokenizer.json", hint)?;
    Tokenizer::from_bytes(&text)
        .map_err(|source| HubError::Tokenizer { path: folder.join("tokenizer.json"), source })
}

/// The chat template: `chat_template.jinja` wins over the key in `tokenizer_config.json`.
pub(super) fn chat_template(folder: &Path) -> Result<Option<ChatTemplate>, HubError> {
    let settings = json(folder, "tokenizer_config.json")?.unwrap_or(Value::Null);
    let (path, source) = match optional(folder, "chat_template.jinja")? {
        Some(text) => {
            let path = folder.join("chat_template.jinja");
            let text = String::from_utf8(text)
                .map_err(|_| HubError::damaged(&path, "it is not UTF-8 text"))?;
            (path, text)
        }
        None => match template_of(&settings) {
            Some(source) => (folder.join("tokenizer_config.json"), source),
            None => return Ok(None),
        },
    };
    let token = |name: &str| token_text(settings.get(name)).unwrap_or_default();
    let template = ChatTemplate::new(&source, &token("bos_token"), &token("eos_token"))
        .map_err(|source| HubError::Chat { path, source })?;
    let others = ["unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];
    Ok(Some(others.iter().fold(template, |template, name| match token_text(settings.get(*name)) {
        Some(token) => template.with_token(name, &token),
        None => template,
    })))
}

pub(super) fn companions(folder: &Path) -> Result<Vec<(String, Vec<u8>)>, HubError> {
    let mut files = Vec::new();
    for name in COMPANIONS {
        if let Some(content) = optional(folder, name)? {
            files.push((name.to_string(), content));
        }
    }
    Ok(files)
}

/// A template given as text, or the one named `default` of a list of named ones.
fn template_of(settings: &Value) -> Option<String> {
    match settings.get("chat_template")? {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => {
            let has_name = |entry: &&Value| entry.get("name") == Some(&Value::from("default"));
            let entry = named.iter().find(has_name).or_else(|| named.first())?;
            Some(entry.get("template")?.as_str()?.to_string())
        }
        _ => None,
    }
}

/// A token given as text, or as an object with its settings.
fn token_text(token: Option<&Value>) -> Option<String> {
    let token = token?;
    let text = token.as_str().or_else(|| token.get("content")?.as_str())?;
    Some(text.to_string())
}

fn json(folder: &Path, name: &str) -> Result<Option<Value>, HubError> {
    let Some(text) = optional(folder, name)? else { return Ok(None) };
    let value = serde_json::from_slice(&text).map_err(|error| {
        HubError::damaged(&folder.join(name), format!("it is not valid JSON: {error}"))
    })?;
    Ok(Some(value))
}

fn optional(folder: &Path, name: &str) -> Result<Option<Vec<u8>>, HubError> {
    let path = folder.join(name);
    match std::fs::read(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HubError::Read { path, source }),
    }
}

fn required(folder: &Path, name: &str, hint: &str) -> Result<Vec<u8>, HubError> {
    optional(folder, name)?.ok_or_else(|| HubError::MissingFile {
        folder: folder.to_path_buf(),
        name: name.to_string(),
        hint: hint.to_string(),
    })
}
