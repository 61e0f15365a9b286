//! Settings of `da-serve`: flags over `DA_SERVE_*` variables over defaults.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

use crate::speculate::DraftSampleMethod;

/// Serves a model over vLLM's API, with speculative decoding.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "da-serve", version, about)]
pub struct ServeConfig {
    /// The target: a folder, a .gguf file, or a hub repository (owner/name, optional @revision).
    #[arg(long, env = "DA_SERVE_MODEL", value_name = "SPEC")]
    pub model: String,

    /// Folder of the draft to start with; without one, decoding is plain.
    #[arg(long, env = "DA_SERVE_DRAFT", value_name = "DIR")]
    pub draft: Option<PathBuf>,

    /// Address to listen on.
    #[arg(long, env = "DA_SERVE_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port to listen on; 0 takes a free one. The address is printed.
    #[arg(long, env = "DA_SERVE_PORT", default_value_t = 8000)]
    pub port: u16,

    /// Tokens to draft in each step, or "auto": whatever pays at the live acceptance and the
    /// costs measured at start-up. 0 turns speculation off.
    #[arg(
        long,
        env = "DA_SERVE_NUM_SPECULATIVE_TOKENS",
        default_value = "auto",
        value_name = "N|auto"
    )]
    pub num_speculative_tokens: NumSpeculativeTokens,

    /// How the draft chooses its tokens for requests with a temperature.
    #[arg(long, env = "DA_SERVE_DRAFT_SAMPLE_METHOD", value_enum, default_value = "greedy")]
    pub draft_sample_method: DraftSampleMethod,

    /// Folder that drafts may be swapped in from; the startup draft's parent if not given.
    #[arg(long, env = "DA_SERVE_DRAFT_ROOT", value_name = "DIR")]
    pub draft_root: Option<PathBuf>,

    /// Sequences that run at the same time; further ones wait.
    #[arg(long, env = "DA_SERVE_MAX_NUM_SEQS", default_value_t = 8, value_parser = at_least_one)]
    pub max_num_seqs: usize,

    /// Longest sequence, prompt and output together; the model's own limit, at most 4096, if not
    /// given.
    #[arg(long, env = "DA_SERVE_MAX_MODEL_LEN", value_parser = at_least_two)]
    pub max_model_len: Option<usize>,

    /// Requests that may wait before further ones are turned away with 503.
    #[arg(long, env = "DA_SERVE_MAX_QUEUED", default_value_t = 1024)]
    pub max_queued: usize,

    /// Prompt tokens read in one step when nothing else runs; a quarter of it otherwise.
    #[arg(long, env = "DA_SERVE_PREFILL_CHUNK", default_value_t = 256, value_parser = at_least_one)]
    pub prefill_chunk: usize,

    /// Largest share of the time that scoring requests (prompt_logprobs) take while others run.
    #[arg(long, env = "DA_SERVE_SCORING_SHARE", default_value_t = 0.3, value_parser = share)]
    pub scoring_share: f64,

    /// Name of the model in the API; the target as given if not set.
    #[arg(long, env = "DA_SERVE_SERVED_MODEL_NAME", value_name = "NAME")]
    pub served_model_name: Option<String>,

    /// Most log-probabilities that a request may ask for at one position.
    #[arg(long, env = "DA_SERVE_MAX_LOGPROBS", default_value_t = 20)]
    pub max_logprobs: usize,

    /// Key that requests to /v1 must bear.
    #[arg(long, env = "DA_SERVE_API_KEY", hide_env_values = true, value_name = "KEY")]
    pub api_key: Option<String>,

    /// Seeds sampling for requests without a seed of their own.
    #[arg(long, env = "DA_SERVE_SEED", default_value_t = 0)]
    pub seed: u64,

    /// Threads for computation; all cores if not given.
    #[arg(long, env = "DA_SERVE_THREADS", value_parser = at_least_one)]
    pub threads: Option<usize>,

    /// Whether answers with one choice carry what speculation did for them.
    #[arg(
        long,
        env = "DA_SERVE_PER_REQUEST_SPEC_DECODE_METRICS",
        value_enum,
        default_value = "off"
    )]
    pub per_request_spec_decode_metrics: RequestMetrics,

    /// Seconds that running requests have to finish after SIGTERM or SIGINT.
    #[arg(long, env = "DA_SERVE_GRACE_SECONDS", default_value_t = 30)]
    pub grace_seconds: u64,
}

/// A draft length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NumSpeculativeTokens {
    Auto,
    Fixed(usize),
}

impl NumSpeculativeTokens {
    /// Longer drafts never pay on any hardware, and a typing error should not allocate for them.
    const MOST: usize = 32;
}

impl FromStr for NumSpeculativeTokens {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(k) if k <= Self::MOST => Ok(Self::Fixed(k)),
            _ => Err(format!("expected \"auto\" or a number from 0 to {}", Self::MOST)),
        }
    }
}

/// What an answer tells of its own speculation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RequestMetrics {
    Off,
    Summary,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    at_least(text, 1)
}

fn at_least_two(text: &str) -> Result<usize, String> {
    at_least(text, 2)
}

fn at_least(text: &str, least: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(value) if value >= least => Ok(value),
        _ => Err(format!("expected a number of at least {least}")),
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("expected a number above 0 and at most 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<ServeConfig, clap::Error> {
        ServeConfig::try_parse_from([&["da-serve", "--model", "m"], arguments].concat())
    }

    #[test]
    fn defaults_are_those_of_the_documentation() {
        let config = parse(&[]).unwrap();
        assert_eq!(config.num_speculative_tokens, NumSpeculativeTokens::Auto);
        assert_eq!((config.max_num_seqs, config.max_logprobs, config.port), (8, 20, 8000));
        assert_eq!(config.draft_sample_method, DraftSampleMethod::Greedy);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (flag, value) in [
            ("--num-speculative-tokens", "-1"),
            ("--num-speculative-tokens", "33"),
            ("--num-speculative-tokens", "many"),
            ("--max-num-seqs", "0"),
            ("--max-model-len", "1"),
            ("--scoring-share", "0"),
            ("--port", "70000"),
            ("--host", "nowhere"),
            ("--draft-sample-method", "random"),
        ] {
            let error = parse(&[&format!("{flag}={value}")]).unwrap_err().to_string();
            assert!(error.contains(flag) && error.contains(value), "{error}");
        }
        assert!(parse(&["--unknown", "1"]).is_err());
    }

    #[test]
    fn a_fixed_length_is_a_number() {
        let config = parse(&["--num-speculative-tokens", "0"]).unwrap();
        assert_eq!(config.num_speculative_tokens, NumSpeculativeTokens::Fixed(0));
    }
}
