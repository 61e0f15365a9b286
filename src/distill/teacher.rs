//! The seam between training and whoever knows the target's distribution.

use std::future::Future;

use super::sample::{Sample, TopK};

/// Why a sample could not be scored.
#[derive(Debug, thiserror::Error)]
pub enum TeacherError {
    /// The teacher is busy, down or restarting: try the same sample again later.
    #[error("teacher is not available: {0}")]
    Unavailable(String),
    /// This sample can never be scored (too long, inconsistent answer): drop it and count why.
    #[error("sample cannot be scored: {0}")]
    Rejected(String),
}

/// Scores a sample's output positions under the target.
pub trait Teacher: Send + Sync {
    /// Returns one [`TopK`] for each output position, log-probabilities at temperature 1.
    ///
    /// # Errors
    /// See [`TeacherError`]; the sample is unchanged either way.
    fn score(
        &self,
        sample: &Sample,
    ) -> impl Future<Output = Result<Vec<TopK>, TeacherError>> + Send;
}
