//! Reading `config.json`, in the spellings that published models use.

use serde_json::{Map, Value};

use super::family::{Anatomy, Sizes};
use super::{ConfigError, Family, ModelConfig, RopeScaling, architecture};

/// Bounds that no model reaches; they keep products of dimensions far from overflow.
const MAX_WIDTH: u64 = 1 << 24;
const MAX_LAYERS: u64 = 1 << 12;
pub(super) const MAX_CONTEXT: u64 = 1 << 32;

/// `LlamaConfig`'s documented value for files that were written before the key existed.
const OLD_LLAMA_THETA: f64 = 10_000.0;

impl ModelConfig {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// When it is not one, is incomplete or contradicts itself, or describes a model that this
    /// version does not run; the error names the key.
    pub fn from_json(json: &[u8]) -> Result<Self, ConfigError> {
        match serde_json::from_slice(json).map_err(ConfigError::Syntax)? {
            Value::Object(document) => Self::from_map(document),
            other => Err(wrong_type("(document)", "an object", &other)),
        }
    }

    /// Reads a parsed `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`].
    pub fn from_map(document: Map<String, Value>) -> Result<Self, ConfigError> {
        let document = text_model(document)?;
        let keys = Keys(&document);
        let family = family(&keys)?;
        refuse_quantised(&keys)?;
        let hidden_size = keys.dimension("hidden_size", MAX_WIDTH)?;
        let num_attention_heads = keys.dimension("num_attention_heads", MAX_WIDTH)?;
        let num_key_value_heads = match keys.value("num_key_value_heads") {
            None => num_attention_heads,
            Some(_) => keys.dimension("num_key_value_heads", MAX_WIDTH)?,
        };
        let head_dim = match keys.value("head_dim") {
            Some(_) => keys.dimension("head_dim", MAX_WIDTH)?,
            None => default_head_dim(family, hidden_size, num_attention_heads)?,
        };
        let num_hidden_layers = keys.dimension("num_hidden_layers", MAX_LAYERS)?;
        let sizes = Sizes { hidden_size, head_dim, layers: num_hidden_layers };
        let anatomy = Anatomy::read(family, &keys, &sizes)?;
        let eps = family.norm_eps_key();
        let config = Self {
            family,
            anatomy,
            vocab_size: keys.dimension("vocab_size", MAX_WIDTH)?,
            hidden_size,
            intermediate_size: keys.dimension("intermediate_size", MAX_WIDTH)?,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            max_position_embeddings: keys.dimension("max_position_embeddings", MAX_CONTEXT)?,
            rope_theta: rope_theta(&keys)?,
            rope_scaling: rope_scaling(&keys)?,
            norm_eps: keys.positive(eps)?.ok_or_else(|| missing(eps))?,
            // Gemma is tied unless its configuration says otherwise, and says nothing of it.
            tie_word_embeddings: keys
                .flag("tie_word_embeddings")?
                .unwrap_or(family == Family::Gemma2),
            bos_token_id: keys.ids("bos_token_id")?.first().copied(),
            eos_token_ids: keys.ids("eos_token_id")?,
            raw: document,
        };
        config.check_heads()?;
        Ok(config)
    }

