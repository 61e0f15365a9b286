//! The integer kernel for AVX2: signed bytes times signed bytes, 32 at a time.

// Tiles are indexed by weight row and activation row, as the formulas are.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::{
    __m256, __m256i, _mm_add_ps, _mm_add_ss, _mm_cvtss_f32, _mm_movehl_ps, _mm_shuffle_ps,
    _mm256_abs_epi8, _mm256_castps256_ps128, _mm256_cvtepi32_ps, _mm256_extractf128_ps,
    _mm256_fmadd_ps, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps,
    _mm256_set1_epi16, _mm256_set1_ps, _mm256_setzero_ps, _mm256_sign_epi8,
};

use super::BLOCK;

/// # Safety
/// AVX2 and FMA must be present, and the lengths must fit `(n, m, blocks)` as the caller of
/// [`super::matmul_q8`] asserts.
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn matmul(
    blocks: usize,
    weights: &[i8],
    weight_scales: &[f32],
    rows: &[i8],
    row_scales: &[f32],
    out: &mut [f32],
    n: usize,
    m: usize,
) {
    let operands = Operands {
        blocks,
        weights: weights.as_ptr(),
        weight_scales: weight_scales.as_ptr(),
        rows: rows.as_ptr(),
        row_scales: row_scales.as_ptr(),
        out: out.as_mut_ptr(),
        m,
    };
    let mut j = 0;
    // SAFETY of every tile: i < n and j < m by the loop bounds.
    unsafe {
        while j < m {
            match m - j {
                1 => {
                    operands.columns::<4, 1>(n, j);
                    j += 1;
                }
                2 => {
                    operands.columns::<2, 2>(n, j);
                    j += 2;
                }
                3 => {
                    operands.columns::<2, 3>(n, j);
                    j += 3;
                }
                5 => {
                    operands.columns::<2, 5>(n, j);
                    j += 5;
                }
                _ => {
                    operands.columns::<2, 4>(n, j);
                    j += 4;
                }
            }
        }
    }
}

struct Operands {
    blocks: usize,
    weights: *const i8,
    weight_scales: *const f32,
    rows: *const i8,
    row_scales: *const f32,
    out: *mut f32,
    m: usize,
}

impl Operands {
    /// All weight rows against the `R` activation rows from `j` on, `W` weight rows at a time.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn columns<const W: usize, const R: usize>(&self, n: usize, j: usize) {
        let mut i = 0;
        unsafe {
            while i + W <= n {
                self.tile::<W, R>(i, j);
                i += W;
            }
            while i < n {
                self.tile::<1, R>(i, j);
                i += 1;
            }
        }
    }

    /// Each of the `W * R` results has an accumulator of its own that sees the blocks in order,
    /// so the tile's shape cannot change a result.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile<const W: usize, const R: usize>(&self, i: usize, j: usize) {
        let blocks = self.blocks;
        let ones = _mm256_set1_epi16(1);
        let mut acc = [[_mm256_setzero_ps(); R]; W];
        unsafe {
            for b in 0..blocks {
                let mut scales: [__m256; R] = [_mm256_setzero_ps(); R];
                let mut values: [__m256i; R] = [_mm256_set1_epi16(0); R];
                for r in 0..R {
                    scales[r] = _mm256_set1_ps(*self.row_scales.add((j + r) * blocks + b));
                    values[r] = load(self.rows.add(((j + r) * blocks + b) * BLOCK));
                }
                for w in 0..W {
                    let weight = load(self.weights.add(((i + w) * blocks + b) * BLOCK));
                    let scale = _mm256_set1_ps(*self.weight_scales.add((i + w) * blocks + b));
                    let magnitude = _mm256_abs_epi8(weight);
                    for r in 0..R {
                        // |w| * sign(a, w): at most 2 * 127 * 127 per pair, which fits 16 bits.
                        let signed = _mm256_sign_epi8(values[r], weight);
                        let pairs = _mm256_maddubs_epi16(magnitude, signed);
                        let sums = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, ones));
                        acc[w][r] =
                            _mm256_fmadd_ps(sums, _mm256_mul_ps(scale, scales[r]), acc[w][r]);
                    }
                }
            }
            for w in 0..W {
                for r in 0..R {
                    *self.out.add((i + w) * self.m + j + r) = horizontal_sum(acc[w][r]);
                }
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn load(from: *const i8) -> __m256i {
    unsafe { _mm256_loadu_si256(from.cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn horizontal_sum(x: __m256) -> f32 {
    let half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let pairs = _mm_add_ps(half, _mm_movehl_ps(half, half));
    _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps::<1>(pairs, pairs)))
}
