//! AdamW (Loshchilov and Hutter 2019) with moments in f32, one fused pass for each tensor.

use std::collections::BTreeMap;

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, Var, bail};
use parking_lot::Mutex;
use rayon::prelude::*;

use crate::model::kernels::{self, AdamWStep};

/// Step sizes and decays.
#[derive(Debug, Clone, Copy)]
pub struct AdamWSettings {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
}

/// A parameter's gradient.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Of every element.
    Whole(&'a [f32]),
    /// Of the rows `ids` of a matrix, each once; all others have none and are left as they are,
    /// moments included. An embedding table sees a few hundred of its rows in a step.
    Rows { ids: &'a [u32], values: &'a [f32] },
}

impl Gradient<'_> {
    /// Sum of the squares, in f64.
    pub fn square_sum(&self) -> f64 {
        let (Self::Whole(values) | Self::Rows { values, .. }) = self;
        let chunks = values.par_chunks(CHUNK);
        chunks.map(|chunk| f64::from(kernels::dot(chunk, chunk))).collect::<Vec<_>>().iter().sum()
    }
}

/// First and second moment of one parameter.
struct Moments {
    first: Vec<f32>,
    second: Vec<f32>,
}

/// Moments of every trainable tensor, and the number of steps taken.
pub struct AdamW {
    settings: AdamWSettings,
    moments: BTreeMap<String, Moments>,
    step: u64,
}

impl AdamW {
    /// Moments at zero for `parameters`.
    pub fn new(parameters: &BTreeMap<String, Var>, settings: AdamWSettings) -> Self {
        let zeros = |var: &Var| vec![0f32; var.elem_count()];
        let moments = parameters
            .iter()
            .map(|(name, var)| (name.clone(), Moments { first: zeros(var), second: zeros(var) }));
        Self { settings, moments: moments.collect(), step: 0 }
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
        &mut self,
        name: &str,
        var: &Var,
        gradient: Gradient<'_>,
        scale: f64,
        learning_rate: f64,
    ) -> Result<()> {
        let Some(moments) = self.moments.get_mut(name) else {
            bail!("no optimizer state for {name}");
        };
        let AdamWSettings { beta1, beta2, eps, weight_decay } = self.settings;
        let step = self.step as f64;
        let step = AdamWStep {
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            scale: scale as f32,
            rate: (learning_rate / (1.0 - beta1.powf(step))) as f32,
            second_correction: (1.0 / (1.0 - beta2.powf(step))) as f32,
            eps: eps as f32,
            decay: (1.0 - learning_rate * weight_decay) as f32,
        };
        let width = var.dims().last().copied().unwrap_or(1);
        let moments = Mutex::new(moments);
        var.as_tensor().inplace_op1(&Update { moments, gradient, step, width })
    }

    /// Counts a step; the bias corrections of its updates use the new count.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// The moments as tensors for a checkpoint, named `first.*` and `second.*`.
    ///
    /// # Errors
    /// When memory for them cannot be had.
    pub fn tensors(&self, parameters: &BTreeMap<String, Var>) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (name, var) in parameters {
            let Some(moments) = self.moments.get(name) else { continue };
            for (kind, values) in [("first", &moments.first), ("second", &moments.second)] {
                let tensor = Tensor::from_slice(values, var.shape(), var.device())?;
                tensors.insert(format!("{kind}.{name}"), tensor);
            }
        }
        Ok(tensors)
    }

    /// Takes moments and step count from a checkpoint.
    ///
    /// # Errors
    /// When one is missing or has another shape.
    pub fn resume(&mut self, step: u64, tensors: &mut BTreeMap<String, Tensor>) -> Result<()> {
        for (name, moments) in &mut self.moments {
            for (kind, moment) in [("first", &mut moments.first), ("second", &mut moments.second)] {
                match tensors.remove(&format!("{kind}.{name}")) {
                    Some(saved) if saved.elem_count() == moment.len() => {
                        *moment = saved.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
                    }
                    _ => bail!("checkpoint lacks the {kind} moment of {name}"),
                }
            }
        }
        self.step = step;
        Ok(())
    }
}

/// Elements one task works on: large enough to amortise, small enough to balance.
const CHUNK: usize = 1 << 15;

/// One parameter's update, as candle lets its storage be written.
struct Update<'a> {
    moments: Mutex<&'a mut Moments>,
    gradient: Gradient<'a>,
    step: AdamWStep,
    /// Elements of a row.
    width: usize,
}

