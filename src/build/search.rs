//! Which shapes are worth trying under a limit, and which of them speeds a server up most.

use super::BuildError;
use super::plan::{Plan, Request, Shape};
use crate::model::ModelConfig;

/// Time of one decode step in units of one parameter read: a server that reads its weights from
/// memory spends it on the parameters of a step, and on every layer a constant besides (kernel
/// launches, attention, norms).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CostModel {
    /// What a layer costs besides its parameters, in parameters read in the same time: about 1e8
    /// on an H100 (0.06 ms at 3.35 TB/s and two bytes each), nothing on a CPU.
    pub layer: f64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { layer: 5e7 }
    }
}

impl CostModel {
    /// Time of a draft's step by that of the target's: c in the formula for the speed-up.
    pub fn latency_ratio(&self, draft: &ModelConfig, target: &ModelConfig) -> f64 {
        self.step(draft) / self.step(target)
    }

    fn step(&self, config: &ModelConfig) -> f64 {
        config.parameters_per_step() as f64 + config.num_hidden_layers as f64 * self.layer
    }
}

/// Expected speed-up with `k` drafted tokens at acceptance `alpha` and latency ratio `c`, for
/// independent positions: `(1 − α^(k+1)) / ((1 − α)(c·k + 1))` (Leviathan et al. 2023, theorem
/// 3.8).
pub fn expected_speedup(alpha: f64, k: usize, c: f64) -> f64 {
    let steps: f64 = (0..=k as i32).map(|i| alpha.powi(i)).sum();
    steps / (c * k as f64 + 1.0)
}

/// The draft length up to `longest` with the greatest expected speed-up, and that speed-up. It is
/// at least 1 token: a draft that should never be asked has a speed-up below 1.
pub fn best_length(alpha: f64, c: f64, longest: usize) -> (usize, f64) {
    (1..=longest.max(1))
        .map(|k| (k, expected_speedup(alpha, k, c)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or((1, 0.0))
}

const LAYERS: [f64; 9] = [0.07, 0.1, 0.14, 0.2, 0.27, 0.34, 0.5, 0.67, 0.8];
const WIDTHS: [f64; 8] = [0.125, 0.2, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0];
const MLPS: [f64; 5] = [0.125, 0.25, 0.375, 0.5, 1.0];
const HEADS: [f64; 2] = [0.34, 1.0];
/// Shapes that are tried.
const CANDIDATES: usize = 8;

/// The shapes to try: those within the request's limits that no other such shape exceeds on every
/// axis, spread over depth. One when the request fixes it.
///
/// # Errors
/// When a value of the request is out of range, or no shape is within the limits.
pub fn candidates(
    target: &ModelConfig,
    request: &Request,
    cost: CostModel,
) -> Result<Vec<Plan>, BuildError> {
    request.check(target)?;
    if !request.is_limited() {
        return Ok(vec![Plan::new(target, request)?]);
    }
    let budget = request.budget(target);
    let mut within: Vec<Plan> = Vec::new();
    let (mut smallest, mut fastest) = (usize::MAX, f64::INFINITY);
    for shape in grid(request) {
        let plan = Plan::from_shape(target, shape);
        let draft = plan.config(target);
        let (parameters, ratio) = (draft.parameters(), cost.latency_ratio(&draft, target));
        (smallest, fastest) = (smallest.min(parameters), fastest.min(ratio));
        let fits = parameters as f64 <= budget
            && request.latency_ratio.is_none_or(|limit| ratio <= limit)
            && !plan.is_identity(target);
        if fits && !within.contains(&plan) {
            within.push(plan);
        }
    }
    let largest: Vec<Plan> =
        within.iter().filter(|plan| !within.iter().any(|o| o.exceeds(plan))).cloned().collect();
    if largest.is_empty() {
        return Err(match request.latency_ratio {
            Some(limit) if fastest > limit => BuildError::TooFast { asked: limit, fastest },
            _ => BuildError::TooSmall {
                asked: budget / target.parameters() as f64,
                smallest: smallest as f64 / target.parameters() as f64,
                vocab_size: target.vocab_size,
            },
        });
    }
    Ok(spread(largest))
}

fn grid(request: &Request) -> Vec<Shape> {
    let axis = |asked: Option<f64>, grid: &[f64]| asked.map_or(grid.to_vec(), |value| vec![value]);
    let mut shapes = Vec::new();
    for layers in axis(request.layers, &LAYERS) {
        for embedding in axis(request.embedding, &WIDTHS) {
            for mlp in axis(request.mlp, &MLPS) {
                for heads in axis(request.heads, &HEADS) {
                    shapes.push(Shape { embedding, layers, mlp, heads });
                }
            }
        }
    }
    shapes
}

/// At most [`CANDIDATES`] of the plans, at even distances in their order by depth and width.
fn spread(mut plans: Vec<Plan>) -> Vec<Plan> {
    plans.sort_by_key(|p| (p.num_hidden_layers, p.hidden_size, p.intermediate_size));
    if plans.len() <= CANDIDATES {
        return plans;
    }
    let last = plans.len() - 1;
    (0..CANDIDATES).map(|at| plans[at * last / (CANDIDATES - 1)].clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_up_follows_the_formula() {
        let closed =
            |a: f64, k: i32, c: f64| (1.0 - a.powi(k + 1)) / ((1.0 - a) * (c * k as f64 + 1.0));
        for (alpha, k, c) in [(0.8, 4, 0.05), (0.3, 2, 0.2), (0.0, 1, 0.1)] {
            let got = expected_speedup(alpha, k, c);
            assert!((got - closed(alpha, k as i32, c)).abs() < 1e-12);
        }
        assert!((expected_speedup(1.0, 4, 0.0) - 5.0).abs() < 1e-12);
    }

    #[test]
    fn better_drafts_are_asked_for_more() {
        assert_eq!(best_length(0.1, 0.2, 8).0, 1);
        let (k, speedup) = best_length(0.8, 0.05, 8);
        assert!(k > 4 && speedup > 2.5, "{k} {speedup}");
    }
}
