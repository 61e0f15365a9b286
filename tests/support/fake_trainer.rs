//! A trainer without tensors, in a process of its own.
//!
//! Its "weights" are one number, the draft's acceptance, which every round raises. It keeps its
//! state on disk as the real one does, and does what a `behaviour.json` in its state folder says,
//! which tests may rewrite at any time.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use draft_adapter::distill::Acceptance;
use draft_adapter::distill::Sample;
use draft_adapter::distill::trainer::{TrainError, TrainSettings, TrainState, Update};
use draft_adapter::model::DraftManifest;
use draft_adapter::model::manifest::{MANIFEST_FILE, sha256_file};
use draft_adapter::sidecar::run::Launch;
use draft_adapter::sidecar::trainer_process::{ProcessOptions, TrainerBackend, serve};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const WEIGHTS: &str = "model.safetensors";
const OPTIONS: &str = "DA_TEST_TRAINER_OPTIONS";

/// What the fake does from now on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Behaviour {
    /// Added to the acceptance by each round.
    pub gain: f64,
    /// The acceptance never rises above this.
    pub cap: f64,
    pub step_ms: u64,
    /// Time between the first and the last byte of an export.
    pub export_ms: u64,
    pub finite: bool,
    /// Exports fail, as on a full disk.
    pub fail_export: bool,
    /// Acceptance measured for a version's folder, in place of its own number.
    pub measured: BTreeMap<String, f64>,
    /// The process ends in the middle of a round that holds more samples than this.
    pub die_above: Option<usize>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            gain: 0.1,
            cap: 1.0,
            step_ms: 0,
            export_ms: 0,
            finite: true,
            fail_export: false,
            measured: BTreeMap::new(),
            die_above: None,
        }
    }
}

impl Behaviour {
    pub fn write(&self, work_dir: &Path) {
        let folder = work_dir.join("trainer");
        std::fs::create_dir_all(&folder).unwrap();
        let fresh = folder.join("behaviour.new");
        std::fs::write(&fresh, serde_json::to_vec(self).unwrap()).unwrap();
        std::fs::rename(fresh, folder.join("behaviour.json")).unwrap();
    }
}

/// Writes a draft folder with this acceptance.
pub fn write_draft(folder: &Path, acceptance: f64) {
    std::fs::create_dir_all(folder).unwrap();
    super::fake_vllm::sim::write_tokenizer(folder);
    std::fs::write(folder.join("config.json"), "{}").unwrap();
    std::fs::write(folder.join(WEIGHTS), acceptance.to_string()).unwrap();
    let manifest = json!({
        "schema": 1, "version": "v000000", "parent": null, "created_unix": 1,
        "target": "fake-target", "target_hash": "", "tokenizer_hash": "", "data_hash": "seed",
        "seed": 0, "settings": {}, "scores": {}, "files": {},
    });
    write_manifest(folder, manifest).unwrap();
}

