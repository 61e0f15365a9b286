//! Floats: what the forward pass of a decoder does between its products.

use super::{LANES, exp, has_avx2};

/// The body of [`dot`], for other kernels to inline.
#[inline(always)]
fn dot_body(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; 2 * LANES];
    let (a_chunks, a_rest) = a.as_chunks::<{ 2 * LANES }>();
    let (b_chunks, b_rest) = b.as_chunks::<{ 2 * LANES }>();
    for (x, y) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..2 * LANES {
            acc[lane] += x[lane] * y[lane];
        }
    }
    let mut sum = total(acc);
    for (x, y) in a_rest.iter().zip(b_rest) {
        sum += x * y;
    }
    sum
}

/// Sum by halves: four dependent additions instead of sixteen.
#[inline(always)]
fn total(mut lanes: [f32; 2 * LANES]) -> f32 {
    let mut half = LANES;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

multiversion! {
    /// Dot product of two slices of equal length.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        dot_body(a, b)
    }
}

/// Keys or values of one head in a cache: row `t` is `rows[t * stride + offset..]`.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    pub rows: &'a [f32],
    pub stride: usize,
    pub offset: usize,
}

/// What becomes of attention scores before the softmax.
#[derive(Debug, Clone, Copy)]
pub struct Scores {
    pub scale: f32,
    /// Scores `s` then become `c·tanh(s / c)`.
    pub softcap: Option<f32>,
}

multiversion! {
    /// `x := c·tanh(x / c)`.
    pub fn softcap(x: &mut [f32], cap: f32) {
        for x in x.iter_mut() {
            *x = cap * tanh(*x / cap);
        }
    }
}

/// `tanh` by way of `exp`; exact to a few ulp of 1.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

multiversion! {
    /// `gate := gelu(gate) * up`, in the tanh approximation (Hendrycks and Gimpel 2016).
    pub fn gelu_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            let inner = 0.797_884_6 * (*g + 0.044_715 * *g * *g * *g);
            *g = 0.5 * *g * (1.0 + tanh(inner)) * u;
        }
    }
}

multiversion! {
    /// `out := (x - mean(x)) / sqrt(var(x) + eps) * gain + bias`.
    pub fn layer_norm(x: &[f32], gain: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        let count = x.len() as f32;
        let mut mean = 0f32;
        for value in x {
            mean += value;
        }
        mean /= count;
        let mut square = 0f32;
        for value in x {
            square += (value - mean) * (value - mean);
        }
        let inverse = 1.0 / (square / count + eps).sqrt();
        for (((o, x), g), b) in out.iter_mut().zip(x).zip(gain).zip(bias) {
            *o = (x - mean) * inverse * g + b;
        }
    }
}

multiversion! {
    /// `out := softmax(cap(scale·query · keysᵀ)) · values` over the first `weights.len()` rows, for a
    /// query and an output of E values. `weights` is left holding the softmax.
    pub fn attend(
        query: &[f32],
        keys: HeadRows<'_>,
        values: HeadRows<'_>,
        scores: Scores,
        weights: &mut [f32],
        out: &mut [f32],
    ) {
        let width = query.len();
        for (weight, key) in weights.iter_mut().zip(keys.rows.chunks(keys.stride)) {
            *weight = dot_body(query, &key[keys.offset..keys.offset + width]) * scores.scale;
        }
        if let Some(cap) = scores.softcap {
            for weight in weights.iter_mut() {
                *weight = cap * tanh(*weight / cap);
            }
        }
        softmax_body(weights);
        out.fill(0.0);
        let row = |t: usize| &values.rows[t * values.stride + values.offset..][..width];
        let (fours, rest) = weights.as_chunks::<4>();
        for (index, [w0, w1, w2, w3]) in fours.iter().enumerate() {
            let t = 4 * index;
            let rows = row(t).iter().zip(row(t + 1)).zip(row(t + 2)).zip(row(t + 3));
            for (out, (((v0, v1), v2), v3)) in out.iter_mut().zip(rows) {
                *out += (w0 * v0 + w1 * v1) + (w2 * v2 + w3 * v3);
            }
        }
        for (index, weight) in rest.iter().enumerate() {
            for (out, value) in out.iter_mut().zip(row(4 * fours.len() + index)) {
                *out += weight * value;
            }
        }
    }
}

multiversion! {
    /// `y += factor * x`.
    pub fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += factor * x;
        }
    }
}

/// The body of [`softmax`], for other kernels to inline.
#[inline(always)]
fn softmax_body(x: &mut [f32]) {
    let mut max = f32::NEG_INFINITY;
    for value in x.iter() {
        max = if *value > max { *value } else { max };
    }
    for value in x.iter_mut() {
        *value = exp(*value - max);
    }
    let mut acc = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] += chunk[lane];
        }
    }
    let mut sum = 0f32;
    for value in acc.iter().chain(rest) {
        sum += value;
    }
    let inverse = 1.0 / sum;
    for value in x.iter_mut() {
        *value *= inverse;
    }
}

multiversion! {
    /// `x := softmax(x)`; does nothing to an empty slice.
    pub fn softmax(x: &mut [f32]) {
        softmax_body(x);
    }
}

multiversion! {
    /// Index of the largest value, the lowest one among equals; 0 for an empty slice. NaN never wins.
    pub fn argmax(x: &[f32]) -> usize {
        let mut best = [f32::NEG_INFINITY; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                best[lane] = if chunk[lane] > best[lane] { chunk[lane] } else { best[lane] };
            }
        }
        let mut max = f32::NEG_INFINITY;
        for value in best.iter().chain(rest) {
            max = if *value > max { *value } else { max };
        }
        x.iter().position(|value| *value == max).unwrap_or(0)
    }
}

multiversion! {
    /// `gate := silu(gate) * up`.
    pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = *g / (1.0 + exp(-*g)) * u;
        }
    }
}

multiversion! {
    /// `out := x / sqrt(mean(x²) + eps) * gain` (Zhang and Sennrich 2019, eq. 4).
    pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        let mut acc = [0f32; LANES];
        let (chunks, rest) = x.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                acc[lane] += chunk[lane] * chunk[lane];
            }
        }
        let mut sum = 0f32;
        for value in acc {
            sum += value;
        }
        for value in rest {
            sum += value * value;
        }
        let inverse = 1.0 / (sum / x.len() as f32 + eps).sqrt();
        for ((o, x), g) in out.iter_mut().zip(x).zip(gain) {
            *o = x * inverse * g;
        }
    }
}
