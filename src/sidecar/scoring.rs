//! The teacher's task: scores captured samples one after the other, for as long as it runs.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::metrics::Metrics;
use super::release::blocking;
use super::store::{SampleStore, StoreError};
use crate::distill::Sample;
use crate::distill::teacher::{Teacher, TeacherError};

/// Samples fetched at once; small, because a fetch copies them.
const FETCH: usize = 8;
/// Wait when nothing is unscored.
const IDLE: Duration = Duration::from_millis(250);
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// What the task needs.
pub struct Scoring<T> {
    pub teacher: T,
    pub store: Arc<dyn SampleStore>,
    /// Samples that may wait. The oldest beyond are dropped: when traffic outruns the teacher,
    /// what is learned must still be today's.
    pub backlog: u64,
    pub metrics: Arc<Metrics>,
}

impl<T: Teacher> Scoring<T> {
    /// Runs until `shutdown`. The sample in work is then left for the next start.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut backoff = FIRST_BACKOFF;
        while !shutdown.is_cancelled() {
            let pause = tokio::select! {
                () = shutdown.cancelled() => return,
                pause = self.batch(&mut backoff) => pause,
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Scores a few samples and says how long to wait before the next few.
    async fn batch(&self, backoff: &mut Duration) -> Duration {
        let (store, backlog) = (self.store.clone(), self.backlog);
        let fetched = blocking(move || {
            let dropped = drop_surplus(store.as_ref(), backlog)?;
            Ok::<_, StoreError>((dropped, store.unscored(FETCH)?))
        })
        .await;
        let fetched = fetched.map(|(dropped, samples)| {
            self.metrics.samples_dropped.with_label_values(&["teacher_behind"]).inc_by(dropped);
            samples
        });
        let samples = match fetched {
            Ok(samples) if samples.is_empty() => return IDLE,
            Ok(samples) => samples,
            Err(error) => {
                tracing::error!(%error, "cannot read samples to score");
                return MAX_BACKOFF;
            }
        };
        for sample in samples {
            match self.teacher.score(&sample).await {
                Ok(teacher) => {
                    *backoff = FIRST_BACKOFF;
                    let (store, id) = (self.store.clone(), sample.id);
                    match blocking(move || store.set_teacher(id, teacher)).await {
                        Ok(()) => self.metrics.samples_scored.inc(),
                        // It may have been evicted or purged while it was being scored.
                        Err(error) => tracing::debug!(%error, "scores not stored"),
                    }
                }
                Err(TeacherError::Unavailable(reason)) => {
                    tracing::debug!(reason, retry_in = ?backoff, "the teacher is not available");
                    let pause = *backoff;
                    *backoff = (*backoff * 2).min(MAX_BACKOFF);
                    return pause;
                }
                Err(TeacherError::Rejected(reason)) => self.reject(&sample, &reason).await,
            }
        }
        Duration::ZERO
    }

    async fn reject(&self, sample: &Sample, reason: &str) {
        tracing::debug!(id = sample.id, reason, "a sample cannot be scored and is dropped");
        self.metrics.samples_dropped.with_label_values(&["unscorable"]).inc();
        let (store, id) = (self.store.clone(), sample.id);
        if let Err(error) = blocking(move || store.remove(id)).await {
            tracing::error!(%error, "cannot remove a sample");
        }
    }
}

fn drop_surplus(store: &dyn SampleStore, backlog: u64) -> Result<u64, StoreError> {
    let stats = store.stats()?;
    let surplus = (stats.samples - stats.scored.min(stats.samples)).saturating_sub(backlog);
    if surplus == 0 {
        return Ok(0);
    }
    let oldest = store.unscored(usize::try_from(surplus).unwrap_or(usize::MAX))?;
    for sample in &oldest {
        store.remove(sample.id)?;
    }
    Ok(oldest.len() as u64)
}
