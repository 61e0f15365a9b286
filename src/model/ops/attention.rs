//! Causal attention with grouped key-value heads.

use candle_core::{CpuStorage, CustomOp3, D, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::{Values, slice};
use crate::model::kernels::{self, Matrix, MatrixMut, Write, matmul_serial};

/// Numbers of heads, their width, and what becomes of scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    pub heads: usize,
    pub key_value_heads: usize,
    pub head_dim: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// Scores `s` then become `c·tanh(s / c)`.
    pub softcap: Option<f32>,
    /// How many of the latest positions a position sees, itself included; none: all.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// The first position that position `t` sees.
    fn first(self, t: usize) -> usize {
        self.window.map_or(0, |window| (t + 1).saturating_sub(window))
    }

    /// Query heads that share a key-value head.
    fn group(self) -> usize {
        self.heads / self.key_value_heads
    }
}

/// `softmax(cap(scale·Q·Kᵀ) + causal mask)·V` for each head: queries `(B, T, H*E)`, keys and values
/// `(B, T, K*E)`, to `(B, T, H*E)`. Weights are computed again in the backward, so memory does
/// not grow with T² for every layer.
///
/// # Errors
/// When the shapes do not fit.
pub fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    shape: AttentionShape,
) -> Result<Tensor> {
    let (b, t, width) = query.dims3()?;
    let key_value = (b, t, shape.key_value_heads * shape.head_dim);
    if width != shape.heads * shape.head_dim
        || key.dims3()? != key_value
        || value.dims3()? != key_value
    {
        let (query, key, value) = (query.shape(), key.shape(), value.shape());
        bail!("attention of {shape:?} over {query:?}, {key:?} and {value:?}");
    }
    if query.device().is_cpu() {
        let (query, key, value) = (query.contiguous()?, key.contiguous()?, value.contiguous()?);
        return query.apply_op3(&key, &value, Attention { shape });
    }
    composed(query, key, value, shape)
}

/// The same in elementary steps.
pub(super) fn composed(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    shape: AttentionShape,
) -> Result<Tensor> {
    let AttentionShape { heads: h, key_value_heads: k, head_dim: e, .. } = shape;
    let (b, t, _) = query.dims3()?;
    let g = shape.group();
    // (B, T, heads * E) -> (B, heads, T, E)
    let split = |x: &Tensor, n: usize| x.reshape((b, t, n, e))?.transpose(1, 2)?.contiguous();
    // Queries of one group share a key head: (B, H, T, E) -> (B, K, G*T, E)
    let query = split(query, h)?.reshape((b, k, g * t, e))?;
    let (key, value) = (split(key, k)?, split(value, k)?);
    // Finite, so that no row can turn into NaN.
    let visible = |row: usize, column: usize| (shape.first(row)..=row).contains(&column);
    let mask: Vec<f32> =
        (0..t * t).map(|index| if visible(index / t, index % t) { 0.0 } else { -1e9 }).collect();
    let mask = Tensor::from_vec(mask, (t, t), query.device())?;
    let scores = (query.matmul(&key.transpose(2, 3)?.contiguous()?)? * f64::from(shape.scale))?;
    let scores = match shape.softcap {
        Some(cap) => ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?,
        None => scores,
    };
    let scores = scores.reshape((b, k, g, t, t))?.broadcast_add(&mask)?;
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?.reshape((b, k, g * t, t))?;
    // (B, K, G*T, E) -> (B, H, T, E) -> (B, T, H*E)
    weights.matmul(&value)?.reshape((b, h, t, e))?.transpose(1, 2)?.reshape((b, t, h * e))
}

struct Attention {
    shape: AttentionShape,
}

/// One window's rows of queries, keys and values.
#[derive(Clone, Copy)]
struct Window<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    time: usize,
}

impl<'a> Window<'a> {
    /// The `index`-th of `count` windows that lie one behind the other.
    fn of(
        query: &'a [f32],
        key: &'a [f32],
        value: &'a [f32],
        index: usize,
        count: usize,
        time: usize,
    ) -> Self {
        Self {
            query: part(query, index, count),
            key: part(key, index, count),
            value: part(value, index, count),
            time,
        }
    }
}

