use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn values(rng: &mut ChaCha8Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(-3.0f32..3.0)).collect()
}

#[test]
fn exp_is_accurate_over_its_range() {
    let mut worst = 0f64;
    for step in -8700..=8700 {
        let x = step as f32 / 100.0;
        let exact = f64::from(x).exp();
        worst = worst.max(((f64::from(exp(x)) - exact) / exact).abs());
    }
    assert!(worst < 4e-7, "worst relative error {worst:e}");
    assert_eq!(exp(f32::NEG_INFINITY), exp(-87.3));
}

#[test]
fn float_kernels_agree_with_plain_loops() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for len in [1, 7, 64, 101] {
        let (a, b) = (values(&mut rng, len), values(&mut rng, len));
        let plain: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        assert!((f64::from(dot(&a, &b)) - plain).abs() < 1e-4);

        let mut soft = a.clone();
        softmax(&mut soft);
        let total: f64 = a.iter().map(|x| f64::from(*x).exp()).sum();
        for (got, x) in soft.iter().zip(&a) {
            assert!((f64::from(*got) - f64::from(*x).exp() / total).abs() < 1e-6);
        }

        let mut gate = a.clone();
        silu_mul(&mut gate, &b);
        for ((got, g), u) in gate.iter().zip(&a).zip(&b) {
            let g = f64::from(*g);
            assert!((f64::from(*got) - g / (1.0 + (-g).exp()) * f64::from(*u)).abs() < 1e-5);
        }

        let mut normed = vec![0.0; len];
        rms_norm(&a, &b, 1e-5, &mut normed);
        let mean: f64 = a.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / len as f64;
        for ((got, x), g) in normed.iter().zip(&a).zip(&b) {
            let want = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*g);
            assert!((f64::from(*got) - want).abs() < 1e-5);
        }
    }
}

#[test]
fn quantised_product_is_close_and_independent_of_the_batch() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let (n, blocks) = (13, 5);
    let k = blocks * BLOCK;
    let weights = values(&mut rng, n * k);
    let mut w_quants = vec![0i8; n * k];
    let mut w_scales = vec![0f32; n * blocks];
    quantize(&weights, &mut w_quants, &mut w_scales);
    for m in 1..=11 {
        let rows = values(&mut rng, m * k);
        let mut quants = vec![0i8; m * k];
        let mut scales = vec![0f32; m * blocks];
        quantize(&rows, &mut quants, &mut scales);
        let mut out = vec![0f32; n * m];
        matmul_q8(blocks, &w_quants, &w_scales, &quants, &scales, &mut out);
        for j in 0..m {
            let mut alone = vec![0f32; n];
            let row = &quants[j * k..][..k];
            let row_scales = &scales[j * blocks..][..blocks];
            matmul_q8(blocks, &w_quants, &w_scales, row, row_scales, &mut alone);
            for i in 0..n {
                assert_eq!(out[i * m + j].to_bits(), alone[i].to_bits(), "row {j} of {m}");
                let exact = dot(&weights[i * k..][..k], &rows[j * k..][..k]);
                assert!((out[i * m + j] - exact).abs() < 1.5, "{} {exact}", out[i * m + j]);
            }
        }
    }
}

#[test]
fn quantising_rounds_to_nearest_and_keeps_the_sign() {
    let mut x = vec![0f32; BLOCK + 3];
    x[..4].copy_from_slice(&[127.0, -127.0, 1.4, -1.6]);
    x[BLOCK] = -2.0;
    let mut quants = vec![7i8; 2 * BLOCK];
    let mut scales = vec![0f32; 2];
    quantize(&x, &mut quants, &mut scales);
    assert_eq!(&quants[..5], &[127, -127, 1, -2, 0]);
    assert_eq!(scales[0], 1.0);
    assert_eq!(quants[BLOCK], -127);
    assert!(quants[BLOCK + 1..].iter().all(|q| *q == 0));
}

