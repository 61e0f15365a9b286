//! What the target does on its own text: covariances, importances, and the states to heal towards.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{D, Device, Tensor};
use faer::Mat;

use super::BuildError;
use super::linalg::Gram;
use crate::distill::Sample;
use crate::model::decoder::Decoder;
use crate::model::ops::RotaryTable;
use crate::model::{ModelConfig, NormKind};

/// Samples of similar length as one padded tensor.
#[derive(Clone)]
pub struct Window {
    /// `(B, T)`, padded on the right.
    pub ids: Tensor,
    /// Rows of the flattened `(B * T)` that hold real tokens: `(N)`.
    pub rows: Tensor,
}

/// Packs prompts with their answers into windows of at most `limit` tokens each.
///
/// # Errors
/// When a tensor cannot be made.
pub fn windows(
    samples: &[Sample],
    batch: usize,
    limit: usize,
    device: &Device,
) -> Result<Vec<Window>, BuildError> {
    let mut texts: Vec<Vec<u32>> = samples
        .iter()
        .map(|s| s.prompt_ids.iter().chain(&s.output_ids).copied().take(limit).collect())
        .filter(|text: &Vec<u32>| !text.is_empty())
        .collect();
    texts.sort_by_key(Vec::len);
    let mut windows = Vec::new();
    for group in texts.chunks(batch) {
        let time = group.iter().map(Vec::len).max().unwrap_or(1);
        let mut ids = vec![0u32; group.len() * time];
        let mut rows = Vec::new();
        for (index, text) in group.iter().enumerate() {
            ids[index * time..][..text.len()].copy_from_slice(text);
            rows.extend((0..text.len()).map(|at| (index * time + at) as u32));
        }
        windows.push(Window {
            ids: Tensor::from_vec(ids, (group.len(), time), device)?,
            rows: Tensor::new(rows, device)?,
        });
    }
    Ok(windows)
}

impl Window {
    /// The real rows of `(B, T, W)`, flattened: `(N, W)`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    pub fn pick(&self, x: &Tensor) -> Result<Tensor, BuildError> {
        let width = x.dim(D::Minus1)?;
        Ok(x.reshape(((), width))?.index_select(&self.rows, 0)?)
    }
}

/// What a norm of this model hands on before its gain: rows scaled to a root mean square of 1,
/// with the mean taken off first where the family does that.
///
/// # Errors
/// When the tensor computation fails.
pub fn unit(x: &Tensor, config: &ModelConfig) -> Result<Tensor, BuildError> {
    let centred = match config.anatomy.norm {
        NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
        NormKind::Rms | NormKind::RmsOffset => x.clone(),
    };
    let mean = centred.sqr()?.mean_keepdim(D::Minus1)?;
    Ok(centred.broadcast_div(&(mean + config.norm_eps)?.sqrt()?)?)
}

/// What one pass over the calibration text tells of the target.
pub struct Statistics {
    /// Per block, Σ x̂x̂ᵀ at its two norm sites together: `(D, D)` each, last the final norm's.
    pub covariances: Vec<Mat<f64>>,
    /// Per block, `1 − cos(input, output)` on average (Block Influence, arXiv 2403.03853 eq. 1).
    pub influence: Vec<f64>,
    /// Per block, what each MLP channel contributes: `E[m²]·‖W_down[:, j]‖²`.
    pub channels: Vec<Vec<f64>>,
    /// Per block, what each key-value group's heads contribute: `E‖A_g W_o,gᵀ‖²`.
    pub groups: Vec<Vec<f64>>,
    pub tokens: usize,
}