/// Gradients of one key-value head and the query heads that share it, each `(T, E)`.
struct HeadGradients {
    queries: Vec<Vec<f32>>,
    key: Vec<f32>,
    value: Vec<f32>,
}

impl Attention {
    fn head<'a>(&self, rows: &'a [f32], head: usize, heads: usize, time: usize) -> Matrix<'a> {
        let e = self.shape.head_dim;
        Matrix::new(&rows[head * e..], time, e, heads * e)
    }

    /// Attention weights `(T, T)` of one query head, zero where a position may not look. Where
    /// scores are capped, `slopes` is left holding the cap's derivative.
    fn weights(
        &self,
        window: Window<'_>,
        head: usize,
        weights: &mut [f32],
        slopes: Option<&mut [f32]>,
    ) {
        let (shape, time) = (self.shape, window.time);
        let query = self.head(window.query, head, shape.heads, time);
        let key = self.head(window.key, head / shape.group(), shape.key_value_heads, time);
        let mut scores = MatrixMut::new(weights, time, time, time);
        matmul_serial(&mut scores, query, key.t(), Write::Replace);
        if let Some(cap) = shape.softcap {
            weights.iter_mut().for_each(|score| *score = (*score * shape.scale / cap).tanh());
            if let Some(slopes) = slopes {
                let capped = slopes.iter_mut().zip(weights.iter());
                capped.for_each(|(slope, tanh)| *slope = 1.0 - tanh * tanh);
            }
            weights.iter_mut().for_each(|tanh| *tanh *= cap);
        } else {
            weights.iter_mut().for_each(|score| *score *= shape.scale);
        }
        for (t, row) in weights.chunks_exact_mut(time).enumerate() {
            let (past, future) = row.split_at_mut(t + 1);
            let (unseen, seen) = past.split_at_mut(shape.first(t));
            kernels::softmax(seen);
            unseen.fill(0.0);
            future.fill(0.0);
        }
    }

    /// One query head's output `(T, E)`.
    fn forward(&self, window: Window<'_>, head: usize) -> Vec<f32> {
        let (shape, time) = (self.shape, window.time);
        let mut weights = vec![0f32; time * time];
        self.weights(window, head, &mut weights, None);
        let value = self.head(window.value, head / shape.group(), shape.key_value_heads, time);
        let mut out = vec![0f32; time * shape.head_dim];
        let mut matrix = MatrixMut::new(&mut out, time, shape.head_dim, shape.head_dim);
        let weights = Matrix::new(&weights, time, time, time);
        matmul_serial(&mut matrix, weights, value, Write::Replace);
        out
    }

    /// With P the weights, G the output's gradient and C the cap's derivative: dV = Pᵀ·G,
    /// dP = G·Vᵀ, dS = scale·C∘P∘(dP − rowsum(dP∘P)), dQ = dS·K, dK = dSᵀ·Q.
    fn backward(&self, window: Window<'_>, gradient: &[f32], kv_head: usize) -> HeadGradients {
        let (shape, time) = (self.shape, window.time);
        let (e, kv_heads) = (shape.head_dim, shape.key_value_heads);
        let key = self.head(window.key, kv_head, kv_heads, time);
        let value = self.head(window.value, kv_head, kv_heads, time);
        let mut result = HeadGradients {
            queries: Vec::new(),
            key: vec![0f32; time * e],
            value: vec![0f32; time * e],
        };
        let (mut weights, mut scores) = (vec![0f32; time * time], vec![0f32; time * time]);
        let mut slopes = shape.softcap.map(|_| vec![0f32; time * time]);
        for head in kv_head * shape.group()..(kv_head + 1) * shape.group() {
            self.weights(window, head, &mut weights, slopes.as_deref_mut());
            let g = self.head(gradient, head, shape.heads, time);
            let p = Matrix::new(&weights, time, time, time);
            let mut d_value = MatrixMut::new(&mut result.value, time, e, e);
            matmul_serial(&mut d_value, p.t(), g, Write::Add);
            let mut d_weights = MatrixMut::new(&mut scores, time, time, time);
            matmul_serial(&mut d_weights, g, value.t(), Write::Replace);
            for (d, p) in scores.chunks_exact_mut(time).zip(weights.chunks_exact(time)) {
                let along = kernels::dot(d, p);
                for (d, p) in d.iter_mut().zip(p) {
                    *d = p * (*d - along) * shape.scale;
                }
            }
            if let Some(slopes) = &slopes {
                scores.iter_mut().zip(slopes).for_each(|(d, slope)| *d *= slope);
            }
            let d_scores = Matrix::new(&scores, time, time, time);
            let mut d_query = vec![0f32; time * e];
            let mut matrix = MatrixMut::new(&mut d_query, time, e, e);
            matmul_serial(&mut matrix, d_scores, key, Write::Replace);
            result.queries.push(d_query);
            let query = self.head(window.query, head, shape.heads, time);
            let mut d_key = MatrixMut::new(&mut result.key, time, e, e);
            matmul_serial(&mut d_key, d_scores.t(), query, Write::Add);
        }
        result
    }
}

