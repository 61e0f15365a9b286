//! Distillation of a draft that was just made: the target answers prompts, the draft learns from
//! its probabilities, and what scored best on held-out answers is kept.

use std::collections::{BTreeMap, HashMap};

use candle_core::{Device, Tensor};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::BuildError;
use super::generate::{Generation, answer, score};
use super::work::WorkFolder;
use crate::distill::select::select;
use crate::distill::trainer::{TrainSettings, Trainer};
use crate::distill::{Comparison, Loss, Reference};
use crate::hub::Weights;
use crate::model::decoder::Decoder;
use crate::model::runtime::Runtime;

/// How a draft is distilled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TeachSettings {
    /// Answer tokens to learn from.
    pub tokens: usize,
    pub loss: Loss,
    /// Teacher's tokens kept at each position; the rest is one bucket.
    pub top_k: usize,
    /// Temperature that answers are sampled at.
    pub temperature: f32,
    /// Share of answers that the draft writes itself and the target scores.
    pub on_policy: f64,
    /// Share of positions to learn from, chosen with a draft that was distilled before (AdaSPEC);
    /// none learns from all.
    pub select: Option<f64>,
    /// Rank of low-rank updates; 0 trains every parameter whole.
    pub lora_rank: usize,
    /// Longest answer.
    pub answer_tokens: usize,
    /// At the start; it falls to a tenth along a cosine.
    pub learning_rate: f64,
    /// Answers in one optimizer step.
    pub batch: usize,
    pub seed: u64,
}

impl Default for TeachSettings {
    fn default() -> Self {
        Self {
            tokens: 50_000,
            loss: Loss::ForwardKl,
            top_k: 64,
            temperature: 0.8,
            on_policy: 0.0,
            select: None,
            lora_rank: 0,
            answer_tokens: 160,
            learning_rate: 3e-4,
            batch: 2,
            seed: 0,
        }
    }
}

/// What looks at held-out acceptance have shown so far.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Standing {
    /// Held-out scores by answer tokens learned, the first before any.
    curve: Vec<(u64, Comparison)>,
}

/// What distillation works with.
pub struct Teaching<'a> {
    /// The target as it is served.
    pub target: &'a Runtime,
    pub prompts: &'a [Vec<u32>],
    /// Held-out answers that drafts are judged by.
    pub reference: &'a Reference,
    pub settings: &'a TeachSettings,
    /// Holds the draft to begin with as the folder [`UNTAUGHT`], and what a stopped run left.
    pub work: &'a WorkFolder,
}

/// One of the passes that distillation may take: to a reference draft, then to the draft.
#[derive(Clone, Copy)]
struct Stage<'a> {
    /// What its files in the work folder begin with.
    name: &'static str,
    /// Chooses the positions to learn from; none learns from all.
    chooser: Option<(&'a Decoder, f64)>,
}

/// Folder of the draft before distillation, in the work folder.
pub const UNTAUGHT: &str = "untaught";
const BEST: &str = "best.safetensors";
const STANDING: &str = "standing.json";

/// Prompts that are answered and learned at a time.
const CHUNK: usize = 32;
/// Looks at held-out acceptance on the way, and how many of them may pass without a gain.
const LOOKS: u64 = 10;
const PATIENCE: usize = 4;

