//! The differentiable form of the decoder, on candle tensors in f32.
//!
//! One form for all families, told by the configuration's anatomy what to do. Everything here has
//! a backward. Tensor names are Hugging Face's; shapes are written with
//! B = batch, T = time, D = hidden, H = attention heads, K = key-value heads, G = H / K,
//! E = head_dim, F = intermediate, V = vocabulary.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor};

use super::ops::{self, AttentionShape, RotaryTable};
use super::{ModelConfig, NormKind};

/// A projection `x·Wᵀ + b`.
#[derive(Clone)]
pub struct Linear {
    /// `(out, in)`.
    pub weight: Tensor,
    /// `(out)`.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// `(.., in)` to `(.., out)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let product = ops::linear(x, &self.weight)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

/// A norm over the last dimension, of the kind that the configuration names.
#[derive(Clone)]
pub struct Norm {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

impl Norm {
    /// Normalises the last dimension.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn forward(&self, x: &Tensor, config: &ModelConfig) -> Result<Tensor> {
        let (eps, bias) = (config.norm_eps, self.bias.as_ref());
        match config.anatomy.norm {
            NormKind::Layer => ops::layer_norm(x, &self.weight, bias, eps),
            NormKind::Rms | NormKind::RmsOffset => ops::rms_norm(x, &self.gain(config)?, eps),
        }
    }

    /// What the normalised values are multiplied by.
    ///
    /// # Errors
    /// When the tensor computation fails.
    pub fn gain(&self, config: &ModelConfig) -> Result<Tensor> {
        match config.anatomy.norm {
            NormKind::RmsOffset => &self.weight + 1.0,
            NormKind::Rms | NormKind::Layer => Ok(self.weight.clone()),
        }
    }
}

/// One block.
#[derive(Clone)]
pub struct DecoderLayer {
    pub input_layernorm: Norm,
    pub q_proj: Linear,
    pub k_proj: Linear,
    pub v_proj: Linear,
    pub o_proj: Linear,
    /// Of each query head and each key head, `(E)`.
    pub q_norm: Option<Norm>,
    pub k_norm: Option<Norm>,
    /// Before the MLP; in families with post norms, of what attention gives.
    pub post_attention_layernorm: Norm,
    pub pre_feedforward_layernorm: Option<Norm>,
    pub post_feedforward_layernorm: Option<Norm>,
    pub gate_proj: Linear,
    pub up_proj: Linear,
    pub down_proj: Linear,
    /// How many of the latest tokens a token sees; none: all.
    pub window: Option<usize>,
}

/// A decoder whose parameters are tensors, trainable or not.
pub struct Decoder {
    pub config: ModelConfig,
    pub embed_tokens: Tensor,
    pub layers: Vec<DecoderLayer>,
    pub norm: Norm,
    /// The same tensor as `embed_tokens` when the embeddings are tied.
    pub lm_head: Tensor,
}

impl DecoderLayer {
    /// Heads' outputs side by side, the input of `o_proj`: `(B, T, D)` to `(B, T, H*E)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn attend(&self, x: &Tensor, config: &ModelConfig, rotary: &RotaryTable) -> Result<Tensor> {
        let normed = self.input_layernorm.forward(x, config)?;
        let heads = |projection: &Linear, norm: &Option<Norm>| -> Result<Tensor> {
            let flat = projection.forward(&normed)?;
            let Some(norm) = norm else { return Ok(flat) };
            // (B, T, heads*E) -> (B, T, heads, E) and back
            let (b, t, width) = flat.dims3()?;
            let split = flat.reshape((b, t, width / config.head_dim, config.head_dim))?;
            norm.forward(&split, config)?.reshape((b, t, width))
        };
        let query = ops::rotate(&heads(&self.q_proj, &self.q_norm)?, rotary)?;
        let key = ops::rotate(&heads(&self.k_proj, &self.k_norm)?, rotary)?;
        let value = self.v_proj.forward(&normed)?;
        let shape = AttentionShape {
            heads: config.num_attention_heads,
            key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            scale: config.anatomy.attention_scale as f32,
            softcap: config.anatomy.attention_softcap.map(|cap| cap as f32),
            window: self.window,
        };
        ops::attention(&query, &key, &value, shape)
    }

