//! Closed-form repair of a sliced draft: read decoders and writers by least squares, in order.
//!
//! The draft runs beside the target on the calibration text, block by block. At each norm site the
//! readers get the best linear guess of the target's normalised state from the draft's own; then
//! o_proj and down_proj are refitted so that the draft's residual lands on the projection of the
//! target's, where down_proj aims at the input of the *next kept* block and so absorbs everything
//! that was dropped in between. It costs no parameter and no gradient step.

use candle_core::{D, Tensor};
use faer::Mat;

use super::BuildError;
use super::calibrate::{States, Window, unit};
use super::linalg::{Gram, to_matrix, to_tensor};
use super::plan::Plan;
use super::prune::Selection;
use super::slice::{Parts, Projection, WriteMap};
use crate::model::decoder::{Decoder, Linear};
use crate::model::ops::RotaryTable;

/// How strongly each solve is pulled to what slicing alone would give, relative to the mean
/// diagonal of its Gram matrix.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Ridge {
    pub readers: f64,
    pub writers: f64,
}

impl Default for Ridge {
    fn default() -> Self {
        Self { readers: 0.1, writers: 0.1 }
    }
}

/// One window of calibration text with where target and draft stand in it.
struct Run<'a> {
    window: &'a Window,
    states: &'a States,
    rotary: RotaryTable,
    /// The draft's residual: `(B, T, K)`.
    z: Tensor,
}

/// A place in the target's residual stream that the draft is fitted to.
#[derive(Clone, Copy)]
enum Goal {
    Input(usize),
    Middle(usize),
    Last,
}

impl Goal {
    fn of(self, states: &States) -> Result<&Tensor, BuildError> {
        let state = match self {
            Self::Input(layer) => states.inputs.get(&layer),
            Self::Middle(layer) => states.middles.get(&layer),
            Self::Last => Some(&states.last),
        };
        state.ok_or_else(|| BuildError::Solve("the target's states were not recorded".into()))
    }
}

