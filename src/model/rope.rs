//! Rotary position embedding (Su et al. 2021), in Hugging Face's half-split layout.

use super::ModelConfig;

/// Angular frequencies of the `head_dim / 2` rotated pairs, scaled as the configuration says.
pub fn inverse_frequencies(config: &ModelConfig) -> Vec<f32> {
    config.rope_frequencies().into_iter().map(|frequency| frequency as f32).collect()
}

/// Cosines and sines of one position, each `head_dim / 2` long.
pub fn rotation(frequencies: &[f32], position: usize) -> (Vec<f32>, Vec<f32>) {
    frequencies
        .iter()
        .map(|frequency| {
            let angle = position as f32 * frequency;
            (angle.cos(), angle.sin())
        })
        .unzip()
}

/// Rotates one head: pairs are `(x[i], x[i + head_dim / 2])`.
pub fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
