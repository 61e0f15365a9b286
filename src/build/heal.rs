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
use super::calibrate::{States, Window, unit_rms};
use super::linalg::{Gram, to_matrix, to_tensor};
use super::plan::Plan;
use super::prune::Selection;
use super::slice::{WriteMap, read_through};
use crate::model::decoder::{Decoder, DecoderLayer};
use crate::model::ops::{RotaryTable, linear};

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
    let embed_tokens = target.embed_tokens.matmul(&map.tensor)?;
    let mut runs = Vec::with_capacity(text.len());
    for (window, states) in text {
        let (b, t) = window.ids.dims2()?;
        let z = embed_tokens.index_select(&window.ids.flatten_all()?, 0)?.reshape((b, t, ()))?;
        runs.push(Run { window, states, rotary: RotaryTable::new(&config, t), z });
    }
    let ones = Tensor::ones(plan.hidden_size, candle_core::DType::F32, device)?;
    let eps = (target.config.rms_norm_eps, config.rms_norm_eps);
    let fit = |runs: &[Run<'_>], goal: Goal| -> Result<Tensor, BuildError> {
        let mut gram = Gram::new(plan.hidden_size, target.config.hidden_size);
        for run in runs {
            let draft = unit_rms(&run.window.pick(&run.z)?, eps.1)?;
            gram.add(&draft, &unit_rms(goal.of(run.states)?, eps.0)?, None)?;
        }
        to_tensor(&gram.ridge(&map.prior(), ridge.readers)?, device)
    };

    let mut layers = Vec::with_capacity(selection.layers.len());
    for (kept, index) in selection.layers.iter().enumerate() {
        let source = selection.pruned(&target.layers[*index], kept, target)?;
        let decoder = fit(&runs, Goal::Input(*index))?;
        let read = |w: &Tensor, gain: &Tensor, decoder: &Tensor| read_through(w, gain, decoder);
        let mut layer = DecoderLayer {
            input_layernorm: ones.clone(),
            q_proj: read(&source.q_proj, &source.input_layernorm, &decoder)?,
            k_proj: read(&source.k_proj, &source.input_layernorm, &decoder)?,
            v_proj: read(&source.v_proj, &source.input_layernorm, &decoder)?,
            o_proj: source.o_proj.clone(),
            post_attention_layernorm: ones.clone(),
            gate_proj: source.gate_proj.clone(),
            up_proj: source.up_proj.clone(),
            down_proj: source.down_proj.clone(),
        };
        let attended: Vec<Tensor> = runs
            .iter()
            .map(|run| Ok(layer.attend(&run.z, &config, &run.rotary)?))
            .collect::<Result<_, BuildError>>()?;
        let goal = Goal::Middle(*index);
        layer.o_proj = refit(&mut runs, &attended, &source.o_proj, map, ridge.writers, goal)?;

        let decoder = fit(&runs, Goal::Middle(*index))?;
        layer.gate_proj = read(&source.gate_proj, &source.post_attention_layernorm, &decoder)?;
        layer.up_proj = read(&source.up_proj, &source.post_attention_layernorm, &decoder)?;
        let gated: Vec<Tensor> = runs
            .iter()
            .map(|run| Ok(layer.gate(&run.z, &config)?))
            .collect::<Result<_, BuildError>>()?;
        let goal = selection.layers.get(kept + 1).map_or(Goal::Last, |next| Goal::Input(*next));
        layer.down_proj = refit(&mut runs, &gated, &source.down_proj, map, ridge.writers, goal)?;
        layers.push(layer);
        on_layer(kept + 1);
    }
    let decoder = fit(&runs, Goal::Last)?;
    Ok(Decoder {
        lm_head: read_through(&target.lm_head, &target.norm, &decoder)?,
        config,
        embed_tokens,
        layers,
        norm: ones,
    })
}

/// Refits a writer so that `z + inputs·Wᵀ` lands on the projection of the target's state, and
/// moves every run's `z` there. Rows count by the inverse of the target's RMS, else the few
/// tokens of enormous norm would own the fit.
fn refit(
    runs: &mut [Run<'_>],
    inputs: &[Tensor],
    writer: &Tensor,
    map: &WriteMap,
    ridge: f64,
    goal: Goal,
) -> Result<Tensor, BuildError> {
    let prior: Mat<f64> = to_matrix(&writer.t()?.contiguous()?)? * &map.q;
    let mut gram = Gram::new(prior.nrows(), prior.ncols());
    for (run, input) in runs.iter().zip(inputs) {
        let goal = goal.of(run.states)?;
        let missing = (goal.matmul(&map.tensor)? - run.window.pick(&run.z)?)?;
        let weights = (goal.sqr()?.mean_keepdim(D::Minus1)? + 1e-12)?.sqrt()?.recip()?;
        gram.add(&run.window.pick(input)?, &missing, Some(&weights))?;
    }
    let device = writer.device();
    let fitted = to_tensor(&gram.ridge(&prior, ridge)?, device)?.t()?.contiguous()?;
    for (run, input) in runs.iter_mut().zip(inputs) {
        run.z = (&run.z + linear(input, &fitted)?)?;
    }
    Ok(fitted)
}
