//! Closed-form repair of a sliced draft: read decoders and writers by least squares, in order.
//!
//! The draft runs beside the target on the calibration text, block by block. At each norm site the
//! readers get the best linear guess of the target's normalised state from the draft's own; then
//! o_proj and down_proj are refitted so that the draft's residual lands on the projection of the
//! target's, where down_proj aims at the input of the *next kept* block and so absorbs everything
//! that was dropped in between. It costs no parameter and no gradient step, and needs of the
//! target only what it is doing at the moment: several drafts can be healed along one walk.

use candle_core::{D, Tensor};
use faer::Mat;
use rayon::prelude::*;

use super::BuildError;
use super::calibrate::{Window, unit};
use super::linalg::{Gram, to_matrix, to_tensor};
use super::plan::Plan;
use super::prune::Selection;
use super::slice::{Projection, WriteMap};
use super::stream::{Sight, Streamed, Walk, groups, together};
use crate::model::ModelConfig;
use crate::model::decoder::{Decoder, DecoderLayer, Linear};
use crate::model::ops::RotaryTable;

/// How strongly each solve is pulled to what slicing alone would give, relative to the mean
/// diagonal of its Gram matrix.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Ridge {
    pub readers: f64,
    pub writers: f64,
}

impl Default for Ridge {
    /// Best between 12,000 and 36,000 tokens; less of it pays with more text (docs/log.md).
    fn default() -> Self {
        Self { readers: 0.03, writers: 0.03 }
    }
}

/// A draft to heal: its shape, what it keeps of the target, and how.
#[derive(Clone, Copy)]
pub struct Patient<'a> {
    pub plan: &'a Plan,
    pub selection: &'a Selection,
    pub map: &'a WriteMap,
    pub ridge: Ridge,
}

/// Heals drafts along one walk of `windows` through the target. `on_layer` is told of every block
/// that the walk has passed.
///
/// # Errors
/// When the target cannot be read, or a tensor computation or a solve fails.
pub fn heal(
    target: Streamed<'_>,
    windows: &[Window],
    patients: &[Patient<'_>],
    on_layer: &mut dyn FnMut(usize),
) -> Result<Vec<Decoder>, BuildError> {
    let mut walk = Walk::new(target, windows)?;
    let mut healings = patients
        .iter()
        .map(|patient| Healing::new(target.config, *patient, windows, &walk.residual))
        .collect::<Result<Vec<_>, _>>()?;
    while walk.step(&mut |index, layer, sight| {
        healings.iter_mut().try_for_each(|healing| healing.see(index, layer, &sight))
    })? {
        on_layer(1);
    }
    healings.into_iter().map(|healing| healing.finish(target, &walk.residual)).collect()
}

/// A draft that follows the target.
struct Healing<'a> {
    target: &'a ModelConfig,
    draft: ModelConfig,
    patient: Patient<'a>,
    windows: &'a [Window],
    rotary: Vec<RotaryTable>,
    /// The draft's residual in each window: `(B, T, K)`.
    z: Vec<Tensor>,
    layers: Vec<DecoderLayer>,
    open: Option<Open>,
}

/// The block that is being healed: complete up to `down_proj`, whose goal is not seen yet.
struct Open {
    /// The target's block without what is dropped.
    source: DecoderLayer,
    layer: DecoderLayer,
    /// The input of `down_proj` in each window: `(B, T, F)`.
    gated: Vec<Tensor>,
}

impl<'a> Healing<'a> {
    fn new(
        target: &'a ModelConfig,
        patient: Patient<'a>,
        windows: &'a [Window],
        embedded: &[Tensor],
    ) -> Result<Self, BuildError> {
        let draft = patient.plan.config(target);
        let mut rotary = Vec::with_capacity(windows.len());
        let mut z = Vec::with_capacity(windows.len());
        for embedded in embedded {
            rotary.push(RotaryTable::new(&draft, embedded.dim(1)?));
            z.push(patient.map.project(embedded)?);
        }
        let layers = Vec::new();
        Ok(Self { target, draft, patient, windows, rotary, z, layers, open: None })
    }

    fn see(
        &mut self,
        index: usize,
        layer: &DecoderLayer,
        sight: &Sight<'_>,
    ) -> Result<(), BuildError> {
        let kept = self.layers.len() + usize::from(self.open.is_some());
        match sight {
            Sight::Input(x) if self.patient.selection.layers.get(kept) == Some(&index) => {
                self.close(x)?;
                self.attention(kept, layer, x)
            }
            Sight::Middle(x) if self.is_open(index) => self.mlp(x),
            _ => Ok(()),
        }
    }

    /// Whether the block `index` of the target is the one being healed.
    fn is_open(&self, index: usize) -> bool {
        let at = self.layers.len();
        self.open.is_some() && self.patient.selection.layers.get(at) == Some(&index)
    }

