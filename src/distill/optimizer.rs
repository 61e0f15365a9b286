//! AdamW (Loshchilov and Hutter 2019) with moments in f32 and three fused passes per tensor.

use std::collections::BTreeMap;

use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var, bail};
use rayon::prelude::*;

/// Step sizes and decays.
#[derive(Debug, Clone, Copy)]
pub struct AdamWSettings {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// Moments of every trainable tensor, and the number of steps taken.
pub struct AdamW {
    settings: AdamWSettings,
    /// First and second moment by parameter name.
    moments: BTreeMap<String, (Tensor, Tensor)>,
    step: u64,
}

impl AdamW {
    /// Moments at zero for `parameters`.
    ///
    /// # Errors
    /// When the moments cannot be allocated.
    pub fn new(parameters: &BTreeMap<String, Var>, settings: AdamWSettings) -> Result<Self> {
        let moments = parameters
            .iter()
            .map(|(name, var)| Ok((name.clone(), (var.zeros_like()?, var.zeros_like()?))))
            .collect::<Result<_>>()?;
        Ok(Self { settings, moments, step: 0 })
    }

    /// Steps taken, over all resumes.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Updates `var` in place with its gradient times `scale` (for clipping). Call
    /// [`AdamW::begin_step`] once before the tensors of a step.
    ///
    /// # Errors
    /// When the parameter is unknown or the shapes differ.
    pub fn update(
        &self,
        name: &str,
        var: &Var,
        gradient: &Tensor,
        scale: f64,
        learning_rate: f64,
    ) -> Result<()> {
        let Some((first, second)) = self.moments.get(name) else {
            bail!("no optimizer state for {name}");
        };
        let AdamWSettings { beta1, beta2, eps, weight_decay } = self.settings;
        let gradient = gradient.contiguous()?;
        let average =
            |power: i32, beta: f64| Average { beta: beta as f32, scale: scale as f32, power };
        first.inplace_op2(&gradient, &average(1, beta1))?;
        second.inplace_op2(&gradient, &average(2, beta2))?;
        let step = self.step as f64;
        let apply = Apply {
            rate: (learning_rate / (1.0 - beta1.powf(step))) as f32,
            second_correction: (1.0 / (1.0 - beta2.powf(step))) as f32,
            eps: eps as f32,
            decay: (1.0 - learning_rate * weight_decay) as f32,
        };
        var.as_tensor().inplace_op3(first, second, &apply)
    }

    /// Counts a step; the bias corrections of its updates use the new count.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// The moments as tensors for a checkpoint, named `first.*` and `second.*`.
    pub fn tensors(&self) -> BTreeMap<String, Tensor> {
        let mut tensors = BTreeMap::new();
        for (name, (first, second)) in &self.moments {
            tensors.insert(format!("first.{name}"), first.clone());
            tensors.insert(format!("second.{name}"), second.clone());
        }
        tensors
    }

    /// Takes moments and step count from a checkpoint.
    ///
    /// # Errors
    /// When one is missing or has another shape.
    pub fn resume(&mut self, step: u64, tensors: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, (first, second)) in &mut self.moments {
            for (kind, moment) in [("first", first), ("second", second)] {
                match tensors.remove(&format!("{kind}.{name}")) {
                    Some(saved) if saved.shape() == moment.shape() => *moment = saved,
                    _ => bail!("checkpoint lacks the {kind} moment of {name}"),
                }
            }
        }
        self.step = step;
        Ok(())
    }
}

/// `moment := beta * moment + (1 - beta) * (scale * gradient)^power`.
struct Average {
    beta: f32,
    scale: f32,
    power: i32,
}

/// `parameter := decay * parameter - rate * first / (sqrt(second * correction) + eps)`.
struct Apply {
    rate: f32,
    second_correction: f32,
    eps: f32,
    decay: f32,
}

/// Elements one task works on: large enough to amortise, small enough to balance.
const CHUNK: usize = 1 << 15;

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&storage.as_slice::<f32>()?[from..to]),
        None => bail!("expected a contiguous tensor"),
    }
}

fn slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    let Some((from, to)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor");
    };
    match storage {
        CpuStorage::F32(values) => Ok(&mut values[from..to]),
        _ => bail!("expected f32"),
    }
}

impl InplaceOp2 for Average {
    fn name(&self) -> &'static str {
        "moment"
    }

    fn cpu_fwd(
        &self,
        moment: &mut CpuStorage,
        moment_layout: &Layout,
        gradient: &CpuStorage,
        gradient_layout: &Layout,
    ) -> Result<()> {
        let moment = slice_mut(moment, moment_layout)?;
        let gradient = slice(gradient, gradient_layout)?;
        let (beta, rest, scale) = (self.beta, 1.0 - self.beta, self.scale);
        moment.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).for_each(|(m, g)| {
            if self.power == 1 {
                m.iter_mut().zip(g).for_each(|(m, g)| *m = beta * *m + rest * (scale * g));
            } else {
                m.iter_mut().zip(g).for_each(|(m, g)| {
                    *m = beta * *m + rest * (scale * g) * (scale * g);
                });
            }
        });
        Ok(())
    }
}

impl InplaceOp3 for Apply {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(
        &self,
        parameter: &mut CpuStorage,
        parameter_layout: &Layout,
        first: &CpuStorage,
        first_layout: &Layout,
        second: &CpuStorage,
        second_layout: &Layout,
    ) -> Result<()> {
        let parameter = slice_mut(parameter, parameter_layout)?;
        let first = slice(first, first_layout)?;
        let second = slice(second, second_layout)?;
        parameter
            .par_chunks_mut(CHUNK)
            .zip(first.par_chunks(CHUNK))
            .zip(second.par_chunks(CHUNK))
            .for_each(|((p, m), v)| {
                for ((p, m), v) in p.iter_mut().zip(m).zip(v) {
                    let root = (v * self.second_correction).sqrt() + self.eps;
                    *p = self.decay * *p - self.rate * m / root;
                }
            });
        Ok(())
    }
}

/// Sum of the squares of a gradient, in f64.
///
/// # Errors
/// When it is not a contiguous f32 tensor on the CPU.
pub fn square_sum(gradient: &Tensor) -> Result<f64> {
    let gradient = gradient.contiguous()?;
    let (storage, layout) = gradient.storage_and_layout();
    match &*storage {
        candle_core::Storage::Cpu(cpu) => Ok(slice(cpu, layout)?
            .par_chunks(CHUNK)
            .map(|chunk| f64::from(crate::model::kernels::dot(chunk, chunk)))
            .sum()),
        _ => Ok(f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?)),
    }
}
