//! Signed bytes in blocks with one scale each, and the products of such matrices.

#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use super::{has_avx2, has_vnni};

/// Elements that share one scale.
pub const BLOCK: usize = 32;
/// Weight rows that are stored together for [`matmul_panels`].
pub const PANEL: usize = 16;

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
