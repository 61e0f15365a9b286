//! Who scores samples: the upstream itself, or the log-probabilities that came with the answer.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::distill::teacher::{Teacher, TeacherError};
use crate::distill::{Sample, TopK};
use crate::metrics::VLLM_REQUESTS_WAITING;
use crate::vllm::{Client, ClientError};

/// How to have samples scored by the upstream.
#[derive(Debug, Clone)]
pub struct RescoreSettings {
    /// The target's name at the server.
    pub model: String,
    /// Candidates for each position; lowered to what the server allows.
    pub top_k: usize,
    /// Longest prompt and answer together, in tokens; the prompt is cut from the left. Servers do
    /// not plan for the memory that scoring takes, so long windows can bring them down.
    pub window: usize,
    /// Scheduling priority, higher waits longer; left out when the server refuses it.
    pub priority: Option<i64>,
    /// Holds back while the server has requests waiting.
    pub yield_to_traffic: bool,
    /// Failures in a row after which nothing is sent for `pause`.
    pub max_failures: u32,
    pub pause: Duration,
}

impl RescoreSettings {
    /// The defaults for a model.
    pub fn new(model: &str) -> Self {
        Self {
            model: model.into(),
            top_k: 20,
            window: 1024,
            priority: Some(1000),
            yield_to_traffic: true,
            max_failures: 3,
            pause: Duration::from_secs(30),
        }
    }
}

/// Scores by asking the upstream for `prompt_logprobs` of prompt and answer.
///
/// At most one request is under way at a time, whatever the number of callers.
pub struct RescoreTeacher {
    client: Client,
    settings: RescoreSettings,
    one_at_a_time: Semaphore,
    /// What the server allows, once a request was refused for asking more.
    top_k: AtomicUsize,
    without_priority: AtomicBool,
    failures: AtomicU32,
    paused_until: Mutex<Option<Instant>>,
}

impl RescoreTeacher {
    pub fn new(client: Client, settings: RescoreSettings) -> Self {
        let top_k = AtomicUsize::new(settings.top_k.max(1));
        Self {
            client,
            settings,
            one_at_a_time: Semaphore::new(1),
            top_k,
            without_priority: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            paused_until: Mutex::new(None),
        }
    }

    /// Candidates for each position that are asked for now.
    pub fn top_k(&self) -> usize {
        self.top_k.load(Ordering::Relaxed)
    }

    /// Whether nothing is sent because of failures in a row.
    pub fn is_paused(&self) -> bool {
        self.paused_until.lock().is_some_and(|until| Instant::now() < until)
    }

    /// The tokens to send, and how many of them are the prompt's.
    fn window(&self, sample: &Sample) -> Result<(Vec<u32>, usize), TeacherError> {
        let output = sample.output_ids.len();
        // The first output token needs at least one token in front of it.
        if output == 0 || sample.prompt_ids.is_empty() || output >= self.settings.window {
            let window = self.settings.window;
            return Err(TeacherError::Rejected(format!(
                "{output} output tokens after {} prompt tokens do not fit a window of {window}",
                sample.prompt_ids.len()
            )));
        }
        let prompt = sample.prompt_ids.len().min(self.settings.window - output);
        let cut = &sample.prompt_ids[sample.prompt_ids.len() - prompt..];
        Ok(([cut, &sample.output_ids].concat(), prompt))
    }

    async fn make_way(&self) -> Result<(), TeacherError> {
        if self.is_paused() {
            return Err(TeacherError::Unavailable("paused after failures in a row".into()));
        }
        if !self.settings.yield_to_traffic {
            return Ok(());
        }
        let metrics = self.client.metrics().await.map_err(|e| self.failed(e))?;
        match metrics.sum(VLLM_REQUESTS_WAITING) {
            Some(waiting) if waiting > 0.0 => {
                Err(TeacherError::Unavailable(format!("{waiting} requests of users are waiting")))
            }
            _ => Ok(()),
        }
    }

