//! The families of dense decoders, and what each does differently from the first Llama.

use super::parse::{Keys, missing, wrong_type};
use super::{ConfigError, parse};

/// A family of decoders, as Hugging Face and vLLM know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma2,
    StableLm,
}

impl Family {
    pub const ALL: [Self; 6] =
        [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Gemma2, Self::StableLm];

    /// The name in `architectures`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::StableLm => "StableLmForCausalLM",
        }
    }

    /// The value of `model_type`, and the architecture's name in GGUF files. llama.cpp files
    /// Mistral under `llama`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
            Self::StableLm => "stablelm",
        }
    }

    /// The key of the norms' epsilon.
    pub fn norm_eps_key(self) -> &'static str {
        match self {
            Self::StableLm => "layer_norm_eps",
            _ => "rms_norm_eps",
        }
    }

    pub(super) fn of_architecture(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.architecture() == name)
    }

    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.model_type() == name)
    }
}

/// How a norm scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// By the root mean square, times the gain.
    Rms,
    /// The same with a gain of 1 plus what is stored (Gemma).
    RmsOffset,
    /// Mean taken off first, a bias added at the end.
    Layer,
}

/// What the gate of the feed-forward network goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// What distinguishes one decoder from another beyond its sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Anatomy {
    pub norm: NormKind,
    pub activation: Activation,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Queries and keys are normalised head by head before their rotation.
    pub qk_norm: bool,
    /// What attention and MLP give is normalised before it is added to the residual.
    pub post_norms: bool,
    /// Leading dimensions of each head that are rotated.
    pub rotary_dim: usize,
    /// What scores are multiplied by.
    pub attention_scale: f64,
    /// Scores `s` become `c·tanh(s / c)`.
    pub attention_softcap: Option<f64>,
    /// Logits likewise.
    pub final_softcap: Option<f64>,
    /// What rows of the embedding table are multiplied by.
    pub embedding_scale: f64,
    /// For each layer, how many of the latest tokens a token sees, itself included; none: all.
    pub windows: Vec<Option<usize>>,
}

/// Sizes that an [`Anatomy`] depends on.
pub(super) struct Sizes {
    pub hidden_size: usize,
    pub head_dim: usize,
    pub layers: usize,
}

impl Anatomy {
    pub(super) fn read(
        family: Family,
        keys: &Keys<'_>,
        sizes: &Sizes,
    ) -> Result<Self, ConfigError> {
        let flag = |key: &str, default: bool| Ok(keys.flag(key)?.unwrap_or(default));
        let plain = Self {
            norm: NormKind::Rms,
            activation: Activation::Silu,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            post_norms: false,
            rotary_dim: sizes.head_dim,
            attention_scale: (sizes.head_dim as f64).powf(-0.5),
            attention_softcap: None,
            final_softcap: None,
            embedding_scale: 1.0,
            windows: vec![None; sizes.layers],
        };
        let attention_bias = flag("attention_bias", false)?;
        let anatomy = match family {
            // `qkv_bias` is vLLM's spelling for biases on the inputs of attention alone.
            Family::Llama | Family::Mistral => Self {
                qkv_bias: attention_bias || flag("qkv_bias", false)?,
                o_bias: attention_bias,
                mlp_bias: flag("mlp_bias", false)?,
                windows: windows(family, keys, sizes.layers)?,
                ..plain
            },
            Family::Qwen2 => {
                Self { qkv_bias: true, windows: windows(family, keys, sizes.layers)?, ..plain }
            }
            Family::Qwen3 => Self {
                qkv_bias: attention_bias,
                o_bias: attention_bias,
                qk_norm: true,
                windows: windows(family, keys, sizes.layers)?,
                ..plain
            },
            Family::Gemma2 => Self {
                norm: NormKind::RmsOffset,
                activation: Activation::GeluTanh,
                qkv_bias: attention_bias,
                o_bias: attention_bias,
                post_norms: true,
                attention_scale: keys
                    .positive("query_pre_attn_scalar")?
                    .unwrap_or(256.0)
                    .powf(-0.5),
                attention_softcap: softcap(keys, "attn_logit_softcapping", 50.0)?,
                final_softcap: softcap(keys, "final_logit_softcapping", 30.0)?,
                embedding_scale: (sizes.hidden_size as f64).sqrt(),
                windows: windows(family, keys, sizes.layers)?,
                ..plain
            },
            Family::StableLm => Self {
                norm: NormKind::Layer,
                qkv_bias: flag("use_qkv_bias", false)?,
                rotary_dim: rotary_dim(keys, sizes.head_dim)?,
                ..plain
            },
        };
        anatomy.check(family, keys)?;
        Ok(anatomy)
    }

