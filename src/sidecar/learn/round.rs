//! One round of training.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{CompareRequest, Learn, LearnError, Phase, must_stop};
use crate::distill::Sample;
use crate::proto::trainer::TrainProgress;
use crate::sidecar::release::blocking;
use crate::sidecar::rounds::{Round, compose, data_hash};
use crate::sidecar::supervisor::TrainerError;
use crate::sidecar::versions::TrainingTotals;

/// A trainer that reports no step for this long hangs and is killed. The slowest step seen on
/// two cores takes seconds.
const STALLED_AFTER: Duration = Duration::from_secs(600);

/// How a round ended.
pub(super) enum Outcome {
    /// Trained, saved by the trainer, recorded here.
    Learned,
    /// Paused, rolled back, asked a question or stopping: to be repeated.
    Interrupted,
}

type Message = Result<Option<TrainProgress>, tonic::Status>;

enum Event {
    Progress(Result<Message, tokio::time::error::Elapsed>),
    Stop,
    Question(CompareRequest),
}

impl Learn {
    pub(super) async fn round(
        &mut self,
        new: Vec<Sample>,
        shutdown: &CancellationToken,
    ) -> Result<Outcome, LearnError> {
        let number = self.release.snapshot().ledger.training.rounds + 1;
        let (store, settings) = (self.store.clone(), self.settings.learn.clone());
        let new_samples = new.len();
        let (round, hash) = {
            let before = self.release.snapshot().ledger.data_hash.clone();
            blocking(move || -> Result<_, LearnError> {
                let hash = data_hash(&before, &new);
                Ok((compose(&settings, number, new, store.learned()?), hash))
            })
            .await?
        };
        tracing::info!(
            round = number,
            new = new_samples,
            samples = round.samples.len(),
            "a round begins"
        );
        let mut phase = Phase::Training {
            round: number,
            new_samples,
            samples: round.samples.len(),
            steps: 0,
            loss: None,
        };
        self.set_phase(phase.clone());
        let mut cost = TrainingTotals { rounds: 1, ..TrainingTotals::default() };
        // The list already holds every pass, each with its own picks.
        let mut stream = self.trainer.train(&round.samples, 1, number).await?;
        let mut changes = self.release.watch();
        loop {
            let event = tokio::select! {
                message = tokio::time::timeout(STALLED_AFTER, stream.message()) => {
                    Event::Progress(message)
                }
                () = shutdown.cancelled() => Event::Stop,
                _ = changes.wait_for(must_stop) => Event::Stop,
                question = self.questions.recv() => question.map_or(Event::Stop, Event::Question),
            };
            let message = match event {
                Event::Progress(message) => message,
                Event::Stop => return Ok(self.interrupted(number)),
                Event::Question(question) => {
                    // Ends the round after its current step, so that the trainer is free.
                    drop(stream);
                    self.interrupted(number);
                    self.answer(question).await?;
                    return Ok(Outcome::Interrupted);
                }
            };
            let Ok(message) = message else {
                self.trainer.kill();
                let reason = format!("no step in {} s", STALLED_AFTER.as_secs());
                return Err(TrainerError::Down(reason).into());
            };
            match message.map_err(TrainerError::from)? {
                Some(progress) => {
                    self.count(&progress, &mut cost);
                    if let Phase::Training { steps, loss, .. } = &mut phase {
                        *steps += 1;
                        *loss = progress.loss.is_finite().then_some(progress.loss);
                    }
                    self.set_phase(phase.clone());
                }
                None => break,
            }
        }
        self.finish(round, cost, hash).await?;
        Ok(Outcome::Learned)
    }

    /// The trainer has saved its state: only now do the samples count as learned.
    async fn finish(
        &self,
        round: Round,
        cost: TrainingTotals,
        data_hash: String,
    ) -> Result<(), LearnError> {
        self.release.learned(cost, data_hash).await?;
        let store = self.store.clone();
        blocking(move || store.mark_learned(&round.new_ids)).await?;
        self.metrics.training_rounds.with_label_values(&["done"]).inc();
        tracing::info!(
            steps = cost.steps,
            tokens = cost.tokens,
            seconds = cost.seconds,
            "a round is learned"
        );
        Ok(())
    }

    fn interrupted(&self, round: u64) -> Outcome {
        tracing::info!(round, "a round is interrupted and will be repeated");
        self.metrics.training_rounds.with_label_values(&["interrupted"]).inc();
        Outcome::Interrupted
    }

    fn count(&self, progress: &TrainProgress, cost: &mut TrainingTotals) {
        cost.steps += 1;
        cost.seconds += progress.seconds;
        self.metrics.training_steps.inc();
        self.metrics.training_seconds.inc_by(progress.seconds.max(0.0));
        if progress.skipped {
            cost.skipped_steps += 1;
            self.metrics.training_skipped_steps.inc();
            return;
        }
        cost.tokens += progress.tokens;
        self.metrics.training_tokens.inc_by(progress.tokens);
        if progress.loss.is_finite() {
            self.metrics.training_loss.set(f64::from(progress.loss));
        }
        self.progress.send_modify(|shown| shown.step = progress.step);
    }
}
