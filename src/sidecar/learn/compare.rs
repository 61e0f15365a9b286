//! Measures two published versions on the same samples, for the watch.

use tokio::sync::oneshot;

use super::{Learn, LearnError, Phase};
use crate::distill::Sample;

/// A question of the watch.
pub struct CompareRequest {
    pub newer: String,
    /// None: only the newer one is measured.
    pub older: Option<String>,
    /// Samples that neither version has learned from.
    pub samples: Vec<Sample>,
    /// Dropped without an answer when the trainer is down: ask again later.
    pub reply: oneshot::Sender<Comparison>,
}

/// Acceptance of each version.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    pub newer: f64,
    pub older: Option<f64>,
}

impl Learn {
    pub(super) async fn answer(&self, request: CompareRequest) -> Result<(), LearnError> {
        self.set_phase(Phase::Comparing);
        let newer = self.acceptance(&request.newer, &request.samples).await?;
        let older = match &request.older {
            Some(older) => Some(self.acceptance(older, &request.samples).await?),
            None => None,
        };
        // The watch may have given up waiting.
        request.reply.send(Comparison { newer, older }).ok();
        Ok(())
    }

    /// Weights that are not finite accept nothing.
    async fn acceptance(&self, version: &str, samples: &[Sample]) -> Result<f64, LearnError> {
        let folder = self.work.version(version);
        let acceptance = self.trainer.evaluate(Some(&folder), samples).await?;
        let usable = acceptance.finite && acceptance.acceptance_rate.is_finite();
        Ok(if usable { acceptance.acceptance_rate } else { 0.0 })
    }
}
