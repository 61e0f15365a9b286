//! From logits to probabilities to a token, in vLLM's order of operations: temperature, then
//! `top_k`, then `top_p`.

use super::logits::{exp, max};

/// Temperatures below this are greedy, as in vLLM.
const GREEDY_BELOW: f32 = 1e-5;
const BLOCK: usize = 1024;

/// How a request wants its tokens chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy: the most likely token, lowest id first.
    pub temperature: f32,
    /// Share of the probability mass that is kept, in (0, 1]; 1 keeps everything.
    pub top_p: f32,
    /// Tokens that are kept; 0 keeps everything.
    pub top_k: usize,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0 };

    /// Whether no random number is needed.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }
}

/// Working memory of [`probabilities`], kept between calls.
#[derive(Debug, Default)]
pub struct Scratch {
    values: Vec<f32>,
    candidates: Vec<(f32, u32)>,
}

/// Writes the distribution that `sampling` makes of one row of logits into `out`, one
/// probability for each id. Returns `false` when the row holds nothing to choose from (no finite
/// logit).
///
/// `sampling` must not be greedy. Tokens tied with the last one that `top_k` keeps are kept too;
/// of tokens tied at the edge of `top_p`, the lower ids are kept.
pub fn probabilities(
    logits: &[f32],
    sampling: &Sampling,
    scratch: &mut Scratch,
    out: &mut Vec<f32>,
) -> bool {
    debug_assert!(!sampling.is_greedy(), "a greedy request has no distribution");
    let largest = max(logits);
    if !largest.is_finite() {
        return false;
    }
    let scale = 1.0 / sampling.temperature;
    out.resize(logits.len(), 0.0);
    for (probability, &logit) in out.iter_mut().zip(logits) {
        *probability = exp((logit - largest) * scale);
    }
    if 0 < sampling.top_k && sampling.top_k < logits.len() {
        keep_top_k(logits, sampling.top_k, &mut scratch.values, out);
    }
    let total = sum(out);
    if !total.is_finite() {
        return false;
    }
    let mut mass = total;
    if sampling.top_p < 1.0 {
        mass = keep_top_p(out, total, sampling.top_p, &mut scratch.candidates);
    }
    let scale = (1.0 / mass) as f32;
    for probability in out.iter_mut() {
        *probability *= scale;
    }
    true
}

fn keep_top_k(logits: &[f32], k: usize, values: &mut Vec<f32>, out: &mut [f32]) {
    values.clear();
    values.extend_from_slice(logits);
    let (_, &mut edge, _) = values.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    for (probability, &logit) in out.iter_mut().zip(logits) {
        *probability = if logit < edge { 0.0 } else { *probability };
    }
}

/// Zeroes what `top_p` drops and returns the mass that is left. Ids are dropped in ascending
/// order of probability while the dropped mass is at most `1 - top_p`.
fn keep_top_p(out: &mut [f32], total: f64, top_p: f32, candidates: &mut Vec<(f32, u32)>) -> f64 {
    let drop = (1.0 - f64::from(top_p)) * total;
    // Values at or below this sum to at most `drop`, so all of them go and need no sorting.
    let certain = (drop / out.len() as f64) as f32;
    candidates.clear();
    let mut dropped = 0f64;
    for (id, probability) in out.iter_mut().enumerate() {
        if *probability > certain {
            candidates.push((*probability, id as u32));
        } else {
            dropped += f64::from(*probability);
            *probability = 0.0;
        }
    }
    candidates.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
    let last = candidates.len().saturating_sub(1);
    for &(probability, id) in &candidates[..last] {
        if dropped + f64::from(probability) > drop {
            break;
        }
        dropped += f64::from(probability);
        out[id as usize] = 0.0;
    }
    total - dropped
}

/// The id at which the running sum of `weights` passes `uniform` (in [0, 1)) of their total.
///
/// `weights` need not be normalised; an id of weight zero is never returned unless all are zero.
pub fn sample(weights: &[f32], uniform: f64) -> u32 {
    let target = uniform * sum(weights);
    let mut passed = 0f64;
    let mut last = 0;
    for (index, block) in weights.chunks(BLOCK).enumerate() {
        let mass = block_sum(block);
        if passed + mass <= target {
            if mass > 0.0 {
                last = index;
            }
            passed += mass;
            continue;
        }
        for (offset, &weight) in block.iter().enumerate() {
            passed += f64::from(weight);
            if passed > target && weight > 0.0 {
                return (index * BLOCK + offset) as u32;
            }
        }
        last = index;
    }
    // Rounding left the target a hair above the running sum: the last id that has any weight.
    let start = last * BLOCK;
    let block = &weights[start..weights.len().min(start + BLOCK)];
    (start + block.iter().rposition(|&weight| weight > 0.0).unwrap_or(0)) as u32
}

/// Sum in an order that depends on the length alone, so equal rows give equal sums.
pub(super) fn sum(values: &[f32]) -> f64 {
    values.chunks(BLOCK).map(block_sum).sum()
}

fn block_sum(block: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let chunks = block.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    lanes.iter().chain(rest).map(|&value| f64::from(value)).sum()
}

#[cfg(test)]
mod tests;
