//! Ids to text, one id at a time.

use super::{Tokenizer, TokenizerError};

/// Turns a growing list of ids into text increments, each valid UTF-8, nothing lost or doubled:
/// the increments together are the text of the whole list.
///
/// With a byte-level tokenizer an id costs the length of its own text. With others the text of a
/// short window of ids is taken before and after the new id, because their decoders look at
/// neighbours (a leading space is dropped at the start only, bytes are joined in runs).
#[derive(Debug, Clone)]
pub struct TokenStream {
    skip_special: bool,
    /// Bytes of a character that is not complete yet (byte-level tokenizers).
    pending: Vec<u8>,
    /// Ids from which the next text is computed (other tokenizers).
    window: Vec<u32>,
    /// How many ids at the beginning of the window have been turned into text already.
    emitted: usize,
}

impl TokenStream {
    /// Starts with no context: the first id is decoded as the beginning of a text.
    pub fn new(skip_special: bool) -> Self {
        Self { skip_special, pending: Vec::new(), window: Vec::new(), emitted: 0 }
    }

    /// Starts after `prompt_ids`, whose last few give the context that some decoders need: the
    /// text continues the prompt's, with the space that stands between them.
    pub fn after(tokenizer: &Tokenizer, prompt_ids: &[u32], skip_special: bool) -> Self {
        let mut stream = Self::new(skip_special);
        let context: Vec<u32> = prompt_ids
            .iter()
            .rev()
            .filter(|id| !(skip_special && tokenizer.is_special(**id)))
            .take(CONTEXT)
            .copied()
            .collect();
        stream.window = context.into_iter().rev().collect();
        stream.emitted = stream.window.len();
        stream
    }

    /// Takes the next id; returns the text that is now certain, possibly empty.
    ///
    /// # Errors
    /// When the id is unknown; the stream is then as it was before.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
        let piece = tokenizer.known_piece(id)?;
        if self.skip_special && tokenizer.is_special(id) {
            return Ok(String::new());
        }
        if tokenizer.byte_level {
            self.pending.extend(super::bytes::of_piece(piece));
            return Ok(take_certain(&mut self.pending));
        }
        self.window.push(id);
        if is_byte_fallback(piece) {
            return Ok(String::new());
        }
        self.take_window(tokenizer)
    }

    /// The text still held back when the stream ends.
    ///
    /// # Errors
    /// When decoding fails.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let held = std::mem::take(&mut self.pending);
        if !held.is_empty() {
            return Ok(String::from_utf8_lossy(&held).into_owned());
        }
        if self.emitted == self.window.len() {
            return Ok(String::new());
        }
        self.take_window(tokenizer)
    }

    fn take_window(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let before = tokenizer.decode(&self.window[..self.emitted], false)?;
        let text = tokenizer.decode(&self.window, false)?;
        let Some(new) = text.strip_prefix(before.as_str()) else {
            return Err(TokenizerError::Decode(format!(
                "the text {before:?} became {text:?} when an id was added"
            )));
        };
        let new = new.to_string();
        self.emitted = self.window.len();
        let surplus = self.window.len().saturating_sub(CONTEXT);
        if surplus > 0 {
            self.window.drain(..surplus);
            self.emitted -= surplus;
        }
        Ok(new)
    }
}

/// Ids of context that are kept: decoders look one token back, one more is margin.
const CONTEXT: usize = 2;

/// A byte of a character outside the vocabulary, `<0x00>` to `<0xFF>`. Whether a run of them is
/// text or garbage is only known when the run ends.
fn is_byte_fallback(piece: &str) -> bool {
    let byte = piece.strip_prefix("<0x").and_then(|piece| piece.strip_suffix('>'));
    byte.is_some_and(|byte| byte.len() == 2 && u8::from_str_radix(byte, 16).is_ok())
}

/// Takes all bytes whose text no further byte can change.
fn take_certain(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in pending.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let at_end = taken + invalid.len() == pending.len();
        if invalid.is_empty() || (at_end && is_incomplete(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += invalid.len();
    }
    pending.drain(..taken);
    text
}

/// Whether bytes at the end of the input are the beginning of a character, rather than wrong.
fn is_incomplete(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
