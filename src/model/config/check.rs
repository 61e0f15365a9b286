//! A configuration beside the weights that it should describe.

use super::{Anatomy, ConfigError, ModelConfig, NormKind};
use crate::hub::Weights;

impl ModelConfig {
    /// Every tensor that the model has, in file order, with its shape and the keys that the shape
    /// follows from. A tied head is not among them.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>, &'static str)> {
        let (hidden, anatomy) = (self.hidden_size, &self.anatomy);
        let table = vec![self.vocab_size, hidden];
        let table_keys = "vocab_size and hidden_size";
        let mut shapes = vec![("model.embed_tokens.weight".to_string(), table.clone(), table_keys)];
        for layer in 0..self.num_hidden_layers {
            let mut put = |part: &str, shape: Vec<usize>, from: &'static str| {
                shapes.push((format!("model.layers.{layer}.{part}"), shape, from));
            };
            for name in self.layer_norms() {
                put(&format!("{name}.weight"), vec![hidden], "hidden_size");
                if anatomy.norm == NormKind::Layer {
                    put(&format!("{name}.bias"), vec![hidden], "hidden_size");
                }
            }
            for (name, out, width, bias, from) in self.layer_projections() {
                put(&format!("{name}.weight"), vec![out, width], from);
                if bias {
                    put(&format!("{name}.bias"), vec![out], from);
                }
            }
            if anatomy.qk_norm {
                for name in ["q_norm", "k_norm"] {
                    put(&format!("self_attn.{name}.weight"), vec![self.head_dim], "head_dim");
                }
            }
        }
        shapes.push(("model.norm.weight".to_string(), vec![hidden], "hidden_size"));
        if anatomy.norm == NormKind::Layer {
            shapes.push(("model.norm.bias".to_string(), vec![hidden], "hidden_size"));
        }
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_string(), table, table_keys));
        }
        shapes
    }

    /// Norms of a layer over the residual's width.
    fn layer_norms(&self) -> &'static [&'static str] {
        if self.anatomy.post_norms {
            &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]
        } else {
            &["input_layernorm", "post_attention_layernorm"]
        }
    }

    /// Projections of a layer: name, outputs, inputs, whether it has a bias, and the keys.
    #[allow(clippy::type_complexity)]
    fn layer_projections(&self) -> [(&'static str, usize, usize, bool, &'static str); 7] {
        let (hidden, mlp) = (self.hidden_size, self.intermediate_size);
        let (query, key_value) = (self.query_size(), self.key_value_size());
        let Anatomy { qkv_bias, o_bias, mlp_bias, .. } = self.anatomy;
        let query_keys = "num_attention_heads * head_dim and hidden_size";
        let value_keys = "num_key_value_heads * head_dim and hidden_size";
        let mlp_keys = "intermediate_size and hidden_size";
        [
            ("self_attn.q_proj", query, hidden, qkv_bias, query_keys),
            ("self_attn.k_proj", key_value, hidden, qkv_bias, value_keys),
            ("self_attn.v_proj", key_value, hidden, qkv_bias, value_keys),
            ("self_attn.o_proj", hidden, query, o_bias, query_keys),
            ("mlp.gate_proj", mlp, hidden, mlp_bias, mlp_keys),
            ("mlp.up_proj", mlp, hidden, mlp_bias, mlp_keys),
            ("mlp.down_proj", hidden, mlp, mlp_bias, mlp_keys),
        ]
    }

    /// Checks that the weights have every tensor of this model in its shape and in a format that
    /// can be read, and no layer beyond the last.
    ///
    /// # Errors
    /// The first tensor that does not fit, with what was expected and what is there.
    pub fn check_weights(&self, weights: &Weights) -> Result<(), ConfigError> {
        let names = weights.names();
        let packed = [".qweight", ".qzeros", ".scales", ".weight_scale_inv", ".weight_packed"];
        if let Some(name) = names.iter().find(|name| packed.iter().any(|end| name.ends_with(end))) {
            return Err(ConfigError::Encoding {
                name: name.clone(),
                stored_as: "packed quantised weights".to_string(),
            });
        }
        for (name, expected, from) in self.tensor_shapes() {
            let Some(got) = weights.shape(&name) else {
                return Err(ConfigError::MissingTensor {
                    name,
                    expected: format!("shape {expected:?} from {from}"),
                });
            };
            if got != expected {
                return Err(ConfigError::Shape { name, expected, got, from });
            }
            if !weights.is_readable(&name) {
                let stored_as = weights.stored_as(&name).unwrap_or_default();
                return Err(ConfigError::Encoding { name, stored_as });
            }
        }
        let beyond = format!("model.layers.{}.", self.num_hidden_layers);
        if let Some(name) = names.iter().find(|name| name.starts_with(&beyond)) {
            return Err(ConfigError::Contradiction {
                what: format!(
                    "num_hidden_layers is {}, but the weights have tensor {name}",
                    self.num_hidden_layers
                ),
                hint: "the weights and the configuration are not of the same model".to_string(),
            });
        }
        Ok(())
    }
}
