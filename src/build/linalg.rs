//! Streaming Gram matrices and the two solves that slicing and healing need, in f64.

use candle_core::{DType, Device, Tensor};
use faer::linalg::solvers::Solve;
use faer::{Mat, Side};

use super::BuildError;
use crate::model::kernels::{Matrix, MatrixMut, Write, matmul};
use crate::model::ops::Values;

/// Rows of one f32 product before it is added in f64: bounds the error of summation.
const CHUNK: usize = 1024;

/// `Σ w xᵀx` and `Σ w xᵀy` over rows x of width p and y of width q.
pub struct Gram {
    xx: Mat<f64>,
    xy: Mat<f64>,
}

impl Gram {
    /// Zeros for inputs of width `p` and outputs of width `q`.
    pub fn new(p: usize, q: usize) -> Self {
        Self { xx: Mat::zeros(p, p), xy: Mat::zeros(p, q) }
    }

    /// Width p of the inputs.
    pub fn width(&self) -> usize {
        self.xx.nrows()
    }

    /// Adds rows `x` `(N, p)` to `Σ xᵀx` alone.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add_inputs(&mut self, x: &Tensor) -> Result<(), BuildError> {
        self.add(x, &x.narrow(1, 0, 0)?, None)
    }

    /// Adds rows `x` `(N, p)` and `y` `(N, q)`; `weights` `(N, 1)` multiply both sides of each
    /// row's equation.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn add(
        &mut self,
        x: &Tensor,
        y: &Tensor,
        weights: Option<&Tensor>,
    ) -> Result<(), BuildError> {
        let rows = x.dim(0)?;
        for start in (0..rows).step_by(CHUNK) {
            let count = CHUNK.min(rows - start);
            let (mut x, mut y) = (x.narrow(0, start, count)?, y.narrow(0, start, count)?);
            if let Some(weights) = weights {
                let weights = weights.narrow(0, start, count)?;
                (x, y) = (x.broadcast_mul(&weights)?, y.broadcast_mul(&weights)?);
            }
            let (x, y) = (x.contiguous()?, y.contiguous()?);
            let values = Values::of(&x)?;
            let transposed = Matrix::new(&values, count, self.xx.ncols(), self.xx.ncols()).t();
            accumulate(&mut self.xx, transposed, &values, count);
            if self.xy.ncols() > 0 {
                accumulate(&mut self.xy, transposed, &Values::of(&y)?, count);
            }
        }
        Ok(())
    }

    /// `Σ w xᵀx` alone.
    pub fn into_inputs(self) -> Mat<f64> {
        self.xx
    }

    /// The minimiser of `Σ w‖y − xB‖² + λ‖B − prior‖²`, `(p, q)`, with λ relative to the mean
    /// diagonal of the Gram matrix. Ridge pulls towards `prior`, never towards zero.
    ///
    /// # Errors
    /// When the system is singular, which λ > 0 rules out unless the data are not finite.
    pub fn ridge(&self, prior: &Mat<f64>, lambda: f64) -> Result<Mat<f64>, BuildError> {
        let p = self.xx.nrows();
        let mean = (0..p).map(|i| self.xx[(i, i)]).sum::<f64>() / p as f64;
        let ridge = (lambda * mean).max(f64::MIN_POSITIVE);
        let mut left = self.xx.clone();
        for i in 0..p {
            left[(i, i)] += ridge;
        }
        let right = &self.xy + prior * faer::Scale(ridge);
        let factors = left.llt(Side::Lower).map_err(|e| {
            BuildError::Solve(format!("least squares of width {p} is not solvable: {e:?}"))
        })?;
        Ok(factors.solve(&right))
    }
}

/// Eigenvectors of a symmetric matrix with their eigenvalues, the largest first.
#[derive(Debug, Clone)]
pub struct Spectrum {
    /// `(D, D)`, one eigenvector in each column.
    pub vectors: Mat<f64>,
    pub values: Vec<f64>,
}

impl Spectrum {
    /// Decomposes `c`.
    ///
    /// # Errors
    /// When the decomposition does not converge.
    pub fn new(c: &Mat<f64>) -> Result<Self, BuildError> {
        let d = c.nrows();
        let eigen = c
            .self_adjoint_eigen(Side::Lower)
            .map_err(|e| BuildError::Solve(format!("eigenvectors of width {d}: {e:?}")))?;
        // They come in ascending order.
        let (u, values) = (eigen.U(), eigen.S().column_vector());
        Ok(Self {
            vectors: Mat::from_fn(d, d, |row, column| u[(row, d - 1 - column)]),
            values: (0..d).rev().map(|i| values[i]).collect(),
        })
    }

