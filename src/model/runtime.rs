//! The serving form of the decoder: weights in Q8_0, one KV cache for each sequence.
//!
//! **Architecture invariant**: a row's result depends on its own sequence only, bit for bit,
//! never on how many other rows are in the batch. That is what makes greedy speculative output
//! equal to plain output rather than nearly equal.

use half::f16;
use rayon::prelude::*;

use super::kernels::{self, HeadRows, Scores};
use super::kv_cache::KvCache;
use super::q8::{QMatrix, QRows};
use super::{Activation, ModelConfig, rope};
use crate::hub::Weights;

mod load;

use load::{Loader, read};

/// Rows that are normed or gated one after the other by one task.
const ROWS_PER_TASK: usize = 16;

/// What can go wrong while loading or running.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Hub(#[from] crate::hub::HubError),
    #[error("cannot read tensor {name}: {source}")]
    Tensor { name: String, source: candle_core::Error },
    #[error(
        "tensor {name} has shape {got:?}, expected {expected:?}\nhint: config.json and the weights do not belong together"
    )]
    Shape { name: String, expected: Vec<usize>, got: Vec<usize> },
    #[error(
        "tensor {name} holds values that are not finite\nhint: the file is damaged or training diverged; use another version"
    )]
    NotFinite { name: String },
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    TokenOutOfRange { id: u32, vocab_size: usize },
    #[error("sequence of {len} tokens is longer than the model's context of {limit}")]
    TooLong { len: usize, limit: usize },
}

/// Which rows of a segment need logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    None,
    Last,
    All,
}

/// Consecutive new tokens of one sequence.
pub struct Segment<'a> {
    /// Tokens at positions `cache.len()..cache.len() + tokens.len()`.
    pub tokens: &'a [u32],
    /// Extended by `tokens.len()` on return.
    pub cache: &'a mut KvCache,
    pub logits: LogitsOf,
}

struct Layer {
    input_layernorm: Norm,
    /// q, k and v stacked: `(query_size + 2 * key_value_size, hidden)`.
    qkv_proj: Linear,
    /// Gains of the norm of each query head and each key head.
    qk_norm: Option<(Vec<f32>, Vec<f32>)>,
    o_proj: Linear,
    /// What attention gives, before it is added.
    attention_postnorm: Option<Norm>,
    mlp_norm: Norm,
    /// gate and up stacked: `(2 * intermediate, hidden)`.
    gate_up_proj: Linear,
    down_proj: Linear,
    mlp_postnorm: Option<Norm>,
    window: Option<usize>,
}

struct Linear {
    weight: QMatrix,
    bias: Option<Vec<f32>>,
}

/// A norm with its gain as it is applied.
struct Norm {
    gain: Vec<f32>,
    /// Only of norms that take the mean off.
    bias: Option<Vec<f32>>,
}

/// Immutable weights, shared between threads.
pub struct Runtime {
    config: ModelConfig,
    frequencies: Vec<f32>,
    /// `(vocab, hidden)`; half precision, as only single rows are read.
    embed_tokens: Vec<f16>,
    layers: Vec<Layer>,
    norm: Norm,
    lm_head: QMatrix,
}

/// Buffers of one forward pass, all row-major with one row for each token.
#[derive(Default)]
struct Scratch {
    normed: Vec<f32>,
    quantized: QRows,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    transposed: Vec<f32>,
}

