//! Exact acceptance of drafts beside their target, over the whole vocabulary.
//!
//! [`super::evaluate`] judges by what a teacher has told, its top K and a tail. Here the target is
//! at hand: its states on its own answers are kept, and every draft is compared with the very
//! distributions.

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::Sample;
use super::evaluate::accepted_lengths;
use crate::model::decoder::{Decoder, head};
use crate::model::ops::Values;
use crate::model::{ModelConfig, kernels};

/// Positions whose logits exist at a time; bounds them to `2 * CHUNK * vocab_size` values.
const CHUNK: usize = 256;

/// Answers of a target with its states at every answered position.
pub struct Reference {
    lm_head: Tensor,
    config: ModelConfig,
    answers: Vec<Answer>,
    /// Whether a draft may propose a token; empty when it may propose all.
    proposable: Vec<bool>,
}

struct Answer {
    domain: String,
    /// `(1, T)`: the prompt and the answer but for its last token.
    ids: Tensor,
    /// The target's states that predict the answer: `(N, D)`.
    hidden: Tensor,
    /// The answer's N tokens.
    outputs: Vec<u32>,
}

/// What a draft is worth on a set of answers.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Comparison {
    pub positions: u64,
    /// Chance that a token is accepted: at temperature 0 how often the most likely tokens agree;
    /// above it the mean of `Σ min(p, q)`, for a draft that is sampled at the same temperature.
    pub acceptance_rate: f64,
    /// Mean of `Σ min(p, q)` at temperature 1.
    pub alpha: f64,
    /// Tokens of a verification step, the bonus token included, at the draft length asked for.
    pub mean_accepted_length: f64,
    /// Chance that the i-th drafted token is reached and accepted, from the first on.
    pub by_position: Vec<f64>,
    /// Of the draft on the answers: `exp(−mean log q)`.
    pub perplexity: f64,
    /// Whether every logit of the draft was finite.
    pub finite: bool,
}

impl Reference {
    /// Runs the target over its answers; prompts are cut from the left so that a sequence has at
    /// most `window` tokens.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn new(target: &Decoder, samples: &[Sample], window: usize) -> Result<Self> {
        let (config, lm_head) = (target.config.clone(), target.lm_head.clone());
        Self::with(config, lm_head, samples, window, |texts| {
            texts.iter().map(|ids| target.hidden(ids)?.squeeze(0)).collect()
        })
    }

    /// The same of a target of which only the head is in memory: `hidden` gives the states after
    /// its final norm, `(T, D)`, for each of the texts `(1, T)`.
    ///
    /// # Errors
    /// When `hidden` fails or the tensors do not fit.
    pub fn with<E: From<candle_core::Error>>(
        config: ModelConfig,
        lm_head: Tensor,
        samples: &[Sample],
        window: usize,
        hidden: impl FnOnce(&[Tensor]) -> std::result::Result<Vec<Tensor>, E>,
    ) -> std::result::Result<Self, E> {
        let device = lm_head.device();
        let usable: Vec<&Sample> = samples
            .iter()
            .filter(|s| !s.prompt_ids.is_empty() && !s.output_ids.is_empty())
            .collect();
        let mut texts = Vec::with_capacity(usable.len());
        for sample in &usable {
            let outputs = &sample.output_ids[..sample.output_ids.len().min(window / 2)];
            let room = window - (outputs.len() - 1);
            let from = sample.prompt_ids.len().saturating_sub(room);
            let prompt = &sample.prompt_ids[from..];
            let ids: Vec<u32> =
                prompt.iter().chain(&outputs[..outputs.len() - 1]).copied().collect();
            let length = ids.len();
            texts.push(Tensor::from_vec(ids, (1, length), device)?);
        }
        let mut answers = Vec::with_capacity(usable.len());
        for ((sample, ids), states) in usable.into_iter().zip(&texts).zip(hidden(&texts)?) {
            let count = sample.output_ids.len().min(window / 2);
            let hidden = states.narrow(0, states.dim(0)? - count, count)?.contiguous()?;
            let outputs = sample.output_ids[..count].to_vec();
            answers.push(Answer {
                domain: sample.domain.clone(),
                ids: ids.clone(),
                hidden,
                outputs,
            });
        }
        Ok(Self { lm_head, config, answers, proposable: Vec::new() })
    }

    /// Lets drafts that are compared from now on propose nothing but these tokens.
    pub fn restrict(&mut self, tokens: impl Iterator<Item = u32>) {
        self.proposable = vec![false; self.config.vocab_size];
        for token in tokens {
            if let Some(may) = self.proposable.get_mut(token as usize) {
                *may = true;
            }
        }
    }

    /// The domains of the answers, sorted.
    pub fn domains(&self) -> Vec<&str> {
        let mut domains: Vec<&str> = self.answers.iter().map(|a| a.domain.as_str()).collect();
        domains.sort_unstable();
        domains.dedup();
        domains
    }

    /// Compares a draft over all answers, or those of one domain, at a temperature and for drafts
    /// of `num_speculative_tokens`.
    ///
    /// # Errors
    /// When the vocabularies differ or a tensor computation fails.
    pub fn compare(
        &self,
        draft: &Decoder,
        domain: Option<&str>,
        temperature: f32,
        num_speculative_tokens: usize,
    ) -> Result<Comparison> {
        let mut result = Comparison {
            finite: true,
            by_position: vec![0.0; num_speculative_tokens],
            ..Comparison::default()
        };
        let (mut accepted, mut alpha, mut length, mut surprise) = (0.0, 0.0, 0.0, 0.0);
        let chosen = |answer: &&Answer| domain.is_none_or(|domain| answer.domain == domain);
        for answer in self.answers.iter().filter(chosen) {
            let positions = self.positions(answer, draft, temperature)?;
            let chances: Vec<f64> = positions.iter().map(|p| p.accepted).collect();
            result.positions += positions.len() as u64;
            result.finite &= positions.iter().all(|p| p.finite);
            accepted += chances.iter().sum::<f64>();
            alpha += positions.iter().map(|p| p.alpha).sum::<f64>();
            surprise += positions.iter().map(|p| p.surprise).sum::<f64>();
            length += accepted_lengths(&chances, num_speculative_tokens).iter().sum::<f64>();
            for start in 0..chances.len() {
                let mut reached = 1.0;
                for (sum, chance) in result.by_position.iter_mut().zip(&chances[start..]) {
                    reached *= chance;
                    *sum += reached;
                }
            }
        }
        let count = result.positions.max(1) as f64;
        result.acceptance_rate = accepted / count;
        result.alpha = alpha / count;
        result.mean_accepted_length = length / count;
        result.perplexity = (surprise / count).exp();
        result.by_position.iter_mut().for_each(|sum| *sum /= count);
        Ok(result)
    }

    fn positions(
        &self,
        answer: &Answer,
        draft: &Decoder,
        temperature: f32,
    ) -> Result<Vec<Position>> {
        let count = answer.outputs.len();
        let hidden = predicting(draft, &answer.ids, count)?;
        let mut positions = Vec::with_capacity(count);
        for start in (0..count).step_by(CHUNK) {
            let rows = CHUNK.min(count - start);
            let p = head(&answer.hidden.narrow(0, start, rows)?, &self.lm_head, &self.config)?;
            let q = draft.head(&hidden.narrow(0, start, rows)?)?;
            if p.dims() != q.dims() {
                candle_core::bail!(
                    "the draft's vocabulary is of {} tokens, the target's of {}",
                    q.dim(1)?,
                    p.dim(1)?
                );
            }
            let (p, q) = (Values::of(&p)?, Values::of(&q)?);
            let width = self.config.vocab_size;
            let outputs = &answer.outputs[start..start + rows];
            positions.par_extend(p.par_chunks(width).zip(q.par_chunks(width)).zip(outputs).map(
                |((p, q), output)| match self.proposable.as_slice() {
                    [] => Position::new(p, q, *output, temperature),
                    may => Position::new(p, &masked(q, may), *output, temperature),
                },
            ));
        }
        Ok(positions)
    }
}

