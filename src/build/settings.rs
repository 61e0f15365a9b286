//! What is asked of a build.

use std::path::PathBuf;

use candle_core::DType;
use serde::{Deserialize, Serialize};

use super::BuildError;
use super::heal::Ridge;
use super::plan::{Plan, PlanFile, Request};
use super::search::{CostModel, candidates};
use super::teach::TeachSettings;
use crate::hub::Target;

/// Everything that shapes a build.
#[derive(Debug, Clone)]
pub struct Settings {
    pub request: Request,
    pub cost: CostModel,
    /// A plan to follow instead of the request.
    pub plan: Option<PlanFile>,
    pub output: PathBuf,
    /// A file or folder; none takes the built-in prompts.
    pub calibration: Option<PathBuf>,
    /// Tokens of text to slice and heal on.
    pub calibration_tokens: usize,
    /// Temperature that the target answers at.
    pub temperature: f32,
    pub seed: u64,
    pub dtype: DType,
    pub ridge: Ridge,
    pub init: Init,
    pub distill: Option<TeachSettings>,
    /// Prompts to distil on; none takes the calibration's.
    pub prompts: Option<PathBuf>,
    /// Most used tokens to keep; none keeps the whole vocabulary.
    pub vocab: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            request: Request::default(),
            cost: CostModel::default(),
            plan: None,
            output: PathBuf::new(),
            calibration: None,
            calibration_tokens: 24_000,
            temperature: 0.8,
            seed: 0,
            dtype: DType::BF16,
            ridge: Ridge::default(),
            init: Init::Sliced,
            distill: None,
            prompts: None,
            vocab: None,
        }
    }
}

/// What a draft is before it is distilled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// Sliced, pruned and healed.
    Sliced,
    /// Sliced and pruned: layers of the target with nothing repaired.
    Layers,
    /// Random values in the same shape.
    Random,
}

impl Settings {
    /// The shapes to try; one when the request or a plan file fixes it.
    ///
    /// # Errors
    /// When the request cannot be met or the plan does not fit.
    pub fn plans(&self, target: &Target) -> Result<Vec<Plan>, BuildError> {
        match &self.plan {
            Some(file) => {
                file.check(&target.config)?;
                Ok(vec![file.plan.clone()])
            }
            None => candidates(&target.config, &self.request, self.cost),
        }
    }
}
