//! The statistics of the watch. Pure functions over counters.

use std::collections::VecDeque;

use crate::config::sidecar::WatchSettings;
use crate::sidecar::learn::Comparison;
use crate::sidecar::versions::LiveCounters;

/// The most recent windows of one version.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    windows: VecDeque<LiveCounters>,
}

impl Evidence {
    /// Adds a window and drops the oldest ones while `most` drafted tokens remain without them.
    pub fn add(&mut self, window: LiveCounters, most: u64) {
        if window.drafted == 0 {
            return;
        }
        self.windows.push_back(window);
        let mut drafted: u64 = self.windows.iter().map(|window| window.drafted).sum();
        while let Some(oldest) = self.windows.front()
            && drafted - oldest.drafted >= most
        {
            drafted -= oldest.drafted;
            self.windows.pop_front();
        }
    }

    pub fn total(&self) -> LiveCounters {
        let mut total = LiveCounters::default();
        for window in &self.windows {
            total.add(window);
        }
        total
    }
}

/// What looks wrong.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Suspicion {
    /// Standard errors below the version before, when that is significant.
    pub worse_z: Option<f64>,
    /// Far below what the draft was measured to reach.
    pub collapsed: bool,
}

/// What follows from it.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    Wait,
    RollBack {
        reason: String,
    },
    /// The traffic has changed; `predicted` is what the draft reaches on it.
    Drift {
        reason: String,
        predicted: f64,
    },
}

/// Looks at the live counters alone.
pub fn suspect(
    settings: &WatchSettings,
    live: &LiveCounters,
    before: Option<&LiveCounters>,
    predicted: Option<f64>,
) -> Suspicion {
    if live.drafted < settings.min_tokens {
        return Suspicion::default();
    }
    let worse_z = before
        .filter(|before| before.drafted >= settings.min_tokens)
        .filter(|before| drop(before, live) >= settings.min_drop)
        .map(|before| z(before, live))
        .filter(|z| *z >= settings.z);
    let collapsed = predicted.is_some_and(|predicted| is_collapsed(settings, live, predicted));
    Suspicion { worse_z, collapsed }
}

/// Decides with the samples captured since the swap: a drop that the drafts themselves do not
/// show on the same traffic is the traffic's.
pub fn decide(
    settings: &WatchSettings,
    live: &LiveCounters,
    suspicion: &Suspicion,
    comparison: &Comparison,
) -> Decision {
    let newer = comparison.newer;
    if suspicion.collapsed && is_collapsed(settings, live, newer) {
        let reason = format!(
            "the server accepts {:.3} of this draft's first tokens, its folder reaches {newer:.3} on the same traffic",
            first_position(live)
        );
        return Decision::RollBack { reason };
    }
    if let (Some(z), Some(older)) = (suspicion.worse_z, comparison.older) {
        // Half of the smallest drop that counts: measured on fewer tokens than the live figure,
        // but paired.
        if older - newer >= settings.min_drop / 2.0 {
            let reason = format!(
                "live acceptance fell by {z:.1} standard errors, and on samples since the swap it reaches {newer:.3}, the version before {older:.3}"
            );
            return Decision::RollBack { reason };
        }
    }
    let reason = match comparison.older {
        Some(older) => format!(
            "on samples since the swap it reaches {newer:.3}, the version before {older:.3}"
        ),
        None => format!("on samples since the swap its folder reaches {newer:.3} too"),
    };
    Decision::Drift { reason, predicted: newer }
}

/// Decides without such samples: only a drop far beyond chance counts.
pub fn decide_blind(settings: &WatchSettings, suspicion: &Suspicion) -> Decision {
    match suspicion.worse_z {
        Some(z) if z >= settings.strict_z => Decision::RollBack {
            reason: format!(
                "live acceptance fell by {z:.1} standard errors, with too few samples to tell why"
            ),
        },
        _ => Decision::Wait,
    }
}

fn drop(before: &LiveCounters, live: &LiveCounters) -> f64 {
    before.acceptance_rate().unwrap_or(0.0) - live.acceptance_rate().unwrap_or(0.0)
}

/// By how many standard errors the acceptance rate fell.
fn z(before: &LiveCounters, live: &LiveCounters) -> f64 {
    let deviation = (rate_variance(before) + rate_variance(live)).sqrt();
    // Two rates without any spread that still differ are as different as can be.
    drop(before, live) / deviation.max(1e-9)
}

/// Variance of accepted over drafted tokens, in units of whole steps: the tokens of one step are
/// accepted or lost together, so a plain binomial over tokens would be far too sure of itself.
fn rate_variance(counters: &LiveCounters) -> f64 {
    let (drafts, drafted) = (counters.drafts as f64, counters.drafted as f64);
    if counters.drafts == 0 || counters.drafted == 0 {
        return 0.0;
    }
    let positions = &counters.accepted_per_position;
    if !positions.is_empty() && positions.iter().sum::<u64>() == counters.accepted {
        // P(A > i) is per_position[i] / drafts, which gives both moments of A.
        let tail = |i: usize| positions[i] as f64 / drafts;
        let mean: f64 = (0..positions.len()).map(tail).sum();
        let square: f64 = (0..positions.len()).map(|i| (2 * i + 1) as f64 * tail(i)).sum();
        return (square - mean * mean).max(0.0) * drafts / (drafted * drafted);
    }
    // The spread is largest when a step is accepted wholly or not at all.
    let rate = counters.accepted as f64 / drafted;
    rate * (1.0 - rate) / drafts
}

/// Acceptance of the first drafted token: the live counterpart of acceptance per position, which
/// later positions are not, as they count as lost once an earlier one is.
fn first_position(live: &LiveCounters) -> f64 {
    match live.accepted_per_position.first() {
        Some(first) if live.drafts > 0 => *first as f64 / live.drafts as f64,
        _ => live.acceptance_rate().unwrap_or(0.0),
    }
}

fn is_collapsed(settings: &WatchSettings, live: &LiveCounters, predicted: f64) -> bool {
    let expected = if live.accepted_per_position.is_empty() {
        chained(predicted, live.drafted as f64 / (live.drafts as f64).max(1.0))
    } else {
        predicted
    };
    first_position(live) < settings.collapse_ratio * expected
}

/// Accepted share of `drafted` tokens a step when each is accepted with the same chance.
fn chained(chance: f64, drafted: f64) -> f64 {
    let steps = drafted.round().max(1.0) as i32;
    (1..=steps).map(|i| chance.powi(i)).sum::<f64>() / f64::from(steps)
}

#[cfg(test)]
mod tests;
