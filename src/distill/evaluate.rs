//! How well a draft predicts what the server would accept.

use candle_core::Result;
use rayon::prelude::*;

use super::batch::{Batch, usable};
use super::{Sample, TopK};
use crate::model::decoder::Decoder;
use crate::model::kernels;
use crate::model::ops::Values;

/// Acceptance of a draft on samples of the target's own answers.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Acceptance {
    pub positions: u64,
    /// Mean over positions, under the greedy-draft rule: at temperature 0 whether the draft's
    /// most likely token is the answer's, above it the target's probability of that token.
    pub acceptance_rate: f64,
    /// Mean over positions of `Σ min(p, q)` at temperature 1, over the teacher's buckets.
    pub alpha: f64,
    /// Expected tokens of a verification step, bonus token included.
    pub mean_accepted_length: f64,
    /// Whether every logit was finite.
    pub finite: bool,
    /// Mean acceptance of each sample, in the order given; 0 for one that cannot be judged.
    pub per_sample: Vec<f64>,
}

/// Positions in one forward pass; bounds the logits to `CHUNK * vocab_size` values.
const CHUNK: usize = 512;

/// Judges `decoder` on scored samples, at draft length `num_speculative_tokens`.
///
/// # Errors
/// When a tensor computation fails.
pub fn evaluate(
    decoder: &Decoder,
    samples: &[Sample],
    window: usize,
    num_speculative_tokens: usize,
) -> Result<Acceptance> {
    let mut result = Acceptance { finite: true, ..Acceptance::default() };
    let (mut accepted, mut alpha, mut length) = (0.0, 0.0, 0.0);
    for sample in samples {
        if !usable(sample) {
            result.per_sample.push(0.0);
            continue;
        }
        let batch = Batch::new(&[sample], window, decoder.embed_tokens.device())?;
        let positions = judge(decoder, &batch, sample.temperature)?;
        let chances: Vec<f64> = positions.iter().map(|position| position.accepted).collect();
        result.finite &= positions.iter().all(|position| position.finite);
        result.positions += positions.len() as u64;
        accepted += chances.iter().sum::<f64>();
        alpha += positions.iter().map(|position| position.alpha).sum::<f64>();
        length += accepted_lengths(&chances, num_speculative_tokens).iter().sum::<f64>();
        result.per_sample.push(chances.iter().sum::<f64>() / chances.len() as f64);
    }
    let count = result.positions.max(1) as f64;
    result.acceptance_rate = accepted / count;
    result.alpha = alpha / count;
    result.mean_accepted_length = length / count;
    Ok(result)
}

/// Expected tokens of a verification step that starts at each position: `1 + Σ_i Π_{j<=i} a_j`
/// over the next `k` chances (Leviathan et al. 2023, with per-position chances).
pub fn accepted_lengths(chances: &[f64], k: usize) -> Vec<f64> {
    (0..chances.len())
        .map(|start| {
            let run = chances[start..].iter().take(k).scan(1.0, |product, chance| {
                *product *= chance;
                Some(*product)
            });
            1.0 + run.sum::<f64>()
        })
        .collect()
}

struct Position {
    accepted: f64,
    alpha: f64,
    finite: bool,
}

fn judge(decoder: &Decoder, batch: &Batch<'_>, temperature: f32) -> Result<Vec<Position>> {
    let width = decoder.config.hidden_size;
    let hidden = decoder.hidden(&batch.ids)?.reshape(((), width))?.index_select(&batch.rows, 0)?;
    let mut positions = Vec::with_capacity(batch.outputs.len());
    for start in (0..batch.outputs.len()).step_by(CHUNK) {
        let count = CHUNK.min(batch.outputs.len() - start);
        let logits = decoder.head(&hidden.narrow(0, start, count)?)?;
        let rows = Values::of(&logits)?;
        let teacher = &batch.teacher[start..start + count];
        let outputs = &batch.outputs[start..start + count];
        positions.par_extend(
            rows.par_chunks(decoder.config.vocab_size)
                .zip(teacher)
                .zip(outputs)
                .map(|((row, teacher), output)| judge_row(row, teacher, *output, temperature)),
        );
    }
    Ok(positions)
}

fn judge_row(logits: &[f32], teacher: &TopK, output: u32, temperature: f32) -> Position {
    let finite = logits.iter().all(|logit| logit.is_finite());
    let best = kernels::argmax(logits) as u32;
    let mut probabilities = logits.to_vec();
    kernels::softmax(&mut probabilities);
    let (p, q) = super::loss::buckets(teacher, &probabilities);
    let alpha = p.iter().zip(&q).map(|(p, q)| f64::from(p.min(*q))).sum();
    let accepted = if temperature <= 0.0 {
        f64::from(u8::from(best == output))
    } else {
        tempered_probability(teacher, best, temperature)
    };
    Position { accepted, alpha, finite }
}

/// The target's probability of `token` at `temperature`, from its top K at temperature 1. The
/// tail's share is what is left at temperature 1: an upper bound for any temperature below.
pub fn tempered_probability(teacher: &TopK, token: u32, temperature: f32) -> f64 {
    let weight = |logprob: f32| (f64::from(logprob) / f64::from(temperature)).exp();
    let known: f64 = teacher.logprobs.iter().map(|logprob| f64::from(*logprob).exp()).sum();
    let total: f64 = teacher.logprobs.iter().map(|logprob| weight(*logprob)).sum();
    let tail = (1.0 - known).max(0.0).min(total);
    let own = teacher.ids.iter().position(|id| *id == token);
    own.map_or(0.0, |at| weight(teacher.logprobs[at]) / (total + tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_lengths_match_a_count_by_hand() {
        let lengths = accepted_lengths(&[1.0, 1.0, 0.0, 1.0], 4);
        assert_eq!(lengths, [3.0, 2.0, 1.0, 2.0]);
        assert_eq!(accepted_lengths(&[0.5, 0.5], 4), [1.75, 1.5]);
        assert_eq!(accepted_lengths(&[1.0; 8], 3)[0], 4.0);
    }

    #[test]
    fn tempering_sharpens_and_ignores_unknown_tokens() {
        let ln = |p: f32| p.ln();
        let teacher = TopK { ids: vec![4, 9], logprobs: vec![ln(0.6), ln(0.4)] };
        assert!((tempered_probability(&teacher, 4, 1.0) - 0.6).abs() < 1e-6);
        let half = tempered_probability(&teacher, 4, 0.5);
        assert!((half - 0.36 / 0.52).abs() < 1e-6);
        assert_eq!(tempered_probability(&teacher, 5, 1.0), 0.0);
    }
}
