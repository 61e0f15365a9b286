//! The steps in order, with what each one does to acceptance.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::{DType, Device};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::calibrate::{Statistics, Window, states, statistics, windows};
use super::export::{config_json, model_card, vllm_command};
use super::generate::{Generation, answer};
use super::heal::{Ridge, heal};
use super::plan::{Plan, Request};
use super::prune::{Gather, Selection, Source, by_influence, evenly};
use super::slice::{WriteMap, slice};
use super::{BuildError, corpus};
use crate::distill::evaluate::evaluate;
use crate::distill::{Acceptance, Sample};
use crate::hub::Target;
use crate::model::DraftManifest;
use crate::model::decoder::Decoder;
use crate::model::draft_folder::DraftFolder;
use crate::model::runtime::Runtime;

/// Everything that shapes a build.
#[derive(Debug, Clone)]
pub struct Settings {
    pub request: Request,
    pub output: PathBuf,
    /// None takes the built-in prompts.
    pub calibration: Option<PathBuf>,
    /// Tokens of target text to slice and heal on.
    pub calibration_tokens: usize,
    pub seed: u64,
    pub dtype: DType,
    pub ridge: Ridge,
}

/// What a build tells while it runs.
#[derive(Debug, Clone)]
pub enum Progress<'a> {
    /// A step began; `total` units of work, 0 when that is not known.
    Started {
        step: &'static str,
        total: usize,
    },
    Advanced {
        units: usize,
    },
    /// A step ended, with what acceptance is now where that was measured.
    Finished {
        step: &'static str,
        detail: String,
        acceptance: Option<&'a Acceptance>,
    },
}

/// What came out.
#[derive(Debug, Clone)]
pub struct Report {
    pub plan: Plan,
    pub selection: Selection,
    pub target_parameters: usize,
    pub draft_parameters: usize,
    /// Acceptance after each step, in order.
    pub steps: Vec<(&'static str, Acceptance)>,
    pub checksum: String,
    pub vllm_command: String,
}

/// Draft length that mean accepted lengths are given for.
const NUM_SPECULATIVE_TOKENS: usize = 4;
/// Longest calibration window.
const WINDOW: usize = 512;
/// Held-out prompts that acceptance is measured on, and the length of the answers.
const HELD_OUT: usize = 16;
const ANSWER: usize = 64;

/// Builds a draft of `target` and writes it to `settings.output`.
///
/// # Errors
/// See [`BuildError`]; nothing half-written is left behind.
pub fn run(
    target: &Target,
    settings: &Settings,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Report, BuildError> {
    let plan = Plan::new(&target.config, &settings.request)?;
    let mut build = Build { target, settings, plan, steps: Vec::new(), on_progress };
    build.check_output()?;
    let text = build.text()?;
    let decoder = Decoder::new(&target.config, |name| {
        target.weights.tensor(name, &Device::Cpu).map_err(BuildError::from)
    })?;
    let (draft, selection) = build.shrink(&decoder, &text)?;
    build.export(&draft, &selection, &text)
}

struct Text {
    calibration: Vec<Sample>,
    held_out: Vec<Sample>,
}

struct Build<'a> {
    target: &'a Target,
    settings: &'a Settings,
    plan: Plan,
    steps: Vec<(&'static str, Acceptance)>,
    on_progress: &'a mut dyn FnMut(Progress<'_>),
}

impl Build<'_> {
    /// Refuses at once what would fail after minutes of work.
    fn check_output(&self) -> Result<(), BuildError> {
        use crate::model::draft_folder::WriteError;
        let output = &self.settings.output;
        if output.exists() {
            return Err(WriteError::Exists { path: output.clone() }.into());
        }
        let parent = output.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or(std::path::Path::new("."));
        std::fs::create_dir_all(parent)
            .and_then(|()| tempfile::tempfile_in(parent).map(drop))
            .map_err(|source| WriteError::Io { path: parent.into(), source }.into())
    }

