//! Chat templates, rendered as transformers renders them.

use serde_json::Value;

/// What can go wrong with a template.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {}

/// A compiled chat template.
pub struct ChatTemplate {}

impl ChatTemplate {
    /// Compiles a Jinja template; `bos_token` and `eos_token` are the strings it may refer to.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn new(_source: &str, _bos_token: &str, _eos_token: &str) -> Result<Self, ChatError> {
        todo!()
    }

    /// Renders an OpenAI `messages` array; the result is encoded without adding special tokens.
    ///
    /// # Errors
    /// When the template raises an exception on these messages.
    pub fn render(
        &self,
        _messages: &Value,
        _tools: Option<&Value>,
        _add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        todo!()
    }
}