    /// Sends the request, asking for less where the server refuses what was asked.
    async fn ask(&self, ids: &[u32]) -> Result<Vec<Option<TopK>>, TeacherError> {
        loop {
            let top_k = self.top_k();
            let priority = self.priority();
            let answer =
                self.client.prompt_logprobs(&self.settings.model, ids, top_k, priority).await;
            let error = match answer {
                Ok(rows) => {
                    self.failures.store(0, Ordering::Relaxed);
                    let rows = rows
                        .into_iter()
                        .map(|row| row.map(|row| TopK { ids: row.ids, logprobs: row.logprobs }));
                    return Ok(rows.collect());
                }
                Err(error) => error,
            };
            if let ClientError::Refused { status: 400, detail, .. } = &error {
                if let Some(allowed) = allowed_top_k(detail, top_k) {
                    self.top_k.store(allowed, Ordering::Relaxed);
                    info!(
                        asked = top_k,
                        allowed,
                        "server limits log-probabilities; raise its --max-logprobs for more"
                    );
                    continue;
                }
                if priority.is_some() && detail.to_lowercase().contains("priority") {
                    self.without_priority.store(true, Ordering::Relaxed);
                    info!("server schedules first come, first served; scoring without a priority");
                    continue;
                }
            }
            return Err(self.failed(error));
        }
    }

    fn priority(&self) -> Option<i64> {
        self.settings.priority.filter(|_| !self.without_priority.load(Ordering::Relaxed))
    }

    /// Counts a failure that is the server's, and says what it means for the sample.
    fn failed(&self, error: ClientError) -> TeacherError {
        match error {
            ClientError::Unavailable { .. } => {
                let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
                if failures >= self.settings.max_failures {
                    self.failures.store(0, Ordering::Relaxed);
                    *self.paused_until.lock() = Some(Instant::now() + self.settings.pause);
                    warn!(failures, "scoring pauses after failures in a row");
                }
                TeacherError::Unavailable(error.to_string())
            }
            // A key that is wrong now may be right after a restart; no sample is to blame.
            ClientError::Refused { status: 401 | 403 | 404, .. } | ClientError::BadUrl { .. } => {
                TeacherError::Unavailable(error.to_string())
            }
            ClientError::Refused { .. } | ClientError::Unexpected { .. } => {
                TeacherError::Rejected(error.to_string())
            }
        }
    }
}

impl Teacher for RescoreTeacher {
    async fn score(&self, sample: &Sample) -> Result<Vec<TopK>, TeacherError> {
        let (ids, prompt) = self.window(sample)?;
        let closed = |_| TeacherError::Unavailable("shutting down".into());
        let _turn = self.one_at_a_time.acquire().await.map_err(closed)?;
        self.make_way().await?;
        let rows = self.ask(&ids).await?;
        // The client has checked that there is a row for each id that was sent, bar the first.
        rows.into_iter().skip(prompt).collect::<Option<Vec<_>>>().ok_or_else(|| {
            TeacherError::Rejected("an output position has no log-probabilities".into())
        })
    }
}

/// The limit in a refusal such as "Requested prompt logprobs of 64, which is greater than max
/// allowed: 20"; half of what was asked where the message is about log-probabilities but names
/// none.
fn allowed_top_k(detail: &str, asked: usize) -> Option<usize> {
    let detail = detail.to_lowercase();
    if !detail.contains("logprobs") || asked <= 1 {
        return None;
    }
    let mut numbers = detail.rsplit(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    let named = numbers.find(|n: &usize| *n < asked && *n > 0);
    Some(named.unwrap_or(asked / 2))
}

/// For samples that were captured with the server's live log-probabilities.
pub struct LiveTeacher;

impl Teacher for LiveTeacher {
    async fn score(&self, sample: &Sample) -> Result<Vec<TopK>, TeacherError> {
        if sample.is_scored() {
            return Ok(sample.teacher.clone());
        }
        Err(TeacherError::Rejected(
            "it came without log-probabilities\nhint: clients have to ask for them, or choose re-scoring"
                .into(),
        ))
    }
}
