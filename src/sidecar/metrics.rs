//! The sidecar's metrics: one registry, filled by every task.

use prometheus::core::Collector;
use prometheus::{
    Counter, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec,
    IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

use serde_json::{Map, Value, json};

use super::capture::CaptureObserver;
use super::proxy::ProxyObserver;
use super::versions::LiveCounters;
use crate::metrics as names;

/// A swap that nobody notices takes milliseconds; one of seconds is a fault.
const STALL_BUCKETS: &[f64] = &[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0];
/// The proxy's own share is well below a millisecond; the upper buckets show a starved machine.
const OVERHEAD_BUCKETS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// Every metric of the sidecar. Cheap to share; all methods are lock-free or nearly so.
pub struct Metrics {
    registry: Registry,
    acceptance_rate: GaugeVec,
    mean_accepted_length: GaugeVec,
    pub acceptance_data: IntGauge,
    drafted_tokens: IntCounterVec,
    accepted_tokens: IntCounterVec,
    pub training_steps: IntCounter,
    pub training_skipped_steps: IntCounter,
    pub training_loss: Gauge,
    pub training_tokens: IntCounter,
    pub training_seconds: Counter,
    pub training_rounds: IntCounterVec,
    pub trainer_up: IntGauge,
    pub trainer_restarts: IntCounter,
    pub params_without_grad: IntGauge,
    pub gate_score: GaugeVec,
    pub gate_verdicts: IntCounterVec,
    pub swaps: IntCounter,
    pub swap_failures: IntCounter,
    pub swap_stall: Histogram,
    pub rollbacks: IntCounterVec,
    pub drifts: IntCounter,
    pub paused: IntGauge,
    pub samples_captured: IntCounter,
    pub samples_dropped: IntCounterVec,
    pub samples_opted_out: IntCounter,
    pub samples_scored: IntCounter,
    pub store_samples: IntGauge,
    pub store_bytes: IntGauge,
    pub proxy_overhead: Histogram,
    pub proxy_requests: IntCounterVec,
    pub proxy_in_flight: IntGauge,
    pub proxy_upstream_errors: IntCounter,
    draft_version: IntGaugeVec,
    pub upstream_up: IntGauge,
}

impl Metrics {
    pub fn new() -> Self {
        let registry = Registry::new();
        let made = Made(&registry);
        let build_info = made.int_gauges(names::BUILD_INFO, "Build of this sidecar.", &["version"]);
        build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Self {
            acceptance_rate: made.gauges(
                names::ACCEPTANCE_RATE,
                "Accepted tokens over drafted tokens while the version ran; the bonus token is not counted.",
                &["version"],
            ),
            mean_accepted_length: made.gauges(
                names::MEAN_ACCEPTED_LENGTH,
                "1 + accepted tokens over verification steps while the version ran: the bonus token is counted.",
                &["version"],
            ),
            acceptance_data: made.int_gauge(
                names::ACCEPTANCE_DATA,
                "1 when the upstream has drafted anything since the running version was swapped in.",
            ),
            drafted_tokens: made.counters(names::DRAFTED_TOKENS, "Tokens drafted by the version.", &["version"]),
            accepted_tokens: made.counters(names::ACCEPTED_TOKENS, "Tokens of the version that the target accepted.", &["version"]),
            training_steps: made.counter(names::TRAINING_STEPS, "Optimizer steps."),
            training_skipped_steps: made.counter(
                names::TRAINING_SKIPPED_STEPS,
                "Optimizer steps dropped because loss or gradient was not finite.",
            ),
            training_loss: made.gauge(names::TRAINING_LOSS, "Loss of the last optimizer step."),
            training_tokens: made.counter(names::TRAINING_TOKENS, "Output tokens learned from, each pass counted."),
            training_seconds: made.float_counter(names::TRAINING_SECONDS, "Time spent in optimizer steps."),
            training_rounds: made.counters(names::TRAINING_ROUNDS, "Rounds of training, by outcome.", &["outcome"]),
            trainer_up: made.int_gauge(names::TRAINER_UP, "1 while the trainer process answers."),
            trainer_restarts: made.counter(names::TRAINER_RESTARTS, "Times the trainer process was started again."),
            params_without_grad: made.int_gauge(
                names::PARAMS_WITHOUT_GRAD,
                "Trainable tensors that the start-up check found without a gradient.",
            ),
            gate_score: made.gauges(
                names::GATE_SCORE,
                "Held-out acceptance at the last gate, of the running draft (before) and the candidate (after).",
                &["side"],
            ),
            gate_verdicts: made.counters(names::GATE_VERDICTS, "Gate decisions.", &["verdict"]),
            swaps: made.counter(names::SWAPS, "Times the upstream took another draft."),
            swap_failures: made.counter(names::SWAP_FAILURES, "Swaps that failed or could not be verified."),
            swap_stall: made.histogram(
                names::SWAP_STALL,
                "How long requests stood still during a swap.",
                STALL_BUCKETS,
            ),
            rollbacks: made.counters(names::ROLLBACKS, "Versions taken back.", &["cause"]),
            drifts: made.counter(names::DRIFTS, "Drops of live acceptance explained by changed traffic."),
            paused: made.int_gauge(names::PAUSED, "1 while an operator has paused learning."),
            samples_captured: made.counter(names::SAMPLES_CAPTURED, "Samples taken into the store."),
            samples_dropped: made.counters(names::SAMPLES_DROPPED, "Exchanges and samples lost.", &["reason"]),
            samples_opted_out: made.counter(names::SAMPLES_OPTED_OUT, "Requests that asked not to be learned from."),
            samples_scored: made.counter(names::SAMPLES_SCORED, "Samples scored by the teacher."),
            store_samples: made.int_gauge(names::STORE_SAMPLES, "Samples in the store."),
            store_bytes: made.int_gauge(names::STORE_BYTES, "Size of the samples in the store."),
            proxy_overhead: made.histogram(
                names::PROXY_OVERHEAD,
                "Time from a request's arrival to the response's head, less the upstream's share.",
                OVERHEAD_BUCKETS,
            ),
            proxy_requests: made.counters(names::PROXY_REQUESTS, "Proxied requests by status class.", &["class"]),
            proxy_in_flight: made.int_gauge(names::PROXY_IN_FLIGHT, "Proxied requests that have not ended."),
            proxy_upstream_errors: made.counter(
                names::PROXY_UPSTREAM_ERRORS,
                "Requests for which the upstream could not be reached.",
            ),
            draft_version: made.int_gauges(names::DRAFT_VERSION, "1 for the version that serves.", &["version"]),
            upstream_up: made.int_gauge(names::UPSTREAM_UP, "1 while the upstream answers."),
            registry,
        }
    }

    /// The Prometheus text format.
    pub fn render(&self) -> String {
        let mut buffer = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut buffer) {
            tracing::error!(%error, "cannot write the metrics");
        }
        String::from_utf8_lossy(&buffer).into_owned()
    }

    /// The counters of this process for the status document.
    pub fn counts(&self) -> Value {
        json!({
            "captured": self.samples_captured.get(),
            "opted_out": self.samples_opted_out.get(),
            "scored": self.samples_scored.get(),
            "dropped": by_label(&self.samples_dropped),
            "gate": by_label(&self.gate_verdicts),
            "rounds": by_label(&self.training_rounds),
            "swaps": self.swaps.get(),
            "swap_failures": self.swap_failures.get(),
            "rollbacks": by_label(&self.rollbacks).values().filter_map(Value::as_u64).sum::<u64>(),
            "drifts": self.drifts.get(),
            "requests": by_label(&self.proxy_requests),
            "upstream_errors": self.proxy_upstream_errors.get(),
        })
    }

    /// Adds one window of the upstream's counters to a version.
    pub fn add_live(&self, version: &str, window: &LiveCounters) {
        self.drafted_tokens.with_label_values(&[version]).inc_by(window.drafted);
        self.accepted_tokens.with_label_values(&[version]).inc_by(window.accepted);
    }

    /// Exports what a version has reached so far; nothing where it has not drafted yet, because
    /// 0/0 is neither 0 nor a number.
    pub fn set_live(&self, version: &str, total: &LiveCounters) {
        if let Some(rate) = total.acceptance_rate() {
            self.acceptance_rate.with_label_values(&[version]).set(rate);
        }
        if let Some(length) = total.mean_accepted_length() {
            self.mean_accepted_length.with_label_values(&[version]).set(length);
        }
    }

    /// Names the version that serves; none while that is not known.
    pub fn set_serving(&self, version: Option<&str>) {
        self.draft_version.reset();
        if let Some(version) = version {
            self.draft_version.with_label_values(&[version]).set(1);
        }
    }

    /// Drops the series of a version that retention has deleted, so that their number is bounded.
    pub fn forget(&self, version: &str) {
        // A version that never served has no series; that is not an error.
        self.acceptance_rate.remove_label_values(&[version]).ok();
        self.mean_accepted_length.remove_label_values(&[version]).ok();
        self.drafted_tokens.remove_label_values(&[version]).ok();
        self.accepted_tokens.remove_label_values(&[version]).ok();
    }
}

