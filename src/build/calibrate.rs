//! What the target does on its own text: covariances and importances.

use std::time::{Duration, Instant};

use candle_core::{D, Device, Tensor};
use faer::Mat;
use rayon::prelude::*;

use super::BuildError;
use super::linalg::{Gram, to_matrix};
use super::stream::{Sight, Streamed, Walk, groups, together};
use super::work::WorkFolder;
use crate::distill::Sample;
use crate::model::decoder::DecoderLayer;
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
#[derive(Debug, Clone)]
pub struct Statistics {
    /// Σ over the norm sites of `C / tr C` with `C = Σ x̂x̂ᵀ`: `(D, D)`. A block's two sites count
    /// as one.
    pub covariance: Mat<f64>,
    /// Per block, `1 − cos(input, output)` on average (Block Influence, arXiv 2403.03853 eq. 1).
    pub influence: Vec<f64>,
    /// Per block, what each MLP channel contributes: `E[m²]·‖W_down[:, j]‖²`.
    pub channels: Vec<Vec<f64>>,
    /// Per block, what each key-value group's heads contribute: `E‖A_g W_o,gᵀ‖²`.
    pub groups: Vec<Vec<f64>>,
    pub tokens: usize,
}

/// Time between two savings of where calibration stands.
const SAVE_EVERY: Duration = Duration::from_secs(60);
const SAVED: &str = "statistics";

/// Walks the windows through the target and gathers [`Statistics`]. `on_layer` is told how many
/// blocks are done. With a work folder a stopped walk goes on where it was saved last.
///
/// # Errors
/// When the target cannot be read or a tensor computation fails.
pub fn statistics(
    target: Streamed<'_>,
    windows: &[Window],
    work: Option<&WorkFolder>,
    on_layer: &mut dyn FnMut(usize),
) -> Result<Statistics, BuildError> {
    let mut walk = Walk::new(target, windows)?;
    let mut gathering = Gathering::new(target.config);
    if let Some(work) = work {
        gathering.resume(work, &mut walk)?;
        on_layer(walk.depth);
    }
    let mut saved = Instant::now();
    loop {
        let before = walk.residual.clone();
        if !walk.step(&mut |index, layer, sight| gathering.see(windows, index, layer, sight))? {
            break;
        }
        gathering.influence(windows, &before, &walk.residual)?;
        on_layer(1);
        if let Some(work) = work.filter(|_| saved.elapsed() > SAVE_EVERY) {
            gathering.save(work, &walk)?;
            saved = Instant::now();
        }
    }
    let mut last = Gram::new(target.config.hidden_size, 0);
    gathering.site(&mut last, windows, &walk.residual)?;
    gathering.close(last);
    let tokens = windows.iter().map(|w| Ok(w.rows.dim(0)?)).sum::<Result<usize, BuildError>>()?;
    gathering.statistics.influence.iter_mut().for_each(|sum| *sum /= tokens.max(1) as f64);
    gathering.statistics.tokens = tokens;
    Ok(gathering.statistics)
}

/// [`Statistics`] in the making.
struct Gathering<'a> {
    config: &'a ModelConfig,
    statistics: Statistics,
    /// Of the block that the walk is in.
    site: Gram,
    /// `Σ aaᵀ` over each key-value group's heads.
    heads: Vec<Gram>,
    /// `Σ m²` of each MLP channel.
    energy: Vec<f64>,
}

impl<'a> Gathering<'a> {
    fn new(config: &'a ModelConfig) -> Self {
        let d = config.hidden_size;
        let statistics = Statistics {
            covariance: Mat::zeros(d, d),
            influence: Vec::new(),
            channels: Vec::new(),
            groups: Vec::new(),
            tokens: 0,
        };
        Self { config, statistics, site: Gram::new(d, 0), heads: Vec::new(), energy: Vec::new() }
    }

    fn see(
        &mut self,
        windows: &[Window],
        index: usize,
        layer: &DecoderLayer,
        sight: Sight<'_>,
    ) -> Result<(), BuildError> {
        let config = self.config;
        match sight {
            Sight::Input(x) => {
                let groups = config.num_key_value_heads;
                let width = config.query_size() / groups;
                self.heads = (0..groups).map(|_| Gram::new(width, 0)).collect();
                self.energy = vec![0.0; config.intermediate_size];
                let mut site = Gram::new(config.hidden_size, 0);
                self.site(&mut site, windows, x)?;
                self.site = site;
            }
            Sight::Attended(window, attended) => {
                let attended = window.pick(attended)?;
                self.heads.par_iter_mut().enumerate().try_for_each(|(group, gram)| {
                    let width = gram.width();
                    gram.add_inputs(&attended.narrow(1, group * width, width)?.contiguous()?)
                })?;
            }
            Sight::Middle(x) => {
                let mut site = std::mem::replace(&mut self.site, Gram::new(0, 0));
                self.site(&mut site, windows, x)?;
                self.close(site);
                let heads = std::mem::take(&mut self.heads);
                self.statistics.groups.push(group_energy(heads, &layer.o_proj.weight)?);
            }
            Sight::Gated(window, gated) => {
                let energy = window.pick(gated)?.sqr()?.sum(0)?.to_vec1::<f32>()?;
                for (sum, energy) in self.energy.iter_mut().zip(energy) {
                    *sum += f64::from(energy);
                }
                // The last window's pass completes the block.
                if self.statistics.channels.len() == index {
                    self.statistics.channels.push(Vec::new());
                }
                let norms = layer.down_proj.weight.sqr()?.sum(0)?.to_vec1::<f32>()?;
                self.statistics.channels[index] =
                    self.energy.iter().zip(norms).map(|(e, norm)| e * f64::from(norm)).collect();
            }
        }
        Ok(())
    }