    /// The residual after attention, from the block's input and [`DecoderLayer::attend`]:
    /// `(B, T, D)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add_attended(
        &self,
        x: &Tensor,
        attended: &Tensor,
        config: &ModelConfig,
    ) -> Result<Tensor> {
        let update = self.o_proj.forward(attended)?;
        if config.anatomy.post_norms {
            return x + self.post_attention_layernorm.forward(&update, config)?;
        }
        x + update
    }

    /// The norm before the MLP.
    pub fn mlp_norm(&self) -> &Norm {
        self.pre_feedforward_layernorm.as_ref().unwrap_or(&self.post_attention_layernorm)
    }

    /// The norm before the MLP, to be replaced.
    pub fn mlp_norm_mut(&mut self) -> &mut Norm {
        self.pre_feedforward_layernorm.as_mut().unwrap_or(&mut self.post_attention_layernorm)
    }

    /// The input of `down_proj`, activation(gate)·up: `(B, T, D)` to `(B, T, F)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn gate(&self, x: &Tensor, config: &ModelConfig) -> Result<Tensor> {
        let normed = self.mlp_norm().forward(x, config)?;
        let (gate, up) = (self.gate_proj.forward(&normed)?, self.up_proj.forward(&normed)?);
        ops::gated(&gate, &up, config.anatomy.activation)
    }

    /// The block's output, from the residual after attention and [`DecoderLayer::gate`]:
    /// `(B, T, D)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add_gated(&self, x: &Tensor, gated: &Tensor, config: &ModelConfig) -> Result<Tensor> {
        let update = self.down_proj.forward(gated)?;
        match &self.post_feedforward_layernorm {
            Some(norm) => x + norm.forward(&update, config)?,
            None => x + update,
        }
    }

    /// Builds the block from its named tensors; `get` returns the one of that name within it.
    ///
    /// # Errors
    /// When `get` fails.
    pub fn new<E>(
        config: &ModelConfig,
        window: Option<usize>,
        mut get: impl FnMut(&str) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Self, E> {
        let anatomy = &config.anatomy;
        let mut norm = |name: &str, bias: bool| -> std::result::Result<Norm, E> {
            let weight = get(&format!("{name}.weight"))?;
            let bias = if bias { Some(get(&format!("{name}.bias"))?) } else { None };
            Ok(Norm { weight, bias })
        };
        let layer_bias = anatomy.norm == NormKind::Layer;
        let input_layernorm = norm("input_layernorm", layer_bias)?;
        let post_attention_layernorm = norm("post_attention_layernorm", layer_bias)?;
        let mut optional = |name: &str, there: bool, bias: bool| {
            if there { norm(name, bias).map(Some) } else { Ok(None) }
        };
        let post_norms = anatomy.post_norms;
        let pre_feedforward_layernorm =
            optional("pre_feedforward_layernorm", post_norms, layer_bias)?;
        let post_feedforward_layernorm =
            optional("post_feedforward_layernorm", post_norms, layer_bias)?;
        let q_norm = optional("self_attn.q_norm", anatomy.qk_norm, false)?;
        let k_norm = optional("self_attn.k_norm", anatomy.qk_norm, false)?;
        let mut linear = |name: &str, bias: bool| -> std::result::Result<Linear, E> {
            let weight = get(&format!("{name}.weight"))?;
            let bias = if bias { Some(get(&format!("{name}.bias"))?) } else { None };
            Ok(Linear { weight, bias })
        };
        Ok(Self {
            input_layernorm,
            q_proj: linear("self_attn.q_proj", anatomy.qkv_bias)?,
            k_proj: linear("self_attn.k_proj", anatomy.qkv_bias)?,
            v_proj: linear("self_attn.v_proj", anatomy.qkv_bias)?,
            o_proj: linear("self_attn.o_proj", anatomy.o_bias)?,
            q_norm,
            k_norm,
            post_attention_layernorm,
            pre_feedforward_layernorm,
            post_feedforward_layernorm,
            gate_proj: linear("mlp.gate_proj", anatomy.mlp_bias)?,
            up_proj: linear("mlp.up_proj", anatomy.mlp_bias)?,
            down_proj: linear("mlp.down_proj", anatomy.mlp_bias)?,
            window,
        })
    }

    /// Every tensor of the block by its name within it.
    fn tensors(&self) -> Vec<(String, Tensor)> {
        let mut tensors = Vec::new();
        let mut put = |name: &str, weight: &Tensor, bias: &Option<Tensor>| {
            tensors.push((format!("{name}.weight"), weight.clone()));
            if let Some(bias) = bias {
                tensors.push((format!("{name}.bias"), bias.clone()));
            }
        };
        for (name, norm) in [
            ("input_layernorm", Some(&self.input_layernorm)),
            ("post_attention_layernorm", Some(&self.post_attention_layernorm)),
            ("pre_feedforward_layernorm", self.pre_feedforward_layernorm.as_ref()),
            ("post_feedforward_layernorm", self.post_feedforward_layernorm.as_ref()),
            ("self_attn.q_norm", self.q_norm.as_ref()),
            ("self_attn.k_norm", self.k_norm.as_ref()),
        ] {
            if let Some(norm) = norm {
                put(name, &norm.weight, &norm.bias);
            }
        }
        for (name, linear) in [
            ("self_attn.q_proj", &self.q_proj),
            ("self_attn.k_proj", &self.k_proj),
            ("self_attn.v_proj", &self.v_proj),
            ("self_attn.o_proj", &self.o_proj),
            ("mlp.gate_proj", &self.gate_proj),
            ("mlp.up_proj", &self.up_proj),
            ("mlp.down_proj", &self.down_proj),
        ] {
            put(name, &linear.weight, &linear.bias);
        }
        tensors
    }
}

