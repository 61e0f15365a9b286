//! Matrices in Q8_0: signed bytes in blocks of 32 with one scale each, and their products.

use rayon::prelude::*;

use super::kernels::{self, BLOCK, PANEL, PanelRows};

/// Products smaller than this many multiplications run on the calling thread.
const SERIAL_BELOW: usize = 1 << 16;

/// Rows that are quantised one after the other by one task.
const ROWS_PER_TASK: usize = 16;

/// A weight matrix `(out, in)`, each row padded to whole blocks.
pub struct QMatrix {
    out_features: usize,
    in_features: usize,
    weights: Layout,
    scales: Vec<f32>,
}

/// How the bytes lie in memory: as the processor multiplies them fastest.
enum Layout {
    /// Row by row.
    Rows(Vec<i8>),
    /// See [`kernels::pack_panels`].
    Panels(Vec<u8>),
}

/// Activation rows `(rows, in)`, quantised for a product. Keeps its buffers between uses.
#[derive(Default)]
pub struct QRows {
    rows: usize,
    blocks: usize,
    quants: Vec<i8>,
    scales: Vec<f32>,
    corrections: Vec<i32>,
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
        if kernels::has_vnni() {
            let (weights, scales) = kernels::pack_panels(blocks, &quants, &scales);
            return Self { out_features, in_features, weights: Layout::Panels(weights), scales };
        }
        Self { out_features, in_features, weights: Layout::Rows(quants), scales }
    }

    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        let weights = match &self.weights {
            Layout::Rows(weights) => weights.len(),
            Layout::Panels(weights) => weights.len(),
        };
        weights + self.scales.len() * size_of::<f32>()
    }

    /// `rows · selfᵀ`, written to `out` as `(rows, out_features)`. `scratch` holds the result as
    /// the kernels write it.
    ///
    /// # Panics
    /// When `rows` was quantised from another width or `out` has another size.
    pub fn matmul(&self, rows: &QRows, out: &mut [f32], scratch: &mut Vec<f32>) {
        let (n, m, blocks) = (self.out_features, rows.rows, rows.blocks);
        assert_eq!(blocks, self.in_features.div_ceil(BLOCK), "width of the activations");
        assert_eq!(out.len(), n * m, "size of the output");
        if m == 0 {
            return;
        }
        match &self.weights {
            Layout::Rows(weights) if m == 1 => self.rows(weights, rows, out),
            Layout::Rows(weights) => {
                scratch.resize(n * m, 0.0);
                self.rows(weights, rows, scratch);
                transpose(scratch, n, m, out);
            }
            Layout::Panels(weights) if m == 1 && n.is_multiple_of(PANEL) => {
                let chunk = self.chunk(m, n / PANEL) * PANEL;
                self.panels(weights, rows, out, chunk);
            }
            Layout::Panels(weights) => {
                let panels = n.div_ceil(PANEL);
                let chunk = self.chunk(m, panels) * PANEL;
                scratch.resize(panels * PANEL * m, 0.0);
                self.panels(weights, rows, scratch, chunk);
                gather(scratch, chunk, n, m, out);
            }
        }
    }

    /// Writes `(out_features, rows)`.
    fn rows(&self, weights: &[i8], rows: &QRows, out: &mut [f32]) {
        let (m, blocks) = (rows.rows, rows.blocks);
        let chunk = self.chunk(m, self.out_features).next_multiple_of(4);
        each_chunk(out, chunk * m, |index, out| {
            let (from, count) = (index * chunk, out.len() / m);
            kernels::matmul_q8(
                blocks,
                &weights[from * blocks * BLOCK..][..count * blocks * BLOCK],
                &self.scales[from * blocks..][..count * blocks],
                &rows.quants,
                &rows.scales,
                out,
            );
        });
    }

    /// Writes `(rows, chunk)` for one chunk of outputs after the other.
    fn panels(&self, weights: &[u8], rows: &QRows, out: &mut [f32], chunk: usize) {
        let (m, blocks) = (rows.rows, rows.blocks);
        let operand = PanelRows {
            blocks,
            quants: &rows.quants,
            scales: &rows.scales,
            corrections: &rows.corrections,
        };
        each_chunk(out, chunk * m, |index, out| {
            let (from, count) = (index * chunk * blocks, out.len() / m * blocks);
            let weights = &weights[from * BLOCK..][..count * BLOCK];
            kernels::matmul_panels(weights, &self.scales[from..][..count], operand, out);
        });
    }

    /// How many of `units` equal parts of the output one task computes: all of them when the
    /// product is small, else a few tasks for each thread, so that a thread that lost its core
    /// does not hold up all.
    fn chunk(&self, m: usize, units: usize) -> usize {
        if self.out_features * self.in_features * m < SERIAL_BELOW {
            return units;
        }
        units.div_ceil(4 * rayon::current_num_threads())
    }
}

/// Calls `one` with every chunk of `out` and its index, in parallel when there are several.
fn each_chunk(out: &mut [f32], size: usize, one: impl Fn(usize, &mut [f32]) + Sync) {
    if size >= out.len() {
        one(0, out);
    } else {
        out.par_chunks_mut(size).enumerate().for_each(|(index, out)| one(index, out));
    }
}

/// `(m, chunk)` for one chunk of columns after the other to `(m, n)`; the last chunk may hold
/// more columns than are wanted.
fn gather(from: &[f32], chunk: usize, n: usize, m: usize, to: &mut [f32]) {
    for (index, from) in from.chunks(chunk * m).enumerate() {
        let (first, width) = (index * chunk, from.len() / m);
        let wanted = width.min(n - first);
        for (from, to) in from.chunks_exact(width).zip(to.chunks_exact_mut(n)) {
            to[first..first + wanted].copy_from_slice(&from[..wanted]);
        }
    }
}

impl QRows {
    /// Quantises `(rows, width)` values, replacing what was held.
    pub fn quantize(&mut self, values: &[f32], width: usize) {
        self.rows = values.len() / width;
        self.blocks = width.div_ceil(BLOCK);
        self.quants.resize(self.rows * self.blocks * BLOCK, 0);
        self.scales.resize(self.rows * self.blocks, 0.0);
        self.corrections.clear();
        let rows = self.quants.par_chunks_mut(self.blocks * BLOCK);
        rows.zip(self.scales.par_chunks_mut(self.blocks))
            .zip(values.par_chunks(width))
            .with_min_len(ROWS_PER_TASK)
            .for_each(|((quants, scales), values)| kernels::quantize(values, quants, scales));
        if kernels::has_vnni() {
            let sums = self.quants.chunks_exact(BLOCK).map(kernels::sum);
            self.corrections.extend(sums.map(|sum| -128 * sum));
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
