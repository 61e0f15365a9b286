//! Distillation losses over the teacher's top K and one tail bucket.
//!
//! The teacher is known at K tokens; everything else is one bucket with the mass that is left, so
//! that no probability is lost and nothing is renormalised. With the draft's distribution q folded
//! into the same buckets, every loss here is a function of the bucket masses, and its gradient
//! with respect to a logit z_j of bucket b is `q_j (∂L/∂q_b − Σ_c q_c ∂L/∂q_c)`.

use std::str::FromStr;

use crate::distill::TopK;
use crate::model::kernels;

/// Masses are kept this far from zero where a loss divides by them or takes their logarithm.
const TINY: f32 = 1e-7;

/// Which divergence between teacher p and draft q is minimised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// `Σ p log(p/q)`.
    ForwardKl,
    /// `Σ q log(q/p)`.
    ReverseKl,
    /// `½ Σ |p − q|`: one minus the acceptance rate of probabilistic drafting.
    TotalVariation,
    /// `−log Σ min(p, q)` (LK losses, arXiv 2602.23881): as total variation, but with a gradient
    /// that does not fade while the overlap is small.
    LogAlpha,
    /// `½ Σ p log(p/m) + ½ Σ q log(q/m)` with `m = (p + q)/2` (Jensen-Shannon).
    JensenShannon,
}

/// A loss name that is not known.
#[derive(Debug, thiserror::Error)]
#[error(
    "unknown loss {0:?}, expected forward_kl, reverse_kl, total_variation, log_alpha or jensen_shannon"
)]
pub struct UnknownLoss(String);

impl FromStr for Loss {
    type Err = UnknownLoss;

    fn from_str(name: &str) -> Result<Self, UnknownLoss> {
        match name {
            "forward_kl" => Ok(Self::ForwardKl),
            "reverse_kl" => Ok(Self::ReverseKl),
            "total_variation" => Ok(Self::TotalVariation),
            "log_alpha" => Ok(Self::LogAlpha),
            "jensen_shannon" => Ok(Self::JensenShannon),
            other => Err(UnknownLoss(other.into())),
        }
    }
}

impl Loss {
    /// The loss and its derivative with respect to each bucket's draft mass. `p` and `q` hold the
    /// masses of the K tokens followed by the tail's; `derivative` is overwritten.
    pub fn over_buckets(self, p: &[f32], q: &[f32], derivative: &mut [f32]) -> f32 {
        let mut value = 0.0;
        match self {
            Self::ForwardKl => {
                for ((p, q), d) in p.iter().zip(q).zip(derivative) {
                    let q = q.max(TINY);
                    value += if *p > 0.0 { p * (p / q).ln() } else { 0.0 };
                    *d = -p / q;
                }
            }
            Self::ReverseKl => {
                for ((p, q), d) in p.iter().zip(q).zip(derivative) {
                    let ratio = (q.max(TINY) / p.max(TINY)).ln();
                    value += q * ratio;
                    *d = ratio + 1.0;
                }
            }
            Self::TotalVariation => {
                for ((p, q), d) in p.iter().zip(q).zip(derivative) {
                    value += 0.5 * (p - q).abs();
                    *d = if q > p { 0.5 } else { -0.5 };
                }
            }
            Self::JensenShannon => {
                for ((p, q), d) in p.iter().zip(q).zip(derivative) {
                    let m = (0.5 * (p + q)).max(TINY);
                    let own = (q.max(TINY) / m).ln();
                    value += 0.5 * q * own;
                    value += if *p > 0.0 { 0.5 * p * (p / m).ln() } else { 0.0 };
                    *d = 0.5 * own;
                }
            }
            Self::LogAlpha => {
                let alpha: f32 = p.iter().zip(q).map(|(p, q)| p.min(*q)).sum();
                let alpha = alpha.max(TINY);
                value = -alpha.ln();
                for ((p, q), d) in p.iter().zip(q).zip(derivative) {
                    *d = if q < p { -1.0 / alpha } else { 0.0 };
                }
            }
        }
        value
    }

    /// Replaces one row of logits `(V)` by the loss's gradient with respect to them, times
    /// `weight`; returns the loss, not weighted.
    pub fn gradient_in_place(self, teacher: &TopK, logits: &mut [f32], weight: f32) -> f32 {
        kernels::softmax(logits);
        let (p, q) = buckets(teacher, logits);
        let mut derivative = vec![0.0; p.len()];
        let value = self.over_buckets(&p, &q, &mut derivative);
        let mean: f32 = q.iter().zip(&derivative).map(|(q, d)| q * d).sum();
        let tail = derivative[p.len() - 1];
        for logit in logits.iter_mut() {
            *logit *= weight * (tail - mean);
        }
        for ((id, q), d) in teacher.ids.iter().zip(&q).zip(&derivative) {
            logits[*id as usize] = weight * q * (d - mean);
        }
        value
    }
}

/// Masses of the teacher's K tokens and of the tail, under the teacher and under the draft's
/// probabilities `(V)`.
pub fn buckets(teacher: &TopK, probabilities: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let mut p: Vec<f32> = teacher.logprobs.iter().map(|logprob| logprob.exp()).collect();
    let mut q: Vec<f32> = teacher.ids.iter().map(|id| probabilities[*id as usize]).collect();
    p.push((1.0 - p.iter().sum::<f32>()).max(0.0));
    q.push((1.0 - q.iter().sum::<f32>()).max(0.0));
    (p, q)
}

#[cfg(test)]
mod tests;
