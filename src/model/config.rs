//! A decoder's shape, as read from a Hugging Face `config.json` or from GGUF metadata.

use serde_json::{Map, Value};

/// The shape of a decoder. Dimensions are in elements, angles in radians.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// `architectures[0]`, for example `LlamaForCausalLM`.
    pub architecture: String,
    /// `model_type`, for example `llama`.
    pub model_type: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    /// Never derived after loading: a sliced draft keeps the target's value.
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rope_theta: f64,
    pub rms_norm_eps: f64,
    pub tie_word_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// Every id that ends a generation; a list in some configs, a number in others.
    pub eos_token_ids: Vec<u32>,
    /// The document as it was read, so that keys which are not understood here (rope scaling,
    /// for example) reach the draft's `config.json` unchanged.
    pub raw: Map<String, Value>,
}

impl ModelConfig {
    /// Width of the query projection's output: `num_attention_heads * head_dim`.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of the key and of the value projection's output.
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Parameters as stored, with a tied table counted once.
    pub fn parameters(&self) -> usize {
        let table = self.vocab_size * self.hidden_size;
        let attention = self.hidden_size * (2 * self.query_size() + 2 * self.key_value_size());
        let mlp = 3 * self.hidden_size * self.intermediate_size;
        let norms = 2 * self.hidden_size;
        let tables = if self.tie_word_embeddings { table } else { 2 * table };
        tables + self.num_hidden_layers * (attention + mlp + norms) + self.hidden_size
    }

    /// Parameters that one decode step reads: the input table contributes a single row.
    pub fn parameters_per_step(&self) -> usize {
        let table = self.vocab_size * self.hidden_size;
        let stored = self.parameters() + self.hidden_size;
        if self.tie_word_embeddings { stored } else { stored - table }
    }
}