fn by_label(counters: &IntCounterVec) -> Map<String, Value> {
    let families = counters.collect();
    let metrics = families.iter().flat_map(|family| family.get_metric());
    metrics
        .map(|metric| {
            let label = metric.get_label().first().map_or("", |label| label.value());
            (label.to_owned(), json!(metric.get_counter().get_value() as u64))
        })
        .collect()
}

impl ProxyObserver for Metrics {
    fn started(&self) {
        self.proxy_in_flight.inc();
    }

    fn finished(&self, status: u16, overhead_seconds: f64) {
        self.proxy_in_flight.dec();
        let class = match status {
            0..200 => "1xx",
            200..300 => "2xx",
            300..400 => "3xx",
            400..500 => "4xx",
            _ => "5xx",
        };
        self.proxy_requests.with_label_values(&[class]).inc();
        self.proxy_overhead.observe(overhead_seconds);
    }

    fn upstream_error(&self) {
        self.proxy_upstream_errors.inc();
    }
}

impl CaptureObserver for Metrics {
    /// The domain comes from the client and must not become a label.
    fn captured(&self, _domain: &str) {
        self.samples_captured.inc();
    }

    fn dropped(&self, reason: &'static str) {
        self.samples_dropped.with_label_values(&[reason]).inc();
    }

