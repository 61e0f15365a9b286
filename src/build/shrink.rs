//! From the target to a draft with nothing learned: shape, slicing, pruning, healing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use candle_core::{Device, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use super::calibrate::{Statistics, Window, statistics, windows};
use super::heal::{Patient, heal};
use super::linalg::Spectrum;
use super::pipeline::{Build, LONGEST_DRAFT, NUM_SPECULATIVE_TOKENS, STORY, Text, WINDOW};
use super::plan::Plan;
use super::prune::{Selection, by_influence, evenly};
use super::search::best_length;
use super::slice::{WriteMap, slice};
use super::teach::UNTAUGHT;
use super::{BuildError, Init, Made, Progress, Story, Tried, export};
use crate::distill::{Comparison, Reference};
use crate::model::decoder::Decoder;

/// Drafts of more parameters are not made only to see what slicing alone does.
const LARGEST_SHOWN: usize = 2_000_000_000;
/// Every so many windows serve to gather statistics: covariances and importances settle long
/// before the least-squares fits do.
const STATISTICS_EVERY: usize = 3;
/// Every so many windows serve to compare shapes.
const SEARCH_EVERY: usize = 3;

impl Build<'_> {
    /// Makes the draft, and keeps it when it is to be distilled.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub(super) fn make(
        &mut self,
        plans: Vec<Plan>,
        text: &Text,
        reference: &Reference,
    ) -> Result<Made, BuildError> {
        let made = match plans.as_slice() {
            [plan] if plan.is_identity(&self.target.config) => self.copy(plan, reference)?,
            _ => self.shrink(plans, text, reference)?,
        };
        if self.settings.distill.is_some() {
            self.work.drop_folder(UNTAUGHT)?;
            export::keep(self.target, &made.draft, &self.work.join(UNTAUGHT))?;
            self.work.keep(STORY, &made.story)?;
        }
        Ok(made)
    }

    /// The target itself, where nothing is to be cut.
    fn copy(&mut self, plan: &Plan, reference: &Reference) -> Result<Made, BuildError> {
        let config = &self.target.config;
        let draft = Decoder::new(config, |name| {
            self.target.weights.tensor(name, &Device::Cpu).map_err(BuildError::from)
        })?;
        let layers = config.num_hidden_layers;
        let selection = Selection {
            layers: (0..layers).collect(),
            groups: vec![(0..config.num_key_value_heads).collect(); layers],
            channels: vec![(0..config.intermediate_size).collect(); layers],
        };
        let mut story = Story::new(plan.clone(), selection);
        self.judge(&mut story, "identity", "nothing is cut".into(), &draft, reference)?;
        Ok(Made { draft, story, trimmed: None })
    }

    fn shrink(
        &mut self,
        plans: Vec<Plan>,
        text: &Text,
        reference: &Reference,
    ) -> Result<Made, BuildError> {
        let (tokens, width) = (Self::tokens(&text.calibration), self.target.config.hidden_size);
        let needed = 2 * plans.iter().map(|p| p.hidden_size).max().unwrap_or(0).min(width);
        if tokens < needed {
            return Err(BuildError::TooLittleText { tokens, needed });
        }
        let windows = windows(&text.calibration, 8, WINDOW, &Device::Cpu)?;
        let layers = self.target.config.num_hidden_layers;
        (self.on_progress)(Progress::Started { step: "inspect", total: layers });
        let some = every(&windows, STATISTICS_EVERY);
        let mut tick = |units| (self.on_progress)(Progress::Advanced { units });
        let statistics = statistics(self.streamed, &some, Some(self.work), &mut tick)?;
        let spectrum = Spectrum::new(&statistics.covariance)?;
        let mut maps = BTreeMap::new();
        for plan in &plans {
            let (k, norm) = (plan.hidden_size, self.target.config.anatomy.norm);
            if let Entry::Vacant(place) = maps.entry(k) {
                place.insert(WriteMap::new(&spectrum, k, norm, &Device::Cpu)?);
            }
        }
        (self.on_progress)(Progress::Finished {
            step: "inspect",
            detail: maps.iter().fold(format!("{} tokens", statistics.tokens), |line, (k, map)| {
                format!("{line}; {:.1} % of the normalised residual at width {k}", 100.0 * map.kept)
            }),
            scores: None,
        });
        let mut tried = Vec::new();
        let plan = match plans.as_slice() {
            [plan] => plan.clone(),
            _ => {
                tried = self.search(&plans, &statistics, &maps, &windows, reference)?;
                best(&tried)?.plan.clone()
            }
        };
        let map = &maps[&plan.hidden_size];
        let first = self.layer_sets(&statistics, &plan).swap_remove(0);
        let selection = Selection::new(&statistics, &plan, first);
        let mut story = Story::new(plan.clone(), selection.clone());
        story.tried = tried;
        story.influence.clone_from(&statistics.influence);
        story.spectrum.clone_from(&spectrum.values);
        story.calibration_tokens = tokens;
        let pruned = self.cut(&mut story, &statistics, map, reference)?;
        let draft = match self.settings.init {
            Init::Sliced => self.heal_best(&mut story, &statistics, map, &windows, reference)?,
            Init::Layers => pruned,
            Init::Random => {
                let draft = random(&pruned, self.settings.seed)?;
                self.judge(&mut story, "random", "nothing is kept".into(), &draft, reference)?;
                draft
            }
        };
        Ok(Made { draft, story, trimmed: None })
    }

    /// Sets of layers worth trying for a plan.
    fn layer_sets(&self, statistics: &Statistics, plan: &Plan) -> Vec<Vec<usize>> {
        if let Some(layers) = self.settings.plan.as_ref().and_then(|file| file.layers.clone()) {
            return vec![layers];
        }
        let (layers, keep) = (self.target.config.num_hidden_layers, plan.num_hidden_layers);
        let mut sets = vec![evenly(layers, keep), by_influence(&statistics.influence, keep)];
        sets.dedup();
        sets
    }

    /// Heals every shape on a part of the text and measures it.
    fn search(
        &mut self,
        plans: &[Plan],
        statistics: &Statistics,
        maps: &BTreeMap<usize, WriteMap>,
        windows: &[Window],
        reference: &Reference,
    ) -> Result<Vec<Tried>, BuildError> {
        let config = &self.target.config;
        (self.on_progress)(Progress::Started { step: "search", total: config.num_hidden_layers });
        let selections: Vec<Selection> = plans
            .iter()
            .map(|plan| {
                let layers = evenly(config.num_hidden_layers, plan.num_hidden_layers);
                Selection::new(statistics, plan, layers)
            })
            .collect();
        let patients: Vec<Patient<'_>> = plans
            .iter()
            .zip(&selections)
            .map(|(plan, selection)| {
                let map = &maps[&plan.hidden_size];
                Patient { plan, selection, map, ridge: self.settings.ridge }
            })
            .collect();
        let on_progress = &mut self.on_progress;
        let mut tick = |units| on_progress(Progress::Advanced { units });
        let drafts = heal(self.streamed, &every(windows, SEARCH_EVERY), &patients, &mut tick)?;
        let mut tried = Vec::with_capacity(plans.len());
        for (plan, draft) in plans.iter().zip(&drafts) {
            let scores = reference.compare(draft, None, 0.0, NUM_SPECULATIVE_TOKENS)?;
            let ratio = self.settings.cost.latency_ratio(&draft.config, config);
            let (length, speedup) = best_length(scores.alpha, ratio, LONGEST_DRAFT);
            (self.on_progress)(Progress::Finished {
                step: "search",
                detail: format!(
                    "{plan}: {:.1} M parameters, latency ratio {ratio:.3}, expected speed-up \
                     {speedup:.2} at draft length {length}",
                    draft.config.parameters() as f64 / 1e6
                ),
                scores: Some(&scores),
            });
            tried.push(Tried {
                plan: plan.clone(),
                parameters: draft.config.parameters(),
                latency_ratio: ratio,
                alpha: scores.alpha,
                num_speculative_tokens: length,
                expected_speedup: speedup,
            });
        }
        Ok(tried)
    }

    /// Measures slicing alone and slicing with pruning; returns the latter's draft.
    fn cut(
        &mut self,
        story: &mut Story,
        statistics: &Statistics,
        map: &WriteMap,
        reference: &Reference,
    ) -> Result<Decoder, BuildError> {
        let config = &self.target.config;
        let whole = Plan {
            hidden_size: story.plan.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_key_value_heads: story.plan.num_key_value_heads,
        };
        if whole.config(config).parameters() <= LARGEST_SHOWN {
            let all: Vec<usize> = (0..config.num_hidden_layers).collect();
            let everything = Selection::new(statistics, &whole, all);
            let sliced = slice(self.streamed, &whole, &everything, map)?;
            let detail = format!("hidden size {}", whole.hidden_size);
            self.judge(story, "slice", detail, &sliced, reference)?;
        }
        let pruned = slice(self.streamed, &story.plan, &story.selection, map)?;
        self.judge(story, "prune", story.plan.to_string(), &pruned, reference)?;
        Ok(pruned)
    }

    /// Heals with each set of layers and keeps the draft that is accepted most.
    fn heal_best(
        &mut self,
        story: &mut Story,
        statistics: &Statistics,
        map: &WriteMap,
        windows: &[Window],
        reference: &Reference,
    ) -> Result<Decoder, BuildError> {
        let total = self.target.config.num_hidden_layers;
        (self.on_progress)(Progress::Started { step: "heal", total });
        let plan = story.plan.clone();
        let selections: Vec<Selection> = self
            .layer_sets(statistics, &plan)
            .into_iter()
            .map(|layers| Selection::new(statistics, &plan, layers))
            .collect();
        let patients: Vec<Patient<'_>> = selections
            .iter()
            .map(|selection| Patient { plan: &plan, selection, map, ridge: self.settings.ridge })
            .collect();
        let on_progress = &mut self.on_progress;
        let mut tick = |units| on_progress(Progress::Advanced { units });
        let drafts = heal(self.streamed, windows, &patients, &mut tick)?;
        let mut best: Option<(Comparison, Decoder, Selection)> = None;
        for (draft, selection) in drafts.into_iter().zip(selections) {
            let scores = reference.compare(&draft, None, 0.0, NUM_SPECULATIVE_TOKENS)?;
            (self.on_progress)(Progress::Finished {
                step: "heal",
                detail: format!("layers {:?}", selection.layers),
                scores: Some(&scores),
            });
            if best.as_ref().is_none_or(|(other, ..)| scores.alpha > other.alpha) {
                best = Some((scores, draft, selection));
            }
        }
        let (scores, draft, selection) =
            best.ok_or_else(|| BuildError::Solve("no set of layers was tried".into()))?;
        story.steps.push(("heal".into(), scores));
        story.selection = selection;
        Ok(draft)
    }

    fn judge(
        &mut self,
        story: &mut Story,
        step: &'static str,
        detail: String,
        draft: &Decoder,
        reference: &Reference,
    ) -> Result<(), BuildError> {
        let scores = reference.compare(draft, None, 0.0, NUM_SPECULATIVE_TOKENS)?;
        (self.on_progress)(Progress::Finished { step, detail, scores: Some(&scores) });
        story.steps.push((step.into(), scores));
        Ok(())
    }
}