    fn project(&self) -> Projection<'_> {
        Projection { target: self.target, draft: &self.draft, map: self.patient.map }
    }

    fn attention(
        &mut self,
        kept: usize,
        layer: &DecoderLayer,
        goal: &[Tensor],
    ) -> Result<(), BuildError> {
        let source = self.patient.selection.pruned(layer, kept, self.target)?;
        let mut layer = self.project().layer(&source, kept)?;
        let decoder = self.decoder(goal)?;
        self.project().read_attention(&mut layer, &source, &decoder)?;
        self.open = Some(Open { source, layer, gated: Vec::new() });
        Ok(())
    }

    fn mlp(&mut self, goal: &[Tensor]) -> Result<(), BuildError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let attended = together(&self.z, &self.rotary, |z, rotary| {
            Ok(open.layer.attend(z, &self.draft, rotary)?)
        })?;
        open.layer.o_proj = self.writer(&open.source.o_proj, &attended, goal)?;
        self.z = together(&self.z, &attended, |z, attended| {
            Ok(open.layer.add_attended(z, attended, &self.draft)?)
        })?;
        drop(attended);
        let decoder = self.decoder(goal)?;
        self.project().read_mlp(&mut open.layer, &open.source, &decoder)?;
        let gate = |z: &Tensor| Ok(open.layer.gate(z, &self.draft)?);
        open.gated = self.z.par_iter().map(gate).collect::<Result<_, BuildError>>()?;
        self.open = Some(open);
        Ok(())
    }

    /// Completes the open block, now that what it should lead to is seen.
    fn close(&mut self, goal: &[Tensor]) -> Result<(), BuildError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        open.layer.down_proj = self.writer(&open.source.down_proj, &open.gated, goal)?;
        self.z = together(&self.z, &open.gated, |z, gated| {
            Ok(open.layer.add_gated(z, gated, &self.draft)?)
        })?;
        self.layers.push(open.layer);
        Ok(())
    }

    fn finish(mut self, target: Streamed<'_>, last: &[Tensor]) -> Result<Decoder, BuildError> {
        self.close(last)?;
        let decoder = self.decoder(last)?;
        let layers = std::mem::take(&mut self.layers);
        self.project().finish(target, layers, &decoder)
    }

    /// The best linear guess of the target's normalised state from the draft's: `(K, D)`.
    fn decoder(&self, goal: &[Tensor]) -> Result<Tensor, BuildError> {
        let mut gram = Gram::new(self.draft.hidden_size, self.target.hidden_size);
        for at in groups(self.windows) {
            let pairs: Vec<(&Tensor, &Tensor)> =
                self.z[at.clone()].iter().zip(&goal[at.clone()]).collect();
            let rows = together(&self.windows[at], &pairs, |window, (z, goal)| {
                let draft = unit(&window.pick(z)?, &self.draft)?;
                Ok((draft, unit(&window.pick(goal)?, self.target)?))
            })?;
            rows.iter().try_for_each(|(draft, goal)| gram.add(draft, goal, None))?;
        }
        let Patient { map, ridge, .. } = self.patient;
        to_tensor(&gram.ridge(&map.prior(), ridge.readers)?, map.tensor.device())
    }

    /// A writer, projected and refitted so that `z + inputs·Wᵀ + b` lands on the projection of the
    /// target's state; the bias stands. Rows count by the inverse of the target's RMS, else the few
    /// tokens of enormous norm would own the fit. Families that norm what a block gives are left as
    /// they are: their update is not linear in the writer.
    fn writer(
        &self,
        source: &Linear,
        inputs: &[Tensor],
        goal: &[Tensor],
    ) -> Result<Linear, BuildError> {
        let mut writer = self.project().writer(source)?;
        if self.draft.anatomy.post_norms {
            return Ok(writer);
        }
        let Patient { map, ridge, .. } = self.patient;
        let prior: Mat<f64> = to_matrix(&source.weight.t()?.contiguous()?)? * &map.q;
        let mut gram = Gram::new(prior.nrows(), prior.ncols());
        for at in groups(self.windows) {
            let places: Vec<usize> = at.clone().collect();
            let rows = together(&self.windows[at], &places, |window, place| {
                let goal = window.pick(&goal[*place])?;
                let mut missing = (map.project(&goal)? - window.pick(&self.z[*place])?)?;
                if let Some(bias) = &writer.bias {
                    missing = missing.broadcast_sub(bias)?;
                }
                let weights = (goal.sqr()?.mean_keepdim(D::Minus1)? + 1e-12)?.sqrt()?.recip()?;
                Ok((window.pick(&inputs[*place])?, missing, weights))
            })?;
            rows.iter().try_for_each(|(inputs, missing, weights)| {
                gram.add(inputs, missing, Some(weights))
            })?;
        }
        let fitted = gram.ridge(&prior, ridge.writers)?;
        writer.weight = to_tensor(&fitted, map.tensor.device())?.t()?.contiguous()?;
        Ok(writer)
    }
}
