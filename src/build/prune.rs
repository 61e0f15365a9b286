//! Which layers, head groups and MLP channels the draft keeps.

use candle_core::Tensor;

use super::BuildError;
use super::calibrate::Statistics;
use super::plan::Plan;
use crate::model::ModelConfig;
use crate::model::decoder::{DecoderLayer, Linear};

/// What is kept, in the target's numbering, ascending.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Selection {
    pub layers: Vec<usize>,
    /// Key-value groups of each kept layer.
    pub groups: Vec<Vec<usize>>,
    /// MLP channels of each kept layer.
    pub channels: Vec<Vec<usize>>,
}

impl Selection {
    /// Takes the most important groups and channels of the given layers.
    pub fn new(statistics: &Statistics, plan: &Plan, layers: Vec<usize>) -> Self {
        let best = |scores: &[Vec<f64>], keep: usize| -> Vec<Vec<usize>> {
            layers.iter().map(|layer| top(&scores[*layer], keep)).collect()
        };
        Self {
            groups: best(&statistics.groups, plan.num_key_value_heads),
            channels: best(&statistics.channels, plan.intermediate_size),
            layers,
        }
    }

    /// The block `layer`, which is the `kept`-th one of the selection, without what is dropped.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn pruned(
        &self,
        layer: &DecoderLayer,
        kept: usize,
        config: &ModelConfig,
    ) -> Result<DecoderLayer, BuildError> {
        let device = layer.q_proj.weight.device();
        let heads = config.num_attention_heads / config.num_key_value_heads * config.head_dim;
        let index = |positions: Vec<u32>| Tensor::new(positions, device);
        let spans = |width: usize| -> Vec<u32> {
            let groups = self.groups[kept].iter();
            groups.flat_map(|g| (g * width..(g + 1) * width).map(|i| i as u32)).collect()
        };
        let (queries, keys) = (index(spans(heads))?, index(spans(config.head_dim))?);
        let channels = index(self.channels[kept].iter().map(|c| *c as u32).collect())?;
        let rows = |linear: &Linear, kept: &Tensor| -> Result<Linear, BuildError> {
            let bias = linear.bias.as_ref().map(|bias| bias.index_select(kept, 0)).transpose()?;
            Ok(Linear { weight: linear.weight.index_select(kept, 0)?, bias })
        };
        let columns = |linear: &Linear, kept: &Tensor| -> Result<Linear, BuildError> {
            let weight = linear.weight.index_select(kept, 1)?;
            Ok(Linear { weight, bias: linear.bias.clone() })
        };
        Ok(DecoderLayer {
            q_proj: rows(&layer.q_proj, &queries)?,
            k_proj: rows(&layer.k_proj, &keys)?,
            v_proj: rows(&layer.v_proj, &keys)?,
            o_proj: columns(&layer.o_proj, &queries)?,
            gate_proj: rows(&layer.gate_proj, &channels)?,
            up_proj: rows(&layer.up_proj, &channels)?,
            down_proj: columns(&layer.down_proj, &channels)?,
            ..layer.clone()
        })
    }
}

/// The `keep` layers with the greatest Block Influence, the first and the last always among them.
pub fn by_influence(influence: &[f64], keep: usize) -> Vec<usize> {
    let last = influence.len() - 1;
    let mut scores = influence.to_vec();
    scores[0] = f64::INFINITY;
    if keep > 1 {
        scores[last] = f64::INFINITY;
    }
    top(&scores, keep)
}

/// `keep` layers at even distances. The first two and the last one stand: the embeddings are
/// turned into a residual stream there, and a residual stream into logits.
pub fn evenly(layers: usize, keep: usize) -> Vec<usize> {
    if keep < 3 || keep == layers {
        return match keep {
            1 => vec![0],
            2 => vec![0, layers - 1],
            _ => (0..layers).collect(),
        };
    }
    let spread = (layers - 2) as f64 / (keep - 2) as f64;
    let middle = (1..keep - 1).map(|i| 1 + (i as f64 * spread).round() as usize);
    [0, 1].into_iter().chain(middle).collect()
}

/// Indices of the `keep` largest scores, ascending; the lower index wins among equals.
fn top(scores: &[f64], keep: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(keep);
    order.sort_unstable();
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_protected_and_the_rest_goes_by_influence() {
        assert_eq!(by_influence(&[0.0, 0.9, 0.1, 0.5, 0.0], 3), [0, 1, 4]);
        assert_eq!(by_influence(&[0.0, 0.9, 0.1, 0.5, 0.0], 1), [0]);
    }

    #[test]
    fn even_layers_are_distinct_ascending_and_complete() {
        for layers in 1..=36 {
            for keep in 1..=layers {
                let kept = evenly(layers, keep);
                assert_eq!(kept.len(), keep, "{keep} of {layers}: {kept:?}");
                assert!(kept.windows(2).all(|pair| pair[0] < pair[1]), "{kept:?}");
                assert_eq!(kept[0], 0);
                assert!(keep == 1 || kept[keep - 1] == layers - 1, "{keep} of {layers}: {kept:?}");
            }
        }
        assert_eq!(evenly(30, 6), [0, 1, 8, 15, 22, 29]);
    }
}