impl Teaching<'_> {
    /// Distils; returns the best draft and its scores on the way. `on_tokens` is told how many
    /// positions were learned since the last call.
    ///
    /// # Errors
    /// When the draft cannot be trained or the work folder not be written.
    pub fn run(
        &self,
        num_speculative_tokens: usize,
        on_tokens: &mut dyn FnMut(usize),
    ) -> Result<(Decoder, Vec<(u64, Comparison)>), BuildError> {
        let Some(share) = self.settings.select else {
            return self.stage(
                Stage { name: "", chooser: None },
                num_speculative_tokens,
                on_tokens,
            );
        };
        let first = Stage { name: "reference-", chooser: None };
        let (reference, _) = self.stage(first, num_speculative_tokens, on_tokens)?;
        let second = Stage { name: "", chooser: Some((&reference, share)) };
        self.stage(second, num_speculative_tokens, on_tokens)
    }

    fn stage(
        &self,
        stage: Stage<'_>,
        num_speculative_tokens: usize,
        on_tokens: &mut dyn FnMut(usize),
    ) -> Result<(Decoder, Vec<(u64, Comparison)>), BuildError> {
        let settings = self.settings;
        let file = |name: &str| format!("{}{name}", stage.name);
        // The same answers are read for a share of the positions.
        let share = stage.chooser.map_or(1.0, |(_, share)| share);
        let budget = ((settings.tokens as f64 * share) as u64).max(1);
        let mut trainer = Trainer::open(
            &self.work.join(UNTAUGHT),
            &self.work.join(&file("training")),
            TrainSettings {
                loss: settings.loss,
                learning_rate: settings.learning_rate,
                batch: settings.batch,
                seed: settings.seed,
                lora_rank: settings.lora_rank,
                ..TrainSettings::default()
            },
        )?;
        let mut standing: Standing = self.work.load(&file(STANDING)).unwrap_or_default();
        let judge = |trainer: &Trainer| -> Result<Comparison, BuildError> {
            Ok(self.reference.compare(&trainer.decoder()?, None, 0.0, num_speculative_tokens)?)
        };
        if standing.curve.is_empty() {
            standing.curve.push((trainer.state().tokens, judge(&trainer)?));
            self.keep_best(&trainer, &file(BEST))?;
            self.work.keep(&file(STANDING), &standing)?;
        }
        let mut told = 0;
        let look_every = budget.div_ceil(LOOKS);
        loop {
            // Everything follows from what the trainer has saved, so that a stop at any moment
            // changes nothing.
            let tokens = trainer.state().tokens;
            on_tokens((tokens - told) as usize);
            told = tokens;
            let is_last = tokens >= budget;
            let looked = standing.curve.last().map_or(0, |(tokens, _)| *tokens);
            if tokens > looked && (is_last || tokens / look_every > looked / look_every) {
                let scores = judge(&trainer)?;
                if standing.best().is_none_or(|best| scores.alpha > best) {
                    self.keep_best(&trainer, &file(BEST))?;
                }
                standing.curve.push((tokens, scores));
                self.work.keep(&file(STANDING), &standing)?;
            }
            if is_last || standing.is_over() {
                break;
            }
            let samples = self.chunk(trainer.rounds(), &trainer, stage.chooser)?;
            let done = tokens as f64 / budget as f64;
            trainer.set_learning_rate(settings.learning_rate * cosine(done));
            trainer.train(&samples, 1, &mut |_| true)?;
            if trainer.state().tokens == tokens {
                return Err(BuildError::NothingToLearn);
            }
        }
        let best = candle_core::safetensors::load(self.work.join(&file(BEST)), &Device::Cpu)?;
        let get = |name: &str| match best.get(name) {
            Some(tensor) => Ok(tensor.clone()),
            None => Err(BuildError::Solve(format!("the best draft lacks {name}"))),
        };
        Ok((Decoder::new(&trainer.decoder()?.config, get)?, standing.curve))
    }

    /// Answers to the next prompts with the target's opinion of them.
    fn chunk(
        &self,
        chunk: u64,
        trainer: &Trainer,
        chooser: Option<(&Decoder, f64)>,
    ) -> Result<Vec<crate::distill::Sample>, BuildError> {
        let settings = self.settings;
        let mut rng = ChaCha8Rng::seed_from_u64(settings.seed.wrapping_add(chunk).wrapping_add(1));
        let prompts = self.prompts_of(chunk);
        let own = (settings.on_policy * prompts.len() as f64).round() as usize;
        let (by_draft, by_target) = prompts.split_at(own.min(prompts.len()));
        let generation = |top_k| Generation {
            temperature: settings.temperature,
            max_tokens: settings.answer_tokens,
            top_k,
        };
        let (top_k, tick) = (settings.top_k, &mut |_: usize| ());
        let mut samples = answer(self.target, by_target, generation(top_k), &mut rng, tick)?;
        if !by_draft.is_empty() {
            let draft = trainer.decoder()?;
            let weights = Weights::from_tensors(draft.tensors());
            let runtime = Runtime::load(&draft.config, &weights)?;
            let mut written = answer(&runtime, by_draft, generation(0), &mut rng, tick)?;
            for sample in &mut written {
                sample.teacher = score(self.target, sample, top_k)?;
            }
            samples.extend(written);
        }
        if let Some((reference, share)) = chooser {
            let window = TrainSettings::default().window;
            select(&mut samples, &trainer.decoder()?, reference, share, window)?;
        }
        Ok(samples)
    }

    /// A stretch of the prompts, which come in another order each time they are through.
    fn prompts_of(&self, chunk: u64) -> Vec<Vec<u32>> {
        let total = self.prompts.len() as u64;
        let mut orders: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        let first = chunk * CHUNK as u64;
        (first..first + (CHUNK as u64).min(total))
            .map(|at| {
                let order = orders.entry(at / total).or_insert_with_key(|pass| {
                    let mut order: Vec<usize> = (0..self.prompts.len()).collect();
                    let seed = self.settings.seed.wrapping_add(*pass);
                    order.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
                    order
                });
                self.prompts[order[(at % total) as usize]].clone()
            })
            .collect()
    }

    fn keep_best(&self, trainer: &Trainer, name: &str) -> Result<(), BuildError> {
        let tensors: HashMap<String, Tensor> = trainer.decoder()?.tensors().into_iter().collect();
        let staging = self.work.join("best.new");
        candle_core::safetensors::save(&tensors, &staging)?;
        std::fs::rename(&staging, self.work.join(name))
            .map_err(|source| BuildError::Work { path: staging, source })
    }
}

impl Standing {
    fn best(&self) -> Option<f64> {
        self.curve.iter().map(|(_, scores)| scores.alpha).reduce(f64::max)
    }

    /// Whether the last looks were all worse than one before them.
    fn is_over(&self) -> bool {
        let best = self
            .curve
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.1.alpha.total_cmp(&b.1.1.alpha))
            .map_or(0, |(at, _)| at);
        self.curve.len() > best + PATIENCE
    }
}

/// From 1 at the start to 0.1 at the end.
fn cosine(done: f64) -> f64 {
    0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done.min(1.0)).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_falls_to_a_tenth() {
        assert!((cosine(0.0) - 1.0).abs() < 1e-9);
        assert!((cosine(0.5) - 0.55).abs() < 1e-9);
        assert!((cosine(1.5) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn it_is_over_when_the_last_looks_brought_nothing() {
        let standing = |alphas: &[f64]| Standing {
            curve: alphas
                .iter()
                .map(|alpha| (0, Comparison { alpha: *alpha, ..Comparison::default() }))
                .collect(),
        };
        assert!(!standing(&[0.3, 0.2, 0.1, 0.1]).is_over());
        assert!(standing(&[0.3, 0.2, 0.1, 0.1, 0.2]).is_over());
        assert!(!standing(&[0.3, 0.2, 0.4, 0.1, 0.2, 0.3]).is_over());
    }
}
