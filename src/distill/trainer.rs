//! The training loop: one owner of the draft's weights, optimizer and random state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

use candle_core::{DType, Device, Tensor, Var};
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

use super::batch::{Batch, usable};
use super::checkpoint::{CheckpointFolder, Header};
use super::evaluate::{Acceptance, evaluate};
use super::head::{Head, HeadLoss};
use super::optimizer::{AdamW, AdamWSettings};
use super::sample::{Sample, TopK};
use crate::hub::Target;
use crate::model::decoder::Decoder;
use crate::model::draft_folder::DraftFolder;
use crate::model::kernels;
use crate::model::{DraftManifest, ModelConfig};

mod gradients;
mod lora;
mod settings;

use gradients::{BodyGradients, visit_gradients};
use lora::Lora;
pub use settings::{TrainSettings, TrainState, Update};

/// What can go wrong in training.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error("cannot read the draft: {0}")]
    Draft(#[from] crate::hub::HubError),
    #[error("cannot read the draft's manifest: {0}")]
    Manifest(#[from] crate::model::manifest::ManifestError),
    #[error("cannot export the draft: {0}")]
    Export(#[from] crate::model::draft_folder::WriteError),
    #[error("cannot save or resume training state in {path}: {reason}")]
    State { path: String, reason: String },
    #[error(
        "{count} tensors receive no gradient, the first is {first}\nhint: this is a defect of this build; training would silently do nothing"
    )]
    NoGradient { count: usize, first: String },
    #[error("tensor computation failed: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// Trains one draft. It belongs to one thread.
pub struct Trainer {
    settings: TrainSettings,
    state: TrainState,
    rounds: u64,
    config: ModelConfig,
    /// What is trained: the draft's tensors, or the factors of their updates.
    parameters: BTreeMap<String, Var>,
    lora: Option<Lora>,
    /// With whole parameters it follows them by itself; with updates it is made for every step.
    decoder: Decoder,
    head: Head,
    optimizer: AdamW,
    checkpoints: CheckpointFolder,
}

/// Optimizer steps between checkpoints inside a round.
const CHECKPOINT_EVERY: usize = 200;

impl Trainer {
    /// Opens training on a draft folder. When `state` holds a checkpoint, training resumes from
    /// it, whatever `draft` says; [`Trainer::restart`] starts over. Runs the gradient check.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn open(draft: &Path, state: &Path, settings: TrainSettings) -> Result<Self, TrainError> {
        let checkpoints = CheckpointFolder::open(state)?;
        let saved = match checkpoints.load() {
            Ok(saved) => saved,
            // Half a checkpoint is worth less than a clean start from the published draft.
            Err(error) => {
                tracing::warn!(%error, "training state is not readable, starting from the draft");
                checkpoints.clear()?;
                None
            }
        };
        let base = match &saved {
            Some((header, _)) if header.state.base.exists() => header.state.base.clone(),
            _ => draft.to_path_buf(),
        };
        let mut trainer = Self::fresh(&base, checkpoints, settings)?;
        if let Some((header, tensors)) = saved {
            trainer.resume(header, tensors)?;
        }
        trainer.check_gradients()?;
        Ok(trainer)
    }

    fn fresh(
        draft: &Path,
        checkpoints: CheckpointFolder,
        settings: TrainSettings,
    ) -> Result<Self, TrainError> {
        let (config, mut parameters) = read_parameters(draft)?;
        let decoder = Decoder::new(&config, |name| take(&parameters, name))?;
        let mut lora = None;
        if settings.lora_rank > 0 {
            let (base, factors) = Lora::new(&parameters, settings.lora_rank, settings.seed)?;
            (lora, parameters) = (Some(base), factors);
        }
        let optimizer = AdamW::new(
            &parameters,
            AdamWSettings {
                beta1: settings.beta1,
                beta2: settings.beta2,
                eps: 1e-8,
                weight_decay: settings.weight_decay,
            },
        );
        let count = parameters.values().map(|var| var.elem_count() as u64).sum();
        let state =
            TrainState { base: draft.to_path_buf(), parameters: count, ..TrainState::default() };
        let head = Head::default();
        Ok(Self {
            settings,
            state,
            rounds: 0,
            config,
            parameters,
            lora,
            decoder,
            head,
            optimizer,
            checkpoints,
        })
    }

    fn resume(
        &mut self,
        header: Header,
        mut tensors: BTreeMap<String, Tensor>,
    ) -> Result<(), TrainError> {
        for (name, var) in &self.parameters {
            let saved = tensors.remove(name).ok_or_else(|| TrainError::State {
                path: self.state.base.display().to_string(),
                reason: format!("checkpoint lacks {name}"),
            })?;
            var.set(&saved)?;
        }
        self.optimizer.resume(header.state.step, &mut tensors)?;
        self.rounds = header.rounds;
        self.state = header.state;
        Ok(())
    }

    pub fn state(&self) -> &TrainState {
        &self.state
    }

    /// Passes over samples that were begun, over all resumes.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Trains `epochs` passes over scored samples; unscored ones are skipped. `on_update` is
    /// called after every step and may return `false` to stop early. Saves a checkpoint at the
    /// end and every few hundred steps.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn train(
        &mut self,
        samples: &[Sample],
        epochs: usize,
        on_update: &mut dyn FnMut(Update) -> bool,
    ) -> Result<(), TrainError> {
        let usable: Vec<&Sample> = samples.iter().filter(|sample| usable(sample)).collect();
        let mut since_checkpoint = 0;
        'training: for _ in 0..epochs {
            let batches = self.shuffled(&usable);
            self.rounds += 1;
            for batch in batches {
                let update = self.step(&batch)?;
                since_checkpoint += 1;
                if since_checkpoint == CHECKPOINT_EVERY {
                    self.checkpoint()?;
                    since_checkpoint = 0;
                }
                if !on_update(update) {
                    break 'training;
                }
            }
        }
        self.checkpoint()
    }

    /// Batches of similar length in random order; the seed depends on the pass, not on the clock.
    fn shuffled<'a>(&self, samples: &[&'a Sample]) -> Vec<Vec<&'a Sample>> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.settings.seed.wrapping_add(self.rounds));
        let mut samples = samples.to_vec();
        samples.shuffle(&mut rng);
        let batch = self.settings.batch.max(1);
        let mut batches = Vec::new();
        for group in samples.chunks_mut(8 * batch) {
            group.sort_by_key(|sample| sample.prompt_ids.len() + sample.output_ids.len());
            batches.extend(group.chunks(batch).map(<[&Sample]>::to_vec));
        }
        batches.shuffle(&mut rng);
        batches
    }

    fn step(&mut self, samples: &[&Sample]) -> Result<Update, TrainError> {
        let started = Instant::now();
        let batch = Batch::new(samples, self.settings.window, &Device::Cpu)?;
        let (loss, gradients) = self.gradients(&batch)?;
        let mut squares = 0.0;
        visit_gradients(&self.parameters, &self.head, &gradients, |_, _, gradient| {
            squares += gradient.square_sum();
            Ok(())
        })?;
        let norm = squares.sqrt();
        let tokens = batch.outputs.len() as u64;
        let skipped = !loss.is_finite() || !norm.is_finite();
        if !skipped {
            self.optimizer.begin_step();
            let clip = self.settings.clip;
            let scale = if clip > 0.0 && norm > clip { clip / norm } else { 1.0 };
            let warmup = self.settings.warmup_steps.max(1) as f64;
            let ramp = (self.optimizer.step_count() as f64 / warmup).min(1.0);
            let rate = self.settings.learning_rate * ramp;
            let (parameters, head) = (&self.parameters, &self.head);
            visit_gradients(parameters, head, &gradients, |name, var, gradient| {
                self.optimizer.update(name, var, gradient, scale, rate)
            })?;
            self.state.tokens += tokens;
        }
        self.state.step = self.optimizer.step_count();
        let seconds = started.elapsed().as_secs_f64();
        self.state.seconds += seconds;
        Ok(Update { step: self.state.step, loss, tokens, seconds, skipped })
    }

    /// Mean loss of a batch and its gradients; the head's is left in `self.head`.
    fn gradients(&mut self, batch: &Batch<'_>) -> Result<(f32, BodyGradients), candle_core::Error> {
        if self.lora.is_some() {
            self.decoder = Decoder::new(&self.config, |name| self.tensor(name))?;
        }
        // The embedding table stays out of the graph: autograd would make its whole gradient,
        // of which nearly every row is zero.
        let embedded = Var::from_tensor(&self.decoder.embed(&batch.ids)?)?;
        let hidden = self.decoder.hidden_of(&embedded)?;
        let hidden = hidden.reshape(((), self.config.hidden_size))?.index_select(&batch.rows, 0)?;
        let (loss, d_hidden) = self.head.loss_and_gradient(
            &hidden.detach(),
            &self.decoder.lm_head.detach(),
            &batch.teacher,
            HeadLoss { loss: self.settings.loss, softcap: self.config.anatomy.final_softcap },
        )?;
        // d(surrogate)/d(hidden) is the head's gradient, which chains it into the body.
        let mut store = (hidden * d_hidden)?.sum_all()?.backward()?;
        let mut body = BodyGradients::default();
        for (name, var) in &self.parameters {
            if let Some(gradient) = store.remove(var) {
                body.tensors.insert(name.clone(), gradient.contiguous()?);
            }
        }
        if self.lora.is_some() {
            return Ok((loss / batch.outputs.len() as f32, body));
        }
        if let Some(gradient) = store.remove(&embedded) {
            body.add_embedding(&batch.ids, &gradient, self.config.anatomy.embedding_scale)?;
        }
        if self.config.tie_word_embeddings {
            let width = self.config.hidden_size;
            let whole = self.head.gradient_mut();
            for (id, row) in body.ids.iter().zip(body.rows.chunks_exact(width)) {
                kernels::add_scaled(&mut whole[*id as usize * width..][..width], 1.0, row);
            }
        }
        Ok((loss / batch.outputs.len() as f32, body))
    }

    /// Proves with one backward pass that every parameter receives a finite gradient that is not
    /// zero: candle drops gradients silently where an operation has no backward.
    fn check_gradients(&mut self) -> Result<(), TrainError> {
        let vocab = self.config.vocab_size as u32;
        let ids: Vec<u32> = (0..12).map(|i| (i * 37 + 5) % vocab).collect();
        let teacher = TopK { ids: vec![1 % vocab], logprobs: vec![-0.1] };
        let sample = Sample {
            prompt_ids: ids[..6].to_vec(),
            output_ids: ids[6..].to_vec(),
            temperature: 1.0,
            teacher: vec![teacher; 6],
            ..Sample::default()
        };
        let batch = Batch::new(&[&sample], self.settings.window.max(16), &Device::Cpu)?;
        let fresh = self.lora.is_some() && self.state.step == 0;
        if fresh {
            Lora::set_up_factors(&self.parameters, 1e-3)?;
        }
        let (_, gradients) = self.gradients(&batch)?;
        if fresh {
            Lora::set_up_factors(&self.parameters, 0.0)?;
        }
        let mut without: BTreeSet<&str> = self.parameters.keys().map(String::as_str).collect();
        visit_gradients(&self.parameters, &self.head, &gradients, |name, _, gradient| {
            let squares = gradient.square_sum();
            if squares.is_finite() && squares > 0.0 {
                without.remove(name);
            }
            Ok(())
        })?;
        self.state.parameters_without_gradient = without.len() as u64;
        match without.first() {
            Some(first) => {
                Err(TrainError::NoGradient { count: without.len(), first: (*first).to_string() })
            }
            None => Ok(()),
        }
    }

    fn checkpoint(&self) -> Result<(), TrainError> {
        let mut tensors = self.optimizer.tensors(&self.parameters)?;
        let own = self.parameters.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone()));
        tensors.extend(own);
        let header = Header { state: self.state.clone(), rounds: self.rounds };
        self.checkpoints.save(&header, &tensors)
    }

    /// Acceptance of the weights being trained.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn evaluate(&self, samples: &[Sample]) -> Result<Acceptance, TrainError> {
        self.judge(&self.decoder()?, samples)
    }

    /// Acceptance of a draft folder, leaving the weights being trained alone.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn evaluate_folder(
        &self,
        draft: &Path,
        samples: &[Sample],
    ) -> Result<Acceptance, TrainError> {
        let target = Target::open(&draft.display().to_string())?;
        let decoder = Decoder::new(&target.config, |name| {
            target.weights.tensor(name, &Device::Cpu).map_err(TrainError::from)
        })?;
        self.judge(&decoder, samples)
    }

    fn judge(&self, decoder: &Decoder, samples: &[Sample]) -> Result<Acceptance, TrainError> {
        let TrainSettings { window, num_speculative_tokens, .. } = self.settings;
        Ok(evaluate(decoder, samples, window, num_speculative_tokens)?)
    }

    /// From the next step on.
    pub fn set_learning_rate(&mut self, rate: f64) {
        self.settings.learning_rate = rate;
    }

    /// The weights being trained, outside the autograd graph. They change with the next step.
    ///
    /// # Errors
    /// When a tensor is missing, which would be a defect.
    pub fn decoder(&self) -> Result<Decoder, TrainError> {
        Decoder::new(&self.config, |name| Ok(self.tensor(name)?.detach()))
    }

    /// A tensor of the draft as it is now, in the autograd graph.
    fn tensor(&self, name: &str) -> Result<Tensor, candle_core::Error> {
        match &self.lora {
            Some(lora) => lora.tensor(&self.parameters, name),
            None => take(&self.parameters, name),
        }
    }

    /// Writes the weights being trained, rounded to bf16, as a draft folder. `manifest` holds
    /// the fields that the caller knows; the rest is taken over from the base. The folder appears
    /// whole or not at all. Returns the checksum.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn export(&self, directory: &Path, manifest: Value) -> Result<String, TrainError> {
        let base = DraftManifest::read(&self.state.base)?;
        let io = |reason: std::io::Error| TrainError::State {
            path: self.state.base.display().to_string(),
            reason: reason.to_string(),
        };
        let mut companions = Vec::new();
        for name in base.files.keys() {
            if name != "config.json" && !name.ends_with(".safetensors") {
                let bytes = std::fs::read(self.state.base.join(name)).map_err(io)?;
                companions.push((name.clone(), bytes));
            }
        }
        let folder = DraftFolder {
            config: &self.config.raw,
            tensors: &self.decoder()?.tensors(),
            dtype: DType::BF16,
            companions: &companions,
            manifest: merge(base, manifest, &self.settings),
        };
        Ok(folder.write(directory)?.checksum())
    }

    /// Drops the training state and starts from a draft folder.
    ///
    /// # Errors
    /// See [`TrainError`].
    pub fn restart(&mut self, draft: &Path) -> Result<(), TrainError> {
        self.checkpoints.clear()?;
        let folder = CheckpointFolder::open(self.checkpoints.path())?;
        let mut fresh = Self::fresh(draft, folder, self.settings.clone())?;
        fresh.rounds = self.rounds;
        fresh.check_gradients()?;
        *self = fresh;
        self.checkpoint()
    }
}

