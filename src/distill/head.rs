//! The language-model head and the loss in one step.
//!
//! Logits over a vocabulary are the largest tensor in training. Going through autograd would keep
//! five or six copies of it; here a slab of positions exists once, is turned into its own gradient
//! in place, and both products with it are taken at once.

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use super::TopK;
use super::loss::Loss;
use crate::model::kernels::{self, Matrix, MatrixMut, Write, matmul};
use crate::model::ops::Values;

/// Positions in one slab: large enough for the products to run at full speed.
const SLAB: usize = 128;

/// A loss of logits that may be capped first.
#[derive(Debug, Clone, Copy)]
pub struct HeadLoss {
    pub loss: Loss,
    /// Logits `z` become `c·tanh(z / c)` before the loss sees them.
    pub softcap: Option<f64>,
}

impl HeadLoss {
    /// As [`Loss::gradient_in_place`], with respect to the logits before the cap.
    fn gradient_in_place(self, teacher: &TopK, logits: &mut [f32], weight: f32) -> f32 {
        let Some(cap) = self.softcap else {
            return self.loss.gradient_in_place(teacher, logits, weight);
        };
        let cap = cap as f32;
        kernels::softcap(logits, cap);
        // d(c·tanh(z/c))/dz = 1 − tanh²
        let slopes: Vec<f32> = logits.iter().map(|z| 1.0 - (z / cap) * (z / cap)).collect();
        let loss = self.loss.gradient_in_place(teacher, logits, weight);
        logits.iter_mut().zip(slopes).for_each(|(gradient, slope)| *gradient *= slope);
        loss
    }
}

/// Buffers that are as large as the head; kept, because fresh pages cost more than the work.
#[derive(Default)]
pub struct Head {
    logits: Vec<f32>,
    gradient: Vec<f32>,
}

impl Head {
    /// The sum of the loss over positions, in nats, and the gradient of its mean with respect to
    /// the hidden states, `(N, D)`, for hidden states `(N, D)`, head `(V, D)` and one teacher row
    /// for each of the N positions. Arguments are taken as constants: the caller chains the
    /// gradient. The head's own gradient is left in [`Head::gradient`].
    ///
    /// # Errors
    /// When the shapes do not fit or a teacher id is outside the vocabulary.
    pub fn loss_and_gradient(
        &mut self,
        hidden: &Tensor,
        lm_head: &Tensor,
        teacher: &[&TopK],
        head: HeadLoss,
    ) -> Result<(f32, Tensor)> {
        let ((positions, width), vocab_size) = (hidden.dims2()?, lm_head.dim(0)?);
        if teacher.len() != positions {
            bail!("{positions} positions but {} teacher rows", teacher.len());
        }
        if teacher.iter().any(|row| row.ids.iter().any(|id| *id as usize >= vocab_size)) {
            bail!("a teacher token is outside the vocabulary of {vocab_size}");
        }
        let hidden = hidden.contiguous()?;
        let (h, w) = (Values::of(&hidden)?, Values::of(lm_head)?);
        let w = Matrix::new(&w, vocab_size, width, width);
        self.gradient.resize(vocab_size * width, 0.0);
        let mut d_hidden = vec![0f32; positions * width];
        let weight = 1.0 / positions as f32;
        let mut total = 0.0;
        let slabs = h.chunks(SLAB * width).zip(d_hidden.chunks_mut(SLAB * width));
        for (index, ((h, d_h), teacher)) in slabs.zip(teacher.chunks(SLAB)).enumerate() {
            let rows = teacher.len();
            self.logits.resize(rows * vocab_size, 0.0);
            let h = Matrix::new(h, rows, width, width);
            let mut logits = MatrixMut::new(&mut self.logits, rows, vocab_size, vocab_size);
            matmul(&mut logits, h, w.t(), Write::Replace);
            let losses: Vec<f32> = self
                .logits
                .par_chunks_mut(vocab_size)
                .zip(teacher)
                .map(|(row, teacher)| head.gradient_in_place(teacher, row, weight))
                .collect();
            total += losses.iter().sum::<f32>();
            let g = Matrix::new(&self.logits, rows, vocab_size, vocab_size);
            matmul(&mut MatrixMut::new(d_h, rows, width, width), g, w, Write::Replace);
            let mut d_w = MatrixMut::new(&mut self.gradient, vocab_size, width, width);
            matmul(&mut d_w, g.t(), h, if index == 0 { Write::Replace } else { Write::Add });
        }
        let d_hidden = Tensor::from_vec(d_hidden, (positions, width), hidden.device())?;
        Ok((total, d_hidden))
    }