    fn opted_out(&self) {
        self.samples_opted_out.inc();
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes and registers metrics. Names and labels are constants of this crate and each is used
/// once, which a test checks, so neither step can fail.
struct Made<'a>(&'a Registry);

const VALID: &str = "metric names are valid and registered once";

impl Made<'_> {
    fn register<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let metric = made.expect(VALID);
        self.0.register(Box::new(metric.clone())).expect(VALID);
        metric
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::new(name, help))
    }

    fn float_counter(&self, name: &str, help: &str) -> Counter {
        self.register(Counter::new(name, help))
    }

    fn gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::new(name, help))
    }

    fn int_gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::new(name, help))
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.register(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.register(GaugeVec::new(Opts::new(name, help), labels))
    }

    fn int_gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.register(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
        self.register(Histogram::with_opts(options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_without_drafts_exports_no_rate() {
        let metrics = Metrics::new();
        metrics.set_live("v000001", &LiveCounters::default());
        assert!(!metrics.render().contains("da_acceptance_rate{"));
        let live = LiveCounters { drafts: 10, drafted: 40, accepted: 10, ..Default::default() };
        metrics.set_live("v000001", &live);
        let text = metrics.render();
        assert!(text.contains("da_acceptance_rate{version=\"v000001\"} 0.25"), "{text}");
        assert!(text.contains("da_mean_accepted_length{version=\"v000001\"} 2"), "{text}");
        metrics.forget("v000001");
        assert!(!metrics.render().contains("v000001"));
    }

    #[test]
    fn only_one_version_serves() {
        let metrics = Metrics::new();
        metrics.set_serving(Some("v000001"));
        metrics.set_serving(Some("v000002"));
        let text = metrics.render();
        assert!(text.contains("da_draft_version{version=\"v000002\"} 1"), "{text}");
        assert!(!text.contains("v000001"), "{text}");
    }
}