/// Runs the target over the windows and gathers [`Statistics`].
///
/// # Errors
/// When a tensor computation fails.
pub fn statistics(target: &Decoder, windows: &[Window]) -> Result<Statistics, BuildError> {
    let config = &target.config;
    let d = config.hidden_size;
    let layers = config.num_hidden_layers;
    let mut covariances: Vec<Gram> = (0..=layers).map(|_| Gram::new(d, 0)).collect();
    let mut influence = vec![0.0; layers];
    let mut channels = vec![vec![0.0; config.intermediate_size]; layers];
    let mut groups = vec![vec![0.0; config.num_key_value_heads]; layers];
    let mut tokens = 0;
    let site = |gram: &mut Gram, x: &Tensor| -> Result<(), BuildError> {
        let normed = unit(x, config)?;
        gram.add(&normed, &normed.narrow(1, 0, 0)?, None)
    };
    for window in windows {
        let rotary = RotaryTable::new(config, window.ids.dim(1)?);
        let mut x = target.embed(&window.ids)?;
        tokens += window.rows.dim(0)?;
        for (index, layer) in target.layers.iter().enumerate() {
            let input = window.pick(&x)?;
            site(&mut covariances[index], &input)?;
            let attended = layer.attend(&x, config, &rotary)?;
            add_group_energy(&mut groups[index], &window.pick(&attended)?, &layer.o_proj.weight)?;
            x = layer.add_attended(&x, &attended, config)?;
            site(&mut covariances[index], &window.pick(&x)?)?;
            let gated = layer.gate(&x, config)?;
            let energy = window.pick(&gated)?.sqr()?.sum(0)?.to_vec1::<f32>()?;
            let norms = layer.down_proj.weight.sqr()?.sum(0)?.to_vec1::<f32>()?;
            for ((sum, energy), norm) in channels[index].iter_mut().zip(energy).zip(norms) {
                *sum += f64::from(energy) * f64::from(norm);
            }
            x = layer.add_gated(&x, &gated, config)?;
            let cosine = cosine(&input, &window.pick(&x)?)?.sum_all()?.to_scalar::<f32>()?;
            influence[index] += window.rows.dim(0)? as f64 - f64::from(cosine);
        }
        site(&mut covariances[layers], &window.pick(&x)?)?;
    }
    influence.iter_mut().for_each(|sum| *sum /= tokens.max(1) as f64);
    let covariances = covariances.into_iter().map(Gram::into_inputs).collect();
    Ok(Statistics { covariances, influence, channels, groups, tokens })
}

fn add_group_energy(
    sums: &mut [f64],
    attended: &Tensor,
    o_proj: &Tensor,
) -> Result<(), BuildError> {
    let width = attended.dim(1)? / sums.len();
    for (group, sum) in sums.iter_mut().enumerate() {
        let heads = attended.narrow(1, group * width, width)?.contiguous()?;
        let columns = o_proj.narrow(1, group * width, width)?.t()?.contiguous()?;
        *sum += f64::from(heads.matmul(&columns)?.sqr()?.sum_all()?.to_scalar::<f32>()?);
    }
    Ok(())
}

/// Row-wise cosine of `(N, D)` and `(N, D)`: `(N)`.
fn cosine(a: &Tensor, b: &Tensor) -> Result<Tensor, BuildError> {
    let norms = (a.sqr()?.sum(1)? * b.sqr()?.sum(1)?)?.sqrt()?;
    Ok(((a * b)?.sum(1)? / (norms + 1e-12)?)?)
}

/// The target's residual stream in one window, at the blocks that a draft may keep.
pub struct States {
    /// Input of each recorded block, by its index: `(N, D)`.
    pub inputs: BTreeMap<usize, Tensor>,
    /// Between attention and MLP of each recorded block: `(N, D)`.
    pub middles: BTreeMap<usize, Tensor>,
    /// After the last block of the target, recorded or not: `(N, D)`.
    pub last: Tensor,
}

/// Runs the target over one window and records its states at the blocks in `recorded`.
///
/// # Errors
/// When a tensor computation fails.
pub fn states(
    target: &Decoder,
    window: &Window,
    recorded: &BTreeSet<usize>,
) -> Result<States, BuildError> {
    let config = &target.config;
    let rotary = RotaryTable::new(config, window.ids.dim(1)?);
    let mut x = target.embed(&window.ids)?;
    let (mut inputs, mut middles) = (BTreeMap::new(), BTreeMap::new());
    for (index, layer) in target.layers.iter().enumerate() {
        let record = recorded.contains(&index);
        if record {
            inputs.insert(index, window.pick(&x)?);
        }
        let attended = layer.attend(&x, config, &rotary)?;
        x = layer.add_attended(&x, &attended, config)?;
        if record {
            middles.insert(index, window.pick(&x)?);
        }
        let gated = layer.gate(&x, config)?;
        x = layer.add_gated(&x, &gated, config)?;
    }
    Ok(States { inputs, middles, last: window.pick(&x)? })
}
