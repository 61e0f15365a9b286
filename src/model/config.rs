//! A decoder's shape, as read from a Hugging Face `config.json` or from GGUF metadata.

use serde_json::{Map, Value};

pub(crate) mod architecture;
mod check;
mod error;
mod family;
mod parse;

pub use error::ConfigError;
pub use family::{Activation, Anatomy, Family, NormKind};

/// The shape of a decoder. Dimensions are in elements, angles in radians.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    /// What the family and its switches come to.
    pub anatomy: Anatomy,
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
    /// How rotary frequencies are changed for long contexts; none for the plain form.
    pub rope_scaling: Option<RopeScaling>,
    /// Of every norm; `layer_norm_eps` in some families.
    pub norm_eps: f64,
    pub tie_word_embeddings: bool,
    pub bos_token_id: Option<u32>,
    /// Every id that ends a generation; a list in some configs, a number in others.
    pub eos_token_ids: Vec<u32>,
    /// The document as it was read, so that keys which are not understood here (rope scaling,
    /// for example) reach the draft's `config.json` unchanged.
    pub raw: Map<String, Value>,
}

/// A change of the rotary frequencies `theta^(-2 i / head_dim)`, in radians per token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Every frequency divided by `factor`.
    Linear { factor: f64 },
    /// Llama 3: wavelengths above `original_max_position_embeddings / low_freq_factor` are
    /// stretched by `factor`, those below `… / high_freq_factor` are kept, with a blend between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// The scaled form of one rotary frequency, both in radians per token.
    pub fn scale(&self, frequency: f64) -> f64 {
        match *self {
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let wavelength = std::f64::consts::TAU / frequency;
                let context = original_max_position_embeddings as f64;
                if wavelength < context / high_freq_factor {
                    frequency
                } else if wavelength > context / low_freq_factor {
                    frequency / factor
                } else {
                    let blend = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    frequency * ((1.0 - blend) / factor + blend)
                }
            }
        }
    }
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

    /// Rotary frequencies in radians per token, scaling applied, one for each pair of a head's
    /// rotated dimensions `(i, i + rotary_dim / 2)`: `rotary_dim / 2` values.
    pub fn rope_frequencies(&self) -> Vec<f64> {
        let rotated = self.anatomy.rotary_dim;
        (0..rotated / 2)
            .map(|pair| {
                let exponent = -2.0 * pair as f64 / rotated as f64;
                let frequency = self.rope_theta.powf(exponent);
                self.rope_scaling.map_or(frequency, |scaling| scaling.scale(frequency))
            })
            .collect()
    }

    /// Parameters as stored, with a tied table counted once.
    pub fn parameters(&self) -> usize {
        let count = |(_, shape, _): &(String, Vec<usize>, &str)| shape.iter().product::<usize>();
        self.tensor_shapes().iter().map(count).sum()
    }

    /// Parameters that one decode step reads: the input table contributes a single row.
    pub fn parameters_per_step(&self) -> usize {
        let table = self.vocab_size * self.hidden_size;
        let stored = self.parameters() + self.hidden_size;
        if self.tie_word_embeddings { stored } else { stored - table }
    }
}

#[cfg(test)]
mod tests;
