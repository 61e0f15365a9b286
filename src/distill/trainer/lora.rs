//! Low-rank updates in place of whole matrices (LoRA, Hu et al. 2021, arXiv 2106.09685).

use std::collections::BTreeMap;

use candle_core::{Device, Result, Tensor, Var};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// A draft of which only the blocks' projections change, each by `scale · B · A`.
pub(super) struct Lora {
    /// Every tensor as it was at the start.
    base: BTreeMap<String, Tensor>,
    scale: f64,
}

/// α of the paper by the rank: an update's strength stays the same for every rank.
const ALPHA_BY_RANK: f64 = 2.0;
const DOWN: &str = ".lora_A";
const UP: &str = ".lora_B";

impl Lora {
    /// Splits parameters into what stands and the factors that are trained: A `(rank, in)` is
    /// Gaussian, B `(out, rank)` zero, so that the draft is at first what it was.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn new(
        parameters: &BTreeMap<String, Var>,
        rank: usize,
        seed: u64,
    ) -> Result<(Self, BTreeMap<String, Var>)> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut factors = BTreeMap::new();
        for (name, var) in parameters.iter().filter(|(name, _)| is_adapted(name)) {
            let (out, width) = var.dims2()?;
            let spread = (width as f32).sqrt().recip();
            let values: Vec<f32> = (0..rank * width)
                .map(|_| spread * Distribution::<f32>::sample(&StandardNormal, &mut rng))
                .collect();
            let down = Tensor::from_vec(values, (rank, width), &Device::Cpu)?;
            factors.insert(format!("{name}{DOWN}"), Var::from_tensor(&down)?);
            let up = Tensor::zeros((out, rank), var.dtype(), &Device::Cpu)?;
            factors.insert(format!("{name}{UP}"), Var::from_tensor(&up)?);
        }
        let base =
            parameters.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
        Ok((Self { base, scale: ALPHA_BY_RANK }, factors))
    }

    /// The tensor of that name with its update, through which gradients reach the factors.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn tensor(&self, factors: &BTreeMap<String, Var>, name: &str) -> Result<Tensor> {
        let Some(base) = self.base.get(name) else {
            candle_core::bail!("no parameter {name}");
        };
        let factor = |end: &str| factors.get(&format!("{name}{end}"));
        match (factor(UP), factor(DOWN)) {
            (Some(up), Some(down)) => base + (up.matmul(down.as_tensor())? * self.scale)?,
            _ => Ok(base.clone()),
        }
    }

    /// Makes every B something other than zero, or zero again. A's gradient passes through B: at
    /// the start there is none, and nothing wrong with that.
    ///
    /// # Errors
    /// When a tensor cannot be made.
    pub fn set_up_factors(factors: &BTreeMap<String, Var>, value: f64) -> Result<()> {
        for (_, var) in factors.iter().filter(|(name, _)| name.ends_with(UP)) {
            var.set(&(var.as_tensor().zeros_like()? + value)?)?;
        }
        Ok(())
    }
}

/// Whether a parameter is a projection of a block.
fn is_adapted(name: &str) -> bool {
    name.ends_with("_proj.weight")
}
