//! Watches what a published version does in service, and takes it back when it does worse.
//!
//! The server's counters carry no version, so the watch attributes them: a window between two
//! readings belongs to a version only if that version ran for the whole of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::learn::{CompareRequest, Comparison};
use super::metrics::Metrics;
use super::release::{ReleaseHandle, RollbackCause, Snapshot, blocking};
use super::store::{SampleStore, StoreError};
use super::versions::LiveCounters;
use crate::config::sidecar::{WatchSettings, seconds};
use crate::distill::Sample;
use crate::vllm::{Client, SpecDecode};

mod evidence;

use evidence::{Decision, Evidence, Suspicion};

/// The last drafted tokens of a version that count, as a multiple of `watch.min_tokens`: enough
/// for a sharp test, few enough that yesterday's traffic does not.
const EVIDENCE_FACTOR: u64 = 8;

/// What the watch needs.
pub struct Watch {
    pub client: Client,
    pub release: ReleaseHandle,
    pub store: Arc<dyn SampleStore>,
    pub questions: mpsc::Sender<CompareRequest>,
    pub settings: WatchSettings,
    pub min_positions: u64,
    pub poll: Duration,
    pub metrics: Arc<Metrics>,
}

/// One reading of the counters, with the circumstances.
struct Reading {
    counters: SpecDecode,
    generation: u64,
}

/// What is known of the version that runs.
struct Case {
    version: String,
    /// Generation of the swap that brought it.
    generation: u64,
    /// What the version before reached, when this one was published right after it.
    before: Option<(String, LiveCounters)>,
    /// Acceptance per position that its folder reached on the latest samples.
    predicted: Option<f64>,
    began_unix_ms: u64,
    suspected_since: Option<Instant>,
}

/// State of the watch between readings.
#[derive(Default)]
struct Memory {
    last: Option<Reading>,
    evidence: HashMap<String, Evidence>,
    case: Option<Case>,
}

impl Watch {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut memory = Memory::default();
        let mut tick = tokio::time::interval(self.poll);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                _ = tick.tick() => {}
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.look(&mut memory) => {}
            }
        }
    }

    async fn look(&self, memory: &mut Memory) {
        let before = self.release.snapshot();
        let Ok(text) = self.client.metrics().await else {
            memory.last = None;
            return;
        };
        let after = self.release.snapshot();
        let settled = settled(&after, seconds(self.settings.settle_seconds));
        // While the server runs another version than it should, it is about to be swapped.
        let serving = after.serving.as_ref().filter(|version| **version == after.ledger.running);
        let (Some(counters), Some(version), true) = (text.spec_decode(), serving, settled) else {
            memory.last = None;
            return;
        };
        if before.generation != after.generation {
            memory.last = None;
            return;
        }
        let reading = Reading { counters, generation: after.generation };
        let window = memory.last.as_ref().and_then(|last| window(last, &reading));
        memory.last = Some(reading);
        self.follow(memory, &after, version);
        if let Some(window) = window {
            self.release.live(version.clone(), window.clone()).await;
            let most = self.settings.min_tokens.saturating_mul(EVIDENCE_FACTOR);
            memory.evidence.entry(version.clone()).or_default().add(window, most);
        }
        self.judge(memory, &after).await;
    }

    /// Opens a new case when another version has come to run.
    fn follow(&self, memory: &mut Memory, snapshot: &Snapshot, version: &str) {
        let known = memory.case.as_ref();
        if known
            .is_some_and(|case| case.version == version && case.generation == snapshot.generation)
        {
            return;
        }
        if let Some(case) = memory.case.as_mut().filter(|case| case.version == version) {
            // The same version again, after the server has restarted.
            case.generation = snapshot.generation;
            return;
        }
        memory.evidence.remove(version);
        let record = snapshot.ledger.find(version);
        // Only a publication puts a version beside its parent in time; after a roll-back or a pin
        // the parent's figures are from other traffic.
        let arrival = snapshot
            .ledger
            .swaps
            .iter()
            .rev()
            .find(|swap| swap.version == version && swap.cause != "sync");
        let parent = record
            .and_then(|record| record.parent.clone())
            .filter(|_| arrival.is_some_and(|swap| swap.cause == "publish"));
        let before = parent.and_then(|parent| {
            let seen = memory.evidence.get(&parent).map(Evidence::total);
            let counters =
                seen.or_else(|| snapshot.ledger.find(&parent).map(|record| record.live.clone()))?;
            Some((parent, counters))
        });
        memory
            .evidence
            .retain(|known, _| before.as_ref().is_some_and(|(parent, _)| parent == known));
        memory.case = Some(Case {
            version: version.to_owned(),
            generation: snapshot.generation,
            before,
            predicted: record.and_then(|record| record.gate.as_ref()).map(|gate| gate.after),
            began_unix_ms: arrival.map_or(snapshot.swapped_unix_ms, |swap| swap.unix_ms),
            suspected_since: None,
        });
    }

    async fn judge(&self, memory: &mut Memory, snapshot: &Snapshot) {
        let Some(case) = memory.case.as_mut() else { return };
        let Some(evidence) = memory.evidence.get_mut(&case.version) else { return };
        if snapshot.ledger.pinned.is_some() {
            return;
        }
        let live = evidence.total();
        let before = case.before.as_ref().map(|(_, counters)| counters);
        let suspicion = evidence::suspect(&self.settings, &live, before, case.predicted);
        if suspicion == Suspicion::default() {
            case.suspected_since = None;
            return;
        }
        let since = *case.suspected_since.get_or_insert_with(Instant::now);
        let overdue = since.elapsed() >= seconds(self.settings.decide_within_seconds);
        let measured = self.compare(case).await;
        tracing::debug!(version = case.version, ?suspicion, ?measured, "live acceptance is low");
        let decision = match measured {
            Ok(Measured::Both(comparison)) => {
                evidence::decide(&self.settings, &live, &suspicion, &comparison)
            }
            Ok(Measured::TooFew { more: true }) if !overdue => Decision::Wait,
            Ok(Measured::TooFew { .. }) => evidence::decide_blind(&self.settings, &suspicion),
            Ok(Measured::NoAnswer) if !overdue => Decision::Wait,
            Ok(Measured::NoAnswer) => evidence::decide_blind(&self.settings, &suspicion),
            Err(error) => {
                tracing::warn!(%error, "cannot read the samples since the swap");
                Decision::Wait
            }
        };
        match decision {
            Decision::Wait => {}
            Decision::Drift { reason, predicted } => {
                tracing::info!(
                    version = case.version,
                    reason,
                    "live acceptance fell with the traffic"
                );
                self.metrics.drifts.inc();
                // The comparison with the version before is void: the traffic is another.
                case.before = None;
                case.predicted = Some(predicted);
                case.suspected_since = None;
                *evidence = Evidence::default();
            }
            Decision::RollBack { reason } => {
                let version = case.version.clone();
                if self.settings.rollback {
                    self.roll_back(&version, reason).await;
                } else {
                    tracing::warn!(version, reason, "would be rolled back (watch.rollback is off)");
                }
                // Done, or not possible: either way this evidence is used up.
                case.before = None;
                case.predicted = None;
                case.suspected_since = None;
            }
        }
    }

    async fn roll_back(&self, version: &str, reason: String) {
        match self.release.roll_back(None, RollbackCause::Watch, reason.clone()).await {
            Ok(message) => tracing::warn!(version, reason, message, "a version was taken back"),
            Err(error) => {
                tracing::error!(version, reason, %error, "a version should be taken back")
            }
        }
    }

    /// Measures the running version, and the one before, on the samples captured since the swap.
    async fn compare(&self, case: &Case) -> Result<Measured, StoreError> {
        let (store, since, limit) =
            (self.store.clone(), case.began_unix_ms, self.settings.compare_samples);
        let (samples, more) = blocking(move || since_swap(store.as_ref(), since, limit)).await?;
        let positions: usize = samples.iter().map(|sample| sample.output_ids.len()).sum();
        if samples.is_empty() || (positions as u64) < self.min_positions {
            return Ok(Measured::TooFew { more });
        }
        let (reply, answer) = oneshot::channel();
        let request = CompareRequest {
            newer: case.version.clone(),
            older: case.before.as_ref().map(|(version, _)| version.clone()),
            samples,
            reply,
        };
        if self.questions.send(request).await.is_err() {
            return Ok(Measured::NoAnswer);
        }
        Ok(match answer.await {
            Ok(comparison) => Measured::Both(comparison),
            Err(_) => Measured::NoAnswer,
        })
    }
}