    fn check_heads(&self) -> Result<(), ConfigError> {
        let contradiction = |what: String| ConfigError::Contradiction {
            what,
            hint: "take config.json from the same place as the weights".to_string(),
        };
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err(contradiction(format!(
                "num_attention_heads {} is not a multiple of num_key_value_heads {}",
                self.num_attention_heads, self.num_key_value_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(contradiction(format!(
                "head_dim {} is odd, rotary embedding turns pairs",
                self.head_dim
            )));
        }
        let widest = self.num_attention_heads.checked_mul(self.head_dim);
        if widest.is_none_or(|width| width as u64 > MAX_WIDTH) {
            return Err(contradiction(format!(
                "{} heads of {} are wider than any model",
                self.num_attention_heads, self.head_dim
            )));
        }
        Ok(())
    }
}

/// Keys that a wrapper may hold for the text model in it.
const SHARED: [&str; 7] = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "vocab_size",
    "torch_dtype",
    "dtype",
];

/// The configuration of the text model, where the document is one of several models of which one
/// reads text; the document itself otherwise.
fn text_model(mut document: Map<String, Value>) -> Result<Map<String, Value>, ConfigError> {
    let Some(Value::Object(mut text)) = document.remove("text_config") else {
        return Ok(document);
    };
    let text_type = text.get("model_type").and_then(Value::as_str).unwrap_or_default();
    let Some(family) = Family::of_model_type(text_type) else {
        let keys = Keys(&document);
        let name = keys.text("model_type")?.unwrap_or("a model with a text_config");
        return Err(architecture::refuse_wrapper(name, Some(text_type)));
    };
    text.insert("architectures".into(), Value::from(vec![family.architecture()]));
    for key in SHARED {
        if let Some(value) = document.remove(key)
            && text.get(key).is_none_or(Value::is_null)
        {
            text.insert(key.into(), value);
        }
    }
    // Quantisation is written once, for all of them.
    if let Some(settings) = document.remove("quantization_config") {
        text.insert("quantization_config".into(), settings);
    }
    Ok(text)
}

/// The family, when this version runs it.
fn family(keys: &Keys<'_>) -> Result<Family, ConfigError> {
    let model_type = keys.text("model_type")?;
    let listed = match keys.value("architectures") {
        None => None,
        Some(Value::Array(names)) => match names.as_slice() {
            [] => None,
            [Value::String(name), ..] => Some(name.as_str()),
            [other, ..] => return Err(wrong_type("architectures", "a list of names", other)),
        },
        Some(other) => return Err(wrong_type("architectures", "a list of names", other)),
    };
    let (name, family) = match (listed, model_type) {
        (Some(name), _) => (name, Family::of_architecture(name)),
        (None, Some(model_type)) => (model_type, Family::of_model_type(model_type)),
        (None, None) => return Err(missing("architectures")),
    };
    if ["vision_config", "audio_config"].iter().any(|key| keys.value(key).is_some()) {
        return Err(architecture::refuse_wrapper(name, None));
    }
    let family = family.ok_or_else(|| architecture::refuse(name))?;
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        if let Some(experts) = keys.value(key).and_then(Value::as_u64).filter(|count| *count > 0) {
            return Err(architecture::refuse_experts(name, experts));
        }
    }
    Ok(family)
}

fn refuse_quantised(keys: &Keys<'_>) -> Result<(), ConfigError> {
    let Some(settings) = keys.value("quantization_config") else { return Ok(()) };
    let method = settings.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
    Err(ConfigError::Unsupported {
        what: format!("a checkpoint quantised with {method} (quantization_config)"),
        hint: "use the unquantised repository of this model as the target; the draft still \
               serves the quantised server"
            .to_string(),
    })
}

/// The share of each head that is rotated, in its old place or its new one.
pub(super) fn rotated_share(keys: &Keys<'_>) -> Result<f64, ConfigError> {
    let nested = match keys.object("rope_parameters")? {
        Some(parameters) => Keys(parameters).positive("partial_rotary_factor")?,
        None => None,
    };
    Ok(nested.or(keys.positive("partial_rotary_factor")?).unwrap_or(1.0))
}

/// A head's width where the configuration does not give it.
fn default_head_dim(
    family: Family,
    hidden_size: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    match family {
        Family::Gemma2 => Ok(256),
        Family::Qwen3 => Ok(128),
        _ => derived_head_dim(hidden_size, heads),
    }
}

fn derived_head_dim(hidden_size: usize, heads: usize) -> Result<usize, ConfigError> {
    if hidden_size.is_multiple_of(heads) {
        return Ok(hidden_size / heads);
    }
    Err(ConfigError::Contradiction {
        what: format!(
            "hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and \
             head_dim is not given"
        ),
        hint: "take config.json from the same place as the weights".to_string(),
    })
}

/// The rotary base: at the top, inside `rope_parameters`, or in both places alike.
fn rope_theta(keys: &Keys<'_>) -> Result<f64, ConfigError> {
    let top = keys.positive("rope_theta")?;
    let parameters = keys.object("rope_parameters")?;
    let nested = match parameters {
        Some(parameters) => Keys(parameters).positive("rope_theta")?,
        None => None,
    };
    match (top, nested) {
        (Some(top), Some(nested)) if top != nested => Err(ConfigError::Contradiction {
            what: format!("rope_theta is {top}, rope_parameters.rope_theta is {nested}"),
            hint: "keep the one that the model was trained with".to_string(),
        }),
        (_, Some(theta)) | (Some(theta), None) => Ok(theta),
        (None, None) if parameters.is_none() => {
            tracing::warn!(
                rope_theta = OLD_LLAMA_THETA,
                "config has no rope_theta; using the value of the first Llama models"
            );
            Ok(OLD_LLAMA_THETA)
        }
        (None, None) => Err(missing("rope_parameters.rope_theta")),
    }
}

