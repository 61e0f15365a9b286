//! Settings of `da-build`.

use std::path::PathBuf;

use candle_core::DType;
use clap::Parser;

use crate::build::heal::Ridge;
use crate::build::plan::PlanFile;
use crate::build::search::CostModel;
use crate::build::teach::TeachSettings;
use crate::build::{BuildError, Init, Request, Settings, corpus};
use crate::distill::Loss;

mod commands;

pub use commands::{Command, EvalArgs};

/// Turns a model into a compact draft for speculative decoding.
#[derive(Debug, Parser)]
#[command(
    name = "da-build",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct BuildArgs {
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The target: a folder, a .gguf file, or owner/name on a hub, with @REVISION if wanted.
    #[arg(long, env = "DA_BUILD_MODEL", value_name = "SPEC", required = true)]
    pub model: Option<String>,
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
    /// Most stored parameters, as a share of the target's; what to shrink is found by trying.
    #[arg(long, value_name = "F")]
    pub target_size: Option<f64>,
    /// Most stored parameters, in millions; what to shrink is found by trying.
    #[arg(long, value_name = "MILLIONS")]
    pub target_params: Option<f64>,
    /// Longest decode step of the draft, as a share of the target's; what to shrink is found by
    /// trying.
    #[arg(long, value_name = "C")]
    pub latency_ratio: Option<f64>,
    /// What a layer costs a step besides its parameters, in millions of parameters read in the same
    /// time: about 100 on an H100, 0 on a CPU.
    #[arg(long, default_value_t = CostModel::default().layer / 1e6, value_name = "MILLIONS")]
    pub layer_cost: f64,
    /// Follow a plan: what --json printed, or a draft's da_manifest.json.
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["es", "ls", "mlp", "heads", "target_size", "target_params", "latency_ratio"]
    )]
    pub plan: Option<PathBuf>,
    /// Text to calibrate on: "builtin", or a file or folder. A .jsonl file holds prompts, chats or
    /// texts, every other file plain text.
    #[arg(long, default_value = "builtin", value_name = "PATH|builtin")]
    pub calibration: String,
    /// Tokens of text to slice and heal on, the target's answers included.
    #[arg(long, default_value_t = Settings::default().calibration_tokens, value_name = "N")]
    pub calibration_tokens: usize,
    /// Temperature that the target answers at.
    #[arg(long, default_value_t = Settings::default().temperature, value_name = "T")]
    pub temperature: f32,
    /// Pull of the readers' least squares towards plain slicing.
    #[arg(long, default_value_t = Ridge::default().readers, value_name = "F")]
    pub ridge_readers: f64,
    /// Pull of the writers' least squares towards plain slicing.
    #[arg(long, default_value_t = Ridge::default().writers, value_name = "F")]
    pub ridge_writers: f64,
    /// What the draft is before it is distilled.
    #[arg(long, default_value = "sliced", value_parser = ["sliced", "layers", "random"])]
    pub init: String,
    /// Distil the draft on the target's answers.
    #[arg(long)]
    pub distill: bool,
    /// Answer tokens to distil on.
    #[arg(long, default_value_t = TeachSettings::default().tokens, value_name = "N", requires = "distill")]
    pub tokens: usize,
    /// Prompts to distil on, as --calibration, which is the default.
    #[arg(long, value_name = "PATH|builtin", requires = "distill")]
    pub prompts: Option<String>,
    /// What the draft is pulled to: forward or reverse KL, total variation, Jensen-Shannon, or
    /// −log of the overlap.
    #[arg(
        long,
        default_value = "forward",
        value_parser = ["forward", "reverse", "tvd", "jsd", "lk"],
        requires = "distill"
    )]
    pub kl_mode: String,
    /// The target's tokens that are kept at each position; the rest is one bucket.
    #[arg(long, default_value_t = TeachSettings::default().top_k, value_name = "K", requires = "distill")]
    pub top_k: usize,
    /// Share of answers that the draft writes itself and the target scores.
    #[arg(long, default_value_t = 0.0, value_name = "F", requires = "distill")]
    pub on_policy: f64,
    /// Learn only where the draft lags behind one that is distilled first: AdaSPEC's choice.
    #[arg(long, value_parser = ["adaspec"], requires = "distill", value_name = "METHOD")]
    pub select: Option<String>,
    /// Share of positions that --select takes.
    #[arg(long, default_value_t = 0.4, value_name = "F", requires = "select")]
    pub select_share: f64,
    /// Train updates of this rank to the blocks' projections, and nothing else.
    #[arg(long, default_value_t = 0, value_name = "R", requires = "distill")]
    pub lora: usize,
    /// Step size at the start of distillation.
    #[arg(long, default_value_t = TeachSettings::default().learning_rate, value_name = "R", requires = "distill")]
    pub learning_rate: f64,
    /// Keep this many of the most used tokens, besides special ones and bytes. The draft gets a
    /// tokenizer of its own; vLLM serves it with use_heterogeneous_vocab.
    #[arg(long, value_name = "N")]
    pub vocab: Option<usize>,
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
    /// When a file that is named cannot be opened, or a value is out of range.
    pub fn settings(&self) -> Result<Settings, BuildError> {
        Ok(Settings {
            request: Request {
                embedding: self.es,
                layers: self.ls,
                mlp: self.mlp,
                heads: self.heads,
                target_size: self.target_size,
                target_params: self.target_params.map(|millions| (millions * 1e6) as usize),
                latency_ratio: self.latency_ratio,
            },
            cost: CostModel { layer: self.layer_cost.max(0.0) * 1e6 },
            plan: self.plan.as_deref().map(PlanFile::read).transpose()?,
            output: self.output.clone().unwrap_or_default(),
            calibration: source(&self.calibration)?,
            calibration_tokens: self.calibration_tokens,
            temperature: self.temperature,
            seed: self.seed,
            dtype: match self.dtype.as_str() {
                "f32" => DType::F32,
                "f16" => DType::F16,
                _ => DType::BF16,
            },
            ridge: Ridge { readers: self.ridge_readers, writers: self.ridge_writers },
            init: match self.init.as_str() {
                "layers" => Init::Layers,
                "random" => Init::Random,
                _ => Init::Sliced,
            },
            distill: if self.distill { Some(self.teach()?) } else { None },
            prompts: self.prompts.as_deref().map_or(Ok(None), source)?,
            vocab: self.vocab,
        })
    }

    fn teach(&self) -> Result<TeachSettings, BuildError> {
        if !(self.select_share > 0.0 && self.select_share <= 1.0) {
            return Err(BuildError::Request {
                flag: "--select-share",
                got: self.select_share.to_string(),
                expected: "a number above 0 and at most 1",
            });
        }
        if !(0.0..=1.0).contains(&self.on_policy) {
            return Err(BuildError::Request {
                flag: "--on-policy",
                got: self.on_policy.to_string(),
                expected: "a number from 0 to 1",
            });
        }
        for (flag, value) in [("--tokens", self.tokens), ("--top-k", self.top_k)] {
            if value == 0 {
                let expected = "at least 1";
                return Err(BuildError::Request { flag, got: value.to_string(), expected });
            }
        }
        Ok(TeachSettings {
            tokens: self.tokens,
            loss: match self.kl_mode.as_str() {
                "reverse" => Loss::ReverseKl,
                "tvd" => Loss::TotalVariation,
                "jsd" => Loss::JensenShannon,
                "lk" => Loss::LogAlpha,
                _ => Loss::ForwardKl,
            },
            top_k: self.top_k,
            temperature: self.temperature,
            on_policy: self.on_policy,
            select: self.select.as_ref().map(|_| self.select_share),
            lora_rank: self.lora,
            learning_rate: self.learning_rate,
            seed: self.seed,
            ..TeachSettings::default()
        })
    }
}

/// A source of prompts or texts; none for the built-in one.
fn source(spec: &str) -> Result<Option<PathBuf>, BuildError> {
    if spec == "builtin" {
        return Ok(None);
    }
    let path = PathBuf::from(spec);
    corpus::check(&path)?;
    Ok(Some(path))
}
