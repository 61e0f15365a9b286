//! The differentiable form of the decoder, on candle tensors in f32.
//!
//! Everything here has a backward. Tensor names are Hugging Face's; shapes are written with
//! B = batch, T = time, D = hidden, H = attention heads, K = key-value heads, G = H / K,
//! E = head_dim, F = intermediate, V = vocabulary.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

use super::ModelConfig;
use super::ops::{self, AttentionShape, RotaryTable, linear};

/// The learned tensors of one block.
pub struct DecoderLayer {
    pub input_layernorm: Tensor,
    pub q_proj: Tensor,
    pub k_proj: Tensor,
    pub v_proj: Tensor,
    pub o_proj: Tensor,
    pub post_attention_layernorm: Tensor,
    pub gate_proj: Tensor,
    pub up_proj: Tensor,
    pub down_proj: Tensor,
}

/// A decoder whose parameters are tensors, trainable or not.
pub struct Decoder {
    pub config: ModelConfig,
    pub embed_tokens: Tensor,
    pub layers: Vec<DecoderLayer>,
    pub norm: Tensor,
    /// The same tensor as `embed_tokens` when the embeddings are tied.
    pub lm_head: Tensor,
}

/// Names and shapes of every tensor of a model, in file order. A tied head is not among them.
pub fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (d, f, v) = (config.hidden_size, config.intermediate_size, config.vocab_size);
    let (q, kv) = (config.query_size(), config.key_value_size());
    let mut shapes = vec![("model.embed_tokens.weight".to_string(), vec![v, d])];
    for layer in 0..config.num_hidden_layers {
        for (name, shape) in [
            ("input_layernorm", vec![d]),
            ("self_attn.q_proj", vec![q, d]),
            ("self_attn.k_proj", vec![kv, d]),
            ("self_attn.v_proj", vec![kv, d]),
            ("self_attn.o_proj", vec![d, q]),
            ("post_attention_layernorm", vec![d]),
            ("mlp.gate_proj", vec![f, d]),
            ("mlp.up_proj", vec![f, d]),
            ("mlp.down_proj", vec![d, f]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}.weight"), shape));
        }
    }
    shapes.push(("model.norm.weight".to_string(), vec![d]));
    if !config.tie_word_embeddings {
        shapes.push(("lm_head.weight".to_string(), vec![v, d]));
    }
    shapes
}

impl DecoderLayer {
    /// Heads' outputs side by side, the input of `o_proj`: `(B, T, D)` to `(B, T, H*E)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn attend(&self, x: &Tensor, config: &ModelConfig, rotary: &RotaryTable) -> Result<Tensor> {
        let normed = ops::rms_norm(x, &self.input_layernorm, config.rms_norm_eps)?;
        let query = ops::rotate(&linear(&normed, &self.q_proj)?, rotary)?;
        let key = ops::rotate(&linear(&normed, &self.k_proj)?, rotary)?;
        let value = linear(&normed, &self.v_proj)?;
        let shape = AttentionShape {
            heads: config.num_attention_heads,
            key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        };
        ops::attention(&query, &key, &value, shape)
    }

    /// The input of `down_proj`, silu(gate)·up: `(B, T, D)` to `(B, T, F)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn gate(&self, x: &Tensor, config: &ModelConfig) -> Result<Tensor> {
        let normed = ops::rms_norm(x, &self.post_attention_layernorm, config.rms_norm_eps)?;
        ops::silu_mul(&linear(&normed, &self.gate_proj)?, &linear(&normed, &self.up_proj)?)
    }
}

impl Decoder {
    /// Builds a decoder from named tensors; `get` returns each one of [`tensor_shapes`].
    ///
    /// # Errors
    /// When `get` fails.
    pub fn new<E>(
        config: &ModelConfig,
        mut get: impl FnMut(&str) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Self, E> {
        let embed_tokens = get("model.embed_tokens.weight")?;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            let mut get = |name: &str| get(&format!("model.layers.{index}.{name}.weight"));
            layers.push(DecoderLayer {
                input_layernorm: get("input_layernorm")?,
                q_proj: get("self_attn.q_proj")?,
                k_proj: get("self_attn.k_proj")?,
                v_proj: get("self_attn.v_proj")?,
                o_proj: get("self_attn.o_proj")?,
                post_attention_layernorm: get("post_attention_layernorm")?,
                gate_proj: get("mlp.gate_proj")?,
                up_proj: get("mlp.up_proj")?,
                down_proj: get("mlp.down_proj")?,
            });
        }
        let norm = get("model.norm.weight")?;
        let lm_head =
            if config.tie_word_embeddings { embed_tokens.clone() } else { get("lm_head.weight")? };
        Ok(Self { config: config.clone(), embed_tokens, layers, norm, lm_head })
    }

    /// Every tensor by its Hugging Face name.
    pub fn tensors(&self) -> BTreeMap<String, Tensor> {
        let mut tensors = BTreeMap::new();
        tensors.insert("model.embed_tokens.weight".to_string(), self.embed_tokens.clone());
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, tensor) in [
                ("input_layernorm", &layer.input_layernorm),
                ("self_attn.q_proj", &layer.q_proj),
                ("self_attn.k_proj", &layer.k_proj),
                ("self_attn.v_proj", &layer.v_proj),
                ("self_attn.o_proj", &layer.o_proj),
                ("post_attention_layernorm", &layer.post_attention_layernorm),
                ("mlp.gate_proj", &layer.gate_proj),
                ("mlp.up_proj", &layer.up_proj),
                ("mlp.down_proj", &layer.down_proj),
            ] {
                tensors.insert(format!("model.layers.{index}.{name}.weight"), tensor.clone());
            }
        }
        tensors.insert("model.norm.weight".to_string(), self.norm.clone());
        if !self.config.tie_word_embeddings {
            tensors.insert("lm_head.weight".to_string(), self.lm_head.clone());
        }
        tensors
    }

    /// Rows of the embedding table: ids `(B, T)` to `(B, T, D)`.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        self.embed_tokens.index_select(&ids.flatten_all()?, 0)?.reshape((b, t, ()))
    }

    /// Hidden states after the final norm: ids `(B, T)` to `(B, T, D)`. Rows are padded on the
    /// right; what stands there cannot reach earlier positions.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.hidden_of(&self.embed(ids)?)
    }

    /// The same from the rows of the embedding table, `(B, T, D)`.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn hidden_of(&self, embedded: &Tensor) -> Result<Tensor> {
        let rotary = RotaryTable::new(&self.config, embedded.dim(1)?);
        let mut x = embedded.clone();
        for layer in &self.layers {
            let attended = layer.attend(&x, &self.config, &rotary)?;
            x = (x + linear(&attended, &layer.o_proj)?)?;
            let gated = layer.gate(&x, &self.config)?;
            x = (x + linear(&gated, &layer.down_proj)?)?;
        }
        ops::rms_norm(&x, &self.norm, self.config.rms_norm_eps)
    }

    /// Logits: ids `(B, T)` to `(B, T, V)`.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        linear(&self.hidden(ids)?, &self.lm_head)
    }
}
