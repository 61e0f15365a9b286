//! What one round learns from: new samples, rehearsal of recent ones, replay of older ones.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};

use crate::config::sidecar::LearnSettings;
use crate::distill::Sample;

/// The samples of a round, each pass over the new ones with fresh picks of the others.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Round {
    pub samples: Vec<Sample>,
    /// Ids to be marked as learned once training has saved its state.
    pub new_ids: Vec<u64>,
}

/// Composes round number `round`. `learned` holds what earlier rounds learned from, in any
/// order. The same arguments give the same round.
pub fn compose(
    settings: &LearnSettings,
    round: u64,
    new: Vec<Sample>,
    mut learned: Vec<Sample>,
) -> Round {
    let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
    rng.set_stream(round);
    learned.sort_by_key(|sample| sample.id);
    let older_count = learned.len().saturating_sub(settings.window_samples);
    let recent = learned.split_off(older_count);
    let older = learned;

    let rehearsed = (new.len() as f64 * settings.rehearsal).round() as usize;
    let mut samples = Vec::new();
    for _ in 0..settings.epochs {
        let mut pass = new.clone();
        pass.extend(recent.partial_shuffled(rehearsed, &mut rng));
        let fresh_tokens: usize = pass.iter().map(tokens).sum();
        // A share f of the whole is f / (1 - f) of the rest.
        let share = settings.replay_fraction / (1.0 - settings.replay_fraction);
        let wanted = (fresh_tokens as f64 * share).round() as usize;
        pass.extend(replay(&older, wanted, &mut rng));
        samples.append(&mut pass);
    }
    Round { samples, new_ids: new.iter().map(|sample| sample.id).collect() }
}

/// About `wanted` output tokens of older samples, the same number of samples from each domain as
/// far as they last. The last pick may exceed the count by part of a sample.
fn replay(older: &[Sample], wanted: usize, rng: &mut ChaCha8Rng) -> Vec<Sample> {
    let mut domains: BTreeMap<&str, Vec<&Sample>> = BTreeMap::new();
    for sample in older {
        domains.entry(&sample.domain).or_default().push(sample);
    }
    for samples in domains.values_mut() {
        samples.shuffle(rng);
    }
    // Which domain comes first must not always be the alphabet's choice.
    let mut order: Vec<Vec<&Sample>> = domains.into_values().collect();
    order.shuffle(rng);
    let mut picked = Vec::new();
    let mut total = 0;
    while total < wanted {
        let mut exhausted = true;
        for samples in &mut order {
            if total >= wanted {
                break;
            }
            if let Some(sample) = samples.pop() {
                total += tokens(sample);
                picked.push(sample.clone());
                exhausted = false;
            }
        }
        if exhausted {
            break;
        }
    }
    picked
}

/// Output tokens: what a step learns from.
fn tokens(sample: &Sample) -> usize {
    sample.output_ids.len()
}

trait PartialShuffled {
    fn partial_shuffled(&self, amount: usize, rng: &mut ChaCha8Rng) -> Vec<Sample>;
}

impl PartialShuffled for Vec<Sample> {
    fn partial_shuffled(&self, amount: usize, rng: &mut ChaCha8Rng) -> Vec<Sample> {
        let mut picks: Vec<&Sample> = self.iter().collect();
        let (chosen, _) = picks.partial_shuffle(rng, amount);
        chosen.iter().map(|sample| (*sample).clone()).collect()
    }
}

/// Running SHA-256 over the ids and tokens of everything a version learned from, in order. It
/// starts from the hash of the parent, so equal hashes mean equal histories.
pub fn data_hash(parent: &str, samples: &[Sample]) -> String {
    let mut hasher = Sha256::new();
    hasher.update(parent.as_bytes());
    for sample in samples {
        hasher.update(sample.id.to_le_bytes());
        for token in sample.prompt_ids.iter().chain(&sample.output_ids) {
            hasher.update(token.to_le_bytes());
        }
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
