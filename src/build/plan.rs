//! The shape of the draft: what is asked for, and what that comes to.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::BuildError;
use crate::model::{Family, ModelConfig};

/// What the user asked to shrink. Multipliers are in (0, 1].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Hidden size (`--es`).
    pub embedding: Option<f64>,
    /// Layers (`--ls`).
    pub layers: Option<f64>,
    /// MLP channels (`--mlp`).
    pub mlp: Option<f64>,
    /// Attention heads, in whole key-value groups (`--heads`).
    pub heads: Option<f64>,
    /// Most stored parameters, as a share of the target's (`--target-size`).
    pub target_size: Option<f64>,
    /// Most stored parameters (`--target-params`).
    pub target_params: Option<usize>,
    /// Longest decode step, as a share of the target's (`--latency-ratio`).
    pub latency_ratio: Option<f64>,
}

/// The sizes of the draft; which layers, heads and channels are kept is decided by measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_key_value_heads: usize,
}

/// Multipliers when nothing is asked for: wide and shallow, since a draft's latency follows its
/// depth, and MLP channels are the cheapest thing to lose.
const DEFAULT: Shape = Shape { embedding: 0.5, layers: 0.2, mlp: 0.5, heads: 1.0 };

/// Multipliers of the four axes, in (0, 1].
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) embedding: f64,
    pub(super) layers: f64,
    pub(super) mlp: f64,
    pub(super) heads: f64,
}

impl std::fmt::Display for Plan {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hidden_size, intermediate_size, num_hidden_layers, num_key_value_heads } = self;
        write!(
            formatter,
            "hidden {hidden_size}, MLP {intermediate_size}, {num_hidden_layers} layers, \
             {num_key_value_heads} key-value groups"
        )
    }
}

/// A plan that was printed before: sizes, and the target's layers if they were chosen already.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanFile {
    pub plan: Plan,
    pub layers: Option<Vec<usize>>,
}

impl PlanFile {
    /// Reads what `da-build --json` printed, or a draft's manifest.
    ///
    /// # Errors
    /// When the file cannot be read or holds no plan.
    pub fn read(path: &Path) -> Result<Self, BuildError> {
        let fail = |reason: String| BuildError::PlanFile { path: path.into(), reason };
        let text = std::fs::read(path).map_err(|e| fail(e.to_string()))?;
        let document: Value = serde_json::from_slice(&text).map_err(|e| fail(e.to_string()))?;
        let holder = document.get("settings").unwrap_or(&document);
        if holder.get("plan").is_none() {
            return Err(fail("it has no \"plan\"".into()));
        }
        serde_json::from_value(holder.clone()).map_err(|e| fail(e.to_string()))
    }

    /// Refuses sizes and layers that the target cannot give.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn check(&self, target: &ModelConfig) -> Result<(), BuildError> {
        self.plan.check(target)?;
        let Some(layers) = &self.layers else { return Ok(()) };
        let ascending = layers.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = layers.iter().all(|layer| *layer < target.num_hidden_layers);
        if layers.len() == self.plan.num_hidden_layers && ascending && inside {
            return Ok(());
        }
        Err(BuildError::Plan(format!(
            "layers are {layers:?}, expected {} ascending numbers below {}",
            self.plan.num_hidden_layers, target.num_hidden_layers
        )))
    }
}

impl Plan {
    /// Turns what a request says of the axes into sizes that vLLM loads: widths in multiples of
    /// 32, whole head groups, hidden size a multiple of the number of heads. Limits are the
    /// search's affair.
    ///
    /// # Errors
    /// When a multiplier is outside (0, 1].
    pub fn new(target: &ModelConfig, request: &Request) -> Result<Self, BuildError> {
        request.check(target)?;
        // Flags that are set stand; an axis that is not mentioned stays whole, unless nothing at
        // all was asked for.
        let given = [request.embedding, request.layers, request.mlp, request.heads];
        let shape = if given.iter().all(Option::is_none) {
            DEFAULT
        } else {
            Shape { embedding: 1.0, layers: 1.0, mlp: 1.0, heads: 1.0 }
        };
        Ok(Self::from_shape(target, request.over(shape)))
    }

