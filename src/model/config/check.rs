//! A configuration beside the weights that it should describe.

use super::{ConfigError, ModelConfig};
use crate::hub::Weights;

impl ModelConfig {
    /// Every tensor that the model has, with its shape and the keys that the shape follows from.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>, &'static str)> {
        let (hidden, mlp) = (self.hidden_size, self.intermediate_size);
        let (query, key_value) = (self.query_size(), self.key_value_size());
        let mut shapes = vec![(
            "model.embed_tokens.weight".to_string(),
            vec![self.vocab_size, hidden],
            "vocab_size and hidden_size",
        )];
        for layer in 0..self.num_hidden_layers {
            let mut put = |part: &str, shape: Vec<usize>, from: &'static str| {
                shapes.push((format!("model.layers.{layer}.{part}.weight"), shape, from));
            };
            let query_keys = "num_attention_heads * head_dim and hidden_size";
            let value_keys = "num_key_value_heads * head_dim and hidden_size";
            let mlp_keys = "intermediate_size and hidden_size";
            put("input_layernorm", vec![hidden], "hidden_size");
            put("self_attn.q_proj", vec![query, hidden], query_keys);
            put("self_attn.k_proj", vec![key_value, hidden], value_keys);
            put("self_attn.v_proj", vec![key_value, hidden], value_keys);
            put("self_attn.o_proj", vec![hidden, query], query_keys);
            put("post_attention_layernorm", vec![hidden], "hidden_size");
            put("mlp.gate_proj", vec![mlp, hidden], mlp_keys);
            put("mlp.up_proj", vec![mlp, hidden], mlp_keys);
            put("mlp.down_proj", vec![hidden, mlp], mlp_keys);
        }
        shapes.push(("model.norm.weight".to_string(), vec![hidden], "hidden_size"));
        if !self.tie_word_embeddings {
            shapes.push((
                "lm_head.weight".to_string(),
                vec![self.vocab_size, hidden],
                "vocab_size and hidden_size",
            ));
        }
        shapes
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
