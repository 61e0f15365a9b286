//! The tokenizer of a GGUF file as the files that the same model has on the hub.

use serde_json::{Map, Value, json};

use super::header::Metadata;
use crate::model::tokenizer::TokenizerError;

/// Token kinds of the GGUF format.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// Words of text, runs of up to three digits, punctuation and white space, as Llama 3 splits.
const LLAMA3_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// The same with digits one by one, as Qwen 2 splits.
const QWEN2_SPLIT: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// What the metadata says about the tokenizer.
pub(crate) struct GgufTokenizer<'a> {
    metadata: &'a Metadata,
    tokens: &'a [String],
    kinds: &'a [i64],
    scheme: Scheme,
}

/// How text is cut before byte-level BPE.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Gpt2,
    Smollm,
    Llama3,
    Qwen2,
}

impl<'a> GgufTokenizer<'a> {
    /// # Errors
    /// When the metadata has no tokenizer, or one of a kind that this version does not read.
    pub(crate) fn new(metadata: &'a Metadata) -> Result<Self, TokenizerError> {
        let model = metadata.text("tokenizer.ggml.model").ok_or(TokenizerError::Absent {
            hint: "the file has no tokenizer metadata; use a GGUF file converted with its \
                   vocabulary",
        })?;
        if model != "gpt2" {
            return Err(TokenizerError::Unsupported {
                what: format!("tokenizer model {model:?}"),
                hint: "this version reads byte-level BPE (\"gpt2\") from GGUF files; use the \
                       Hugging Face folder of this model instead",
            });
        }
        let scheme = match metadata.text("tokenizer.ggml.pre").unwrap_or("default") {
            "default" | "gpt-2" | "gpt2" => Scheme::Gpt2,
            "smollm" => Scheme::Smollm,
            "llama-bpe" | "llama3" | "llama-v3" => Scheme::Llama3,
            "qwen2" => Scheme::Qwen2,
            other => {
                return Err(TokenizerError::Unsupported {
                    what: format!("pre-tokenizer {other:?}"),
                    hint: "this version reads gpt-2, smollm, llama-bpe and qwen2 from GGUF \
                           files; use the Hugging Face folder of this model instead",
                });
            }
        };
        let tokens = metadata.texts("tokenizer.ggml.tokens").unwrap_or_default();
        let kinds = metadata.integers("tokenizer.ggml.token_type").unwrap_or_default();
        if tokens.is_empty() {
            return Err(TokenizerError::Damaged { what: "the token list is empty".to_string() });
        }
        if !kinds.is_empty() && kinds.len() != tokens.len() {
            return Err(TokenizerError::Damaged {
                what: format!("{} tokens have {} token types", tokens.len(), kinds.len()),
            });
        }
        Ok(Self { metadata, tokens, kinds, scheme })
    }

    /// The text of a token that the metadata names by id, for example `bos`.
    pub(crate) fn named(&self, name: &str) -> Option<&str> {
        let id = self.metadata.unsigned(&format!("tokenizer.ggml.{name}_token_id"))?;
        self.tokens.get(usize::try_from(id).ok()?).map(String::as_str)
    }

    fn adds_bos(&self) -> bool {
        let default = self.scheme == Scheme::Llama3;
        self.metadata.flag("tokenizer.ggml.add_bos_token").unwrap_or(default)
    }