/// Rope scaling under its old key `rope_scaling` or its new one, `rope_parameters`.
fn rope_scaling(keys: &Keys<'_>) -> Result<Option<RopeScaling>, ConfigError> {
    let read = |key| keys.object(key)?.map_or(Ok(None), |settings| one_rope_scaling(key, settings));
    let old = read("rope_scaling")?;
    let new = read("rope_parameters")?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ConfigError::Contradiction {
            what: format!("rope_scaling says {old:?}, rope_parameters says {new:?}"),
            hint: "keep the one that the model was trained with".to_string(),
        }),
        (old, new) => Ok(new.or(old)),
    }
}

fn one_rope_scaling(
    key: &str,
    settings: &Map<String, Value>,
) -> Result<Option<RopeScaling>, ConfigError> {
    let keys = Keys(settings);
    let kind = match keys.text("rope_type")? {
        Some(kind) => kind,
        None => keys.text("type")?.unwrap_or("default"),
    };
    let number = |name: &str| keys.positive(name)?.ok_or_else(|| missing(&format!("{key}.{name}")));
    match kind {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScaling::Linear { factor: number("factor")? })),
        "llama3" => {
            let scaling = RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_position_embeddings: keys
                    .dimension("original_max_position_embeddings", MAX_CONTEXT)?,
            };
            if number("high_freq_factor")? <= number("low_freq_factor")? {
                return Err(ConfigError::Contradiction {
                    what: format!("{key}: high_freq_factor is not above low_freq_factor"),
                    hint: "take config.json from the same place as the weights".to_string(),
                });
            }
            Ok(Some(scaling))
        }
        other => Err(ConfigError::rope_scaling(other)),
    }
}

/// Typed look-up in an object; a key whose value is null counts as absent.
pub(super) struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there and null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.0.get(key).is_some_and(Value::is_null)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.value(key)
            .map(|value| value.as_str().ok_or_else(|| wrong_type(key, "a text", value)))
            .transpose()
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.value(key)
            .map(|value| value.as_bool().ok_or_else(|| wrong_type(key, "true or false", value)))
            .transpose()
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        self.value(key)
            .map(|value| value.as_object().ok_or_else(|| wrong_type(key, "an object", value)))
            .transpose()
    }

    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(key, "a number", value))?;
        if number > 0.0 && number.is_finite() {
            return Ok(Some(number));
        }
        Err(out_of_range(key, "a positive number", value))
    }

    pub(super) fn dimension(&self, key: &str, limit: u64) -> Result<usize, ConfigError> {
        let value = self.value(key).ok_or_else(|| missing(key))?;
        let number = value.as_u64().ok_or_else(|| wrong_type(key, "a whole number", value))?;
        let number = usize::try_from(number).ok().filter(|_| (1..=limit).contains(&number));
        number.ok_or_else(|| out_of_range(key, &format!("between 1 and {limit}"), value))
    }

    /// One id, a list of ids, or nothing.
    fn ids(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let one = |value: &Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| wrong_type(key, "a token id or a list of them", value))
        };
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(one).collect(),
            Some(id) => Ok(vec![one(id)?]),
        }
    }
}

pub(super) fn missing(key: &str) -> ConfigError {
    ConfigError::Missing { key: key.to_string() }
}

pub(super) fn wrong_type(key: &str, expected: &str, got: &Value) -> ConfigError {
    ConfigError::WrongType {
        key: key.to_string(),
        expected: expected.to_string(),
        got: shorten(got),
    }
}

fn out_of_range(key: &str, expected: &str, got: &Value) -> ConfigError {
    ConfigError::OutOfRange {
        key: key.to_string(),
        expected: expected.to_string(),
        got: shorten(got),
    }
}

fn shorten(value: &Value) -> String {
    crate::hub::shorten(&value.to_string())
}
