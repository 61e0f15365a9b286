//! Where targets come from: a local folder, a Hugging Face repository, a GGUF file.

use std::path::PathBuf;

use crate::model::chat::ChatTemplate;
use crate::model::{ModelConfig, Tokenizer};

mod weights;

pub use weights::Weights;

/// What can go wrong on the way to a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {}

/// A model that was found and read, wherever it came from. Tensor names are Hugging Face's.
pub struct Target {
    /// As the user named it.
    pub name: String,
    pub config: ModelConfig,
    pub weights: Weights,
    pub tokenizer: Tokenizer,
    /// None for base models: only text completions can be served or learned from.
    pub chat_template: Option<ChatTemplate>,
    /// Files that a draft carries over byte for byte: name and content (`tokenizer.json`,
    /// `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and the like).
    pub companions: Vec<(String, Vec<u8>)>,
    /// Where the weights lie, for messages.
    pub location: PathBuf,
}

impl Target {
    /// Finds and opens a model. `spec` is a folder, a `.gguf` file, or `owner/name` with an
    /// optional `@revision`. A path that exists never touches the network.
    ///
    /// # Errors
    /// See [`HubError`].
    pub fn open(_spec: &str) -> Result<Self, HubError> {
        todo!()
    }
}