    /// `(V, D)`: the gradient of the mean loss of the last call with respect to the head.
    pub fn gradient(&self) -> &[f32] {
        &self.gradient
    }

    /// The same, for adding to it what a tied embedding gets from the body.
    pub fn gradient_mut(&mut self) -> &mut [f32] {
        &mut self.gradient
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// More positions than one slab holds, against candle's autograd on the whole.
    #[test]
    fn slabs_add_up_to_autograds_gradients() {
        let (positions, width, vocab) = (SLAB + 3, 4, 11);
        let values = |count: usize, scale: f32| -> Vec<f32> {
            (0..count).map(|i| ((i * 7919 % 101) as f32 / 50.0 - 1.0) * scale).collect()
        };
        let tensor = |count, scale, shape| {
            let tensor = Tensor::from_vec(values(count, scale), shape, &Device::Cpu).unwrap();
            Var::from_tensor(&tensor).unwrap()
        };
        let hidden = tensor(positions * width, 2.0, (positions, width));
        let lm_head = tensor(vocab * width, 1.0, (vocab, width));
        let targets: Vec<u32> = (0..positions as u32).map(|i| i * 3 % vocab as u32).collect();
        let rows: Vec<TopK> =
            targets.iter().map(|id| TopK { ids: vec![*id], logprobs: vec![0.0] }).collect();
        let teacher: Vec<&TopK> = rows.iter().collect();

        let mut head = Head::default();
        let forward_kl = HeadLoss { loss: Loss::ForwardKl, softcap: None };
        // Twice: what the first call left behind must not count.
        head.loss_and_gradient(&hidden, &lm_head, &teacher, forward_kl).unwrap();
        let (total, d_hidden) =
            head.loss_and_gradient(&hidden, &lm_head, &teacher, forward_kl).unwrap();

        let logits = hidden.matmul(&lm_head.t().unwrap()).unwrap();
        let targets = Tensor::new(targets, &Device::Cpu).unwrap();
        let mean = candle_nn::loss::cross_entropy(&logits, &targets).unwrap();
        let store = mean.backward().unwrap();
        let want = mean.to_scalar::<f32>().unwrap() * positions as f32;
        assert!((total - want).abs() < 1e-3 * want, "{total} and {want}");
        let same = |got: &[f32], want: &Tensor| {
            let want = Values::of(want).unwrap();
            got.iter().zip(want.iter()).for_each(|(a, b)| assert!((a - b).abs() < 1e-6));
            assert_eq!(got.len(), want.len());
        };
        same(&Values::of(&d_hidden).unwrap(), store.get(&hidden).unwrap());
        same(head.gradient(), store.get(&lm_head).unwrap());
    }

    #[test]
    fn a_cap_is_part_of_the_gradient() {
        let teacher = TopK { ids: vec![2, 0], logprobs: vec![0.6f32.ln(), 0.3f32.ln()] };
        let logits = [0.3f32, -1.2, 2.7, 1.5];
        let head = HeadLoss { loss: Loss::ForwardKl, softcap: Some(1.5) };
        let value = |logits: &[f32]| -> f64 {
            head.gradient_in_place(&teacher, &mut logits.to_vec(), 1.0).into()
        };
        let mut gradient = logits.to_vec();
        head.gradient_in_place(&teacher, &mut gradient, 1.0);
        for index in 0..logits.len() {
            let (mut up, mut down) = (logits, logits);
            up[index] += 1e-2;
            down[index] -= 1e-2;
            let numeric = (value(&up) - value(&down)) / 2e-2;
            assert!((f64::from(gradient[index]) - numeric).abs() < 2e-4, "logit {index}");
        }
    }
}