/// The states of the last `count` positions of `(1, T)`: `(count, D)`.
fn predicting(decoder: &Decoder, ids: &Tensor, count: usize) -> Result<Tensor> {
    let time = ids.dim(1)?;
    decoder.hidden(ids)?.squeeze(0)?.narrow(0, time - count, count)?.contiguous()
}

/// Logits without those that may not be proposed.
fn masked(logits: &[f32], may: &[bool]) -> Vec<f32> {
    // Not −∞, which would pass for a broken draft.
    logits.iter().zip(may).map(|(logit, may)| if *may { *logit } else { f32::MIN }).collect()
}

struct Position {
    accepted: f64,
    alpha: f64,
    /// `−log q` of the answer's token.
    surprise: f64,
    finite: bool,
}

impl Position {
    /// From logits `(V)` of target and draft.
    fn new(p: &[f32], q: &[f32], output: u32, temperature: f32) -> Self {
        let finite = q.iter().all(|logit| logit.is_finite());
        let greedy = f64::from(u8::from(kernels::argmax(p) == kernels::argmax(q)));
        let alpha = overlap(p, q, 1.0);
        let accepted = match temperature {
            t if t <= 0.0 => greedy,
            1.0 => alpha,
            t => overlap(p, q, t),
        };
        let mut probabilities = q.to_vec();
        kernels::softmax(&mut probabilities);
        let chance = f64::from(probabilities[output as usize]).max(1e-12);
        Self { accepted, alpha, surprise: -chance.ln(), finite }
    }
}

/// `Σ min(p, q)` of two rows of logits at a temperature above 0: the chance that speculative
/// sampling accepts a token (Leviathan et al. 2023, section 3.2).
pub fn overlap(p: &[f32], q: &[f32], temperature: f32) -> f64 {
    let tempered = |logits: &[f32]| {
        let mut row: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
        kernels::softmax(&mut row);
        row
    };
    tempered(p).iter().zip(tempered(q)).map(|(p, q)| f64::from(p.min(q))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_one_for_equals_and_follows_the_temperature() {
        let p = [0.6f32.ln(), 0.4f32.ln()];
        let q = [0.2f32.ln(), 0.8f32.ln()];
        assert!((overlap(&p, &p, 0.7) - 1.0).abs() < 1e-6);
        assert!((overlap(&p, &q, 1.0) - 0.6).abs() < 1e-6);
        // At 0.5 the masses are squared: 36/52 against 4/68.
        let want = 4.0f64 / 68.0 + 16.0 / 52.0;
        let rows = ([0.6f32.ln(), 0.4f32.ln()], [0.2f32.ln(), 0.8f32.ln()]);
        assert!((overlap(&rows.0, &rows.1, 0.5) - want).abs() < 1e-6);
    }
}