/// One line for each round that the fake has learned: the ids of the samples.
pub fn learned_rounds(work_dir: &Path) -> Vec<Vec<u64>> {
    let text = std::fs::read_to_string(work_dir.join("trainer/rounds.log")).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Runs this test executable again as the trainer: it must have an ignored test
/// `trainer_child` that calls [`child`].
pub fn launch(work_dir: &Path) -> Launch {
    let work_dir = std::path::absolute(work_dir).unwrap();
    Arc::new(move |draft| {
        let options = json!({
            "socket": work_dir.join("trainer.sock"),
            "state": work_dir.join("trainer"),
            "draft": draft,
        });
        let mut command = tokio::process::Command::new(std::env::current_exe().unwrap());
        command.args(["trainer_child", "--exact", "--ignored", "--nocapture"]);
        command.env(OPTIONS, options.to_string());
        command
    })
}

/// The body of `trainer_child`; does nothing when it was not started by [`launch`].
pub fn child() {
    let Ok(options) = std::env::var(OPTIONS) else { return };
    let options: Value = serde_json::from_str(&options).unwrap();
    let path = |name: &str| PathBuf::from(options[name].as_str().unwrap());
    let options = ProcessOptions {
        socket: path("socket"),
        draft: path("draft"),
        state: path("state"),
        settings: TrainSettings::default(),
        nice: 0,
        memory_limit_bytes: 0,
    };
    let (draft, state) = (options.draft.clone(), options.state.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(serve(&options, move || FakeTrainer::open(&draft, &state))).unwrap();
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Saved {
    base: PathBuf,
    acceptance: f64,
    step: u64,
    tokens: u64,
}

struct FakeTrainer {
    folder: PathBuf,
    saved: Saved,
}

impl FakeTrainer {
    fn open(draft: &Path, folder: &Path) -> Result<Self, TrainError> {
        let saved = match std::fs::read(folder.join("state.json")) {
            Ok(text) => serde_json::from_slice(&text).unwrap(),
            Err(_) => Saved {
                base: draft.to_owned(),
                acceptance: acceptance_of(draft)?,
                step: 0,
                tokens: 0,
            },
        };
        Ok(Self { folder: folder.to_owned(), saved })
    }

    fn behaviour(&self) -> Behaviour {
        let text = std::fs::read(self.folder.join("behaviour.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    fn save(&self) {
        let fresh = self.folder.join("state.new");
        std::fs::write(&fresh, serde_json::to_vec(&self.saved).unwrap()).unwrap();
        std::fs::rename(fresh, self.folder.join("state.json")).unwrap();
    }
}

fn unreadable(path: &Path, error: &std::io::Error) -> TrainError {
    TrainError::State { path: path.display().to_string(), reason: error.to_string() }
}

fn acceptance_of(draft: &Path) -> Result<f64, TrainError> {
    let weights = draft.join(WEIGHTS);
    let text = std::fs::read_to_string(&weights).map_err(|error| unreadable(&weights, &error))?;
    Ok(text.parse().unwrap())
}

fn write_manifest(folder: &Path, mut manifest: Value) -> Result<String, TrainError> {
    let mut files = serde_json::Map::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let hash = sha256_file(&entry.path()).unwrap();
        files.insert(entry.file_name().to_string_lossy().into_owned(), hash.into());
    }
    manifest["files"] = Value::Object(files);
    let parsed: DraftManifest = serde_json::from_value(manifest.clone()).unwrap();
    // The fake server reports this field back as the checksum of what it runs.
    manifest["checksum"] = parsed.checksum().into();
    std::fs::write(folder.join(MANIFEST_FILE), manifest.to_string()).unwrap();
    Ok(parsed.checksum())
}

impl TrainerBackend for FakeTrainer {
    fn state(&self) -> TrainState {
        TrainState {
            base: self.saved.base.clone(),
            step: self.saved.step,
            tokens: self.saved.tokens,
            seconds: 0.0,
            parameters: 1,
            parameters_without_gradient: 0,
        }
    }

    fn train(
        &mut self,
        samples: &[Sample],
        _epochs: usize,
        on_update: &mut dyn FnMut(Update) -> bool,
    ) -> Result<(), TrainError> {
        let behaviour = self.behaviour();
        assert!(samples.iter().all(|sample| sample.is_scored() && !sample.held_out));
        for batch in samples.chunks(4) {
            std::thread::sleep(Duration::from_millis(behaviour.step_ms));
            if behaviour.die_above.is_some_and(|most| samples.len() > most) {
                std::process::exit(137);
            }
            let tokens = batch.iter().map(|sample| sample.output_ids.len() as u64).sum();
            self.saved.step += 1;
            self.saved.tokens += tokens;
            let update =
                Update { step: self.saved.step, loss: 1.0, tokens, seconds: 0.01, skipped: false };
            if !on_update(update) {
                self.save();
                return Ok(());
            }
        }
        self.saved.acceptance = (self.saved.acceptance + behaviour.gain).clamp(0.0, behaviour.cap);
        let mut ids: Vec<u64> = samples.iter().map(|sample| sample.id).collect();
        ids.sort_unstable();
        ids.dedup();
        let log = self.folder.join("rounds.log");
        let mut log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        writeln!(log, "{}", json!(ids)).unwrap();
        self.save();
        Ok(())
    }

    fn evaluate(
        &mut self,
        draft: Option<&Path>,
        samples: &[Sample],
    ) -> Result<Acceptance, TrainError> {
        let behaviour = self.behaviour();
        let (rate, finite) = match draft {
            None => (self.saved.acceptance, behaviour.finite),
            Some(draft) => {
                let name = draft.file_name().unwrap().to_string_lossy();
                let measured = behaviour.measured.get(name.as_ref()).copied();
                (measured.map_or_else(|| acceptance_of(draft), Ok)?, true)
            }
        };
        Ok(Acceptance {
            positions: samples.iter().map(|sample| sample.output_ids.len() as u64).sum(),
            acceptance_rate: rate,
            alpha: rate,
            mean_accepted_length: 1.0 + rate,
            finite,
            per_sample: vec![rate; samples.len()],
        })
    }

    fn export(&mut self, directory: &Path, manifest: Value) -> Result<String, TrainError> {
        let behaviour = self.behaviour();
        let failed =
            |reason: String| TrainError::State { path: directory.display().to_string(), reason };
        if behaviour.fail_export {
            return Err(failed("no space left on device".into()));
        }
        std::fs::create_dir(directory).map_err(|error| failed(error.to_string()))?;
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
            let from = self.saved.base.join(name);
            if from.exists() {
                std::fs::copy(from, directory.join(name)).unwrap();
            }
        }
        std::thread::sleep(Duration::from_millis(behaviour.export_ms));
        std::fs::write(directory.join(WEIGHTS), self.saved.acceptance.to_string()).unwrap();
        write_manifest(directory, manifest)
    }

    fn restart(&mut self, draft: &Path) -> Result<(), TrainError> {
        self.saved =
            Saved { base: draft.to_owned(), acceptance: acceptance_of(draft)?, step: 0, tokens: 0 };
        self.save();
        Ok(())
    }
}
