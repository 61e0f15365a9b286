//! The shape of the draft: what is asked for, and what that comes to.

use serde::{Deserialize, Serialize};

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
    /// Stored parameters as a share of the target's (`--target-size`).
    pub target_size: Option<f64>,
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

#[derive(Debug, Clone, Copy)]
struct Shape {
    embedding: f64,
    layers: f64,
    mlp: f64,
    heads: f64,
}

/// Steps of the search for a size, from the least harmful cut on: layers first (they cost
/// latency), then MLP channels, width last (it costs most acceptance per parameter).
const LADDER: [Shape; 12] = [
    Shape { embedding: 1.0, layers: 0.5, mlp: 0.75, heads: 1.0 },
    Shape { embedding: 1.0, layers: 0.3, mlp: 0.75, heads: 1.0 },
    Shape { embedding: 1.0, layers: 0.2, mlp: 0.5, heads: 1.0 },
    Shape { embedding: 0.75, layers: 0.2, mlp: 0.5, heads: 1.0 },
    Shape { embedding: 0.625, layers: 0.2, mlp: 0.5, heads: 1.0 },
    DEFAULT,
    Shape { embedding: 0.5, layers: 0.13, mlp: 0.5, heads: 1.0 },
    Shape { embedding: 0.375, layers: 0.13, mlp: 0.5, heads: 1.0 },
    Shape { embedding: 0.3, layers: 0.13, mlp: 0.375, heads: 0.67 },
    Shape { embedding: 0.22, layers: 0.1, mlp: 0.25, heads: 0.67 },
    Shape { embedding: 0.16, layers: 0.1, mlp: 0.25, heads: 0.34 },
    Shape { embedding: 0.1, layers: 0.07, mlp: 0.2, heads: 0.34 },
];

impl Plan {
    /// Turns a request into sizes that vLLM loads: widths in multiples of 32, whole head groups,
    /// hidden size a multiple of the number of heads.
    ///
    /// # Errors
    /// When a multiplier is outside (0, 1], or the size asked for cannot be reached.
    pub fn new(target: &ModelConfig, request: &Request) -> Result<Self, BuildError> {
        for (flag, value) in [
            ("--es", request.embedding),
            ("--ls", request.layers),
            ("--mlp", request.mlp),
            ("--heads", request.heads),
            ("--target-size", request.target_size),
        ] {
            if let Some(value) = value.filter(|v| !(*v > 0.0 && *v <= 1.0)) {
                return Err(BuildError::Request {
                    flag,
                    got: value.to_string(),
                    expected: "a number above 0 and at most 1",
                });
            }
        }
        if let Some(es) = request.embedding.filter(|es| *es < 1.0 && keeps_width(target)) {
            return Err(BuildError::Request {
                flag: "--es",
                got: es.to_string(),
                expected: "1 for this family, whose servers insist on tied embeddings: cut --ls, \
                           --mlp or --heads",
            });
        }
        let Some(size) = request.target_size else {
            // Flags that are set stand; an axis that is not mentioned stays whole, unless
            // nothing at all was asked for.
            let given = [request.embedding, request.layers, request.mlp, request.heads];
            let shape = if given.iter().all(Option::is_none) {
                DEFAULT
            } else {
                Shape { embedding: 1.0, layers: 1.0, mlp: 1.0, heads: 1.0 }
            };
            return Ok(Self::from_shape(target, request.over(shape)));
        };
        let budget = size * target.parameters() as f64;
        let mut smallest = usize::MAX;
        for shape in LADDER {
            let plan = Self::from_shape(target, request.over(shape));
            let parameters = plan.config(target).parameters();
            if parameters as f64 <= budget {
                return Ok(plan);
            }
            smallest = smallest.min(parameters);
        }
        Err(BuildError::TooSmall {
            asked: size,
            smallest: smallest as f64 / target.parameters() as f64,
            vocab_size: target.vocab_size,
        })
    }

    fn from_shape(target: &ModelConfig, shape: Shape) -> Self {
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