    /// Refuses what changes the computation in ways this version does not know.
    fn check(&self, family: Family, keys: &Keys<'_>) -> Result<(), ConfigError> {
        let refuse = |what: String, hint: &str| {
            Err(ConfigError::Unsupported { what, hint: hint.to_string() })
        };
        let (key, default, expected) = match self.activation {
            Activation::Silu => ("hidden_act", "silu", &["silu"][..]),
            // Early files name the activation in `hidden_act` and mean this one.
            Activation::GeluTanh => (
                "hidden_activation",
                "gelu_pytorch_tanh",
                &["gelu_pytorch_tanh", "gelu_pytorch", "gelu"][..],
            ),
        };
        let activation = keys.text(key)?.unwrap_or(default);
        if !expected.contains(&activation) {
            return refuse(
                format!("{key} {activation:?}"),
                &format!("this version computes {} for this family", expected[0]),
            );
        }
        if family != Family::StableLm && parse::rotated_share(keys)? != 1.0 {
            return refuse(
                format!("partial_rotary_factor {}", parse::rotated_share(keys)?),
                "models of this family rotate whole heads",
            );
        }
        for key in ["qk_layernorm", "use_parallel_residual"] {
            if keys.flag(key)? == Some(true) {
                return refuse(format!("{key} true"), "neither this version nor vLLM runs it");
            }
        }
        Ok(())
    }
}

fn softcap(keys: &Keys<'_>, key: &str, default: f64) -> Result<Option<f64>, ConfigError> {
    // Null switches it off; only a missing key means the family's value.
    if keys.is_null(key) {
        return Ok(None);
    }
    Ok(Some(keys.positive(key)?.unwrap_or(default)))
}

/// StableLM rotates a quarter of each head unless told otherwise.
fn rotary_dim(keys: &Keys<'_>, head_dim: usize) -> Result<usize, ConfigError> {
    let given = keys.value("partial_rotary_factor").is_some()
        || keys.object("rope_parameters")?.is_some_and(|p| p.contains_key("partial_rotary_factor"));
    let share = if given { parse::rotated_share(keys)? } else { 0.25 };
    let dim = (head_dim as f64 * share) as usize;
    if dim < 2 || dim > head_dim || !dim.is_multiple_of(2) {
        return Err(ConfigError::Contradiction {
            what: format!(
                "partial_rotary_factor {share} of head_dim {head_dim} is {dim} dimensions"
            ),
            hint: "rotary embedding turns pairs; take config.json from the same place as the \
                   weights"
                .to_string(),
        });
    }
    Ok(dim)
}

/// What each layer sees, from `layer_types` where there are any, else by the family's rule.
fn windows(
    family: Family,
    keys: &Keys<'_>,
    layers: usize,
) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = match keys.value("sliding_window") {
        None => None,
        Some(_) => Some(keys.dimension("sliding_window", parse::MAX_CONTEXT)?),
    };
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    if qwen && keys.flag("use_sliding_window")? != Some(true) {
        return Ok(vec![None; layers]);
    }
    let window = match (window, family) {
        (None, Family::Gemma2) if !keys.is_null("sliding_window") => Some(4096),
        (window, _) => window,
    };
    let Some(window) = window else { return Ok(vec![None; layers]) };
    if let Some(types) = keys.value("layer_types") {
        let types = types.as_array().ok_or_else(|| wrong_type("layer_types", "a list", types))?;
        if types.len() != layers {
            return Err(ConfigError::Contradiction {
                what: format!("layer_types has {} entries for {layers} layers", types.len()),
                hint: "take config.json from the same place as the weights".to_string(),
            });
        }
        let one = |kind: &serde_json::Value| match kind.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => Ok(Some(window)),
            _ => Err(wrong_type("layer_types", "full_attention or sliding_attention", kind)),
        };
        return types.iter().map(one).collect();
    }
    // The first layer with a window, and how far apart such layers are.
    let (from, step) = match family {
        Family::Gemma2 => (0, 2),
        Family::Qwen2 | Family::Qwen3 => {
            let from = match keys.value("max_window_layers") {
                None => return Err(missing("max_window_layers")),
                Some(value) => value
                    .as_u64()
                    .ok_or_else(|| wrong_type("max_window_layers", "a whole number", value))?,
            };
            (usize::try_from(from).unwrap_or(layers), 1)
        }
        // Llama has no window; a key left over from elsewhere means nothing to it.
        Family::Llama => (layers, 1),
        Family::Mistral | Family::StableLm => (0, 1),
    };
    let slides = |layer: usize| layer >= from && (layer - from).is_multiple_of(step);
    Ok((0..layers).map(|layer| slides(layer).then_some(window)).collect())
}
