//! Whether a candidate may be published. Pure functions over what the trainer measured.

use serde::Serialize;

use super::versions::{DomainScores, GateScores};
use crate::config::sidecar::GateSettings;
use crate::distill::Acceptance;
use crate::distill::Sample;

/// Fewest positions of a domain for its own verdict: with fewer, chance alone exceeds any
/// sensible `max_domain_loss`.
const MIN_DOMAIN_POSITIONS: u64 = 50;

/// What the gate decided.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum Verdict {
    Publish,
    /// Too little held-out data to tell: go on training, publish nothing.
    Hold {
        reason: String,
    },
    Refuse {
        reason: String,
    },
}

impl Verdict {
    /// The label of the metric.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Hold { .. } => "hold",
            Self::Refuse { .. } => "refuse",
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Publish => None,
            Self::Hold { reason } | Self::Refuse { reason } => Some(reason),
        }
    }
}

/// Compares the running draft and the candidate, measured on the same samples in the same order.
pub fn judge(
    settings: &GateSettings,
    samples: &[Sample],
    before: &Acceptance,
    after: &Acceptance,
) -> (Verdict, GateScores) {
    let scores = scores(samples, before, after);
    (verdict(settings, &scores, after), scores)
}

fn verdict(settings: &GateSettings, scores: &GateScores, after: &Acceptance) -> Verdict {
    if scores.positions < settings.min_positions {
        return too_few(scores.positions, settings);
    }
    if !after.finite || !scores.after.is_finite() {
        return Verdict::Refuse { reason: "the candidate is not finite".into() };
    }
    // A running draft that is not finite is worse than any finite one.
    if scores.before.is_finite() && scores.after < scores.before + settings.min_gain {
        let reason = format!(
            "acceptance {:.4} after, {:.4} before, a gain of {:.4} is needed",
            scores.after, scores.before, settings.min_gain
        );
        return Verdict::Refuse { reason };
    }
    let judged = scores.domains.iter().filter(|domain| domain.positions >= MIN_DOMAIN_POSITIONS);
    let worst = judged
        .min_by(|left, right| (left.after - left.before).total_cmp(&(right.after - right.before)));
    match worst {
        Some(domain)
            if scores.domains.len() > 1
                && domain.before - domain.after > settings.max_domain_loss =>
        {
            let reason = format!(
                "domain `{}` falls from {:.4} to {:.4}, at most {:.4} is allowed",
                domain.domain, domain.before, domain.after, settings.max_domain_loss
            );
            Verdict::Refuse { reason }
        }
        _ => Verdict::Publish,
    }
}

/// The verdict while there is too little held-out data.
pub fn too_few(positions: u64, settings: &GateSettings) -> Verdict {
    let reason = format!("{positions} held-out positions, {} are needed", settings.min_positions);
    Verdict::Hold { reason }
}

fn scores(samples: &[Sample], before: &Acceptance, after: &Acceptance) -> GateScores {
    let paired: Vec<(&Sample, f64, f64)> = samples
        .iter()
        .zip(before.per_sample.iter().zip(&after.per_sample))
        .map(|(sample, (before, after))| (sample, *before, *after))
        .collect();
    let mut domains: Vec<DomainScores> = Vec::new();
    for (sample, before, after) in &paired {
        let positions = sample.output_ids.len() as f64;
        let index = domains.iter().position(|known| known.domain == sample.domain);
        let index = index.unwrap_or_else(|| {
            domains.push(DomainScores {
                domain: sample.domain.clone(),
                before: 0.0,
                after: 0.0,
                positions: 0,
            });
            domains.len() - 1
        });
        let domain = &mut domains[index];
        domain.before += before * positions;
        domain.after += after * positions;
        domain.positions += sample.output_ids.len() as u64;
    }
    for domain in &mut domains {
        let positions = (domain.positions as f64).max(1.0);
        domain.before /= positions;
        domain.after /= positions;
    }
    domains.sort_by(|left, right| left.domain.cmp(&right.domain));
    GateScores {
        before: before.acceptance_rate,
        after: after.acceptance_rate,
        mean_length_before: before.mean_accepted_length,
        mean_length_after: after.mean_accepted_length,
        positions: after.positions.min(before.positions),
        samples: paired.len(),
        gain_stderr: stderr(paired.iter().map(|(_, before, after)| after - before)),
        domains,
    }
}

/// Standard error of the mean; 0 for fewer than two values.
fn stderr(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    let count = values.len() as f64;
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>();
    (squares / (count - 1.0) / count).sqrt()
}

#[cfg(test)]
mod tests;
