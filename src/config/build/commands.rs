//! What da-build does besides building.

use std::path::PathBuf;

use clap::Subcommand;
use clap_complete::Shell;

use crate::build::examine::ExamineSettings;
use crate::build::search::CostModel;
use crate::build::{BuildError, corpus};

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Says what a model is, what it would become, and whether a draft fits it and the server.
    Inspect {
        /// The target: a folder, a .gguf file, or owner/name on a hub.
        #[arg(value_name = "MODEL")]
        model: String,
        /// A draft to hold against it.
        #[arg(value_name = "DRAFT")]
        draft: Option<String>,
        /// Print one JSON document.
        #[arg(long)]
        json: bool,
    },
    /// Checks that a draft folder is whole, unchanged and usable.
    Verify {
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Print one JSON document.
        #[arg(long)]
        json: bool,
    },
    /// Measures a draft against its target on the target's own answers.
    Eval(EvalArgs),
    /// Prints a completion script, for example for `source <(da-build completions bash)`.
    Completions {
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
}

#[derive(Debug, Clone, clap::Args)]
pub struct EvalArgs {
    /// The target: a folder, a .gguf file, or owner/name on a hub.
    #[arg(long, value_name = "SPEC")]
    pub target: String,
    /// The draft, in the same forms.
    #[arg(long, value_name = "SPEC")]
    pub draft: String,
    /// Prompts: "builtin", or a file or folder as for --calibration; a line's "domain" is reported
    /// on its own.
    #[arg(long, default_value = "builtin", value_name = "PATH|builtin")]
    pub prompts: String,
    /// Temperatures to report, with commas between.
    #[arg(long, value_delimiter = ',', default_value = "0,1", value_name = "T")]
    pub temperature: Vec<f32>,
    /// Temperature that the target answers at.
    #[arg(long, default_value_t = 0.7, value_name = "T")]
    pub answer_temperature: f32,
    /// Drafted tokens of a step.
    #[arg(long, default_value_t = 4, value_name = "K")]
    pub num_speculative_tokens: usize,
    /// Time of a step of the draft, as a share of the target's; by the cost model when not given.
    #[arg(long, value_name = "C")]
    pub latency_ratio: Option<f64>,
    /// What a layer costs a step besides its parameters, in millions of parameters.
    #[arg(long, default_value_t = CostModel::default().layer / 1e6, value_name = "MILLIONS")]
    pub layer_cost: f64,
    /// Prompts to use, at most.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_prompts: usize,
    /// Longest answer, in tokens.
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub max_tokens: usize,
    /// Decides built-in prompts and sampled answers.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Print one JSON document.
    #[arg(long)]
    pub json: bool,
}

impl EvalArgs {
    /// What to measure.
    ///
    /// # Errors
    /// When a number is out of range or the prompts cannot be opened.
    pub fn settings(&self) -> Result<ExamineSettings, BuildError> {
        let refuse = |flag, got: String, expected| Err(BuildError::Request { flag, got, expected });
        for (flag, value) in [
            ("--num-speculative-tokens", self.num_speculative_tokens),
            ("--max-prompts", self.max_prompts),
            ("--max-tokens", self.max_tokens),
        ] {
            if value == 0 {
                return refuse(flag, value.to_string(), "at least 1");
            }
        }
        let temperatures = self.temperature.iter().chain([&self.answer_temperature]);
        if let Some(wrong) = temperatures.into_iter().find(|t| !(0.0..=5.0).contains(*t)) {
            return refuse("--temperature", wrong.to_string(), "numbers from 0 to 5");
        }
        if let Some(ratio) = self.latency_ratio.filter(|c| !(*c >= 0.0 && c.is_finite())) {
            return refuse("--latency-ratio", ratio.to_string(), "a number of at least 0");
        }
        let prompts = (self.prompts != "builtin").then(|| PathBuf::from(&self.prompts));
        if let Some(path) = &prompts {
            corpus::check(path)?;
        }
        Ok(ExamineSettings {
            prompts,
            temperatures: self.temperature.clone(),
            answer_temperature: self.answer_temperature,
            num_speculative_tokens: self.num_speculative_tokens,
            latency_ratio: self.latency_ratio,
            cost: CostModel { layer: self.layer_cost.max(0.0) * 1e6 },
            max_prompts: self.max_prompts,
            max_tokens: self.max_tokens,
            seed: self.seed,
        })
    }
}