impl InplaceOp1 for Update<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some((from, to)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous parameter");
        };
        let CpuStorage::F32(values) = storage else { bail!("expected a parameter in f32") };
        let parameter = &mut values[from..to];
        let mut moments = self.moments.lock();
        let Moments { first, second } = &mut **moments;
        match self.gradient {
            Gradient::Whole(gradient) => {
                if gradient.len() != parameter.len() {
                    bail!("gradient of {} for {} values", gradient.len(), parameter.len());
                }
                parameter
                    .par_chunks_mut(CHUNK)
                    .zip(first.par_chunks_mut(CHUNK))
                    .zip(second.par_chunks_mut(CHUNK))
                    .zip(gradient.par_chunks(CHUNK))
                    .for_each(|(((p, m), v), g)| kernels::adamw(p, m, v, g, &self.step));
            }
            Gradient::Rows { ids, values } => {
                for (id, gradient) in ids.iter().zip(values.chunks_exact(self.width)) {
                    let at = *id as usize * self.width..(*id as usize + 1) * self.width;
                    let Some(parameter) = parameter.get_mut(at.clone()) else {
                        bail!("gradient for row {id} of a smaller matrix");
                    };
                    let (first, second) = (&mut first[at.clone()], &mut second[at]);
                    kernels::adamw(parameter, first, second, gradient, &self.step);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn optimizer(var: &Var, weight_decay: f64) -> AdamW {
        let settings = AdamWSettings { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay };
        AdamW::new(&BTreeMap::from([("w".to_string(), var.clone())]), settings)
    }

    fn var(values: &[f32], shape: (usize, usize)) -> Var {
        Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu).unwrap()).unwrap()
    }

    fn values(var: &Var) -> Vec<f32> {
        var.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Constants from `tests/golden/adamw.py`, in float64.
    #[test]
    fn steps_match_the_formula() {
        let var = var(&[0.5, -1.0, 2.0, 0.1], (2, 2));
        let mut optimizer = optimizer(&var, 0.1);
        for gradient in [[0.1, -0.2, 0.3, 0.0], [0.2, 0.1, -0.4, 0.5], [-0.3, 0.2, 0.1, 0.1]] {
            optimizer.begin_step();
            optimizer.update("w", &var, Gradient::Whole(&gradient), 1.0, 0.01).unwrap();
        }
        let want = [0.479_607_8, -0.987_068_5, 1.986_167_2, 0.085_468_06];
        for (got, want) in values(&var).iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} and {want}");
        }
    }

    #[test]
    fn rows_are_updated_as_if_they_were_all_there_is() {
        let whole = var(&[0.5, -1.0, 2.0, 0.1, 3.0, 4.0], (3, 2));
        let (first, last) = (var(&[0.5, -1.0], (1, 2)), var(&[3.0, 4.0], (1, 2)));
        let mut optimizers = [&whole, &first, &last].map(|var| optimizer(var, 0.0));
        for gradient in [[0.1, -0.2, 0.3, 0.4], [0.5, 0.6, -0.7, 0.8]] {
            optimizers.iter_mut().for_each(AdamW::begin_step);
            let [all, one, other] = &mut optimizers;
            let rows = Gradient::Rows { ids: &[2, 0], values: &gradient };
            all.update("w", &whole, rows, 0.5, 0.1).unwrap();
            other.update("w", &last, Gradient::Whole(&gradient[..2]), 0.5, 0.1).unwrap();
            one.update("w", &first, Gradient::Whole(&gradient[2..]), 0.5, 0.1).unwrap();
        }
        let got = values(&whole);
        assert_eq!(got[..2], values(&first));
        assert_eq!(got[2..4], [2.0, 0.1]);
        assert_eq!(got[4..], values(&last));
        let outside = Gradient::Rows { ids: &[3], values: &[1.0, 1.0] };
        assert!(optimizers[0].update("w", &whole, outside, 1.0, 0.1).is_err());
    }

    #[test]
    fn moments_survive_a_checkpoint() {
        let var = var(&[0.5, -1.0], (1, 2));
        let mut optimizer = optimizer(&var, 0.0);
        optimizer.begin_step();
        optimizer.update("w", &var, Gradient::Whole(&[0.3, -0.4]), 1.0, 0.1).unwrap();
        let parameters = BTreeMap::from([("w".to_string(), var.clone())]);
        let mut saved = optimizer.tensors(&parameters).unwrap();
        let mut resumed = self::optimizer(&var, 0.0);
        resumed.resume(1, &mut saved).unwrap();
        assert_eq!(resumed.step_count(), 1);
        let (old, new) = (&optimizer.moments["w"], &resumed.moments["w"]);
        assert_eq!((&old.first, &old.second), (&new.first, &new.second));
        assert!(resumed.resume(1, &mut BTreeMap::new()).is_err());
    }
}