/// The `index`-th of the equal parts of `rows` that belong to one window of the batch.
fn part(rows: &[f32], index: usize, windows: usize) -> &[f32] {
    let size = rows.len() / windows;
    &rows[index * size..][..size]
}

/// Writes one head's `(T, E)` into rows of `(T, heads * E)`.
fn scatter(head: &[f32], index: usize, head_dim: usize, rows: &mut [f32], width: usize) {
    for (from, to) in head.chunks_exact(head_dim).zip(rows.chunks_exact_mut(width)) {
        to[index * head_dim..][..head_dim].copy_from_slice(from);
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        query: &CpuStorage,
        query_layout: &Layout,
        key: &CpuStorage,
        key_layout: &Layout,
        value: &CpuStorage,
        value_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (b, time, width) = query_layout.shape().dims3()?;
        let (query, key) = (slice(query, query_layout)?, slice(key, key_layout)?);
        let value = slice(value, value_layout)?;
        let heads = self.shape.heads;
        let outputs: Vec<Vec<f32>> = (0..b * heads)
            .into_par_iter()
            .map(|task| {
                let window = Window::of(query, key, value, task / heads, b, time);
                self.forward(window, task % heads)
            })
            .collect();
        let mut out = vec![0f32; query.len()];
        for (task, head) in outputs.iter().enumerate() {
            let rows = &mut out[task / heads * time * width..][..time * width];
            scatter(head, task % heads, self.shape.head_dim, rows, width);
        }
        Ok((CpuStorage::F32(out), query_layout.shape().clone()))
    }

    fn bwd(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (b, time, width) = query.dims3()?;
        let gradient = gradient.contiguous()?;
        let g = Values::of(&gradient)?;
        let (queries, keys, values) = (Values::of(query)?, Values::of(key)?, Values::of(value)?);
        let (kv_heads, e) = (self.shape.key_value_heads, self.shape.head_dim);
        let (q, k, v, g): (&[f32], &[f32], &[f32], &[f32]) = (&queries, &keys, &values, &g);
        let parts: Vec<HeadGradients> = (0..b * kv_heads)
            .into_par_iter()
            .map(|task| {
                let index = task / kv_heads;
                let window = Window::of(q, k, v, index, b, time);
                self.backward(window, part(g, index, b), task % kv_heads)
            })
            .collect();
        let (mut d_query, mut d_key) = (vec![0f32; q.len()], vec![0f32; k.len()]);
        let mut d_value = vec![0f32; v.len()];
        let kv_width = kv_heads * e;
        for (task, part) in parts.iter().enumerate() {
            let (index, kv_head) = (task / kv_heads, task % kv_heads);
            let rows = &mut d_query[index * time * width..][..time * width];
            for (offset, head) in part.queries.iter().enumerate() {
                scatter(head, kv_head * self.shape.group() + offset, e, rows, width);
            }
            let window = index * time * kv_width..(index + 1) * time * kv_width;
            scatter(&part.key, kv_head, e, &mut d_key[window.clone()], kv_width);
            scatter(&part.value, kv_head, e, &mut d_value[window], kv_width);
        }
        let device = query.device();
        Ok((
            Some(Tensor::from_vec(d_query, query.shape(), device)?),
            Some(Tensor::from_vec(d_key, key.shape(), device)?),
            Some(Tensor::from_vec(d_value, value.shape(), device)?),
        ))
    }
}