impl Decoder {
    /// Builds a decoder from named tensors; `get` returns each one of
    /// [`ModelConfig::tensor_shapes`].
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
            let window = config.anatomy.windows.get(index).copied().flatten();
            let get = |name: &str| get(&format!("model.layers.{index}.{name}"));
            layers.push(DecoderLayer::new(config, window, get)?);
        }
        let bias = match config.anatomy.norm {
            NormKind::Layer => Some(get("model.norm.bias")?),
            NormKind::Rms | NormKind::RmsOffset => None,
        };
        let norm = Norm { weight: get("model.norm.weight")?, bias };
        let lm_head =
            if config.tie_word_embeddings { embed_tokens.clone() } else { get("lm_head.weight")? };
        Ok(Self { config: config.clone(), embed_tokens, layers, norm, lm_head })
    }

    /// Every tensor by its Hugging Face name.
    pub fn tensors(&self) -> BTreeMap<String, Tensor> {
        let mut tensors = BTreeMap::new();
        tensors.insert("model.embed_tokens.weight".to_string(), self.embed_tokens.clone());
        for (index, layer) in self.layers.iter().enumerate() {
            for (name, tensor) in layer.tensors() {
                tensors.insert(format!("model.layers.{index}.{name}"), tensor);
            }
        }
        tensors.insert("model.norm.weight".to_string(), self.norm.weight.clone());
        if let Some(bias) = &self.norm.bias {
            tensors.insert("model.norm.bias".to_string(), bias.clone());
        }
        if !self.config.tie_word_embeddings {
            tensors.insert("lm_head.weight".to_string(), self.lm_head.clone());
        }
        tensors
    }

    /// The residual before the first block, rows of the embedding table at the family's scale:
    /// ids `(B, T)` to `(B, T, D)`.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn embed(&self, ids: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let rows = self.embed_tokens.index_select(&ids.flatten_all()?, 0)?.reshape((b, t, ()))?;
        match self.config.anatomy.embedding_scale {
            1.0 => Ok(rows),
            scale => rows * scale,
        }
    }

    /// Hidden states after the final norm: ids `(B, T)` to `(B, T, D)`. Rows are padded on the
    /// right; what stands there cannot reach earlier positions.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn hidden(&self, ids: &Tensor) -> Result<Tensor> {
        self.hidden_of(&self.embed(ids)?)
    }

    /// The same from what [`Decoder::embed`] gives, `(B, T, D)`.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn hidden_of(&self, embedded: &Tensor) -> Result<Tensor> {
        let rotary = RotaryTable::new(&self.config, embedded.dim(1)?);
        let mut x = embedded.clone();
        for layer in &self.layers {
            let attended = layer.attend(&x, &self.config, &rotary)?;
            x = layer.add_attended(&x, &attended, &self.config)?;
            let gated = layer.gate(&x, &self.config)?;
            x = layer.add_gated(&x, &gated, &self.config)?;
        }
        self.norm.forward(&x, &self.config)
    }

    /// Logits: ids `(B, T)` to `(B, T, V)`.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        self.head(&self.hidden(ids)?)
    }

    /// Logits of hidden states `(.., D)`: `(.., V)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn head(&self, hidden: &Tensor) -> Result<Tensor> {
        head(hidden, &self.lm_head, &self.config)
    }
}

/// Logits of hidden states `(.., D)` under a head `(V, D)`: `(.., V)`.
///
/// # Errors
/// When the shapes do not fit.
pub fn head(hidden: &Tensor, lm_head: &Tensor, config: &ModelConfig) -> Result<Tensor> {
    let logits = ops::linear(hidden, lm_head)?;
    match config.anatomy.final_softcap {
        Some(cap) => (logits / cap)?.tanh()? * cap,
        None => Ok(logits),
    }
}