#[test]
fn panels_give_the_product_of_rows_for_any_number_of_rows() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (n, blocks) = (2 * PANEL + 5, 3);
    let k = blocks * BLOCK;
    let mut quants = vec![0i8; n * k];
    let mut scales = vec![0f32; n * blocks];
    quantize(&values(&mut rng, n * k), &mut quants, &mut scales);
    let (packed, packed_scales) = pack_panels(blocks, &quants, &scales);
    let width = n.next_multiple_of(PANEL);
    for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17] {
        let mut rows = vec![0i8; m * k];
        let mut row_scales = vec![0f32; m * blocks];
        quantize(&values(&mut rng, m * k), &mut rows, &mut row_scales);
        let corrections: Vec<i32> = rows.chunks(BLOCK).map(|block| -128 * sum(block)).collect();
        let product = |from: usize, count: usize| {
            let rows = PanelRows {
                blocks,
                quants: &rows[from * k..][..count * k],
                scales: &row_scales[from * blocks..][..count * blocks],
                corrections: &corrections[from * blocks..][..count * blocks],
            };
            let mut out = vec![0f32; count * width];
            matmul_panels(&packed, &packed_scales, rows, &mut out);
            out
        };
        let out = product(0, m);
        let mut plain = vec![0f32; n * m];
        matmul_q8(blocks, &quants, &scales, &rows, &row_scales, &mut plain);
        for j in 0..m {
            let alone = product(j, 1);
            assert_eq!(out[j * width..][..width], alone, "row {j} of {m}");
            for i in 0..n {
                let (got, want) = (out[j * width + i], plain[i * m + j]);
                assert!((got - want).abs() < 1e-4, "({j}, {i}) of {m}: {got} and {want}");
            }
        }
    }
}

#[test]
fn matrix_products_match_plain_sums_for_every_layout() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    // The last is large enough to be split over threads, by rows and by columns.
    for (m, k, n) in [(1, 1, 1), (5, 7, 3), (130, 96, 700), (700, 96, 130)] {
        let (a, b) = (values(&mut rng, m * k), values(&mut rng, k * n));
        let transposed = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..cols * rows).map(|at| x[at % rows * cols + at / rows]).collect()
        };
        let (a_t, b_t) = (transposed(&a, m, k), transposed(&b, k, n));
        let mut want = vec![0f64; m * n];
        for i in 0..m {
            for j in 0..n {
                let terms = (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[l * n + j]));
                want[i * n + j] = terms.sum();
            }
        }
        let left = [Matrix::new(&a, m, k, k), Matrix::new(&a_t, k, m, m).t()];
        let right = [Matrix::new(&b, k, n, n), Matrix::new(&b_t, n, k, k).t()];
        for a in left {
            for b in right {
                let mut out = vec![1f32; m * (n + 2)];
                for (write, times) in [(Write::Replace, 1.0), (Write::Add, 2.0)] {
                    matmul(&mut MatrixMut::new(&mut out, m, n, n + 2), a, b, write);
                    for (i, row) in out.chunks(n + 2).enumerate() {
                        for (j, got) in row[..n].iter().enumerate() {
                            let want = want[i * n + j] * times;
                            assert!((f64::from(*got) - want).abs() < 1e-3 * times, "{i} {j}");
                        }
                        assert_eq!(row[n..], [1.0, 1.0], "between the rows nothing is written");
                    }
                }
            }
        }
    }
}

#[test]
fn other_activations_and_norms_agree_with_plain_loops() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for len in [1, 7, 64, 101] {
        let (a, b, c) = (values(&mut rng, len), values(&mut rng, len), values(&mut rng, len));
        let mut gate = a.clone();
        gelu_mul(&mut gate, &b);
        for ((got, g), u) in gate.iter().zip(&a).zip(&b) {
            let g = f64::from(*g);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3));
            let want = 0.5 * g * (1.0 + inner.tanh()) * f64::from(*u);
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} and {want}");
        }

        let mut capped = a.clone();
        softcap(&mut capped, 1.5);
        for (got, x) in capped.iter().zip(&a) {
            assert!((f64::from(*got) - 1.5 * (f64::from(*x) / 1.5).tanh()).abs() < 1e-6);
        }

        let mut normed = vec![0.0; len];
        layer_norm(&a, &b, &c, 1e-5, &mut normed);
        let mean = a.iter().map(|x| f64::from(*x)).sum::<f64>() / len as f64;
        let variance = a.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / len as f64;
        for (((got, x), g), bias) in normed.iter().zip(&a).zip(&b).zip(&c) {
            let scaled = (f64::from(*x) - mean) / (variance + 1e-5).sqrt();
            let want = scaled * f64::from(*g) + f64::from(*bias);
            assert!((f64::from(*got) - want).abs() < 1e-4, "{got} and {want}");
        }
    }
}
