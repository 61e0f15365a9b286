//! What a draft is worth under a target, on the target's own answers to given prompts.

use std::path::PathBuf;

use candle_core::Device;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use super::corpus::{self, Prompt, Wanted};
use super::generate::{Generation, answer};
use super::search::{CostModel, best_length, expected_speedup};
use super::stream::{Streamed, reference};
use super::{BuildError, pipeline, trim};
use crate::distill::Comparison;
use crate::hub::Target;
use crate::model::decoder::Decoder;
use crate::model::runtime::Runtime;
use crate::vocab::TokenMap;

/// What to measure.
#[derive(Debug, Clone)]
pub struct ExamineSettings {
    /// A file or folder; none takes the built-in prompts.
    pub prompts: Option<PathBuf>,
    /// At which drafts are compared.
    pub temperatures: Vec<f32>,
    /// At which the target answers.
    pub answer_temperature: f32,
    pub num_speculative_tokens: usize,
    /// Of a step of the draft to one of the target; none takes the cost model's.
    pub latency_ratio: Option<f64>,
    pub cost: CostModel,
    pub max_prompts: usize,
    /// Longest answer, in tokens.
    pub max_tokens: usize,
    pub seed: u64,
}

/// A draft's scores.
#[derive(Debug, Clone, Serialize)]
pub struct Examination {
    pub latency_ratio: f64,
    pub answers: usize,
    pub rows: Vec<Row>,
}

/// Scores in one domain at one temperature.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// None for all of them together.
    pub domain: Option<String>,
    pub temperature: f32,
    pub scores: Comparison,
    /// At the draft length that was asked for.
    pub expected_speedup: f64,
    /// The draft length with the greatest expected speed-up, and that speed-up.
    pub best_length: usize,
    pub best_speedup: f64,
}

/// Lets the target answer and compares the draft. `on_tokens` is told how many tokens each step
/// made, of the number that the first call announces as `(0, total)`.
///
/// # Errors
/// When something cannot be read, or the vocabularies differ in size and no table joins them.
pub fn examine(
    target: &Target,
    draft: &Target,
    settings: &ExamineSettings,
    on_tokens: &mut dyn FnMut(usize, usize),
) -> Result<Examination, BuildError> {
    let (asked, drafted) = (&target.config, &draft.config);
    let table = TokenMap::of_folder(&draft.location, &draft.tokenizer, &target.tokenizer)?;
    if table.is_none() && asked.vocab_size != drafted.vocab_size {
        return Err(BuildError::Vocabulary { target: asked.vocab_size, draft: drafted.vocab_size });
    }
    let mut rng = ChaCha8Rng::seed_from_u64(settings.seed);
    let wanted = Wanted {
        tokens: settings.max_prompts * (settings.max_tokens + corpus::PROMPT),
        answer: settings.max_tokens,
        held_out: 0,
    };
    let corpus = corpus::read(target, settings.prompts.as_deref(), wanted, &mut rng)?;
    let mut samples: Vec<_> = corpus.samples.into_iter().filter_map(corpus::judging).collect();
    samples.extend(corpus.held_out);
    let mut prompts: Vec<Prompt> = corpus.prompts;
    prompts.extend(corpus.held_out_prompts);
    prompts.truncate(settings.max_prompts.saturating_sub(samples.len()));
    samples.truncate(settings.max_prompts);
    if !prompts.is_empty() {
        let total = prompts.len() * settings.max_tokens;
        on_tokens(0, total);
        let runtime = Runtime::load(asked, &target.weights)?;
        let generation = Generation {
            temperature: settings.answer_temperature,
            max_tokens: settings.max_tokens,
            top_k: 0,
        };
        let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.ids.clone()).collect();
        let mut tick = |made| on_tokens(made, total);
        let mut answers = answer(&runtime, &ids, generation, &mut rng, &mut tick)?;
        for answer in &mut answers {
            answer.domain.clone_from(&prompts[answer.id as usize].domain);
        }
        samples.extend(answers);
    }
    let mut reference = reference(Streamed::new(target), &samples, pipeline::WINDOW)?;
    let mut decoder = Decoder::new(drafted, |name| {
        draft.weights.tensor(name, &Device::Cpu).map_err(BuildError::from)
    })?;
    if let Some(table) = &table {
        reference.restrict(table.shared());
        decoder = trim::over_target(&decoder, table, asked.vocab_size)?;
    }
    let ratio =
        settings.latency_ratio.unwrap_or_else(|| settings.cost.latency_ratio(drafted, asked));
    let domains = reference.domains();
    let apart = if domains.len() > 1 { domains } else { Vec::new() };
    let k = settings.num_speculative_tokens;
    let mut rows = Vec::new();
    for temperature in &settings.temperatures {
        for domain in apart.iter().map(|domain| Some(*domain)).chain([None]) {
            let scores = reference.compare(&decoder, domain, *temperature, k)?;
            let rate = scores.acceptance_rate;
            let (best_length, best_speedup) = best_length(rate, ratio, pipeline::LONGEST_DRAFT);
            rows.push(Row {
                domain: domain.map(String::from),
                temperature: *temperature,
                expected_speedup: expected_speedup(rate, k, ratio),
                best_length,
                best_speedup,
                scores,
            });
        }
    }
    Ok(Examination { latency_ratio: ratio, answers: samples.len(), rows })
}
