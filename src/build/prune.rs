//! Which layers, head groups and MLP channels the draft keeps.

use std::collections::BTreeSet;

use candle_core::Tensor;

use super::BuildError;
use super::calibrate::Statistics;
use super::plan::Plan;
use crate::model::decoder::{Decoder, DecoderLayer, Linear};

/// What a block of the draft takes from one block of the target, in the target's numbering,
/// ascending.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Source {
    pub layer: usize,
    /// Key-value groups with their query heads.
    pub groups: Vec<usize>,
    /// MLP channels.
    pub channels: Vec<usize>,
}

/// What is kept: for each block of the draft one source or, where it stands in for several blocks
/// of the target, a source for each of these. The first source is the block's own.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Selection {
    pub blocks: Vec<Vec<Source>>,
}

/// Where a block may take its heads and channels from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gather {
    /// From its own block of the target.
    Own,
    /// MLP channels also from the blocks dropped behind it, the most important first.
    Channels,
    /// MLP channels and head groups.
    All,
}

impl Selection {
    /// Takes the most important groups and channels: of the given layers, or of these and the
    /// layers dropped behind each of them.
    pub fn new(statistics: &Statistics, plan: &Plan, layers: &[usize], gather: Gather) -> Self {
        let total = statistics.channels.len();
        let blocks = layers.iter().enumerate().map(|(kept, layer)| {
            let own = *layer..layer + 1;
            let stretch = *layer..layers.get(kept + 1).copied().unwrap_or(total);
            let best = |scores: &[Vec<f64>], from: std::ops::Range<usize>, keep: usize| {
                let pool: Vec<(usize, usize)> = from
                    .flat_map(|layer| (0..scores[layer].len()).map(move |index| (layer, index)))
                    .collect();
                let flat: Vec<f64> = pool.iter().map(|(l, i)| scores[*l][*i]).collect();
                top(&flat, keep).into_iter().map(|at| pool[at]).collect::<Vec<_>>()
            };
            let (heads, mlp) = match gather {
                Gather::Own => (own.clone(), own),
                Gather::Channels => (own, stretch.clone()),
                Gather::All => (stretch.clone(), stretch.clone()),
            };
            let groups = best(&statistics.groups, heads, plan.num_key_value_heads);
            let channels = best(&statistics.channels, mlp, plan.intermediate_size);
            let of = |kept: &[(usize, usize)], layer: usize| -> Vec<usize> {
                kept.iter().filter(|(l, _)| *l == layer).map(|(_, index)| *index).collect()
            };
            (*layer..total)
                .map(|layer| Source {
                    layer,
                    groups: of(&groups, layer),
                    channels: of(&channels, layer),
                })
                .filter(|source| {
                    source.layer == *layer
                        || !source.groups.is_empty()
                        || !source.channels.is_empty()
                })
                .collect()
        });
        Self { blocks: blocks.collect() }
    }

    /// Every block of the target that something is taken from.
    pub fn sources(&self) -> BTreeSet<usize> {
        self.blocks.iter().flatten().map(|source| source.layer).collect()
    }

    /// The target's block that each block of the draft comes from.
    pub fn layers(&self) -> Vec<usize> {
        self.blocks.iter().filter_map(|sources| Some(sources.first()?.layer)).collect()
    }
}

impl Source {
    /// The target's block without what is dropped.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn pruned(&self, target: &Decoder) -> Result<DecoderLayer, BuildError> {
        let (config, layer) = (&target.config, &target.layers[self.layer]);
        let device = target.embed_tokens.device();
        let heads = config.num_attention_heads / config.num_key_value_heads * config.head_dim;
        let index = |positions: Vec<u32>| Tensor::new(positions, device);
        let spans = |width: usize| -> Vec<u32> {
            let groups = self.groups.iter();
            groups.flat_map(|g| (g * width..(g + 1) * width).map(|i| i as u32)).collect()
        };
        let (queries, keys) = (index(spans(heads))?, index(spans(config.head_dim))?);
        let channels = index(self.channels.iter().map(|c| *c as u32).collect())?;
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