#[derive(Debug)]
enum Measured {
    Both(Comparison),
    TooFew {
        /// Samples wait for the teacher.
        more: bool,
    },
    /// The trainer is down.
    NoAnswer,
}

/// Whether requests begun before the last swap have had time to end.
fn settled(snapshot: &Snapshot, settle: Duration) -> bool {
    !snapshot.swapping && snapshot.swapped_at.is_none_or(|time| time.elapsed() >= settle)
}

/// What the server did between two readings; none when a swap or a restart lies between them.
fn window(last: &Reading, now: &Reading) -> Option<LiveCounters> {
    if last.generation != now.generation {
        return None;
    }
    let delta = now.counters.since(&last.counters);
    if delta.reset {
        return None;
    }
    // Counters are whole numbers carried as floats.
    let whole = |value: f64| value.max(0.0).round() as u64;
    let counts = delta.counts;
    Some(LiveCounters {
        drafts: whole(counts.drafts),
        drafted: whole(counts.draft_tokens),
        accepted: whole(counts.accepted_tokens),
        accepted_per_position: counts.per_pos.iter().map(|value| whole(*value)).collect(),
    })
}

/// Scored samples captured since a time, newest first, and whether more wait for the teacher.
fn since_swap(
    store: &dyn SampleStore,
    since: u64,
    limit: usize,
) -> Result<(Vec<Sample>, bool), StoreError> {
    let mut samples = store.held_out(limit)?;
    samples.extend(store.unlearned(usize::MAX)?);
    // Ids grow with time, so the newest `limit` are all that can matter.
    let learned = store.learned_index()?;
    let newest: Vec<u64> =
        learned[learned.len().saturating_sub(limit)..].iter().map(|(id, _)| *id).collect();
    samples.extend(store.get(&newest)?);
    samples.retain(|sample| sample.captured_unix_ms >= since);
    samples.sort_by_key(|sample| std::cmp::Reverse(sample.id));
    samples.truncate(limit);
    let stats = store.stats()?;
    Ok((samples, stats.samples > stats.scored))
}