    /// Refuses sizes, as read from a file, that the target cannot give.
    ///
    /// # Errors
    /// When a size is 0, exceeds the target's, or does not go together with the others.
    pub fn check(&self, target: &ModelConfig) -> Result<(), BuildError> {
        let refuse = |name: &str, got: usize, expected: String| {
            Err(BuildError::Plan(format!("{name} is {got}, expected {expected}")))
        };
        for (name, got, most) in [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("intermediate_size", self.intermediate_size, target.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers, target.num_hidden_layers),
            ("num_key_value_heads", self.num_key_value_heads, target.num_key_value_heads),
        ] {
            if got == 0 || got > most {
                return refuse(name, got, format!("1 to the target's {most}"));
            }
        }
        let heads =
            self.num_key_value_heads * target.num_attention_heads / target.num_key_value_heads;
        if keeps_width(target) && self.hidden_size != target.hidden_size {
            let expected = format!("{} as in the target, for this family", target.hidden_size);
            return refuse("hidden_size", self.hidden_size, expected);
        }
        if target.family == Family::StableLm && self.hidden_size != heads * target.head_dim {
            let expected = format!("{} heads of {}", heads, target.head_dim);
            return refuse("hidden_size", self.hidden_size, expected);
        }
        Ok(())
    }

    /// Whether this plan has at least as much of everything as another one.
    pub(super) fn exceeds(&self, other: &Self) -> bool {
        self != other
            && self.hidden_size >= other.hidden_size
            && self.intermediate_size >= other.intermediate_size
            && self.num_hidden_layers >= other.num_hidden_layers
            && self.num_key_value_heads >= other.num_key_value_heads
    }

    /// The sizes that multipliers come to.
    pub(super) fn from_shape(target: &ModelConfig, shape: Shape) -> Self {
        let groups = target.num_key_value_heads;
        let mut kept = ((groups as f64 * shape.heads).round() as usize).clamp(1, groups);
        let group = target.num_attention_heads / groups;
        if target.family == Family::StableLm && !keeps_width(target) {
            // vLLM derives the head size of this family from the hidden size, and there is no
            // other architecture that could carry the draft: width and heads shrink together.
            let share = shape.embedding.min(shape.heads);
            kept = ((groups as f64 * share).round() as usize).clamp(1, groups);
        }
        let heads = kept * group;
        // Hugging Face's Llama and Gemma refuse a hidden size that their heads do not divide.
        let unit = match target.family {
            Family::Llama | Family::Gemma2 => lcm(32, heads),
            Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::StableLm => 32,
        };
        let hidden_size = if keeps_width(target) {
            target.hidden_size
        } else if target.family == Family::StableLm {
            heads * target.head_dim
        } else if shape.embedding >= 1.0 && target.hidden_size.is_multiple_of(unit) {
            target.hidden_size
        } else {
            round_to(target.hidden_size as f64 * shape.embedding, unit)
                .min(target.hidden_size / unit * unit)
                .max(unit)
        };
        let layers = (target.num_hidden_layers as f64 * shape.layers).round() as usize;
        Self {
            hidden_size,
            intermediate_size: if shape.mlp >= 1.0 {
                target.intermediate_size
            } else {
                round_to(target.intermediate_size as f64 * shape.mlp, 32)
                    .min(target.intermediate_size)
            },
            num_hidden_layers: layers.clamp(1, target.num_hidden_layers),
            num_key_value_heads: kept,
        }
    }

    /// Whether nothing is cut: the draft is the target.
    pub fn is_identity(&self, target: &ModelConfig) -> bool {
        self.hidden_size == target.hidden_size
            && self.intermediate_size == target.intermediate_size
            && self.num_hidden_layers == target.num_hidden_layers
            && self.num_key_value_heads == target.num_key_value_heads
    }