    /// `tokenizer.json`, in the form that the `tokenizers` library writes.
    pub(crate) fn json(&self) -> Result<Vec<u8>, TokenizerError> {
        let merges = self.metadata.texts("tokenizer.ggml.merges").unwrap_or_default();
        let document = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens(),
            "normalizer": self.normalizer(),
            "pre_tokenizer": self.pre_tokenizer(),
            "post_processor": self.post_processor()?,
            "decoder": byte_level(true),
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": self.scheme == Scheme::Llama3,
                "vocab": self.vocabulary()?,
                "merges": merges,
            },
        });
        pretty(&document)
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.get(id).copied().unwrap_or(1)
    }

    fn vocabulary(&self) -> Result<Map<String, Value>, TokenizerError> {
        let mut vocabulary = Map::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            if self.kind(id) == UNUSED {
                continue;
            }
            if let Some(first) = vocabulary.insert(token.clone(), json!(id)) {
                return Err(TokenizerError::Damaged {
                    what: format!("tokens {first} and {id} are both {token:?}"),
                });
            }
        }
        Ok(vocabulary)
    }

    fn added_tokens(&self) -> Vec<Value> {
        let added = |id: &usize| matches!(self.kind(*id), CONTROL | USER_DEFINED);
        (0..self.tokens.len())
            .filter(added)
            .map(|id| {
                json!({
                    "id": id,
                    "content": self.tokens[id],
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": self.kind(id) == CONTROL,
                })
            })
            .collect()
    }

    fn normalizer(&self) -> Value {
        if self.scheme == Scheme::Qwen2 { json!({"type": "NFC"}) } else { Value::Null }
    }

    fn pre_tokenizer(&self) -> Value {
        let split = |pattern: &str| {
            json!({
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": false,
            })
        };
        let steps = match self.scheme {
            Scheme::Gpt2 => return byte_level(true),
            Scheme::Smollm => {
                vec![json!({"type": "Digits", "individual_digits": true}), byte_level(true)]
            }
            Scheme::Llama3 => vec![split(LLAMA3_SPLIT), byte_level(false)],
            Scheme::Qwen2 => vec![split(QWEN2_SPLIT), byte_level(false)],
        };
        json!({"type": "Sequence", "pretokenizers": steps})
    }

    fn post_processor(&self) -> Result<Value, TokenizerError> {
        if !self.adds_bos() {
            return Ok(byte_level(true));
        }
        let id = self.metadata.unsigned("tokenizer.ggml.bos_token_id");
        let (Some(id), Some(bos)) = (id, self.named("bos")) else {
            return Err(TokenizerError::Damaged {
                what: "texts are to begin with a token that the file does not name \
                       (tokenizer.ggml.bos_token_id)"
                    .to_string(),
            });
        };
        let token = json!({"SpecialToken": {"id": bos, "type_id": 0}});
        let second = json!({"SpecialToken": {"id": bos, "type_id": 1}});
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [token, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                token, {"Sequence": {"id": "A", "type_id": 0}},
                second, {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
        }))
    }

    /// The files that say how the tokenizer is used: `tokenizer_config.json` and
    /// `generation_config.json`.
    pub(crate) fn settings(
        &self,
        eos_token_ids: &[u32],
        max_length: usize,
    ) -> Result<Vec<(String, Vec<u8>)>, TokenizerError> {
        let mut settings = Map::new();
        settings.insert("add_bos_token".to_string(), json!(self.adds_bos()));
        settings.insert("add_prefix_space".to_string(), json!(false));
        for (key, name) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")]
        {
            if let Some(token) = self.named(name) {
                settings.insert(format!("{key}_token"), json!(token));
            }
        }
        if let Some(template) = self.metadata.text("tokenizer.chat_template") {
            settings.insert("chat_template".to_string(), json!(template));
        }
        settings.insert("clean_up_tokenization_spaces".to_string(), json!(false));
        settings.insert("model_max_length".to_string(), json!(max_length));
        settings.insert("tokenizer_class".to_string(), json!("PreTrainedTokenizerFast"));
        let eos = match eos_token_ids {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let generation = json!({
            "bos_token_id": self.metadata.unsigned("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos,
            "pad_token_id": self.metadata.unsigned("tokenizer.ggml.padding_token_id"),
        });
        Ok(vec![
            ("tokenizer_config.json".to_string(), pretty(&Value::Object(settings))?),
            ("generation_config.json".to_string(), pretty(&generation)?),
        ])
    }
}

fn pretty(document: &Value) -> Result<Vec<u8>, TokenizerError> {
    let mut text = serde_json::to_vec_pretty(document)
        .map_err(|error| TokenizerError::Damaged { what: error.to_string() })?;
    text.push(b'\n');
    Ok(text)
}

fn byte_level(use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": true,
        "use_regex": use_regex,
    })
}
