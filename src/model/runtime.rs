//! The serving form of the decoder: weights in Q8_0, one KV cache for each sequence.
//!
//! **Architecture invariant**: a row's result depends on its own sequence only, bit for bit,
//! never on how many other rows are in the batch. That is what makes greedy speculative output
//! equal to plain output rather than nearly equal.

use candle_core::Device;
use half::f16;
use rayon::prelude::*;

use super::kernels::{self, HeadRows};
use super::kv_cache::KvCache;
use super::q8::{QMatrix, QRows};
use super::{ModelConfig, rope};
use crate::hub::Weights;

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
    input_layernorm: Vec<f32>,
    /// q, k and v stacked: `(query_size + 2 * key_value_size, hidden)`.
    qkv_proj: QMatrix,
    o_proj: QMatrix,
    post_attention_layernorm: Vec<f32>,
    /// gate and up stacked: `(2 * intermediate, hidden)`.
    gate_up_proj: QMatrix,
    down_proj: QMatrix,
}

/// Immutable weights, shared between threads.
pub struct Runtime {
    config: ModelConfig,
    frequencies: Vec<f32>,
    /// `(vocab, hidden)`; half precision, as only single rows are read.
    embed_tokens: Vec<f16>,
    layers: Vec<Layer>,
    norm: Vec<f32>,
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
        let (d, f, v) = (config.hidden_size, config.intermediate_size, config.vocab_size);
        let (q, kv) = (config.query_size(), config.key_value_size());
        let read = |name: &str, shape: &[usize]| read(weights, name, shape);
        let stack = |parts: &[(String, usize)], width: usize| -> Result<QMatrix, RuntimeError> {
            let mut stacked = Vec::new();
            for (name, rows) in parts {
                stacked.extend(read(name, &[*rows, width])?);
            }
            let rows = parts.iter().map(|(_, rows)| rows).sum();
            Ok(QMatrix::new(&stacked, rows, width))
        };
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            let p = format!("model.layers.{index}");
            layers.push(Layer {
                input_layernorm: read(&format!("{p}.input_layernorm.weight"), &[d])?,
                qkv_proj: stack(
                    &[
                        (format!("{p}.self_attn.q_proj.weight"), q),
                        (format!("{p}.self_attn.k_proj.weight"), kv),
                        (format!("{p}.self_attn.v_proj.weight"), kv),
                    ],
                    d,
                )?,
                o_proj: stack(&[(format!("{p}.self_attn.o_proj.weight"), d)], q)?,
                post_attention_layernorm: read(
                    &format!("{p}.post_attention_layernorm.weight"),
                    &[d],
                )?,
                gate_up_proj: stack(
                    &[
                        (format!("{p}.mlp.gate_proj.weight"), f),
                        (format!("{p}.mlp.up_proj.weight"), f),
                    ],
                    d,
                )?,
                down_proj: stack(&[(format!("{p}.mlp.down_proj.weight"), d)], f)?,
            });
        }
        let embed = read("model.embed_tokens.weight", &[v, d])?;
        let lm_head = if config.tie_word_embeddings {
            QMatrix::new(&embed, v, d)
        } else {
            QMatrix::new(&read("lm_head.weight", &[v, d])?, v, d)
        };
        Ok(Self {
            frequencies: rope::inverse_frequencies(config),
            embed_tokens: embed.into_iter().map(f16::from_f32).collect(),
            layers,
            norm: read("model.norm.weight", &[d])?,
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
            layer.qkv_proj.bytes()
                + layer.o_proj.bytes()
                + layer.gate_up_proj.bytes()
                + layer.down_proj.bytes()
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

    /// Rows of the embedding table: `(rows, hidden)`.
    fn embed(&self, segments: &[Segment<'_>]) -> Vec<f32> {
        let d = self.config.hidden_size;
        let ids = segments.iter().flat_map(|segment| segment.tokens);
        ids.flat_map(|id| &self.embed_tokens[*id as usize * d..][..d]).map(|x| x.to_f32()).collect()
    }

    fn norm_and_quantize(&self, gain: &[f32], hidden: &[f32], scratch: &mut Scratch) {
        let d = self.config.hidden_size;
        scratch.normed.resize(hidden.len(), 0.0);
        let eps = self.config.rms_norm_eps as f32;
        let rows = hidden.par_chunks(d).zip(scratch.normed.par_chunks_mut(d));
        rows.with_min_len(ROWS_PER_TASK).for_each(|(x, out)| kernels::rms_norm(x, gain, eps, out));
        scratch.quantized.quantize(&scratch.normed, d);
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
        layer.qkv_proj.matmul(&scratch.quantized, &mut scratch.qkv, &mut scratch.transposed);

        for (row, qkv) in rows.iter().zip(scratch.qkv.chunks_mut(width)) {
            for head in qkv[..q_size + kv_size].chunks_mut(head_dim) {
                rope::rotate(head, &row.cos, &row.sin);
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
        let one = |head_index: usize, out: &mut [f32]| {
            let (row_index, head) = (
                head_index / self.config.num_attention_heads,
                head_index % self.config.num_attention_heads,
            );
            let row = &rows[row_index];
            let query = &scratch.qkv[row_index * width + head * head_dim..][..head_dim];
            let (keys, values) = caches[row.segment];
            let head_of =
                |rows| HeadRows { rows, stride: kv_size, offset: head / group * head_dim };
            let mut weights = vec![0f32; row.position + 1];
            kernels::attend(query, head_of(keys), head_of(values), &mut weights, out);
        };
        let work: usize = rows.iter().map(|row| row.position + 1).sum::<usize>() * q_size;
        if work < 1 << 17 {
            scratch.attended.chunks_mut(head_dim).enumerate().for_each(|(i, out)| one(i, out));
        } else {
            scratch.attended.par_chunks_mut(head_dim).enumerate().for_each(|(i, out)| one(i, out));
        }

        scratch.quantized.quantize(&scratch.attended, q_size);
        scratch.projected.resize(hidden.len(), 0.0);
        layer.o_proj.matmul(&scratch.quantized, &mut scratch.projected, &mut scratch.transposed);
        kernels::add_scaled(hidden, 1.0, &scratch.projected);
    }

    fn mlp(&self, layer: &Layer, hidden: &mut [f32], scratch: &mut Scratch) {
        let (d, f) = (self.config.hidden_size, self.config.intermediate_size);
        let rows = hidden.len() / d;
        self.norm_and_quantize(&layer.post_attention_layernorm, hidden, scratch);
        scratch.gate_up.resize(rows * 2 * f, 0.0);
        layer.gate_up_proj.matmul(
            &scratch.quantized,
            &mut scratch.gate_up,
            &mut scratch.transposed,
        );
        scratch.gated.resize(rows * f, 0.0);
        let rows = scratch.gate_up.par_chunks(2 * f).zip(scratch.gated.par_chunks_mut(f));
        rows.with_min_len(ROWS_PER_TASK).for_each(|(gate_up, out)| {
            out.copy_from_slice(&gate_up[..f]);
            kernels::silu_mul(out, &gate_up[f..]);
        });
        scratch.quantized.quantize(&scratch.gated, f);
        scratch.projected.resize(hidden.len(), 0.0);
        layer.down_proj.matmul(&scratch.quantized, &mut scratch.projected, &mut scratch.transposed);
        kernels::add_scaled(hidden, 1.0, &scratch.projected);
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
        logits
    }
}

fn read(weights: &Weights, name: &str, shape: &[usize]) -> Result<Vec<f32>, RuntimeError> {
    let tensor = weights.tensor(name, &Device::Cpu)?;
    if tensor.dims() != shape {
        return Err(RuntimeError::Shape {
            name: name.into(),
            expected: shape.to_vec(),
            got: tensor.dims().to_vec(),
        });
    }
    let values = tensor
        .flatten_all()
        .and_then(|flat| flat.to_vec1::<f32>())
        .map_err(|source| RuntimeError::Tensor { name: name.into(), source })?;
    if values.iter().any(|value| !value.is_finite()) {
        return Err(RuntimeError::NotFinite { name: name.into() });
    }
    Ok(values)
}
