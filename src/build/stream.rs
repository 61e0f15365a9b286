//! The target read one block at a time, and a walk of calibration text through it.
//!
//! A target may be larger than memory: its files are mapped, a block is converted to f32 when the
//! walk reaches it and dropped behind it. What stays is the residual stream of the text.

use std::ops::Range;

use candle_core::{D, Device, Tensor};
use rayon::prelude::*;

use super::BuildError;
use super::calibrate::Window;
use crate::distill::{Reference, Sample};
use crate::hub::{HubError, Target, Weights};
use crate::model::decoder::{DecoderLayer, Norm};
use crate::model::ops::RotaryTable;
use crate::model::{ModelConfig, NormKind};

/// Rows of a table that exist as f32 at a time.
const TABLE_ROWS: usize = 8192;
const EMBEDDINGS: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A target whose tensors are read when they are needed.
#[derive(Clone, Copy)]
pub struct Streamed<'a> {
    pub config: &'a ModelConfig,
    weights: &'a Weights,
}

impl<'a> Streamed<'a> {
    pub fn new(target: &'a Target) -> Self {
        Self { config: &target.config, weights: &target.weights }
    }

    /// Where tensors are made.
    pub fn device(&self) -> Device {
        Device::Cpu
    }

    /// One block.
    ///
    /// # Errors
    /// When a tensor is missing or cannot be read.
    pub fn layer(&self, index: usize) -> Result<DecoderLayer, BuildError> {
        let window = self.config.anatomy.windows.get(index).copied().flatten();
        DecoderLayer::new(self.config, window, |name| {
            let name = format!("model.layers.{index}.{name}");
            self.weights.tensor(&name, &self.device()).map_err(BuildError::from)
        })
    }

    /// The final norm.
    ///
    /// # Errors
    /// When a tensor is missing or cannot be read.
    pub fn norm(&self) -> Result<Norm, BuildError> {
        let get = |name: &str| self.weights.tensor(name, &self.device());
        let bias = match self.config.anatomy.norm {
            NormKind::Layer => Some(get("model.norm.bias")?),
            NormKind::Rms | NormKind::RmsOffset => None,
        };
        Ok(Norm { weight: get("model.norm.weight")?, bias })
    }

    /// The embedding table whole: `(V, D)`.
    ///
    /// # Errors
    /// When it is missing or cannot be read.
    pub fn embed_tokens(&self) -> Result<Tensor, HubError> {
        self.weights.tensor(EMBEDDINGS, &self.device())
    }

    /// The head whole: `(V, D)`.
    ///
    /// # Errors
    /// When it is missing or cannot be read.
    pub fn lm_head(&self) -> Result<Tensor, HubError> {
        self.weights.tensor(self.head_name(), &self.device())
    }

    fn head_name(&self) -> &'static str {
        if self.config.tie_word_embeddings { EMBEDDINGS } else { HEAD }
    }

    /// The embedding table through `map`, some rows at a time: `(V, K)` from rows `(N, D)` that
    /// become `(N, K)`.
    ///
    /// # Errors
    /// When the table cannot be read or `map` fails.
    pub fn map_embeddings(
        &self,
        map: &dyn Fn(&Tensor) -> Result<Tensor, BuildError>,
    ) -> Result<Tensor, BuildError> {
        self.map_table(EMBEDDINGS, map)
    }

    /// The head through `map`, as [`Streamed::map_embeddings`].
    ///
    /// # Errors
    /// When the table cannot be read or `map` fails.
    pub fn map_head(
        &self,
        map: &dyn Fn(&Tensor) -> Result<Tensor, BuildError>,
    ) -> Result<Tensor, BuildError> {
        self.map_table(self.head_name(), map)
    }

    fn map_table(
        &self,
        name: &str,
        map: &dyn Fn(&Tensor) -> Result<Tensor, BuildError>,
    ) -> Result<Tensor, BuildError> {
        let rows = self.config.vocab_size;
        let mut parts = Vec::new();
        for start in (0..rows).step_by(TABLE_ROWS) {
            let range = start..rows.min(start + TABLE_ROWS);
            parts.push(map(&self.weights.rows(name, range, &self.device())?)?);
        }
        Ok(Tensor::cat(&parts, 0)?)
    }

    /// The residual before the first block for each window: `(B, T, D)`. Only the rows that occur
    /// are read.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn embed(&self, windows: &[Window]) -> Result<Vec<Tensor>, BuildError> {
        let ids = windows
            .iter()
            .map(|window| Ok(window.ids.flatten_all()?.to_vec1::<u32>()?))
            .collect::<Result<Vec<_>, BuildError>>()?;
        let mut distinct: Vec<u32> = ids.iter().flatten().copied().collect();
        distinct.sort_unstable();
        distinct.dedup();
        let rows = distinct
            .iter()
            .map(|id| self.weights.rows(EMBEDDINGS, row(*id), &self.device()))
            .collect::<Result<Vec<_>, _>>()?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let table = (Tensor::cat(&rows, 0)? * self.config.anatomy.embedding_scale)?;
        let place = |id: &u32| distinct.binary_search(id).unwrap_or(0) as u32;
        windows
            .iter()
            .zip(ids)
            .map(|(window, ids)| {
                let (b, t) = window.ids.dims2()?;
                let places = ids.iter().map(place).collect::<Vec<u32>>();
                let places = Tensor::from_vec(places, b * t, &self.device())?;
                Ok(table.index_select(&places, 0)?.reshape((b, t, ()))?)
            })
            .collect()
    }
}

