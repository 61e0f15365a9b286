//! From settings to a server that is ready to listen.

use std::path::Path;
use std::sync::Arc;

use arc_swap::ArcSwap;
use serde_json::Value;
use tokio_util::task::TaskTracker;

use super::drafts::{DraftError, DraftHandle};
use super::engine::{Engine, EngineHandle, EngineSettings, pool};
use super::http::{App, Defaults, Parts};
use super::metrics::EngineMetrics;
use super::stage::{Fitting, ServedDraft, open, startup};
use super::{ServeError, stage};
use crate::config::serve::{NumSpeculativeTokens, RequestMetrics, ServeConfig};
use crate::hub::Target;
use crate::model::runtime::Runtime;
use crate::model::{ModelConfig, Tokenizer};
use crate::speculate::neural::NeuralProposer;
use crate::speculate::{CostCurve, DraftLength, Proposer};

/// Longest sequence by default; longer ones cost memory that most traffic does not need.
const DEFAULT_MODEL_LEN: usize = 4096;
/// Timed runs of each size when the costs are measured.
const MEASURE_RUNS: usize = 9;
/// Added to the niceness of the thread that reads drafts.
const STAGING_NICENESS: i32 = 10;
/// Draft tokens read in one step to catch up.
const CATCH_UP: usize = 128;

/// The draft as the server holds it, with what replaces must agree with.
struct Drafting {
    shared: Arc<ArcSwap<ServedDraft>>,
    fitting: Fitting,
}

/// Loads both models, measures them and starts the engine. Blocks for seconds; call it inside a
/// Tokio runtime's blocking thread.
///
/// # Errors
/// See [`ServeError`].
pub fn load(config: &ServeConfig, tasks: &TaskTracker) -> Result<App, ServeError> {
    let target = Target::open(&config.model).map_err(ServeError::Target)?;
    let tokenizer = Arc::new(target.tokenizer);
    let drafting = config.draft.as_deref().map(|path| open_draft(config, path, &tokenizer));
    let drafting = drafting.transpose()?;
    let max_model_len = model_len(config, &target.config)?;
    check_memory(config, max_model_len, &target.config, drafting.as_ref())?;
    let draft_len = drafting.as_ref().map(|d| d.fitting.config.max_position_embeddings);
    if let Some(draft_len) = draft_len.filter(|len| *len < max_model_len) {
        tracing::warn!(draft_len, max_model_len, "longer sequences go on without drafts");
    }
    let model = Runtime::load(&target.config, &target.weights).map_err(ServeError::Load)?;
    let model = Arc::new(model);
    tracing::info!(
        model = config.model,
        parameters = target.config.parameters(),
        draft = drafting.as_ref().map(|d| d.shared.load().version.clone()),
        draft_parameters = drafting.as_ref().map(|d| d.fitting.config.parameters()),
        max_model_len,
        max_num_seqs = config.max_num_seqs,
        "loaded"
    );
    let pool = pool(config.threads.unwrap_or(0))?;
    // In the engine's own threads, as that is where it will be paid.
    let length = pool.install(|| draft_length(config, &model, drafting.as_ref()))?;

    let name = config.served_model_name.clone().unwrap_or_else(|| config.model.clone());
    let metrics = Arc::new(EngineMetrics::new(&name)?);
    let vocab_size = tokenizer.vocab_size().min(target.config.vocab_size);
    let settings = EngineSettings {
        max_queued: config.max_queued,
        prefill_chunk: config.prefill_chunk,
        prefill_chunk_busy: config.prefill_chunk.div_ceil(4),
        scoring_share: config.scoring_share,
        seed: config.seed,
        ..EngineSettings::new(config.max_num_seqs, max_model_len, vocab_size)
    };
    let proposer = drafting.as_ref().map(|drafting| -> Box<dyn Proposer> {
        let shared = Arc::clone(&drafting.shared);
        let method = config.draft_sample_method;
        Box::new(NeuralProposer::new(shared, method, vocab_size, CATCH_UP))
    });
    let engine = Engine::start(pool, settings, model, proposer, length, Arc::clone(&metrics));
    let drafts = match drafting {
        None => DraftHandle::none(),
        Some(drafting) => draft_handle(drafting, &tokenizer, &engine, tasks)?,
    };
    let (defaults, eos_ids) = generation_config(&target.companions, &target.config);
    let parts = Parts {
        engine,
        drafts,
        metrics,
        tokenizer,
        model_name: name,
        max_model_len,
        vocab_size: target.config.vocab_size,
    };
    let mut app = App::new(parts);
    app.chat_template = target.chat_template;
    app.root.clone_from(&config.model);
    app.max_logprobs = config.max_logprobs;
    app.defaults = defaults;
    app.eos_ids = eos_ids.into();
    app.api_key.clone_from(&config.api_key);
    app.request_speculation_metrics =
        config.per_request_spec_decode_metrics == RequestMetrics::Summary;
    Ok(app)
}

fn open_draft(
    config: &ServeConfig,
    path: &Path,
    tokenizer: &Tokenizer,
) -> Result<Drafting, ServeError> {
    let read = || -> Result<Drafting, DraftError> {
        let path = stage::canonical(path)?;
        let draft = open(&path)?;
        let root = config.draft_root.as_deref().or(path.parent()).unwrap_or(&path);
        let fitting = Fitting::of(root, &draft)?;
        let shared = Arc::new(ArcSwap::from_pointee(startup(&path, &draft, tokenizer)?));
        Ok(Drafting { shared, fitting })
    };
    read().map_err(ServeError::Draft)
}

