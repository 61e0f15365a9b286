//! Text to token ids and back.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

mod bytes;
mod stream;

pub use stream::TokenStream;

/// What can go wrong with a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    #[error("there is no tokenizer\nhint: {hint}")]
    Absent { hint: &'static str },
    #[error("tokenizer.json is not valid JSON: {0}\nhint: download or copy it again")]
    Syntax(serde_json::Error),
    #[error(
        "tokenizer.json cannot be read: {reason}\nhint: {kinds}; it may have been written by a \
         newer version of the tokenizers library than this build has (0.23)"
    )]
    Unreadable { reason: String, kinds: String },
    #[error("{what} is not supported\nhint: {hint}")]
    Unsupported { what: String, hint: &'static str },
    #[error("the tokenizer is damaged: {what}\nhint: download or copy the model again")]
    Damaged { what: String },
    #[error("the tokenizer refuses the text: {0}")]
    Encode(String),
    #[error("the tokenizer cannot decode: {0}")]
    Decode(String),
    #[error(
        "token id {id} is unknown, the tokenizer has {vocab_size} ids\nhint: ids of a padded \
         vocabulary have no text; mask them before sampling"
    )]
    UnknownId { id: u32, vocab_size: usize },
}

/// A tokenizer with what serving and training need to know of it.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    json: Vec<u8>,
    pieces: Vec<Option<Box<str>>>,
    ids: HashMap<Box<str>, u32>,
    special: HashSet<u32>,
    unknown: Option<u32>,
    byte_level: bool,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// When it is not one, or was written by a version this build cannot read.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        let document: Value = serde_json::from_slice(json).map_err(TokenizerError::Syntax)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| {
            let reason = crate::hub::shorten(&error.to_string());
            TokenizerError::Unreadable { reason, kinds: kinds(&document) }
        })?;
        // Some published files ask for padding or truncation, which no caller here wants.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| TokenizerError::Unreadable {
            reason: error.to_string(),
            kinds: kinds(&document),
        })?;
        let mut pieces = Vec::new();
        let mut ids = HashMap::new();
        for (piece, id) in inner.get_vocab(true) {
            let index = id as usize;
            if index >= MAX_IDS {
                return Err(TokenizerError::Damaged {
                    what: format!("{piece:?} has id {id}, beyond any vocabulary"),
                });
            }
            if index >= pieces.len() {
                pieces.resize(index + 1, None);
            }
            pieces[index] = Some(piece.clone().into_boxed_str());
            ids.insert(piece.into_boxed_str(), id);
        }
        let special = inner
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect();
        let unknown = document.pointer("/model/unk_token").and_then(Value::as_str);
        let unknown = unknown.and_then(|piece| ids.get(piece).copied());
        let byte_level = bytes::is_byte_level(document.get("decoder").unwrap_or(&Value::Null));
        Ok(Self { inner, json: json.to_vec(), pieces, ids, special, unknown, byte_level })
    }

    /// The `tokenizer.json` that this tokenizer was read from, byte for byte.
    pub fn json(&self) -> &[u8] {
        &self.json
    }

    /// Token ids of `text`. Special tokens written in the text are recognised; none is added
    /// unless `add_special` is set.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, add_special)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of `ids`; bytes that are not valid UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When an id is unknown.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        for id in ids {
            self.known_piece(*id)?;
        }
        self.inner
            .decode(ids, skip_special)
            .map_err(|error| TokenizerError::Decode(error.to_string()))
    }

    /// Number of ids, added tokens included: one more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The vocabulary string of an id, as `tokenizer.json` spells it.
    pub fn piece(&self, id: u32) -> Option<String> {
        self.known_piece(id).ok().map(str::to_string)
    }

    /// The bytes of text that an id stands for, or none where that depends on its neighbours
    /// (tokenizers that are not byte-level) or the id is unknown.
    pub fn piece_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if !self.byte_level {
            return None;
        }
        self.known_piece(id).ok().map(bytes::of_piece)
    }

    /// The id of a vocabulary string, for example of `<|im_end|>`.
    pub fn token_id(&self, piece: &str) -> Option<u32> {
        self.ids.get(piece).copied()
    }

    /// The token for text that the vocabulary cannot spell, where the model names one.
    pub fn unknown_id(&self) -> Option<u32> {
        self.unknown
    }

    /// Whether the id is a special token, which decoding may skip.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    fn known_piece(&self, id: u32) -> Result<&str, TokenizerError> {
        self.pieces
            .get(id as usize)
            .and_then(Option::as_deref)
            .ok_or(TokenizerError::UnknownId { id, vocab_size: self.vocab_size() })
    }
}

/// Far above any published vocabulary; keeps a damaged id from allocating gigabytes.
const MAX_IDS: usize = 1 << 24;

/// The kinds of the parts of a `tokenizer.json`, for a message about one that cannot be read.
fn kinds(document: &Value) -> String {
    let kind = |part: &str| {
        let kind = document.get(part).and_then(|part| part.get("type")).and_then(Value::as_str);
        format!("{part} {}", kind.unwrap_or("none"))
    };
    let version = document.get("version").and_then(Value::as_str).unwrap_or("none");
    let parts = ["model", "normalizer", "pre_tokenizer", "post_processor", "decoder"].map(kind);
    format!("it has version {version}, {}", parts.join(", "))
}

#[cfg(test)]
mod tests;