/// Every n-th window, all of them when there are fewer than n.
fn every(windows: &[Window], n: usize) -> Vec<Window> {
    let step = if windows.len() < n { 1 } else { n };
    windows.iter().step_by(step).cloned().collect()
}

fn best(tried: &[Tried]) -> Result<&Tried, BuildError> {
    tried
        .iter()
        .max_by(|a, b| a.expected_speedup.total_cmp(&b.expected_speedup))
        .ok_or_else(|| BuildError::Solve("no shape was tried".into()))
}

/// A draft of the same shape with values as training starts from when there is nothing to start
/// from: matrices of standard deviation 0.02, the norms as they are.
fn random(like: &Decoder, seed: u64) -> Result<Decoder, BuildError> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let normal =
        Normal::new(0.0f32, 0.02).map_err(|e| BuildError::Solve(format!("no normal: {e}")))?;
    let mut tensors: BTreeMap<String, Tensor> = like.tensors();
    for tensor in tensors.values_mut().filter(|tensor| tensor.rank() == 2) {
        let values: Vec<f32> = (0..tensor.elem_count()).map(|_| normal.sample(&mut rng)).collect();
        *tensor = Tensor::from_vec(values, tensor.shape(), tensor.device())?;
    }
    Decoder::new(&like.config, |name| {
        tensors
            .get(name)
            .cloned()
            .ok_or_else(|| BuildError::Solve(format!("the draft lacks {name}")))
    })
}