/// The base's manifest with the caller's fields over it and the training settings filled in.
fn merge(base: DraftManifest, fields: Value, settings: &TrainSettings) -> DraftManifest {
    let mut merged = serde_json::to_value(&base).unwrap_or_default();
    if let (Some(merged), Value::Object(fields)) = (merged.as_object_mut(), fields) {
        merged.insert("parent".into(), Value::String(base.version.clone()));
        merged.insert("seed".into(), settings.seed.into());
        merged.insert("settings".into(), serde_json::to_value(settings).unwrap_or_default());
        merged.insert("scores".into(), Value::Object(Map::new()));
        merged.extend(fields);
    }
    serde_json::from_value(merged).unwrap_or(base)
}

fn take(parameters: &BTreeMap<String, Var>, name: &str) -> Result<Tensor, candle_core::Error> {
    match parameters.get(name) {
        Some(var) => Ok(var.as_tensor().clone()),
        None => candle_core::bail!("no parameter {name}"),
    }
}

fn read_parameters(draft: &Path) -> Result<(ModelConfig, BTreeMap<String, Var>), TrainError> {
    let target = Target::open(&draft.display().to_string())?;
    let mut parameters = BTreeMap::new();
    for (name, ..) in target.config.tensor_shapes() {
        let tensor = target.weights.tensor(&name, &Device::Cpu)?;
        parameters.insert(name, Var::from_tensor(&tensor)?);
    }
    Ok((target.config, parameters))
}
