//! Arithmetic on slices, compiled once for AVX2 + FMA and once for any processor.
//!
//! Every function treats its rows one by one and in one fixed order, so a row's result does not
//! depend on its neighbours. This is the only module with `unsafe`: calls into functions that
//! need processor features, each right after the check that they are there, and the loads of the
//! integer kernel, whose bounds are asserted on entry.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod matrix;

pub use matrix::{Matrix, MatrixMut, Write, matmul, matmul_serial};

/// Elements that share one scale.
pub const BLOCK: usize = 32;
/// Weight rows that are stored together for [`matmul_panels`].
pub const PANEL: usize = 16;

#[inline]
fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether [`matmul_panels`] is the fast way here: AVX-512 with byte products (VNNI).
pub fn has_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx512f")
            && std::arch::is_x86_feature_detected!("avx512bw")
            && std::arch::is_x86_feature_detected!("avx512vnni")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Defines a safe function whose body is compiled for AVX2 + FMA as well as for the baseline.
macro_rules! multiversion {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn wide($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
                if has_avx2() {
                    // SAFETY: the features were detected on the line above.
                    return unsafe { wide($($arg),*) };
                }
            }
            body($($arg),*)
        }
    };
}

const LANES: usize = 8;

/// `exp` to about 2 ulp, branch-free so that it vectorises (Cephes' polynomial).
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low bits
    let x = x.clamp(-87.3, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    (p * r * r + r + 1.0) * scale
}

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

