//! The engine's counters under vLLM's names, so that whoever reads vLLM reads this.

use std::time::{Duration, Instant};

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder, exponential_buckets,
};

use crate::metrics as names;

/// Every metric of one engine, labelled with the model's served name.
pub struct EngineMetrics {
    registry: Registry,
    drafts: IntCounter,
    draft_tokens: IntCounter,
    accepted_tokens: IntCounter,
    accepted_per_position: IntCounterVec,
    running: IntGauge,
    waiting: IntGauge,
    cache_usage: Gauge,
    prompt_tokens: IntCounter,
    generation_tokens: IntCounter,
    success: IntCounterVec,
    queue_time: Histogram,
    first_token: Histogram,
    inter_token: Histogram,
    end_to_end: Histogram,
    iteration_tokens: Histogram,
}

/// How a request ended, as the label `finished_reason` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Stop,
    Length,
    Abort,
    Error,
}

impl Ended {
    const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// Registers while it builds, so that no metric is forgotten.
struct Builder<'a> {
    registry: Registry,
    model_name: &'a str,
}

impl Builder<'_> {
    fn add<M: Collector + Clone + 'static>(
        &self,
        metric: Result<M, prometheus::Error>,
    ) -> Result<M, prometheus::Error> {
        let metric = metric?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn options(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model_name).const_label("engine", "0")
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
        self.add(IntCounter::with_opts(self.options(name, help)))
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
        self.add(IntGauge::with_opts(self.options(name, help)))
    }

    fn vector(
        &self,
        name: &str,
        help: &str,
        label: &str,
    ) -> Result<IntCounterVec, prometheus::Error> {
        self.add(IntCounterVec::new(self.options(name, help), &[label]))
    }

    fn histogram(
        &self,
        name: &str,
        help: &str,
        buckets: Vec<f64>,
    ) -> Result<Histogram, prometheus::Error> {
        let common_opts = self.options(name, help);
        self.add(Histogram::with_opts(HistogramOpts { common_opts, buckets }))
    }
}

impl EngineMetrics {
    /// Draft positions that are exported from the start, before anything was accepted there.
    const POSITIONS: usize = 8;

    /// Makes and registers every metric.
    ///
    /// # Errors
    /// When the model's name cannot be a label.
    pub fn new(model_name: &str) -> Result<Self, prometheus::Error> {
        let b = Builder { registry: Registry::new(), model_name };
        // 1 ms to 131 s by doublings: from one decode step of a small model to a long answer.
        let seconds = || exponential_buckets(0.001, 2.0, 18);
        let this = Self {
            drafts: b.counter(
                names::VLLM_NUM_DRAFTS,
                "Verifications that had drafted tokens; mean accepted length is 1 + accepted / drafts.",
            )?,
            draft_tokens: b.counter(
                names::VLLM_NUM_DRAFT_TOKENS,
                "Drafted tokens; acceptance rate is accepted / drafted.",
            )?,
            accepted_tokens: b.counter(
                names::VLLM_NUM_ACCEPTED_TOKENS,
                "Drafted tokens that the target accepted, its own token not counted.",
            )?,
            accepted_per_position: b.vector(
                names::VLLM_ACCEPTED_PER_POS,
                "Accepted tokens by position in the draft.",
                "position",
            )?,
            running: b.gauge(names::VLLM_REQUESTS_RUNNING, "Sequences that run.")?,
            waiting: b.gauge(names::VLLM_REQUESTS_WAITING, "Sequences that wait.")?,
            cache_usage: b.add(Gauge::with_opts(b.options(
                names::VLLM_KV_CACHE_USAGE,
                "Share of the cache's capacity that is in use, 0 to 1.",
            )))?,
            prompt_tokens: b.counter(names::VLLM_PROMPT_TOKENS, "Prompt tokens admitted.")?,
            generation_tokens: b.counter(names::VLLM_GENERATION_TOKENS, "Tokens generated.")?,
            success: b.vector(
                names::VLLM_REQUEST_SUCCESS,
                "Sequences that ended, by reason.",
                "finished_reason",
            )?,
            queue_time: b.histogram(
                names::VLLM_REQUEST_QUEUE_TIME,
                "Time from arrival to admission.",
                seconds()?,
            )?,
            first_token: b.histogram(
                names::VLLM_TIME_TO_FIRST_TOKEN,
                "Time from arrival to the first token.",
                seconds()?,
            )?,
            inter_token: b.histogram(
                names::VLLM_INTER_TOKEN_LATENCY,
                "Time between two deliveries of tokens; one delivery may hold several.",
                seconds()?,
            )?,
            end_to_end: b.histogram(
                names::VLLM_E2E_LATENCY,
                "Time from arrival to the end of a sequence that was not aborted.",
                seconds()?,
            )?,
            iteration_tokens: b.histogram(
                names::VLLM_ITERATION_TOKENS,
                "Rows of each forward of the target.",
                exponential_buckets(1.0, 2.0, 13)?,
            )?,
            registry: b.registry,
        };
        for position in 0..Self::POSITIONS {
            this.accepted_per_position.with_label_values(&[position.to_string()]);
        }
        for ended in Ended::ALL {
            this.success.with_label_values(&[ended.label()]);
        }
        Ok(this)
    }

    /// The text form of every metric.
    ///
    /// # Errors
    /// When a metric cannot be encoded.
    pub fn encode(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(text)
    }

    /// A sequence ended.
    pub fn ended(&self, ended: Ended, arrived: Instant) {
        self.success.with_label_values(&[ended.label()]).inc();
        if matches!(ended, Ended::Stop | Ended::Length) {
            self.end_to_end.observe(arrived.elapsed().as_secs_f64());
        }
    }

    pub(super) fn admitted(&self, prompt_tokens: usize, waited: Duration) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.queue_time.observe(waited.as_secs_f64());
    }

    pub(super) fn forward(&self, rows: usize) {
        self.iteration_tokens.observe(rows as f64);
    }

    pub(super) fn verified(&self, drafted: usize, accepted: usize) {
        self.drafts.inc();
        self.draft_tokens.inc_by(drafted as u64);
        self.accepted_tokens.inc_by(accepted as u64);
        for position in 0..accepted {
            self.accepted_per_position.with_label_values(&[position.to_string()]).inc();
        }
    }

    /// `count` tokens of one sequence were delivered at `now`.
    pub(super) fn tokens(
        &self,
        count: usize,
        arrived: Instant,
        previous: Option<Instant>,
        now: Instant,
    ) {
        self.generation_tokens.inc_by(count as u64);
        match previous {
            None => self.first_token.observe((now - arrived).as_secs_f64()),
            Some(previous) => self.inter_token.observe((now - previous).as_secs_f64()),
        }
    }

    pub(super) fn load(&self, running: usize, waiting: usize, cache_usage: f64) {
        self.running.set(running as i64);
        self.waiting.set(waiting as i64);
        self.cache_usage.set(cache_usage);
    }
}