    /// The first `k` eigenvectors, `(D, k)`, and the share of the trace that they hold.
    pub fn top(&self, k: usize) -> (Mat<f64>, f64) {
        let d = self.vectors.nrows();
        let kept: f64 = self.values[..k].iter().sum();
        let top = Mat::from_fn(d, k, |row, column| self.vectors[(row, column)]);
        (top, kept / self.values.iter().sum::<f64>())
    }
}

/// Adds `xᵀ · y` for `rows` rows of `y`.
fn accumulate(sum: &mut Mat<f64>, x: Matrix<'_>, y: &[f32], rows: usize) {
    let (height, width) = (sum.nrows(), sum.ncols());
    let mut product = vec![0.0; height * width];
    let out = &mut MatrixMut::new(&mut product, height, width, width);
    matmul(out, x, Matrix::new(y, rows, width, width), Write::Replace);
    for (column, sums) in sum.col_iter_mut().enumerate() {
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum += f64::from(product[row * width + column]);
        }
    }
}

/// A matrix as an f32 tensor of the same shape.
///
/// # Errors
/// When the tensor cannot be made.
pub fn to_tensor(matrix: &Mat<f64>, device: &Device) -> Result<Tensor, BuildError> {
    let (rows, columns) = (matrix.nrows(), matrix.ncols());
    let mut values = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        values.extend((0..columns).map(|column| matrix[(row, column)] as f32));
    }
    Ok(Tensor::from_vec(values, (rows, columns), device)?)
}

/// A 2-d tensor as a matrix of the same shape.
///
/// # Errors
/// When the tensor is not 2-d or cannot be read.
pub fn to_matrix(tensor: &Tensor) -> Result<Mat<f64>, BuildError> {
    let (rows, columns) = tensor.dims2()?;
    let values = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(Mat::from_fn(rows, columns, |row, column| f64::from(values[row * columns + column])))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32], shape: (usize, usize)) -> Tensor {
        Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
    }

    #[test]
    fn ridge_finds_the_map_and_leans_towards_the_prior() {
        let x = tensor(&[1., 0., 0., 1., 1., 1., 2., -1.], (4, 2));
        let map = tensor(&[2., -1., 0.5, 3.], (2, 2));
        let mut gram = Gram::new(2, 2);
        gram.add(&x, &x.matmul(&map).unwrap(), None).unwrap();
        let want = to_matrix(&map).unwrap();
        let exact = gram.ridge(&Mat::zeros(2, 2), 1e-12).unwrap();
        assert!((&exact - &want).norm_max() < 1e-6);
        let prior = Mat::from_fn(2, 2, |i, j| (i + 2 * j) as f64);
        let pulled = gram.ridge(&prior, 1e9).unwrap();
        assert!((&pulled - &prior).norm_max() < 1e-6);
    }

    #[test]
    fn a_row_of_weight_zero_does_not_count() {
        let x = tensor(&[1., 2., 3., 4.], (4, 1));
        let y = tensor(&[2., 4., 6., 1000.], (4, 1));
        let mut gram = Gram::new(1, 1);
        gram.add(&x, &y, Some(&tensor(&[1., 1., 1., 0.], (4, 1)))).unwrap();
        let map = gram.ridge(&Mat::zeros(1, 1), 0.0).unwrap();
        assert!((map[(0, 0)] - 2.0).abs() < 1e-9);
    }

    #[test]
    fn eigenvectors_are_orthonormal_and_ordered() {
        let c = Mat::from_fn(3, 3, |i, j| if i == j { [1.0, 5.0, 3.0][i] } else { 0.0 });
        let (q, kept) = Spectrum::new(&c).unwrap().top(2);
        assert!((kept - 8.0 / 9.0).abs() < 1e-12);
        assert!((q[(1, 0)].abs() - 1.0).abs() < 1e-12 && (q[(2, 1)].abs() - 1.0).abs() < 1e-12);
        let gram = q.transpose() * &q;
        assert!((&gram - Mat::<f64>::identity(2, 2)).norm_max() < 1e-12);
    }
}