fn model_len(config: &ServeConfig, model: &ModelConfig) -> Result<usize, ServeError> {
    let limit = model.max_position_embeddings;
    match config.max_model_len {
        Some(len) if len > limit => Err(ServeError::Setting(format!(
            "--max-model-len {len} is more than the {limit} positions of {}",
            config.model
        ))),
        Some(len) => Ok(len),
        None => Ok(limit.min(DEFAULT_MODEL_LEN)),
    }
}

/// Refuses limits that the machine's memory cannot hold, before any request finds out.
fn check_memory(
    config: &ServeConfig,
    max_model_len: usize,
    target: &ModelConfig,
    drafting: Option<&Drafting>,
) -> Result<(), ServeError> {
    let per_token = |model: &ModelConfig| {
        2 * model.num_hidden_layers * model.key_value_size() * size_of::<f32>()
    };
    let draft = drafting.map_or(0, |drafting| per_token(&drafting.fitting.config));
    // One more than run: the scoring request.
    let sequences = config.max_num_seqs.saturating_add(1);
    let tokens = sequences.saturating_mul(max_model_len);
    let needed = tokens.saturating_mul(per_token(target) + draft);
    match available_memory() {
        Some(available) if needed > available => Err(ServeError::Setting(format!(
            "{} sequences of {max_model_len} tokens need up to {} MiB of cache, but {} MiB of \
             memory are available\nhint: lower --max-num-seqs or --max-model-len",
            config.max_num_seqs,
            needed >> 20,
            available >> 20
        ))),
        _ => Ok(()),
    }
}

/// Memory that can be had without swapping, in bytes; none where the system does not say.
fn available_memory() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<usize>().ok().map(|kib| kib << 10)
}

fn draft_length(
    config: &ServeConfig,
    model: &Runtime,
    drafting: Option<&Drafting>,
) -> Result<DraftLength, ServeError> {
    let Some(drafting) = drafting else { return Ok(DraftLength::fixed(0, None)) };
    let draft = drafting.shared.load();
    let curve = CostCurve::measure(model, Some(&draft.model), MEASURE_RUNS);
    let curve = curve.map_err(ServeError::Measure)?;
    tracing::info!(
        verify_ms = ?curve.verify_ms,
        draft_ms = ?curve.draft_ms,
        break_even_acceptance = curve.break_even(),
        "measured one forward of 1, 2, ... rows"
    );
    Ok(match config.num_speculative_tokens {
        NumSpeculativeTokens::Auto => DraftLength::auto(curve),
        NumSpeculativeTokens::Fixed(k) => DraftLength::fixed(k, Some(curve)),
    })
}

fn draft_handle(
    drafting: Drafting,
    tokenizer: &Arc<Tokenizer>,
    engine: &EngineHandle,
    tasks: &TaskTracker,
) -> Result<DraftHandle, ServeError> {
    let Drafting { shared, fitting } = drafting;
    let tokenizer = Arc::clone(tokenizer);
    // One thread of low priority: reading a draft must not slow the streams down.
    let staging = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .thread_name(|_| "staging".to_owned())
        .start_handler(|_| {
            if let Err(error) = rustix::process::nice(STAGING_NICENESS) {
                tracing::debug!(%error, "staging runs at ordinary priority");
            }
        })
        .build()?;
    let stage = move |path: &Path, version: Option<&str>| {
        staging.install(|| fitting.stage(path, version, &tokenizer))
    };
    Ok(DraftHandle::start(shared, Arc::new(stage), engine.clone(), tasks))
}

/// Sampling defaults and end-of-sequence ids, as the model's makers set them.
fn generation_config(
    companions: &[(String, Vec<u8>)],
    config: &ModelConfig,
) -> (Defaults, Vec<u32>) {
    let file = companions.iter().find(|(name, _)| name == "generation_config.json");
    let value: Value =
        file.and_then(|(_, bytes)| serde_json::from_slice(bytes).ok()).unwrap_or(Value::Null);
    let mut defaults = Defaults::default();
    if let Some(temperature) = value["temperature"].as_f64().filter(|t| *t >= 0.0) {
        defaults.temperature = temperature;
    }
    if let Some(top_p) = value["top_p"].as_f64().filter(|p| *p > 0.0 && *p <= 1.0) {
        defaults.top_p = top_p;
    }
    if let Some(top_k) = value["top_k"].as_i64().filter(|k| *k >= -1) {
        defaults.top_k = top_k;
    }
    if value["repetition_penalty"].as_f64().is_some_and(|penalty| penalty != 1.0) {
        tracing::warn!("the model's default repetition_penalty is not supported and not applied");
    }
    let mut eos_ids = config.eos_token_ids.clone();
    let more = match &value["eos_token_id"] {
        Value::Array(ids) => ids.clone(),
        id => vec![id.clone()],
    };
    eos_ids.extend(more.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
    eos_ids.sort_unstable();
    eos_ids.dedup();
    (defaults, eos_ids)
}
