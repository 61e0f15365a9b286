//! Products of f32 matrices, split over threads in independent pieces.
//!
//! The pieces are ordinary tasks that any thread may take. Threads that meet at a barrier inside
//! a product, as the tensor library's do, spin whenever one of them has lost its core, and a
//! trainer that runs beside a server loses its core all the time.

use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

/// A matrix somewhere in a slice; element `(i, j)` is at `i * row_stride + j * col_stride`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `(rows, cols)` in rows of `row_stride` elements.
    ///
    /// # Panics
    /// When `data` is too short.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix {rows} x {cols} ({row_stride})");
        Self { data, rows, cols, row_stride, col_stride: 1 }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

fn fits(len: usize, rows: usize, cols: usize, row_stride: usize) -> bool {
    rows == 0 || cols == 0 || (cols <= row_stride && (rows - 1) * row_stride + cols <= len)
}

/// Where a product goes: `(rows, cols)` in rows of `row_stride` elements.
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a> MatrixMut<'a> {
    /// `(rows, cols)` in rows of `row_stride` elements.
    ///
    /// # Panics
    /// When `data` is too short.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride), "matrix {rows} x {cols} ({row_stride})");
        Self { data, rows, cols, row_stride }
    }
}

/// Whether a product replaces what was there or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    Replace,
    Add,
}

/// Multiplications that are worth a task of their own.
const TASK: usize = 1 << 21;

/// `out := a · b`, or `out += a · b`, on the calling thread.
///
/// # Panics
/// When the shapes do not fit.
pub fn matmul_serial(out: &mut MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, write: Write) {
    check(out, a, b);
    let (m, n) = (out.rows, out.cols);
    // SAFETY: the whole of `out`, which is borrowed mutably.
    unsafe { piece(out.data.as_mut_ptr(), out.row_stride, a, b, (0, m), (0, n), write) };
}

/// `out := a · b`, or `out += a · b`, on the threads of the current pool.
///
/// # Panics
/// When the shapes do not fit.
pub fn matmul(out: &mut MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, write: Write) {
    check(out, a, b);
    let (m, n) = (out.rows, out.cols);
    let threads = rayon::current_num_threads();
    let pieces = (m * n * a.cols / TASK).min(if threads == 1 { 1 } else { 2 * threads });
    if pieces <= 1 {
        return matmul_serial(out, a, b, write);
    }
    // Along the longer side, as each piece packs the whole of the shorter side's operand. Pieces
    // end at multiples of 48, which the micro-kernels' heights and widths divide.
    let by_rows = m >= n;
    let size = (if by_rows { m } else { n }).div_ceil(pieces).next_multiple_of(48);
    let count = (if by_rows { m } else { n }).div_ceil(size);
    let target = Target(out.data.as_mut_ptr());
    let stride = out.row_stride;
    (0..count).into_par_iter().for_each(|index| {
        let from = index * size;
        let range = |whole: usize| (from, size.min(whole - from));
        let (rows, cols) = if by_rows { (range(m), (0, n)) } else { ((0, m), range(n)) };
        // SAFETY: pieces are disjoint parts of `out`, which stays borrowed until all are done.
        unsafe { piece(target.get(), stride, a, b, rows, cols, write) };
    });
}

/// Lets disjoint pieces of one matrix be written from several threads.
struct Target(*mut f32);

// SAFETY: only `matmul` makes one, and its tasks write disjoint elements.
unsafe impl Sync for Target {}

impl Target {
    fn get(&self) -> *mut f32 {
        self.0
    }
}

fn check(out: &MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>) {
    assert!(
        out.rows == a.rows && out.cols == b.cols && a.cols == b.rows,
        "product of {} x {} and {} x {} into {} x {}",
        a.rows,
        a.cols,
        b.rows,
        b.cols,
        out.rows,
        out.cols
    );
}

/// Rows `rows.0..` (`rows.1` of them) and columns likewise of the product.
///
/// # Safety
/// Nobody else may touch these elements of the matrix that `out` points to, and they must be
/// inside it.
unsafe fn piece(
    out: *mut f32,
    stride: usize,
    a: Matrix<'_>,
    b: Matrix<'_>,
    rows: (usize, usize),
    cols: (usize, usize),
    write: Write,
) {
    if rows.1 == 0 || cols.1 == 0 {
        return;
    }
    // SAFETY: `check` has compared the shapes, the pieces lie inside them, and the slices behind
    // the pointers are as long as `fits` says.
    let (out, a, b) = unsafe {
        (
            MatMut::from_raw_parts_mut(
                out.add(rows.0 * stride + cols.0),
                rows.1,
                cols.1,
                stride as isize,
                1,
            ),
            MatRef::from_raw_parts(
                a.data.as_ptr().add(rows.0 * a.row_stride),
                rows.1,
                a.cols,
                a.row_stride as isize,
                a.col_stride as isize,
            ),
            MatRef::from_raw_parts(
                b.data.as_ptr().add(cols.0 * b.col_stride),
                b.rows,
                cols.1,
                b.row_stride as isize,
                b.col_stride as isize,
            ),
        )
    };
    let accumulate = match write {
        Write::Replace => Accum::Replace,
        Write::Add => Accum::Add,
    };
    faer::linalg::matmul::matmul(out, accumulate, a, b, 1.0, Par::Seq);
}
