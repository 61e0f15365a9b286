//! Which positions are worth learning: those where the draft lags behind one that was already
//! distilled (AdaSPEC, arXiv 2510.19779, section 3: tokens that a reference draft learns well and
//! the draft does not know yet; the others cost capacity that a small draft does not have).

use std::cmp::Reverse;

use candle_core::Result;
use rayon::prelude::*;

use super::batch::{Batch, usable};
use super::{Loss, Sample, TopK};
use crate::model::decoder::Decoder;
use crate::model::ops::Values;

/// Positions whose logits exist at a time.
const CHUNK: usize = 256;

/// Takes the teacher's opinion from every position that is not among the `share` of them with the
/// greatest `loss(draft) − loss(reference)`, by forward KL; training passes over what has none.
///
/// # Errors
/// When a tensor computation fails.
pub fn select(
    samples: &mut [Sample],
    draft: &Decoder,
    reference: &Decoder,
    share: f64,
    window: usize,
) -> Result<()> {
    let mut gaps = Vec::new();
    for sample in samples.iter().filter(|sample| usable(sample)) {
        let (own, other) = (losses(draft, sample, window)?, losses(reference, sample, window)?);
        // What the window cuts off ranks last.
        let gap = |(own, other): (&f32, f32)| {
            if own.is_finite() { own - other } else { f32::NEG_INFINITY }
        };
        gaps.extend(own.iter().zip(other).map(gap));
    }
    let mut chosen = largest(&gaps, share).into_iter();
    for sample in samples.iter_mut().filter(|sample| usable(sample)) {
        for row in sample.teacher.iter_mut().filter(|row| !row.ids.is_empty()) {
            if !chosen.next().unwrap_or(false) {
                *row = TopK::default();
            }
        }
    }
    Ok(())
}

/// Which of the values are among the largest `share` of them, at least one.
pub fn largest(values: &[f32], share: f64) -> Vec<bool> {
    let keep = ((values.len() as f64 * share).round() as usize).max(1).min(values.len());
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(Reverse(b).cmp(&Reverse(a))));
    let mut chosen = vec![false; values.len()];
    order[..keep].iter().for_each(|at| chosen[*at] = true);
    chosen
}

/// Forward KL of a draft at every position of a sample that the teacher has an opinion of; −∞
/// beyond the window.
fn losses(decoder: &Decoder, sample: &Sample, window: usize) -> Result<Vec<f32>> {
    let batch = Batch::new(&[sample], window, decoder.embed_tokens.device())?;
    let width = decoder.config.hidden_size;
    let hidden = decoder.hidden(&batch.ids)?.reshape(((), width))?.index_select(&batch.rows, 0)?;
    let mut losses = Vec::with_capacity(sample.output_ids.len());
    for start in (0..batch.teacher.len()).step_by(CHUNK) {
        let count = CHUNK.min(batch.teacher.len() - start);
        let logits = decoder.head(&hidden.narrow(0, start, count)?)?;
        let rows = Values::of(&logits)?;
        losses.par_extend(
            rows.par_chunks(decoder.config.vocab_size)
                .zip(&batch.teacher[start..start + count])
                .map(|(row, teacher)| {
                    Loss::ForwardKl.gradient_in_place(teacher, &mut row.to_vec(), 0.0)
                }),
        );
    }
    let scored = sample.teacher.iter().filter(|row| !row.ids.is_empty()).count();
    losses.resize(scored, f32::NEG_INFINITY);
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_earlier_ones_among_equals() {
        assert_eq!(largest(&[0.1, 0.5, -1.0, 0.5], 0.5), [false, true, false, true]);
        assert_eq!(largest(&[1.0, 1.0, 1.0], 0.34), [true, false, false]);
        assert_eq!(largest(&[3.0], 0.0), [true], "one is always left");
        assert_eq!(largest(&[], 0.5), Vec::<bool>::new());
    }
}
