//! Which token comes next, given the target's logits and perhaps a drafted token.
//!
//! The rules make the emitted tokens distributed exactly as the target's own
//! ([speculative sampling](https://arxiv.org/abs/2302.01318)):
//! - greedy: a drafted token stands when it is the target's most likely token;
//! - drafted by argmax (`q` is one-hot): the target's token is sampled, and the draft stands when
//!   it is that token. Its probability to stand is `p(x)`, and what replaces it is distributed as
//!   `p` without `x`, so this is the rejection rule; in addition the same seed gives the same
//!   text with any draft, or with none;
//! - drafted by sampling from `q`: it stands with probability `min(1, p/q)`, otherwise the token
//!   is sampled from the residual `max(0, p - q)`.

use rand::Rng;

use super::logits::argmax;
use super::sampling::{Sampling, Scratch, probabilities, sample};

/// A token that the target has not confirmed yet.
#[derive(Debug, Clone, Copy)]
pub struct Drafted<'a> {
    pub token: u32,
    /// The distribution it was sampled from; none when the draft took its most likely token.
    pub probabilities: Option<&'a [f32]>,
}

/// The token that is emitted, and whether it is the drafted one by acceptance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    pub token: u32,
    pub accepted: bool,
}

/// Decides tokens; holds the working memory for it.
#[derive(Debug, Default)]
pub struct Verifier {
    scratch: Scratch,
    probabilities: Vec<f32>,
}

impl Verifier {
    /// Decides the token that follows, from one row of logits without padding columns. Uses one
    /// random number for a sampled token without draft or with an argmax draft.
    ///
    /// Returns `None` when the row has no finite logit.
    pub fn choose(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        drafted: Option<Drafted<'_>>,
        rng: &mut impl Rng,
    ) -> Option<Choice> {
        if sampling.is_greedy() {
            let token = argmax(logits);
            let finite = logits.get(token as usize).is_some_and(|value| value.is_finite());
            let accepted = drafted.is_some_and(|draft| draft.token == token);
            return finite.then_some(Choice { token, accepted });
        }
        let p = &mut self.probabilities;
        if !probabilities(logits, sampling, &mut self.scratch, p) {
            return None;
        }
        Some(match drafted {
            None => Choice { token: sample(p, rng.random()), accepted: false },
            Some(Drafted { token, probabilities: None }) => one_hot(p, token, rng.random()),
            Some(Drafted { token, probabilities: Some(q) }) => {
                probabilistic(p, q, token, rng.random(), rng.random())
            }
        })
    }
}

/// Decides over a token that the draft chose deterministically. `p` is the target's distribution,
/// `uniform` lies in [0, 1).
pub fn one_hot(p: &[f32], drafted: u32, uniform: f64) -> Choice {
    let token = sample(p, uniform);
    Choice { token, accepted: token == drafted }
}

/// Decides over a token sampled from `q`. Overwrites `p` with the residual when it is refused.
/// Both uniforms lie in [0, 1): the first decides acceptance, the second the replacement.
pub fn probabilistic(
    p: &mut [f32],
    q: &[f32],
    drafted: u32,
    acceptance: f64,
    replacement: f64,
) -> Choice {
    let index = drafted as usize;
    let (p_x, q_x) = (p.get(index).copied(), q.get(index).copied());
    let (p_x, q_x) = (f64::from(p_x.unwrap_or(0.0)), f64::from(q_x.unwrap_or(0.0)));
    // Written without a division, so that q(x) = 0 needs no case of its own.
    if p_x > 0.0 && acceptance * q_x < p_x {
        return Choice { token: drafted, accepted: true };
    }
    if residual(p, q) {
        return Choice { token: sample(p, replacement), accepted: false };
    }
    // p equals q up to rounding, so a refusal was rounding too and the token itself is as good.
    Choice { token: drafted, accepted: p_x > 0.0 }
}

/// Turns `p` into `max(0, p - q)`, not normalised. Returns whether any mass is left.
pub fn residual(p: &mut [f32], q: &[f32]) -> bool {
    let mut mass = 0f64;
    for (p, &q) in p.iter_mut().zip(q) {
        *p = (*p - q).max(0.0);
        mass += f64::from(*p);
    }
    mass > 0.0
}

/// Probability that a token drafted from `q` is accepted: `sum(min(p, q))`.
pub fn overlap(p: &[f32], q: &[f32]) -> f64 {
    p.iter().zip(q).map(|(&p, &q)| f64::from(p.min(q))).sum()
}

#[cfg(test)]
mod tests;