    /// The draft's configuration. Folding the final norm's gain into the head unties it.
    pub fn config(&self, target: &ModelConfig) -> ModelConfig {
        let group = target.num_attention_heads / target.num_key_value_heads;
        let identity = self.is_identity(target);
        if identity {
            return target.clone();
        }
        let heads = self.num_key_value_heads * group;
        let mut anatomy = target.anatomy.clone();
        // A server's cache wants all layers alike, and a draft has little use for a window.
        let first = anatomy.windows.first().copied().flatten();
        let alike = anatomy.windows.iter().all(|window| *window == first);
        anatomy.windows = vec![first.filter(|_| alike); self.num_hidden_layers];
        // vLLM derives the head size of Qwen2 from the hidden size. Its Mistral is the same
        // decoder with a head size of its own.
        let derived = self.hidden_size == heads * target.head_dim;
        let family = match target.family {
            Family::Qwen2 if !derived => Family::Mistral,
            family => family,
        };
        if family == Family::Gemma2 {
            anatomy.embedding_scale = (self.hidden_size as f64).sqrt();
        }
        ModelConfig {
            family,
            anatomy,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: self.num_key_value_heads,
            // The sliced norm divides by the smaller width: see `slice`.
            norm_eps: target.norm_eps * target.hidden_size as f64 / self.hidden_size as f64,
            tie_word_embeddings: keeps_width(target) && target.tie_word_embeddings,
            ..target.clone()
        }
    }
}

/// Families whose norms of what a block gives, and whose tie of embeddings and head, a smaller
/// residual would break: Gemma 2. Layers, heads and MLP channels can be cut.
fn keeps_width(target: &ModelConfig) -> bool {
    target.anatomy.post_norms
}

impl Request {
    /// Refuses values that are out of range.
    ///
    /// # Errors
    /// When one is.
    pub fn check(&self, target: &ModelConfig) -> Result<(), BuildError> {
        for (flag, value) in [
            ("--es", self.embedding),
            ("--ls", self.layers),
            ("--mlp", self.mlp),
            ("--heads", self.heads),
            ("--target-size", self.target_size),
            ("--latency-ratio", self.latency_ratio),
        ] {
            if let Some(value) = value.filter(|v| !(*v > 0.0 && *v <= 1.0)) {
                return Err(BuildError::Request {
                    flag,
                    got: value.to_string(),
                    expected: "a number above 0 and at most 1",
                });
            }
        }
        if let Some(es) = self.embedding.filter(|es| *es < 1.0 && keeps_width(target)) {
            return Err(BuildError::Request {
                flag: "--es",
                got: es.to_string(),
                expected: "1 for this family, whose servers insist on tied embeddings: cut --ls, \
                           --mlp or --heads",
            });
        }
        Ok(())
    }

    /// Whether the shape is to be found under a limit.
    pub fn is_limited(&self) -> bool {
        self.target_size.is_some() || self.target_params.is_some() || self.latency_ratio.is_some()
    }

    /// Most stored parameters.
    pub(super) fn budget(&self, target: &ModelConfig) -> f64 {
        let share = self.target_size.map(|size| size * target.parameters() as f64);
        let count = self.target_params.map(|count| count as f64);
        share.unwrap_or(f64::INFINITY).min(count.unwrap_or(f64::INFINITY))
    }

    fn over(&self, shape: Shape) -> Shape {
        Shape {
            embedding: self.embedding.unwrap_or(shape.embedding),
            layers: self.layers.unwrap_or(shape.layers),
            mlp: self.mlp.unwrap_or(shape.mlp),
            heads: self.heads.unwrap_or(shape.heads),
        }
    }
}

fn round_to(value: f64, unit: usize) -> usize {
    ((value / unit as f64).round() as usize).max(1) * unit
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
