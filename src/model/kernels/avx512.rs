//! The integer kernel for AVX-512 VNNI: panels of 16 weight rows, four products at a time in each
//! of 16 lanes, so that a lane is an output and nothing is summed across lanes.

// Tiles are indexed by activation row, as the formulas are.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m512i, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_storeu_ps,
};

use super::{BLOCK, PANEL, PanelRows};

/// Activation rows that share one pass over a panel: 8 accumulators of floats, 8 of integers,
/// and the weights fit the 32 registers.
const MOST_ROWS: usize = 8;
/// Four bytes of each of a panel's rows: one register.
const GROUP: usize = 4 * PANEL;

/// # Safety
/// AVX-512 F, BW and VNNI must be present, and the lengths must fit as the caller of
/// [`super::matmul_panels`] asserts.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn matmul(
    weights: &[u8],
    weight_scales: &[f32],
    rows: PanelRows<'_>,
    out: &mut [f32],
) {
    let panels = weight_scales.len() / (rows.blocks * PANEL);
    let m = rows.scales.len() / rows.blocks;
    let tiles = m.div_ceil(MOST_ROWS).max(1);
    let tile = m.div_ceil(tiles);
    for panel in 0..panels {
        let bytes = rows.blocks * BLOCK * PANEL;
        let weights = weights[panel * bytes..][..bytes].as_ptr();
        let scales = &weight_scales[panel * rows.blocks * PANEL..][..rows.blocks * PANEL];
        let mut j = 0;
        while j < m {
            let count = tile.min(m - j);
            let from = &mut out[j * panels * PANEL + panel * PANEL..];
            let (out, stride) = (from.as_mut_ptr(), panels * PANEL);
            let scales = scales.as_ptr();
            // SAFETY: j + count <= m, and the panel's slices were cut to their lengths above.
            unsafe {
                match count {
                    1 => accumulate::<1>(weights, scales, rows, j, out, stride),
                    2 => accumulate::<2>(weights, scales, rows, j, out, stride),
                    3 => accumulate::<3>(weights, scales, rows, j, out, stride),
                    4 => accumulate::<4>(weights, scales, rows, j, out, stride),
                    5 => accumulate::<5>(weights, scales, rows, j, out, stride),
                    6 => accumulate::<6>(weights, scales, rows, j, out, stride),
                    7 => accumulate::<7>(weights, scales, rows, j, out, stride),
                    _ => accumulate::<8>(weights, scales, rows, j, out, stride),
                }
            }
            j += count;
        }
    }
}

/// One panel against `R` activation rows from `j` on. Every output has its own accumulator that
/// sees the blocks in order, so `R` cannot change a result.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn accumulate<const R: usize>(
    weights: *const u8,
    scales: *const f32,
    rows: PanelRows<'_>,
    j: usize,
    out: *mut f32,
    stride: usize,
) {
    let blocks = rows.blocks;
    let (quants, row_scales) = (rows.quants.as_ptr(), rows.scales.as_ptr());
    let corrections = rows.corrections.as_ptr();
    let mut acc = [_mm512_setzero_ps(); R];
    unsafe {
        for b in 0..blocks {
            let mut ints: [__m512i; R] = [_mm512_setzero_si512(); R];
            for r in 0..R {
                ints[r] = _mm512_set1_epi32(*corrections.add((j + r) * blocks + b));
            }
            for group in 0..BLOCK / 4 {
                let weight = weights.add((b * (BLOCK / 4) + group) * GROUP);
                let weight = _mm512_loadu_si512(weight.cast());
                for r in 0..R {
                    let four = quants.add(((j + r) * blocks + b) * BLOCK + 4 * group);
                    let four = four.cast::<i32>().read_unaligned();
                    ints[r] = _mm512_dpbusd_epi32(ints[r], weight, _mm512_set1_epi32(four));
                }
            }
            let scale = _mm512_loadu_ps(scales.add(b * PANEL));
            for r in 0..R {
                let row_scale = _mm512_set1_ps(*row_scales.add((j + r) * blocks + b));
                let product = _mm512_mul_ps(scale, row_scale);
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(ints[r]), product, acc[r]);
            }
        }
        for r in 0..R {
            _mm512_storeu_ps(out.add(r * stride), acc[r]);
        }
    }
}