/// Heals a draft of the given shape from the start; returns it complete. `text` holds the
/// calibration windows with the target's states at every layer of `selection`.
///
/// # Errors
/// When a tensor computation or a solve fails, or a state was not recorded.
pub fn heal(
    target: &Decoder,
    plan: &Plan,
    selection: &Selection,
    map: &WriteMap,
    text: &[(Window, States)],
    ridge: Ridge,
    on_layer: &mut dyn FnMut(usize),
) -> Result<Decoder, BuildError> {
    let config = plan.config(&target.config);
    let device = target.embed_tokens.device();
    let project = Projection { target: &target.config, draft: &config, map };
    let mut runs = Vec::with_capacity(text.len());
    for (window, states) in text {
        let (b, t) = window.ids.dims2()?;
        // (B, T, D) · (D, K) -> (B, T, K)
        let embedded = target.embed(&window.ids)?.reshape((b * t, ()))?;
        let z = embedded.matmul(&map.tensor)?.reshape((b, t, ()))?;
        runs.push(Run { window, states, rotary: RotaryTable::new(&config, t), z });
    }
    // The best linear guess of each goal's normalised state from the draft's: (K, D) each.
    let fit = |runs: &[Run<'_>], goals: &[Goal]| -> Result<Vec<Tensor>, BuildError> {
        let width = target.config.hidden_size;
        let mut gram = Gram::new(plan.hidden_size, goals.len() * width);
        for run in runs {
            let draft = unit(&run.window.pick(&run.z)?, &config)?;
            let states = goals
                .iter()
                .map(|goal| unit(goal.of(run.states)?, &target.config))
                .collect::<Result<Vec<_>, _>>()?;
            gram.add(&draft, &Tensor::cat(&states, 1)?, None)?;
        }
        let prior = map.prior();
        let priors =
            Mat::from_fn(prior.nrows(), goals.len() * width, |row, at| prior[(row, at % width)]);
        let decoders = to_tensor(&gram.ridge(&priors, ridge.readers)?, device)?;
        (0..goals.len())
            .map(|goal| Ok(decoders.narrow(1, goal * width, width)?.contiguous()?))
            .collect()
    };

    let own = selection.layers();
    let mut layers = Vec::with_capacity(own.len());
    for (kept, sources) in selection.blocks.iter().enumerate() {
        let parts = Parts::new(sources, target)?;
        let mut layer = project.layer(&parts.own, kept)?;
        let goals: Vec<Goal> = parts.heads_of.iter().map(|layer| Goal::Input(*layer)).collect();
        project.read_attention(&mut layer, &parts.heads, &fit(&runs, &goals)?)?;
        let attended: Vec<Tensor> = runs
            .iter()
            .map(|run| Ok(layer.attend(&run.z, &config, &run.rotary)?))
            .collect::<Result<_, BuildError>>()?;
        let o_proj = parts.o_proj()?;
        layer.o_proj = project.writer(&o_proj)?;
        if !config.anatomy.post_norms {
            let goal = Goal::Middle(own[kept]);
            refit(&mut layer.o_proj, &runs, &attended, &o_proj, map, ridge.writers, goal)?;
        }
        for (run, attended) in runs.iter_mut().zip(&attended) {
            run.z = layer.add_attended(&run.z, attended, &config)?;
        }

        let goals: Vec<Goal> = parts.mlps_of.iter().map(|layer| Goal::Middle(*layer)).collect();
        project.read_mlp(&mut layer, &parts.mlps, &fit(&runs, &goals)?)?;
        let gated: Vec<Tensor> = runs
            .iter()
            .map(|run| Ok(layer.gate(&run.z, &config)?))
            .collect::<Result<_, BuildError>>()?;
        let down_proj = parts.down_proj()?;
        layer.down_proj = project.writer(&down_proj)?;
        if !config.anatomy.post_norms {
            let goal = own.get(kept + 1).map_or(Goal::Last, |next| Goal::Input(*next));
            refit(&mut layer.down_proj, &runs, &gated, &down_proj, map, ridge.writers, goal)?;
        }
        for (run, gated) in runs.iter_mut().zip(&gated) {
            run.z = layer.add_gated(&run.z, gated, &config)?;
        }
        layers.push(layer);
        on_layer(kept + 1);
    }
    project.finish(target, layers, &fit(&runs, &[Goal::Last])?.swap_remove(0))
}

/// Refits the weights of a writer, whose bias stands, so that `z + inputs·Wᵀ + b` lands on the
/// projection of the target's state. Rows count by the inverse of the target's RMS, else the few
/// tokens of enormous norm would own the fit. Families that norm what a block gives are left as
/// they are: their update is not linear in the writer.
fn refit(
    writer: &mut Linear,
    runs: &[Run<'_>],
    inputs: &[Tensor],
    source: &Linear,
    map: &WriteMap,
    ridge: f64,
    goal: Goal,
) -> Result<(), BuildError> {
    let prior: Mat<f64> = to_matrix(&source.weight.t()?.contiguous()?)? * &map.q;
    let mut gram = Gram::new(prior.nrows(), prior.ncols());
    for (run, input) in runs.iter().zip(inputs) {
        let goal = goal.of(run.states)?;
        let mut missing = (goal.matmul(&map.tensor)? - run.window.pick(&run.z)?)?;
        if let Some(bias) = &writer.bias {
            missing = missing.broadcast_sub(bias)?;
        }
        let weights = (goal.sqr()?.mean_keepdim(D::Minus1)? + 1e-12)?.sqrt()?.recip()?;
        gram.add(&run.window.pick(input)?, &missing, Some(&weights))?;
    }
    let fitted = gram.ridge(&prior, ridge)?;
    writer.weight = to_tensor(&fitted, writer.weight.device())?.t()?.contiguous()?;
    Ok(())
}