fn row(id: u32) -> Range<usize> {
    id as usize..id as usize + 1
}

/// What a walk shows of a block, for all windows at once or for one after the other.
pub enum Sight<'a> {
    /// The residual before the block: `(B, T, D)` for each window.
    Input(&'a [Tensor]),
    /// The input of `o_proj` in one window: `(B, T, H*E)`.
    Attended(&'a Window, &'a Tensor),
    /// The residual between attention and MLP: `(B, T, D)` for each window.
    Middle(&'a [Tensor]),
    /// The input of `down_proj` in one window: `(B, T, F)`.
    Gated(&'a Window, &'a Tensor),
}

/// A text on its way through a target.
pub struct Walk<'a> {
    target: Streamed<'a>,
    windows: &'a [Window],
    rotary: Vec<RotaryTable>,
    /// Blocks that it has been through.
    pub depth: usize,
    /// The residual of each window: `(B, T, D)`.
    pub residual: Vec<Tensor>,
}

impl<'a> Walk<'a> {
    /// At the first block.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn new(target: Streamed<'a>, windows: &'a [Window]) -> Result<Self, BuildError> {
        let rotary = windows
            .iter()
            .map(|window| Ok(RotaryTable::new(target.config, window.ids.dim(1)?)))
            .collect::<Result<_, BuildError>>()?;
        Ok(Self { target, windows, rotary, depth: 0, residual: target.embed(windows)? })
    }

    /// Goes through the next block and shows it; false when there is none left.
    ///
    /// # Errors
    /// When the block cannot be read, a tensor computation fails, or `see` fails.
    pub fn step(
        &mut self,
        see: &mut dyn FnMut(usize, &DecoderLayer, Sight<'_>) -> Result<(), BuildError>,
    ) -> Result<bool, BuildError> {
        let (index, config) = (self.depth, self.target.config);
        if index == config.num_hidden_layers {
            return Ok(false);
        }
        let layer = self.target.layer(index)?;
        see(index, &layer, Sight::Input(&self.residual))?;
        for at in groups(self.windows) {
            let x = &self.residual[at.clone()];
            let attended = together(x, &self.rotary[at.clone()], |x, rotary| {
                Ok(layer.attend(x, config, rotary)?)
            })?;
            let next =
                together(x, &attended, |x, attended| Ok(layer.add_attended(x, attended, config)?))?;
            for (window, attended) in self.windows[at.clone()].iter().zip(&attended) {
                see(index, &layer, Sight::Attended(window, attended))?;
            }
            self.residual.splice(at, next);
        }
        see(index, &layer, Sight::Middle(&self.residual))?;
        for at in groups(self.windows) {
            let x = &self.residual[at.clone()];
            let gated = x
                .par_iter()
                .map(|x| Ok(layer.gate(x, config)?))
                .collect::<Result<Vec<_>, BuildError>>()?;
            let next = together(x, &gated, |x, gated| Ok(layer.add_gated(x, gated, config)?))?;
            for (window, gated) in self.windows[at.clone()].iter().zip(&gated) {
                see(index, &layer, Sight::Gated(window, gated))?;
            }
            self.residual.splice(at, next);
        }
        self.depth += 1;
        Ok(true)
    }
}

/// Windows that are worked on at a time: one for each thread, so that what they need between two
/// steps stays small.
pub fn groups(windows: &[Window]) -> impl Iterator<Item = Range<usize>> {
    let (count, size) = (windows.len(), rayon::current_num_threads());
    (0..count).step_by(size).map(move |start| start..count.min(start + size))
}

/// Works on pairs, each on a thread of its own.
///
/// # Errors
/// The first one of `work`.
pub fn together<A: Sync, B: Sync, R: Send>(
    left: &[A],
    right: &[B],
    work: impl Fn(&A, &B) -> Result<R, BuildError> + Sync,
) -> Result<Vec<R>, BuildError> {
    left.par_iter().zip(right).map(|(left, right)| work(left, right)).collect()
}

/// Hidden states after the final norm at the real positions of each window: `(N, D)`.
fn hidden(target: Streamed<'_>, windows: &[Window]) -> Result<Vec<Tensor>, BuildError> {
    let mut walk = Walk::new(target, windows)?;
    while walk.step(&mut |_, _, _| Ok(()))? {}
    let norm = target.norm()?;
    let rows = walk.residual.iter().zip(windows);
    rows.map(|(x, window)| window.pick(&norm.forward(x, target.config)?)).collect()
}

/// The target's states on answers, to judge drafts by; see [`Reference::new`].
///
/// # Errors
/// When the target cannot be read or a tensor computation fails.
pub fn reference(
    target: Streamed<'_>,
    answers: &[Sample],
    window: usize,
) -> Result<Reference, BuildError> {
    Reference::with(target.config.clone(), target.lm_head()?, answers, window, |texts| {
        let windows = texts.iter().map(alone).collect::<Result<Vec<_>, _>>()?;
        hidden(target, &windows)
    })
}

/// A text as one window of `(1, T)`.
fn alone(ids: &Tensor) -> Result<Window, BuildError> {
    let time = ids.dim(D::Minus1)? as u32;
    Ok(Window { ids: ids.clone(), rows: Tensor::arange(0, time, ids.device())? })
}
