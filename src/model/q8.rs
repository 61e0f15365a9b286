//! Matrices in Q8_0: signed bytes in blocks of 32 with one scale each, and their products.

use rayon::prelude::*;

use super::kernels::{self, BLOCK};

/// Products smaller than this many multiplications run on the calling thread.
const SERIAL_BELOW: usize = 1 << 16;

/// A weight matrix `(out, in)`, each row padded to whole blocks.
pub struct QMatrix {
    out_features: usize,
    in_features: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
}

/// Activation rows `(rows, in)`, quantised for a product. Keeps its buffers between uses.
#[derive(Default)]
pub struct QRows {
    rows: usize,
    blocks: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
}

impl QMatrix {
    /// Quantises row-major f32 weights `(out_features, in_features)`.
    ///
    /// # Panics
    /// When `weights` does not hold `out_features * in_features` values.
    pub fn new(weights: &[f32], out_features: usize, in_features: usize) -> Self {
        assert_eq!(weights.len(), out_features * in_features);
        let blocks = in_features.div_ceil(BLOCK);
        let mut quants = vec![0; out_features * blocks * BLOCK];
        let mut scales = vec![0.0; out_features * blocks];
        quants
            .par_chunks_mut(blocks * BLOCK)
            .zip(scales.par_chunks_mut(blocks))
            .zip(weights.par_chunks(in_features))
            .for_each(|((q, s), w)| kernels::quantize(w, q, s));
        Self { out_features, in_features, quants, scales }
    }

    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.quants.len() + self.scales.len() * size_of::<f32>()
    }

    /// `rows · selfᵀ`, written to `out` as `(rows, out_features)`. `scratch` holds the transposed
    /// result in between.
    ///
    /// # Panics
    /// When `rows` was quantised from another width or `out` has another size.
    pub fn matmul(&self, rows: &QRows, out: &mut [f32], scratch: &mut Vec<f32>) {
        let (n, m, blocks) = (self.out_features, rows.rows, rows.blocks);
        assert_eq!(blocks, self.in_features.div_ceil(BLOCK), "width of the activations");
        assert_eq!(out.len(), n * m, "size of the output");
        if m == 1 {
            self.product(rows, out);
            return;
        }
        scratch.resize(n * m, 0.0);
        self.product(rows, scratch);
        transpose(scratch, n, m, out);
    }

    /// Writes `(out_features, rows)`.
    fn product(&self, rows: &QRows, out: &mut [f32]) {
        let (n, m, blocks) = (self.out_features, rows.rows, rows.blocks);
        let one = |(index, out): (usize, &mut [f32]), chunk: usize| {
            let from = index * chunk;
            let count = out.len() / m;
            kernels::matmul_q8(
                blocks,
                &self.quants[from * blocks * BLOCK..][..count * blocks * BLOCK],
                &self.scales[from * blocks..][..count * blocks],
                &rows.quants,
                &rows.scales,
                out,
            );
        };
        if n * m * blocks * BLOCK < SERIAL_BELOW {
            one((0, out), n);
            return;
        }
        // A few chunks for each thread, so that a thread that lost its core does not hold up all.
        let chunk = n.div_ceil(4 * rayon::current_num_threads()).next_multiple_of(4);
        out.par_chunks_mut(chunk * m).enumerate().for_each(|item| one(item, chunk));
    }
}

impl QRows {
    /// Quantises `(rows, width)` values, replacing what was held.
    pub fn quantize(&mut self, values: &[f32], width: usize) {
        self.rows = values.len() / width;
        self.blocks = width.div_ceil(BLOCK);
        self.quants.resize(self.rows * self.blocks * BLOCK, 0);
        self.scales.resize(self.rows * self.blocks, 0.0);
        let rows = self.quants.chunks_mut(self.blocks * BLOCK);
        let rows = rows.zip(self.scales.chunks_mut(self.blocks)).zip(values.chunks(width));
        for ((quants, scales), values) in rows {
            kernels::quantize(values, quants, scales);
        }
    }
}

/// `(n, m)` to `(m, n)`.
fn transpose(from: &[f32], n: usize, m: usize, to: &mut [f32]) {
    let one = |row: usize, to: &mut [f32]| {
        for (value, from) in to.iter_mut().zip(from[row..].iter().step_by(m)) {
            *value = *from;
        }
    };
    if n * m < SERIAL_BELOW {
        to.chunks_mut(n).enumerate().for_each(|(row, to)| one(row, to));
    } else {
        to.par_chunks_mut(n).enumerate().for_each(|(row, to)| one(row, to));
    }
}
