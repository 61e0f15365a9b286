//! Arithmetic on slices, compiled once for AVX2 + FMA and once for any processor.
//!
//! Every function treats its rows one by one and in one fixed order, so a row's result does not
//! depend on its neighbours. This is the only module with `unsafe`: calls into functions that
//! need processor features, each right after the check that they are there, and the loads of the
//! integer kernel, whose bounds are asserted on entry.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;

/// Elements that share one scale.
pub const BLOCK: usize = 32;

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

multiversion! {
    /// Dot product of two slices of equal length.
    pub fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut acc = [0f32; 2 * LANES];
        let (a_chunks, a_rest) = a.as_chunks::<{ 2 * LANES }>();
        let (b_chunks, b_rest) = b.as_chunks::<{ 2 * LANES }>();
        for (x, y) in a_chunks.iter().zip(b_chunks) {
            for lane in 0..2 * LANES {
                acc[lane] += x[lane] * y[lane];
            }
        }
        let mut sum = 0f32;
        for value in acc {
            sum += value;
        }
        for (x, y) in a_rest.iter().zip(b_rest) {
            sum += x * y;
        }
        sum
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

multiversion! {
    /// `x := softmax(x)`; does nothing to an empty slice.
    pub fn softmax(x: &mut [f32]) {
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

#[cfg(test)]
mod tests;