multiversion! {
    /// `out := softmax(query · keysᵀ / √E) · values` over the first `weights.len()` rows, for a
    /// query and an output of E values. `weights` is left holding the softmax.
    pub fn attend(
        query: &[f32],
        keys: HeadRows<'_>,
        values: HeadRows<'_>,
        weights: &mut [f32],
        out: &mut [f32],
    ) {
        let width = query.len();
        let scale = 1.0 / (width as f32).sqrt();
        for (weight, key) in weights.iter_mut().zip(keys.rows.chunks(keys.stride)) {
            *weight = dot_body(query, &key[keys.offset..keys.offset + width]) * scale;
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
    /// Gradients of [`silu_mul`]'s result with respect to both factors, for its gradient `g`.
    pub fn silu_mul_backward(
        gate: &[f32],
        up: &[f32],
        g: &[f32],
        d_gate: &mut [f32],
        d_up: &mut [f32],
    ) {
        let inputs = gate.iter().zip(up).zip(g);
        for (((gate, up), g), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
            let sigmoid = 1.0 / (1.0 + exp(-*gate));
            *d_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
            *d_up = g * gate * sigmoid;
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

multiversion! {
    /// Gradients of [`rms_norm`] for its result's gradient `g`. With r = (mean(x²) + eps)^-½ and
    /// n = x·r: `d_x := r·(g·gain − n·mean(g·gain·n))`, `d_gain += g·n`.
    pub fn rms_norm_backward(
        x: &[f32],
        gain: &[f32],
        g: &[f32],
        eps: f32,
        d_x: &mut [f32],
        d_gain: &mut [f32],
    ) {
        let (mut squares, mut along) = ([0f32; LANES], [0f32; LANES]);
        let (x_chunks, x_rest) = x.as_chunks::<LANES>();
        let (gain_chunks, gain_rest) = gain.as_chunks::<LANES>();
        let (g_chunks, g_rest) = g.as_chunks::<LANES>();
        for ((x, gain), g) in x_chunks.iter().zip(gain_chunks).zip(g_chunks) {
            for lane in 0..LANES {
                squares[lane] += x[lane] * x[lane];
                along[lane] += g[lane] * gain[lane] * x[lane];
            }
        }
        let (mut square, mut product) = (0f32, 0f32);
        for lane in 0..LANES {
            square += squares[lane];
            product += along[lane];
        }
        for ((x, gain), g) in x_rest.iter().zip(gain_rest).zip(g_rest) {
            square += x * x;
            product += g * gain * x;
        }
        let count = x.len() as f32;
        let r = 1.0 / (square / count + eps).sqrt();
        let mean = product * r / count;
        let inputs = x.iter().zip(gain).zip(g);
        for (((x, gain), g), (d_x, d_gain)) in inputs.zip(d_x.iter_mut().zip(d_gain)) {
            let n = x * r;
            *d_x = r * (g * gain - n * mean);
            *d_gain += g * n;
        }
    }
}

/// One step of AdamW with its bias corrections worked in.
#[derive(Debug, Clone, Copy)]
pub struct AdamWStep {
    pub beta1: f32,
    pub beta2: f32,
    /// The gradient is multiplied by this first.
    pub scale: f32,
    /// Step size over `1 - beta1^t`.
    pub rate: f32,
    /// `1 / (1 - beta2^t)`.
    pub second_correction: f32,
    pub eps: f32,
    /// `1 - step size * weight decay`.
    pub decay: f32,
}

multiversion! {
    /// Updates a parameter `p` and its moments `m` and `v` with its gradient `g`.
    pub fn adamw(p: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], step: &AdamWStep) {
        let (keep1, keep2) = (1.0 - step.beta1, 1.0 - step.beta2);
        for (((p, m), v), g) in p.iter_mut().zip(m).zip(v).zip(g) {
            let g = step.scale * g;
            *m = step.beta1 * *m + keep1 * g;
            *v = step.beta2 * *v + keep2 * g * g;
            let root = (*v * step.second_correction).sqrt() + step.eps;
            *p = step.decay * *p - step.rate * *m / root;
        }
    }
}

multiversion! {
    /// Quantises to signed bytes in blocks of [`BLOCK`], one scale for each block; a shorter last
    /// block is padded with zeros. `quants` and `scales` must hold `x.len()` rounded up.
    pub fn quantize(x: &[f32], quants: &mut [i8], scales: &mut [f32]) {
        for ((x, q), scale) in x.chunks(BLOCK).zip(quants.chunks_mut(BLOCK)).zip(scales) {
            let mut max = 0f32;
            for value in x {
                let abs = value.abs();
                max = if abs > max { abs } else { max };
            }
            *scale = max / 127.0;
            let inverse = if max > 0.0 { 127.0 / max } else { 0.0 };
            q.fill(0);
            for (q, value) in q.iter_mut().zip(x) {
                // Rounds to nearest by the float trick: |value * inverse| <= 127 always.
                let rounded = value * inverse + 12_582_912.0;
                *q = rounded.to_bits() as i8;
            }
        }
    }
}

multiversion! {
    /// Sum of signed bytes.
    pub fn sum(x: &[i8]) -> i32 {
        let mut sum = 0i32;
        for value in x {
            sum += i32::from(*value);
        }
        sum
    }
}

/// Multiplies quantised weight rows with quantised activation rows.
///
/// `weights` is `(n, blocks * BLOCK)` with `weight_scales` `(n, blocks)`; `rows` is
/// `(m, blocks * BLOCK)` with `row_scales` `(m, blocks)`; `out` is `(n, m)`.
///
/// # Panics
/// When the lengths do not fit together.
pub fn matmul_q8(
    blocks: usize,
    weights: &[i8],
    weight_scales: &[f32],
    rows: &[i8],
    row_scales: &[f32],
    out: &mut [f32],
) {
    let m = row_scales.len() / blocks;
    let n = weight_scales.len() / blocks;
    assert_eq!(weights.len(), n * blocks * BLOCK);
    assert_eq!(weight_scales.len(), n * blocks);
    assert_eq!(rows.len(), m * blocks * BLOCK);
    assert_eq!(row_scales.len(), m * blocks);
    assert_eq!(out.len(), n * m);
    #[cfg(target_arch = "x86_64")]
    if has_avx2() {
        // SAFETY: the features were detected, the lengths were asserted.
        unsafe { avx2::matmul(blocks, weights, weight_scales, rows, row_scales, out, n, m) };
        return;
    }
    for i in 0..n {
        for j in 0..m {
            let mut sum = 0f32;
            for b in 0..blocks {
                let w = &weights[(i * blocks + b) * BLOCK..][..BLOCK];
                let a = &rows[(j * blocks + b) * BLOCK..][..BLOCK];
                let dot: i32 = w.iter().zip(a).map(|(w, a)| i32::from(*w) * i32::from(*a)).sum();
                sum += dot as f32 * (weight_scales[i * blocks + b] * row_scales[j * blocks + b]);
            }
            out[i * m + j] = sum;
        }
    }
}

/// Quantised activation rows as [`matmul_panels`] wants them.
#[derive(Clone, Copy)]
pub struct PanelRows<'a> {
    pub blocks: usize,
    /// `(m, blocks * BLOCK)`.
    pub quants: &'a [i8],
    /// `(m, blocks)`.
    pub scales: &'a [f32],
    /// `(m, blocks)`: −128 times the sum of the block's bytes, which takes back the offset of
    /// the weights.
    pub corrections: &'a [i32],
}

/// Stores quantised rows `(n, blocks * BLOCK)` with scales `(n, blocks)` as panels.
///
/// A panel is [`PANEL`] rows; within it, for each block, four bytes of the first row, four of the
/// second, and so on, then the next four of the first. Bytes are offset by 128, as the processor
/// multiplies unsigned with signed ones. Scales are `(panels, blocks, PANEL)`. Missing rows of
/// the last panel are zeros.
///
/// # Panics
/// When the lengths do not fit together.
pub fn pack_panels(blocks: usize, quants: &[i8], scales: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let n = scales.len() / blocks;
    assert_eq!(quants.len(), n * blocks * BLOCK);
    let panels = n.div_ceil(PANEL);
    let mut bytes = vec![128u8; panels * PANEL * blocks * BLOCK];
    let mut packed_scales = vec![0f32; panels * PANEL * blocks];
    for (row, (quants, scales)) in
        quants.chunks_exact(blocks * BLOCK).zip(scales.chunks_exact(blocks)).enumerate()
    {
        let (panel, lane) = (row / PANEL, row % PANEL);
        for (at, four) in quants.chunks_exact(4).enumerate() {
            let to = ((panel * blocks * BLOCK / 4 + at) * PANEL + lane) * 4;
            for (byte, quant) in bytes[to..to + 4].iter_mut().zip(four) {
                *byte = quant.cast_unsigned() ^ 0x80;
            }
        }
        for (block, scale) in scales.iter().enumerate() {
            packed_scales[(panel * blocks + block) * PANEL + lane] = *scale;
        }
    }
    (bytes, packed_scales)
}

/// Multiplies panels of weights, see [`pack_panels`], with quantised activation rows; `out` is
/// `(m, panels * PANEL)`.
///
/// # Panics
/// When the lengths do not fit together.
pub fn matmul_panels(weights: &[u8], weight_scales: &[f32], rows: PanelRows<'_>, out: &mut [f32]) {
    let blocks = rows.blocks;
    let m = rows.scales.len() / blocks;
    let panels = weight_scales.len() / (blocks * PANEL);
    assert_eq!(weight_scales.len(), panels * blocks * PANEL);
    assert_eq!(weights.len(), weight_scales.len() * BLOCK);
    assert_eq!(rows.scales.len(), m * blocks);
    assert_eq!(rows.quants.len(), m * blocks * BLOCK);
    assert_eq!(rows.corrections.len(), m * blocks);
    assert_eq!(out.len(), m * panels * PANEL);
    #[cfg(target_arch = "x86_64")]
    if has_vnni() {
        // SAFETY: the features were detected, the lengths were asserted.
        unsafe { avx512::matmul(weights, weight_scales, rows, out) };
        return;
    }
    for j in 0..m {
        for panel in 0..panels {
            for lane in 0..PANEL {
                let mut sum = 0f32;
                for b in 0..blocks {
                    let mut dot = rows.corrections[j * blocks + b];
                    for k in 0..BLOCK {
                        let group = (panel * blocks + b) * BLOCK / 4 + k / 4;
                        let weight = weights[(group * PANEL + lane) * 4 + k % 4];
                        let value = rows.quants[(j * blocks + b) * BLOCK + k];
                        dot += i32::from(weight) * i32::from(value);
                    }
                    let scale = weight_scales[(panel * blocks + b) * PANEL + lane];
                    sum += dot as f32 * (scale * rows.scales[j * blocks + b]);
                }
                out[j * panels * PANEL + panel * PANEL + lane] = sum;
            }
        }
    }
}

#[cfg(test)]
mod tests;
