//! Samples into padded windows, and where in them the loss is taken.

use candle_core::{Device, Result, Tensor};

use super::{Sample, TopK};

/// Some samples as one padded window tensor.
pub struct Batch<'a> {
    /// `(B, T)`, padded on the right with token 0.
    pub ids: Tensor,
    /// Rows of the flattened `(B * T)` that predict an output token of which the teacher has an
    /// opinion: `(N)`.
    pub rows: Tensor,
    /// The teacher's opinion of each of the N predictions.
    pub teacher: Vec<&'a TopK>,
    /// The token that was generated at each of the N predictions.
    pub outputs: Vec<u32>,
    /// For each sample, how many of the N predictions are its own.
    pub lengths: Vec<usize>,
}

impl<'a> Batch<'a> {
    /// Packs scored samples; prompts are cut from the left so that a row has at most `window`
    /// tokens, outputs from the right when they alone are longer.
    ///
    /// # Errors
    /// When the tensors cannot be made.
    pub fn new(samples: &[&'a Sample], window: usize, device: &Device) -> Result<Self> {
        let cut: Vec<(&[u32], &[u32], &'a Sample)> = samples
            .iter()
            .map(|sample| {
                let output = &sample.output_ids[..sample.output_ids.len().min(window - 1)];
                // The last output token is predicted but never fed.
                let room = window - (output.len() - 1).min(window - 1);
                let from = sample.prompt_ids.len().saturating_sub(room);
                (&sample.prompt_ids[from..], output, *sample)
            })
            .collect();
        let length =
            |(prompt, output, _): &(&[u32], &[u32], &Sample)| prompt.len() + output.len() - 1;
        let time = cut.iter().map(length).max().unwrap_or(1);
        let mut ids = vec![0u32; cut.len() * time];
        let (mut rows, mut teacher, mut outputs, mut lengths) = (vec![], vec![], vec![], vec![]);
        for (index, (prompt, output, sample)) in cut.iter().enumerate() {
            let row = &mut ids[index * time..][..time];
            let fed = prompt.iter().chain(&output[..output.len() - 1]);
            row.iter_mut().zip(fed).for_each(|(slot, id)| *slot = *id);
            let first = index * time + prompt.len() - 1;
            let before = rows.len();
            for ((at, opinion), id) in sample.teacher.iter().enumerate().zip(*output) {
                // A position without an opinion is only read past.
                if !opinion.ids.is_empty() {
                    rows.push((first + at) as u32);
                    teacher.push(opinion);
                    outputs.push(*id);
                }
            }
            lengths.push(rows.len() - before);
        }
        Ok(Self {
            ids: Tensor::from_vec(ids, (cut.len(), time), device)?,
            rows: Tensor::new(rows, device)?,
            teacher,
            outputs,
            lengths,
        })
    }
}

/// Whether a sample can be learned from: it has a prompt, every output position is scored, and the
/// teacher's opinion of one of them at least was kept.
pub fn usable(sample: &Sample) -> bool {
    let has_opinion = || sample.teacher.iter().any(|row| !row.ids.is_empty());
    !sample.prompt_ids.is_empty() && sample.is_scored() && has_opinion()
}