    fn site(
        &self,
        gram: &mut Gram,
        windows: &[Window],
        residual: &[Tensor],
    ) -> Result<(), BuildError> {
        for at in groups(windows) {
            let rows = together(&windows[at.clone()], &residual[at], |window, x| {
                unit(&window.pick(x)?, self.config)
            })?;
            rows.iter().try_for_each(|rows| gram.add_inputs(rows))?;
        }
        Ok(())
    }

    /// Adds a block's covariance at equal weight with the others.
    fn close(&mut self, site: Gram) {
        let covariance = site.into_inputs();
        let trace: f64 = (0..covariance.nrows()).map(|i| covariance[(i, i)]).sum();
        self.statistics.covariance += covariance * faer::Scale(1.0 / trace.max(f64::MIN_POSITIVE));
    }

    fn influence(
        &mut self,
        windows: &[Window],
        before: &[Tensor],
        after: &[Tensor],
    ) -> Result<(), BuildError> {
        let pairs: Vec<(&Tensor, &Tensor)> = before.iter().zip(after).collect();
        let moved = together(windows, &pairs, |window, (before, after)| {
            let cosine = cosine(&window.pick(before)?, &window.pick(after)?)?.sum_all()?;
            Ok(window.rows.dim(0)? as f64 - f64::from(cosine.to_scalar::<f32>()?))
        })?;
        self.statistics.influence.push(moved.iter().sum());
        Ok(())
    }

    fn save(&self, work: &WorkFolder, walk: &Walk<'_>) -> Result<(), BuildError> {
        let Statistics { covariance, influence, channels, groups, .. } = &self.statistics;
        let d = covariance.nrows();
        let values: Vec<f64> = (0..d * d).map(|at| covariance[(at / d, at % d)]).collect();
        let device = Device::Cpu;
        let mut tensors = vec![("covariance".into(), Tensor::from_vec(values, (d, d), &device)?)];
        for (name, rows) in [("channels", channels), ("groups", groups)] {
            let width = rows.first().map_or(0, Vec::len);
            let values = rows.concat();
            tensors.push((name.into(), Tensor::from_vec(values, (rows.len(), width), &device)?));
        }
        tensors.push(("influence".into(), Tensor::new(influence.as_slice(), &device)?));
        let residual = walk.residual.iter().enumerate();
        tensors.extend(residual.map(|(at, x)| (format!("residual.{at}"), x.clone())));
        work.keep_tensors(SAVED, tensors)
    }

    /// Takes up what [`Gathering::save`] left; leaves everything as it is when nothing fits.
    fn resume(&mut self, work: &WorkFolder, walk: &mut Walk<'_>) -> Result<(), BuildError> {
        let Some(mut saved) = work.load_tensors(SAVED) else { return Ok(()) };
        let mut take = |name: &str| saved.remove(name);
        let (Some(covariance), Some(channels), Some(groups), Some(influence)) =
            (take("covariance"), take("channels"), take("groups"), take("influence"))
        else {
            return Ok(());
        };
        let residual: Option<Vec<Tensor>> =
            (0..walk.residual.len()).map(|at| take(&format!("residual.{at}"))).collect();
        let Some(residual) = residual else { return Ok(()) };
        let covariance = covariance.to_vec2::<f64>()?;
        let d = self.config.hidden_size;
        self.statistics.covariance = Mat::from_fn(d, d, |row, column| covariance[row][column]);
        self.statistics.channels = channels.to_vec2()?;
        self.statistics.groups = groups.to_vec2()?;
        self.statistics.influence = influence.to_vec1()?;
        walk.depth = self.statistics.influence.len();
        walk.residual = residual;
        Ok(())
    }
}

/// `E‖A_g W_o,gᵀ‖²` of each group from `Σ aaᵀ` of its heads: `tr(W_o,g · Σ aaᵀ · W_o,gᵀ)`.
fn group_energy(heads: Vec<Gram>, o_proj: &Tensor) -> Result<Vec<f64>, BuildError> {
    let mut energies = Vec::with_capacity(heads.len());
    for (group, gram) in heads.into_iter().enumerate() {
        let width = gram.width();
        let writer = to_matrix(&o_proj.narrow(1, group * width, width)?.contiguous()?)?;
        let product = &writer * gram.into_inputs();
        let rows = 0..writer.nrows();
        energies.push(
            rows.map(|row| {
                (0..width).map(|at| product[(row, at)] * writer[(row, at)]).sum::<f64>()
            })
            .sum(),
        );
    }
    Ok(energies)
}

/// Row-wise cosine of `(N, D)` and `(N, D)`: `(N)`.
fn cosine(a: &Tensor, b: &Tensor) -> Result<Tensor, BuildError> {
    let norms = (a.sqr()?.sum(1)? * b.sqr()?.sum(1)?)?.sqrt()?;
    Ok(((a * b)?.sum(1)? / (norms + 1e-12)?)?)
}
