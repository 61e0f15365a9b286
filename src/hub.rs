//! Where targets come from: a local folder, a Hugging Face repository, a GGUF file.

use std::path::{Path, PathBuf};

use crate::model::chat::{ChatError, ChatTemplate};
use crate::model::config::ConfigError;
use crate::model::tokenizer::TokenizerError;
use crate::model::{ModelConfig, Tokenizer};

mod encoding;
mod folder;
mod gguf;
mod mapped;
mod repository;
mod safetensors;
mod weights;

pub use repository::{HubSettings, HubToken};
pub use weights::Weights;

/// What can go wrong on the way to a model.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is damaged: {what}\nhint: download or copy the file again", path.display())]
    Damaged { path: PathBuf, what: String },
    #[error("{} has no {name}\nhint: {hint}", folder.display())]
    MissingFile { folder: PathBuf, name: String, hint: String },
    #[error("tensor {name} is not in {}\nhint: the model has another architecture or a shard was \
             left out", place.display())]
    MissingTensor { name: String, place: PathBuf },
    #[error("tensor {name} in {} is stored as {stored_as}, which cannot be read: {reason}\nhint: \
             use the unquantised model", path.display())]
    UnreadableTensor { name: String, path: PathBuf, stored_as: String, reason: String },
    #[error("tensor {name} cannot be converted: {source}")]
    Convert { name: String, source: candle_core::Error },
    #[error("{}: {source}", path.display())]
    Config { path: PathBuf, source: ConfigError },
    #[error("{}: {source}", path.display())]
    Tokenizer { path: PathBuf, source: TokenizerError },
    #[error("{}: {source}", path.display())]
    Chat { path: PathBuf, source: ChatError },
    #[error(
        "{spec:?} is neither a path that exists nor a repository name\nhint: give a folder with \
         config.json, a .gguf file, or owner/name with an optional @revision"
    )]
    Unknown { spec: String },
    #[error("repository {repository}: {what}\nhint: {hint}")]
    Repository { repository: String, what: String, hint: String },
}

impl HubError {
    fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_path_buf(), what: what.into() }
    }
}

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
    /// Commit of the hub repository that was read; none for local models.
    pub commit: Option<String>,
}

impl Target {
    /// Finds and opens a model. `spec` is a folder, a `.gguf` file, or `owner/name` with an
    /// optional `@revision`. A path that exists never touches the network.
    ///
    /// # Errors
    /// See [`HubError`].
    pub fn open(spec: &str) -> Result<Self, HubError> {
        Self::open_with(spec, &HubSettings::from_env())
    }

    /// As [`Target::open`], with the hub's settings given rather than taken from the environment.
    ///
    /// # Errors
    /// See [`HubError`].
    pub fn open_with(spec: &str, settings: &HubSettings) -> Result<Self, HubError> {
        let path = Path::new(spec);
        if path.is_dir() {
            return Self::open_folder(spec, path);
        }
        if path.exists() {
            return Self::open_gguf(spec, path);
        }
        let Some((repository, revision)) = repository::parse_name(spec) else {
            return Err(HubError::Unknown { spec: spec.to_string() });
        };
        let snapshot = repository::fetch(repository, revision, settings)?;
        let mut target = Self::open_folder(spec, &snapshot.folder)?;
        target.commit = Some(snapshot.commit);
        Ok(target)
    }

    /// SHA-256 over the bytes of the weight files, in name order, in lower-case hexadecimal: for
    /// a single file the same as `sha256sum` prints. Reads every byte, once per call.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn hash(&self) -> Result<String, HubError> {
        self.weights.hash()
    }

    fn open_folder(name: &str, folder: &Path) -> Result<Self, HubError> {
        let config = folder::config(folder)?;
        let weights = safetensors::open_folder(folder)?.of_text_model();
        check(&config, &weights, folder)?;
        let tokenizer = folder::tokenizer(folder)?;
        Ok(Self {
            name: name.to_string(),
            chat_template: folder::chat_template(folder)?,
            companions: folder::companions(folder)?,
            location: folder.to_path_buf(),
            commit: None,
            config,
            weights,
            tokenizer,
        })
    }

    fn open_gguf(name: &str, path: &Path) -> Result<Self, HubError> {
        let tokenizer_error = |source| HubError::Tokenizer { path: path.to_path_buf(), source };
        let file = gguf::GgufFile::open(path)?;
        let config = file.config()?;
        let metadata = file.metadata();
        let parts = gguf::GgufTokenizer::new(metadata).map_err(tokenizer_error)?;
        let json = parts.json().map_err(tokenizer_error)?;
        let tokenizer = Tokenizer::from_bytes(&json).map_err(tokenizer_error)?;
        let mut companions = vec![("tokenizer.json".to_string(), json)];
        let settings = parts.settings(&config.eos_token_ids, config.max_position_embeddings);
        companions.extend(settings.map_err(tokenizer_error)?);
        let chat_template = match metadata.text("tokenizer.chat_template") {
            None => None,
            Some(source) => {
                let token = |name| parts.named(name).unwrap_or_default();
                let template = ChatTemplate::new(source, token("bos"), token("eos"))
                    .map_err(|source| HubError::Chat { path: path.to_path_buf(), source })?;
                Some(
                    template
                        .with_token("unk_token", token("unknown"))
                        .with_token("pad_token", token("padding")),
                )
            }
        };
        let weights = file.into_weights(&config)?;
        check(&config, &weights, path)?;
        Ok(Self {
            name: name.to_string(),
            location: path.to_path_buf(),
            commit: None,
            config,
            weights,
            tokenizer,
            chat_template,
            companions,
        })
    }
}

fn check(config: &ModelConfig, weights: &Weights, path: &Path) -> Result<(), HubError> {
    config
        .check_weights(weights)
        .map_err(|source| HubError::Config { path: path.to_path_buf(), source })
}

/// The beginning of a text that may be long, for messages.
pub(crate) fn shorten(text: &str) -> String {
    const LIMIT: usize = 200;
    match text.char_indices().nth(LIMIT) {
        None => text.to_string(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
