//! The settings of `da-sidecar`.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{ConfigError, Layers, Loaded};
use crate::distill::trainer::TrainSettings;
use crate::sidecar::proxy::ADMIN_PATHS;

mod check;
mod keys;

pub use keys::{KEYS, reference};

/// Prefix of the environment variables.
pub const ENV_PREFIX: &str = "DA_";
/// Keys whose values are never printed.
pub const SECRET_KEYS: &[&str] = &["upstream.api_key"];

/// Everything that shapes a sidecar. Empty text means "not set"; [`KEYS`] documents each key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SidecarSettings {
    pub work_dir: PathBuf,
    pub draft: PathBuf,
    pub grace_seconds: f64,
    pub log: String,
    pub log_format: LogFormat,
    pub upstream: UpstreamSettings,
    pub proxy: ProxyKeys,
    pub admin: AdminKeys,
    pub control: ControlKeys,
    pub capture: CaptureKeys,
    pub store: StoreKeys,
    pub teacher: TeacherKeys,
    pub learn: LearnSettings,
    pub gate: GateSettings,
    pub publish: PublishSettings,
    pub watch: WatchSettings,
    pub trainer: TrainerKeys,
    pub train: TrainSettings,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

/// The server that is proxied, scored with and swapped.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamSettings {
    pub url: String,
    pub api_key: String,
    pub model: String,
    pub swap_timeout_seconds: f64,
    pub poll_seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProxyKeys {
    pub listen: String,
    pub deny: Vec<String>,
    pub connect_timeout_seconds: f64,
    pub max_request_bytes: usize,
    pub max_response_bytes: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminKeys {
    pub listen: String,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ControlKeys {
    pub listen: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CaptureKeys {
    pub enabled: bool,
    pub sample_rate: f64,
    pub held_out_every: u64,
    pub queue: usize,
    pub budget_bytes: usize,
    pub max_prompt_tokens: usize,
    pub min_output_tokens: usize,
    pub max_output_tokens: usize,
    pub default_temperature: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    Memory,
    Disk,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreKeys {
    pub kind: StoreKind,
    pub max_samples: u64,
    pub max_bytes: u64,
    pub ttl_seconds: u64,
}

/// Who says what the target thinks of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TeacherKind {
    Rescore,
    Live,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TeacherKeys {
    pub kind: TeacherKind,
    pub top_k: usize,
    pub window: usize,
    pub backlog: u64,
    pub yield_to_traffic: bool,
}

/// When a round begins and what it learns from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnSettings {
    pub enabled: bool,
    pub round_samples: usize,
    pub round_max_wait_seconds: f64,
    pub epochs: usize,
    pub rehearsal: f64,
    pub window_samples: usize,
    pub replay_fraction: f64,
    pub seed: u64,
}

/// What a candidate must reach.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GateSettings {
    pub samples: usize,
    pub min_positions: u64,
    pub min_gain: f64,
    pub max_domain_loss: f64,
    pub refusals_before_restart: u32,
}

/// Where versions go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SinkKind {
    Upstream,
    Folder,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PublishSettings {
    pub sink: SinkKind,
    pub keep_versions: usize,
    pub server_path: String,
}

/// When a published version is taken back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WatchSettings {
    pub rollback: bool,
    pub settle_seconds: f64,
    pub min_tokens: u64,
    pub min_drop: f64,
    pub z: f64,
    pub strict_z: f64,
    pub collapse_ratio: f64,
    pub compare_samples: usize,
    pub decide_within_seconds: f64,
}

/// The trainer child process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerKeys {
    pub nice: i32,
    pub memory_limit_bytes: u64,
    pub threads: usize,
    pub start_timeout_seconds: f64,
    pub restart_max_seconds: f64,
}

impl Default for SidecarSettings {
    fn default() -> Self {
        Self {
            work_dir: "da-work".into(),
            draft: PathBuf::new(),
            grace_seconds: 30.0,
            log: "info".into(),
            log_format: LogFormat::Text,
            upstream: UpstreamSettings::default(),
            proxy: ProxyKeys::default(),
            admin: AdminKeys::default(),
            control: ControlKeys::default(),
            capture: CaptureKeys::default(),
            store: StoreKeys::default(),
            teacher: TeacherKeys::default(),
            learn: LearnSettings::default(),
            gate: GateSettings::default(),
            publish: PublishSettings::default(),
            watch: WatchSettings::default(),
            trainer: TrainerKeys::default(),
            train: TrainSettings::default(),
        }
    }
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:8000".into(),
            api_key: String::new(),
            model: String::new(),
            swap_timeout_seconds: 120.0,
            poll_seconds: 2.0,
        }
    }
}

impl Default for ProxyKeys {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8080".into(),
            deny: ADMIN_PATHS.iter().map(|path| (*path).to_owned()).collect(),
            connect_timeout_seconds: 5.0,
            max_request_bytes: 1 << 20,
            max_response_bytes: 4 << 20,
        }
    }
}

impl Default for AdminKeys {
    fn default() -> Self {
        Self { listen: "127.0.0.1:9090".into() }
    }
}

impl Default for CaptureKeys {
    fn default() -> Self {
        Self {
            enabled: true,
            sample_rate: 1.0,
            held_out_every: 8,
            queue: 256,
            budget_bytes: 64 << 20,
            max_prompt_tokens: 4096,
            min_output_tokens: 2,
            max_output_tokens: 4096,
            default_temperature: 1.0,
        }
    }
}

impl Default for StoreKeys {
    fn default() -> Self {
        Self {
            kind: StoreKind::Memory,
            max_samples: 4000,
            max_bytes: 512 << 20,
            ttl_seconds: 86_400,
        }
    }
}

impl Default for TeacherKeys {
    fn default() -> Self {
        Self {
            kind: TeacherKind::Rescore,
            top_k: 20,
            window: 1024,
            backlog: 512,
            yield_to_traffic: true,
        }
    }
}

impl Default for LearnSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            round_samples: 32,
            round_max_wait_seconds: 120.0,
            epochs: 2,
            rehearsal: 1.0,
            window_samples: 200,
            replay_fraction: 0.2,
            seed: 0,
        }
    }
}

impl Default for GateSettings {
    fn default() -> Self {
        Self {
            samples: 64,
            min_positions: 100,
            min_gain: 0.0,
            max_domain_loss: 0.03,
            refusals_before_restart: 3,
        }
    }
}

impl Default for PublishSettings {
    fn default() -> Self {
        Self { sink: SinkKind::Upstream, keep_versions: 5, server_path: String::new() }
    }
}

impl Default for WatchSettings {
    fn default() -> Self {
        Self {
            rollback: true,
            settle_seconds: 2.0,
            min_tokens: 1000,
            min_drop: 0.05,
            z: 3.0,
            strict_z: 6.0,
            collapse_ratio: 0.5,
            compare_samples: 64,
            decide_within_seconds: 120.0,
        }
    }
}

impl Default for TrainerKeys {
    fn default() -> Self {
        Self {
            nice: 19,
            memory_limit_bytes: 0,
            threads: 0,
            start_timeout_seconds: 300.0,
            restart_max_seconds: 60.0,
        }
    }
}

/// Reads and checks the sidecar's settings.
///
/// # Errors
/// See [`ConfigError`]; values outside their range are refused too.
pub fn load(layers: &Layers) -> Result<Loaded<SidecarSettings>, ConfigError> {
    let loaded = super::load::<SidecarSettings>(layers)?;
    check::check(&loaded)?;
    Ok(loaded)
}

/// Seconds from a setting that [`load`] has checked.
pub fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value).unwrap_or(Duration::MAX)
}
