//! Settings of `da-build`.

use std::path::PathBuf;

use candle_core::DType;
use clap::Parser;

use crate::build::heal::Ridge;
use crate::build::pipeline::Settings;
use crate::build::{BuildError, Request, corpus};

/// Turns a model into a compact draft for speculative decoding.
#[derive(Debug, Parser)]
#[command(name = "da-build", version, about, long_about = None)]
pub struct BuildArgs {
    /// The target: a folder, a .gguf file, or owner/name on a hub, with @REVISION if wanted.
    #[arg(long, env = "DA_BUILD_MODEL", value_name = "SPEC")]
    pub model: String,
    /// Where the draft goes; must not exist.
    #[arg(long, env = "DA_BUILD_OUTPUT", value_name = "DIR", required_unless_present = "dry_run")]
    pub output: Option<PathBuf>,
    /// Hidden size of the draft, as a share of the target's.
    #[arg(long, value_name = "F")]
    pub es: Option<f64>,
    /// Layers of the draft, as a share of the target's.
    #[arg(long, value_name = "F")]
    pub ls: Option<f64>,
    /// MLP channels of the draft, as a share of the target's.
    #[arg(long, value_name = "F")]
    pub mlp: Option<f64>,
    /// Attention heads of the draft, in whole key-value groups, as a share of the target's.
    #[arg(long, value_name = "F")]
    pub heads: Option<f64>,
    /// Stored parameters, as a share of the target's; chooses what to shrink.
    #[arg(long, value_name = "F")]
    pub target_size: Option<f64>,
    /// Text to calibrate on: "builtin", a .jsonl of prompts, chats or texts, or plain text.
    #[arg(long, default_value = "builtin", value_name = "FILE|builtin")]
    pub calibration: String,
    /// Tokens of the target's own text to slice and heal on.
    #[arg(long, default_value_t = 12_000, value_name = "N")]
    pub calibration_tokens: usize,
    /// Pull of the readers' least squares towards plain slicing.
    #[arg(long, default_value_t = Ridge::default().readers, value_name = "F")]
    pub ridge_readers: f64,
    /// Pull of the writers' least squares towards plain slicing.
    #[arg(long, default_value_t = Ridge::default().writers, value_name = "F")]
    pub ridge_writers: f64,
    /// Precision of the exported weights.
    #[arg(long, default_value = "bf16", value_parser = ["f32", "f16", "bf16"])]
    pub dtype: String,
    /// Decides prompts and sampled answers.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to compute; this version builds on the CPU.
    #[arg(long, default_value = "cpu", value_parser = ["cpu"])]
    pub device: String,
    /// Print the plan and the sizes, and do nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the result as one JSON document on stdout; progress stays on stderr.
    #[arg(long)]
    pub json: bool,
}

impl BuildArgs {
    /// The settings of the pipeline.
    ///
    /// # Errors
    /// When the calibration file cannot be opened.
    pub fn settings(&self) -> Result<Settings, BuildError> {
        let calibration = (self.calibration != "builtin").then(|| PathBuf::from(&self.calibration));
        if let Some(path) = &calibration {
            corpus::check(path)?;
        }
        Ok(Settings {
            request: Request {
                embedding: self.es,
                layers: self.ls,
                mlp: self.mlp,
                heads: self.heads,
                target_size: self.target_size,
            },
            output: self.output.clone().unwrap_or_default(),
            calibration,
            calibration_tokens: self.calibration_tokens,
            seed: self.seed,
            dtype: match self.dtype.as_str() {
                "f32" => DType::F32,
                "f16" => DType::F16,
                _ => DType::BF16,
            },
            ridge: Ridge { readers: self.ridge_readers, writers: self.ridge_writers },
        })
    }
}