    /// The target's own words: what to calibrate on, and what to judge by.
    fn text(&mut self) -> Result<Text, BuildError> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.settings.seed);
        let runtime = Runtime::load(&self.target.config, &self.target.weights)?;
        let corpus = corpus::read(self.target, self.settings, HELD_OUT, ANSWER, &mut rng)?;
        let total = (corpus.prompts.len() + corpus.held_out.len()) * ANSWER;
        (self.on_progress)(Progress::Started { step: "calibrate", total });
        let on_progress = &mut self.on_progress;
        let mut tick = |units| on_progress(Progress::Advanced { units });
        let sampled = Generation { temperature: 0.8, max_tokens: ANSWER, top_k: 0 };
        let greedy = Generation { temperature: 0.0, max_tokens: ANSWER, top_k: 64 };
        let mut calibration = answer(&runtime, &corpus.prompts, sampled, &mut rng, &mut tick)?;
        calibration.extend(corpus.texts);
        let held_out = answer(&runtime, &corpus.held_out, greedy, &mut rng, &mut tick)?;
        let tokens: usize =
            calibration.iter().map(|s| s.prompt_ids.len() + s.output_ids.len()).sum();
        let needed = 2 * self.plan.hidden_size.min(self.target.config.hidden_size);
        if tokens < needed && !self.plan.is_identity(&self.target.config) {
            return Err(BuildError::TooLittleText { tokens, needed });
        }
        (self.on_progress)(Progress::Finished {
            step: "calibrate",
            detail: format!("{tokens} tokens, {} held-out answers", held_out.len()),
            acceptance: None,
        });
        Ok(Text { calibration, held_out })
    }

    fn shrink(
        &mut self,
        decoder: &Decoder,
        text: &Text,
    ) -> Result<(Decoder, Selection), BuildError> {
        let config = &decoder.config;
        if self.plan.is_identity(config) {
            let draft = Decoder::new(config, |name| {
                self.target.weights.tensor(name, &Device::Cpu).map_err(BuildError::from)
            })?;
            self.judge("identity", "nothing is cut".into(), &draft, &text.held_out)?;
            let whole = |layer: usize| Source {
                layer,
                groups: (0..config.num_key_value_heads).collect(),
                channels: (0..config.intermediate_size).collect(),
            };
            let blocks = (0..config.num_hidden_layers).map(|layer| vec![whole(layer)]).collect();
            return Ok((draft, Selection { blocks }));
        }
        let windows = windows(&text.calibration, 8, WINDOW, &Device::Cpu)?;
        (self.on_progress)(Progress::Started { step: "inspect", total: 0 });
        // Covariances and importances settle long before the least-squares fits do.
        let every_third: Vec<Window> = windows.iter().step_by(3).map(Window::clone).collect();
        let statistics = statistics(decoder, &every_third)?;
        let norm = config.anatomy.norm;
        let map = WriteMap::new(&statistics, self.plan.hidden_size, norm, &Device::Cpu)?;
        (self.on_progress)(Progress::Finished {
            step: "inspect",
            detail: format!(
                "{} tokens; {:.1} % of the normalised residual kept at width {}",
                statistics.tokens,
                100.0 * map.kept,
                self.plan.hidden_size
            ),
            acceptance: None,
        });
        self.before_healing(decoder, &statistics, &map, &text.held_out)?;
        self.heal_best(decoder, &statistics, &map, windows, &text.held_out)
    }

    /// Measures slicing alone and slicing with pruning, the states that healing starts from.
    fn before_healing(
        &mut self,
        decoder: &Decoder,
        statistics: &Statistics,
        map: &WriteMap,
        held_out: &[Sample],
    ) -> Result<(), BuildError> {
        let config = &decoder.config;
        let whole = Plan {
            hidden_size: self.plan.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_key_value_heads: config.num_key_value_heads,
        };
        let all: Vec<usize> = (0..config.num_hidden_layers).collect();
        let everything = Selection::new(statistics, &whole, &all, Gather::Own);
        let sliced = slice(decoder, &whole, &everything, map)?;
        self.judge("slice", format!("hidden size {}", whole.hidden_size), &sliced, held_out)?;
        let kept = evenly(config.num_hidden_layers, self.plan.num_hidden_layers);
        let selection = Selection::new(statistics, &self.plan, &kept, Gather::Own);
        let pruned = slice(decoder, &self.plan, &selection, map)?;
        let detail = format!(
            "{} layers, {} MLP channels, {} key-value groups",
            self.plan.num_hidden_layers, self.plan.intermediate_size, self.plan.num_key_value_heads
        );
        self.judge("prune", detail, &pruned, held_out)?;
        Ok(())
    }

    /// Heals with each way of choosing layers and keeps the draft that is accepted most.
    fn heal_best(
        &mut self,
        decoder: &Decoder,
        statistics: &Statistics,
        map: &WriteMap,
        windows: Vec<Window>,
        held_out: &[Sample],
    ) -> Result<(Decoder, Selection), BuildError> {
        let (layers, keep) = (decoder.config.num_hidden_layers, self.plan.num_hidden_layers);
        let mut choices = vec![evenly(layers, keep), by_influence(&statistics.influence, keep)];
        choices.dedup();
        (self.on_progress)(Progress::Started { step: "record", total: windows.len() });
        let recorded = choices.iter().flatten().copied().collect();
        let mut text = Vec::with_capacity(windows.len());
        for window in windows {
            let states = states(decoder, &window, &recorded)?;
            text.push((window, states));
            (self.on_progress)(Progress::Advanced { units: 1 });
        }
        let mut best: Option<(Acceptance, Decoder, Selection)> = None;
        for layers in choices {
            (self.on_progress)(Progress::Started { step: "heal", total: keep });
            let selection = Selection::new(statistics, &self.plan, &layers, Gather::Own);
            let on_progress = &mut self.on_progress;
            let mut tick = |_| on_progress(Progress::Advanced { units: 1 });
            let ridge = self.settings.ridge;
            let draft = heal(decoder, &self.plan, &selection, map, &text, ridge, &mut tick)?;
            let acceptance = evaluate(&draft, held_out, WINDOW, NUM_SPECULATIVE_TOKENS)?;
            (self.on_progress)(Progress::Finished {
                step: "heal",
                detail: format!("layers {:?}", selection.layers()),
                acceptance: Some(&acceptance),
            });
            if best.as_ref().is_none_or(|(other, ..)| acceptance.alpha > other.alpha) {
                best = Some((acceptance, draft, selection));
            }
        }
        match best {
            Some((acceptance, draft, selection)) => {
                self.steps.push(("heal", acceptance));
                Ok((draft, selection))
            }
            None => Err(BuildError::Solve("no set of layers was tried".into())),
        }
    }

    fn judge(
        &mut self,
        step: &'static str,
        detail: String,
        draft: &Decoder,
        held_out: &[Sample],
    ) -> Result<(), BuildError> {
        let acceptance = evaluate(draft, held_out, WINDOW, NUM_SPECULATIVE_TOKENS)?;
        (self.on_progress)(Progress::Finished { step, detail, acceptance: Some(&acceptance) });
        self.steps.push((step, acceptance));
        Ok(())
    }

    fn export(
        self,
        draft: &Decoder,
        selection: &Selection,
        text: &Text,
    ) -> Result<Report, BuildError> {
        let settings = self.settings;
        let dtype = match settings.dtype {
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            _ => "float32",
        };
        let scores = json!({
            "steps": self.steps.iter().map(|(step, acceptance)| json!({
                "step": step,
                "acceptance_rate": acceptance.acceptance_rate,
                "alpha": acceptance.alpha,
                "mean_accepted_length": acceptance.mean_accepted_length,
                "positions": acceptance.positions,
            })).collect::<Vec<Value>>(),
        });
        let command = vllm_command(&self.target.name, &settings.output);
        let card =
            model_card(&self.target.name, &draft.config, &self.plan, selection, &scores, &command);
        let mut companions = self.target.companions.clone();
        companions.retain(|(name, _)| name != "README.md");
        companions.push(("README.md".into(), card.into_bytes()));
        let tokenizer = companions.iter().find(|(name, _)| name == "tokenizer.json");
        let manifest = DraftManifest {
            schema: 1,
            version: "v000000".into(),
            parent: None,
            created_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
            target: self.target.name.clone(),
            target_hash: self.target.hash()?,
            tokenizer_hash: tokenizer
                .map(|(_, bytes)| crate::model::manifest::sha256_bytes(bytes))
                .unwrap_or_default(),
            data_hash: data_hash(&text.calibration),
            seed: settings.seed,
            settings: json!({
                "request": settings.request,
                "plan": self.plan,
                "layers": selection.layers(),
                "calibration": settings.calibration.as_ref().map(|p| p.display().to_string()),
                "calibration_tokens": settings.calibration_tokens,
                "ridge": settings.ridge,
            }),
            scores,
            files: Default::default(),
        };
        let config = config_json(&self.target.config, &draft.config, dtype);
        let folder = DraftFolder {
            config: &config,
            tensors: &draft.tensors(),
            dtype: settings.dtype,
            companions: &companions,
            manifest,
        };
        let manifest = folder.write(&settings.output)?;
        Ok(Report {
            target_parameters: self.target.config.parameters(),
            draft_parameters: draft.config.parameters(),
            plan: self.plan,
            selection: selection.clone(),
            steps: self.steps,
            checksum: manifest.checksum(),
            vllm_command: command,
        })
    }
}

fn data_hash(samples: &[Sample]) -> String {
    let mut hasher = Sha256::new();
    for sample in samples {
        for id in sample.prompt_ids.iter().chain(&sample.output_ids) {
            hasher.update(id.to_le_bytes());
        }
        hasher.update(u32::MAX.to_le_bytes());
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}
