//! Whether a draft folder is whole, unchanged and usable.

use std::path::Path;

use candle_core::{Device, Tensor};
use serde::Serialize;

use crate::hub::Target;
use crate::model::decoder::Decoder;
use crate::model::manifest::{DraftManifest, MANIFEST_FILE, sha256_file};

/// What [`verify`] found.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Verdict {
    /// What is wrong, with what to do about it; none for a good folder.
    pub problems: Vec<String>,
    /// What was checked and is good.
    pub good: Vec<String>,
    pub version: Option<String>,
    pub target: Option<String>,
    pub target_hash: Option<String>,
}

/// Checks a draft folder: its manifest and the files' checksums, the configuration beside the
/// tensors, every value, the tokenizer's ids, and one forward pass. Goes on after a problem.
pub fn verify(folder: &Path) -> Verdict {
    let mut verdict = Verdict::default();
    check_files(folder, &mut verdict);
    match Target::open(&folder.display().to_string()) {
        Ok(draft) => check_model(&draft, &mut verdict),
        Err(error) => verdict.problems.push(error.to_string()),
    }
    verdict
}

fn check_files(folder: &Path, verdict: &mut Verdict) {
    let manifest = match DraftManifest::read(folder) {
        Ok(manifest) => manifest,
        Err(error) => {
            verdict.problems.push(format!(
                "{error}\nhint: a folder without {MANIFEST_FILE} was not made by da-build or the \
                 sidecar; its files cannot be compared with anything"
            ));
            return;
        }
    };
    let before = verdict.problems.len();
    for (name, expected) in &manifest.files {
        match sha256_file(&folder.join(name)) {
            Ok(got) if got == *expected => {}
            Ok(got) => verdict.problems.push(format!(
                "{name} was changed: expected sha256 {expected}, got {got}\nhint: build or publish \
                 the draft again, or copy it again from where it came"
            )),
            Err(error) => verdict.problems.push(format!(
                "{name} cannot be read: {error}\nhint: the folder was copied in part; copy it again"
            )),
        }
    }
    let known = |name: &str| name == MANIFEST_FILE || manifest.files.contains_key(name);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let weighs = name.ends_with(".safetensors") || name.ends_with(".bin");
        if weighs && !known(&name) {
            verdict.problems.push(format!(
                "{name} is not in the manifest\nhint: remove it; a server may load it in place of \
                 the draft's weights"
            ));
        }
    }
    if verdict.problems.len() == before {
        verdict.good.push(format!("{} files match their checksums", manifest.files.len()));
    }
    verdict.version = Some(manifest.version);
    verdict.target = Some(manifest.target);
    verdict.target_hash = Some(manifest.target_hash);
}

fn check_model(draft: &Target, verdict: &mut Verdict) {
    let config = &draft.config;
    verdict.good.push(format!(
        "{} as {}: {:.1} M parameters in {} tensors",
        config.family.model_type(),
        config.family.architecture(),
        config.parameters() as f64 / 1e6,
        config.tensor_shapes().len()
    ));
    let ids = draft.tokenizer.vocab_size();
    if ids > config.vocab_size {
        verdict.problems.push(format!(
            "the tokenizer has {ids} ids, the model {} rows\nhint: the tokenizer is not this \
             model's; copy the target's",
            config.vocab_size
        ));
    } else {
        let padding = config.vocab_size - ids;
        verdict.good.push(format!(
            "{ids} token ids fit the {} rows ({padding} of padding)",
            config.vocab_size
        ));
    }
    let mut broken = Vec::new();
    let mut names = draft.weights.names();
    names.retain(|name| !matches!(finite(draft, name), Ok(true)));
    broken.append(&mut names);
    if let Some(first) = broken.first() {
        verdict.problems.push(format!(
            "{} tensors hold values that are not finite, {first} first\nhint: build the draft again",
            broken.len()
        ));
        return;
    }
    match forward(draft) {
        Ok(true) => verdict.good.push("a forward pass gives finite logits".into()),
        Ok(false) => verdict.problems.push(
            "a forward pass gives logits that are not finite\nhint: build the draft again".into(),
        ),
        Err(error) => verdict.problems.push(format!("a forward pass fails: {error}")),
    }
}

fn finite(draft: &Target, name: &str) -> Result<bool, super::BuildError> {
    let tensor = draft.weights.tensor(name, &Device::Cpu)?;
    let largest = tensor.abs()?.flatten_all()?.sum_all()?.to_scalar::<f32>()?;
    Ok(largest.is_finite())
}

fn forward(draft: &Target) -> Result<bool, super::BuildError> {
    let decoder = Decoder::new(&draft.config, |name| {
        draft.weights.tensor(name, &Device::Cpu).map_err(super::BuildError::from)
    })?;
    let vocab = draft.config.vocab_size as u32;
    let ids: Vec<u32> = (0..8).map(|at| (at * 7919 + 1) % vocab).collect();
    let logits = decoder.logits(&Tensor::from_vec(ids, (1, 8), &Device::Cpu)?)?;
    let values = logits.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.iter().all(|value| value.is_finite()))
}