/// Where one row sits: its segment, its position, and its rotation.
struct Row {
    segment: usize,
    position: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Runtime {
    /// Loads and quantises a model.
    ///
    /// # Errors
    /// When a tensor is missing, has the wrong shape, or cannot be read.
    pub fn load(config: &ModelConfig, weights: &Weights) -> Result<Self, RuntimeError> {
        let (d, v) = (config.hidden_size, config.vocab_size);
        let load = Loader { config, weights };
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            layers.push(load.layer(index)?);
        }
        let embed = read(weights, "model.embed_tokens.weight", &[v, d])?;
        let lm_head = if config.tie_word_embeddings {
            QMatrix::new(&embed, v, d)
        } else {
            QMatrix::new(&read(weights, "lm_head.weight", &[v, d])?, v, d)
        };
        Ok(Self {
            frequencies: rope::inverse_frequencies(config),
            embed_tokens: embed.into_iter().map(f16::from_f32).collect(),
            layers,
            norm: load.norm("model.norm", d)?,
            lm_head,
            config: config.clone(),
        })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes that one decode step reads.
    pub fn bytes_per_step(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            [&layer.qkv_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj]
                .iter()
                .map(|linear| linear.weight.bytes())
                .sum::<usize>()
        });
        layers.sum::<usize>() + self.lm_head.bytes()
    }

    /// Runs all segments in one pass. Returns the logits of the rows asked for, in segment
    /// order, row-major `(rows, vocab_size)`. On an error no cache has changed its length.
    ///
    /// # Errors
    /// See [`RuntimeError`].
    pub fn forward(&self, segments: &mut [Segment<'_>]) -> Result<Vec<f32>, RuntimeError> {
        self.check(segments)?;
        let rows = self.rows(segments);
        for segment in segments.iter_mut() {
            segment.cache.reserve(segment.tokens.len());
        }
        let mut hidden = self.embed(segments);
        let mut scratch = Scratch::default();
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(layer, index, &rows, segments, &mut hidden, &mut scratch);
            self.mlp(layer, &mut hidden, &mut scratch);
        }
        let logits = self.logits(segments, &hidden, &mut scratch);
        for segment in segments.iter_mut() {
            segment.cache.len += segment.tokens.len();
        }
        Ok(logits)
    }

    fn check(&self, segments: &[Segment<'_>]) -> Result<(), RuntimeError> {
        let (vocab_size, limit) = (self.config.vocab_size, self.config.max_position_embeddings);
        for segment in segments {
            let len = segment.cache.len() + segment.tokens.len();
            if len > limit {
                return Err(RuntimeError::TooLong { len, limit });
            }
            if let Some(id) = segment.tokens.iter().find(|id| **id as usize >= vocab_size) {
                return Err(RuntimeError::TokenOutOfRange { id: *id, vocab_size });
            }
        }
        Ok(())
    }

    fn rows(&self, segments: &[Segment<'_>]) -> Vec<Row> {
        let mut rows = Vec::new();
        for (index, segment) in segments.iter().enumerate() {
            for offset in 0..segment.tokens.len() {
                let position = segment.cache.len() + offset;
                let (cos, sin) = rope::rotation(&self.frequencies, position);
                rows.push(Row { segment: index, position, cos, sin });
            }
        }
        rows
    }

    /// Rows of the embedding table at the family's scale: `(rows, hidden)`.
    fn embed(&self, segments: &[Segment<'_>]) -> Vec<f32> {
        let d = self.config.hidden_size;
        let scale = self.config.anatomy.embedding_scale as f32;
        let ids = segments.iter().flat_map(|segment| segment.tokens);
        ids.flat_map(|id| &self.embed_tokens[*id as usize * d..][..d])
            .map(|x| x.to_f32() * scale)
            .collect()
    }

    /// `out := norm(hidden)`, row by row.
    fn normalise(&self, norm: &Norm, hidden: &[f32], out: &mut [f32]) {
        let eps = self.config.norm_eps as f32;
        let width = norm.gain.len();
        let rows = hidden.par_chunks(width).zip(out.par_chunks_mut(width));
        rows.with_min_len(ROWS_PER_TASK).for_each(|(x, out)| match &norm.bias {
            Some(bias) => kernels::layer_norm(x, &norm.gain, bias, eps, out),
            None => kernels::rms_norm(x, &norm.gain, eps, out),
        });
    }

    /// `hidden += postnorm(linear(x))` for `x` as it is quantised in `scratch`.
    fn add_projected(
        &self,
        linear: &Linear,
        postnorm: Option<&Norm>,
        hidden: &mut [f32],
        scratch: &mut Scratch,
    ) {
        scratch.projected.resize(hidden.len(), 0.0);
        linear.apply(&scratch.quantized, &mut scratch.projected, &mut scratch.transposed);
        if let Some(norm) = postnorm {
            scratch.normed.resize(hidden.len(), 0.0);
            self.normalise(norm, &scratch.projected, &mut scratch.normed);
            kernels::add_scaled(hidden, 1.0, &scratch.normed);
        } else {
            kernels::add_scaled(hidden, 1.0, &scratch.projected);
        }
    }

    fn norm_and_quantize(&self, norm: &Norm, hidden: &[f32], scratch: &mut Scratch) {
        scratch.normed.resize(hidden.len(), 0.0);
        self.normalise(norm, hidden, &mut scratch.normed);
        scratch.quantized.quantize(&scratch.normed, self.config.hidden_size);
    }

    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        rows: &[Row],
        segments: &mut [Segment<'_>],
        hidden: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (q_size, kv_size) = (self.config.query_size(), self.config.key_value_size());
        let head_dim = self.config.head_dim;
        let width = q_size + 2 * kv_size;
        self.norm_and_quantize(&layer.input_layernorm, hidden, scratch);
        scratch.qkv.resize(rows.len() * width, 0.0);
        layer.qkv_proj.apply(&scratch.quantized, &mut scratch.qkv, &mut scratch.transposed);

        let eps = self.config.norm_eps as f32;
        let rotated = self.config.anatomy.rotary_dim;
        let mut head_normed = vec![0f32; head_dim];
        for (row, qkv) in rows.iter().zip(scratch.qkv.chunks_mut(width)) {
            for (index, head) in qkv[..q_size + kv_size].chunks_mut(head_dim).enumerate() {
                if let Some((query_gain, key_gain)) = &layer.qk_norm {
                    let is_query = index < self.config.num_attention_heads;
                    let gain = if is_query { query_gain } else { key_gain };
                    kernels::rms_norm(head, gain, eps, &mut head_normed);
                    head.copy_from_slice(&head_normed);
                }
                rope::rotate(&mut head[..rotated], &row.cos, &row.sin);
            }
            let cache = &mut segments[row.segment].cache;
            let at = row.position * kv_size;
            cache.keys[index][at..at + kv_size].copy_from_slice(&qkv[q_size..q_size + kv_size]);
            cache.values[index][at..at + kv_size].copy_from_slice(&qkv[q_size + kv_size..]);
        }

        scratch.attended.resize(rows.len() * q_size, 0.0);
        let caches: Vec<(&[f32], &[f32])> = segments
            .iter()
            .map(|s| (s.cache.keys[index].as_slice(), s.cache.values[index].as_slice()))
            .collect();
        let group = self.config.num_attention_heads / self.config.num_key_value_heads;
        let scores = Scores {
            scale: self.config.anatomy.attention_scale as f32,
            softcap: self.config.anatomy.attention_softcap.map(|cap| cap as f32),
        };
        let window = layer.window;
        let one = |head_index: usize, out: &mut [f32]| {
            let (row_index, head) = (
                head_index / self.config.num_attention_heads,
                head_index % self.config.num_attention_heads,
            );
            let row = &rows[row_index];
            let query = &scratch.qkv[row_index * width + head * head_dim..][..head_dim];
            let (keys, values) = caches[row.segment];
            let seen = row.position + 1;
            let first = window.map_or(0, |window| seen.saturating_sub(window));
            let offset = head / group * head_dim;
            let keys = HeadRows { rows: &keys[first * kv_size..], stride: kv_size, offset };
            let values = HeadRows { rows: &values[first * kv_size..], stride: kv_size, offset };
            let mut weights = vec![0f32; seen - first];
            kernels::attend(query, keys, values, scores, &mut weights, out);
        };
        let work: usize = rows.iter().map(|row| row.position + 1).sum::<usize>() * q_size;
        if work < 1 << 17 {
            scratch.attended.chunks_mut(head_dim).enumerate().for_each(|(i, out)| one(i, out));
        } else {
            scratch.attended.par_chunks_mut(head_dim).enumerate().for_each(|(i, out)| one(i, out));
        }

        scratch.quantized.quantize(&scratch.attended, q_size);
        self.add_projected(&layer.o_proj, layer.attention_postnorm.as_ref(), hidden, scratch);
    }

    fn mlp(&self, layer: &Layer, hidden: &mut [f32], scratch: &mut Scratch) {
        let (d, f) = (self.config.hidden_size, self.config.intermediate_size);
        let rows = hidden.len() / d;
        self.norm_and_quantize(&layer.mlp_norm, hidden, scratch);
        scratch.gate_up.resize(rows * 2 * f, 0.0);
        layer.gate_up_proj.apply(&scratch.quantized, &mut scratch.gate_up, &mut scratch.transposed);
        let activation = self.config.anatomy.activation;
        scratch.gated.resize(rows * f, 0.0);
        let rows = scratch.gate_up.par_chunks(2 * f).zip(scratch.gated.par_chunks_mut(f));
        rows.with_min_len(ROWS_PER_TASK).for_each(|(gate_up, out)| {
            out.copy_from_slice(&gate_up[..f]);
            match activation {
                Activation::Silu => kernels::silu_mul(out, &gate_up[f..]),
                Activation::GeluTanh => kernels::gelu_mul(out, &gate_up[f..]),
            }
        });
        scratch.quantized.quantize(&scratch.gated, f);
        self.add_projected(&layer.down_proj, layer.mlp_postnorm.as_ref(), hidden, scratch);
    }

    fn logits(&self, segments: &[Segment<'_>], hidden: &[f32], scratch: &mut Scratch) -> Vec<f32> {
        let d = self.config.hidden_size;
        let mut wanted = Vec::new();
        let mut first = 0;
        for segment in segments {
            let end = first + segment.tokens.len();
            match segment.logits {
                LogitsOf::None => {}
                LogitsOf::Last => wanted.extend(end.max(first + 1) - 1..end),
                LogitsOf::All => wanted.extend(first..end),
            }
            first = end;
        }
        if wanted.is_empty() {
            return Vec::new();
        }
        let last: Vec<f32> =
            wanted.iter().flat_map(|row| &hidden[row * d..][..d]).copied().collect();
        self.norm_and_quantize(&self.norm, &last, scratch);
        let mut logits = vec![0.0; wanted.len() * self.lm_head.out_features()];
        self.lm_head.matmul(&scratch.quantized, &mut logits, &mut scratch.transposed);
        if let Some(cap) = self.config.anatomy.final_softcap {
            logits.par_chunks_mut(1 << 14).for_each(|x| kernels::softcap(x, cap as f32));
        }
        logits
    }
}
