//! What types cannot say of the settings: ranges, addresses, and what goes together.

use std::net::SocketAddr;

use super::SidecarSettings;
use crate::config::{ConfigError, Loaded};

/// Refuses values outside their range, by the key's name.
pub(super) fn check(loaded: &Loaded<SidecarSettings>) -> Result<(), ConfigError> {
    let settings = &loaded.settings;
    for (key, address) in [
        ("proxy.listen", &settings.proxy.listen),
        ("admin.listen", &settings.admin.listen),
        ("control.listen", &settings.control.listen),
    ] {
        let unset = key == "control.listen" && address.is_empty();
        if !unset && address.parse::<SocketAddr>().is_err() {
            return Err(loaded.invalid(key, "expected ADDRESS:PORT, for example 127.0.0.1:8080"));
        }
    }
    let parsed: Result<http::Uri, _> = settings.upstream.url.parse();
    if !parsed.is_ok_and(|uri| uri.host().is_some() && uri.scheme_str() == Some("http")) {
        // The proxy speaks plain HTTP to the server beside it.
        return Err(loaded.invalid("upstream.url", "expected http://HOST:PORT"));
    }
    if settings.proxy.deny.iter().any(|path| !path.starts_with('/')) {
        return Err(loaded.invalid("proxy.deny", "expected paths that start with /"));
    }
    if settings.work_dir.as_os_str().is_empty() {
        return Err(loaded.invalid("work_dir", "expected a folder"));
    }
    let fractions = [
        ("capture.sample_rate", settings.capture.sample_rate, 1.0),
        ("learn.replay_fraction", settings.learn.replay_fraction, 0.9),
        ("gate.min_gain", settings.gate.min_gain, 1.0),
        ("gate.max_domain_loss", settings.gate.max_domain_loss, 1.0),
        ("watch.min_drop", settings.watch.min_drop, 1.0),
        ("watch.collapse_ratio", settings.watch.collapse_ratio, 1.0),
        ("learn.rehearsal", settings.learn.rehearsal, 100.0),
        ("capture.default_temperature", settings.capture.default_temperature, 100.0),
    ];
    for (key, value, most) in fractions {
        if !(0.0..=most).contains(&value) {
            return Err(loaded.invalid(key, format!("expected a number from 0 to {most}")));
        }
    }
    let seconds = [
        ("grace_seconds", settings.grace_seconds),
        ("upstream.swap_timeout_seconds", settings.upstream.swap_timeout_seconds),
        ("upstream.poll_seconds", settings.upstream.poll_seconds),
        ("proxy.connect_timeout_seconds", settings.proxy.connect_timeout_seconds),
        ("learn.round_max_wait_seconds", settings.learn.round_max_wait_seconds),
        ("watch.settle_seconds", settings.watch.settle_seconds),
        ("watch.decide_within_seconds", settings.watch.decide_within_seconds),
        ("trainer.start_timeout_seconds", settings.trainer.start_timeout_seconds),
        ("trainer.restart_max_seconds", settings.trainer.restart_max_seconds),
    ];
    for (key, value) in seconds {
        if !(0.0..=1e9).contains(&value) {
            return Err(loaded.invalid(key, "expected a number of seconds, 0 or more"));
        }
    }
    let above_zero = [
        ("learn.round_samples", settings.learn.round_samples as f64),
        ("learn.epochs", settings.learn.epochs as f64),
        ("gate.samples", settings.gate.samples as f64),
        ("publish.keep_versions", settings.publish.keep_versions as f64),
        ("store.max_samples", settings.store.max_samples as f64),
        ("store.max_bytes", settings.store.max_bytes as f64),
        ("capture.queue", settings.capture.queue as f64),
        ("teacher.top_k", settings.teacher.top_k as f64),
        ("teacher.window", settings.teacher.window as f64),
        ("teacher.backlog", settings.teacher.backlog as f64),
        ("train.batch", settings.train.batch as f64),
        ("train.window", settings.train.window as f64),
        ("watch.z", settings.watch.z),
        ("watch.strict_z", settings.watch.strict_z),
        ("upstream.poll_seconds", settings.upstream.poll_seconds),
        ("train.learning_rate", settings.train.learning_rate),
    ];
    for (key, value) in above_zero {
        if value.is_nan() || value <= 0.0 {
            return Err(loaded.invalid(key, "expected more than 0"));
        }
    }
    Ok(())
}
