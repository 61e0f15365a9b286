//! Text to token ids and back.

/// What can go wrong with a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {}

/// A tokenizer with what serving and training need to know of it.
pub struct Tokenizer {}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// When it is not one, or was written by a version this build cannot read.
    pub fn from_bytes(_json: &[u8]) -> Result<Self, TokenizerError> {
        todo!()
    }

    /// Token ids of `text`. Special tokens written in the text are recognised; none is added
    /// unless `add_special` is set.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, _text: &str, _add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        todo!()
    }

    /// Text of `ids`; bytes that are not valid UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When an id is unknown.
    pub fn decode(&self, _ids: &[u32], _skip_special: bool) -> Result<String, TokenizerError> {
        todo!()
    }

    /// Number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        todo!()
    }

    /// The vocabulary string of an id, as `tokenizer.json` spells it.
    pub fn piece(&self, _id: u32) -> Option<String> {
        todo!()
    }

    /// Whether the id is a special token, which decoding may skip.
    pub fn is_special(&self, _id: u32) -> bool {
        todo!()
    }
}

/// Turns a growing list of ids into text increments, each valid UTF-8, nothing lost or doubled.
pub struct TokenStream {}

impl TokenStream {
    /// Starts after `prompt_ids`, whose last few give the context that some decoders need.
    pub fn new(_skip_special: bool) -> Self {
        todo!()
    }

    /// Takes the next id; returns the text that is now certain, possibly empty.
    ///
    /// # Errors
    /// When the id is unknown.
    pub fn push(&mut self, _tokenizer: &Tokenizer, _id: u32) -> Result<String, TokenizerError> {
        todo!()
    }

    /// The text still held back when the stream ends.
    ///
    /// # Errors
    /// When decoding fails.
    pub fn finish(&mut self, _tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        todo!()
    }
}
