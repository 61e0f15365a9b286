//! `da_manifest.json`: everything a draft version was made from.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Name of the manifest inside a draft folder.
pub const MANIFEST_FILE: &str = "da_manifest.json";

/// The record of one draft version. Immutable once written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DraftManifest {
    /// Layout version of this document.
    pub schema: u32,
    /// `v000000` for the draft that `da-build` made, counting up from there.
    pub version: String,
    /// Version that training started from; none for `v000000`.
    pub parent: Option<String>,
    pub created_unix: u64,
    /// What the target was: name as given, and the hash of what was read.
    pub target: String,
    pub target_hash: String,
    /// SHA-256 of the draft's `tokenizer.json`.
    pub tokenizer_hash: String,
    /// SHA-256 over the token ids of the data that this version learned from or was calibrated on.
    pub data_hash: String,
    pub seed: u64,
    /// Settings of the run that made it.
    pub settings: Value,
    /// What was measured before it was released.
    pub scores: Value,
    /// SHA-256 of every other file of the folder, by name.
    pub files: BTreeMap<String, String>,
}

/// What can be wrong with a draft folder's manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{path} is not a draft manifest: {source}")]
    Parse { path: String, source: serde_json::Error },
    #[error(
        "{path} does not match its manifest: expected sha256 {expected}, got {got}\nhint: the folder was changed or half copied; build or publish it again"
    )]
    Checksum { path: String, expected: String, got: String },
}

impl DraftManifest {
    /// Reads the manifest of a draft folder.
    ///
    /// # Errors
    /// When the file is missing or not a manifest.
    pub fn read(folder: &Path) -> Result<Self, ManifestError> {
        let path = folder.join(MANIFEST_FILE);
        let text = std::fs::read(&path)
            .map_err(|source| ManifestError::Read { path: path.display().to_string(), source })?;
        serde_json::from_slice(&text)
            .map_err(|source| ManifestError::Parse { path: path.display().to_string(), source })
    }

    /// Checks every file of the folder against the manifest.
    ///
    /// # Errors
    /// When a file is missing or its hash differs.
    pub fn verify(&self, folder: &Path) -> Result<(), ManifestError> {
        for (name, expected) in &self.files {
            let path = folder.join(name);
            let got = sha256_file(&path).map_err(|source| ManifestError::Read {
                path: path.display().to_string(),
                source,
            })?;
            if &got != expected {
                return Err(ManifestError::Checksum {
                    path: path.display().to_string(),
                    expected: expected.clone(),
                    got,
                });
            }
        }
        Ok(())
    }

    /// One checksum for the whole version: the hash of the weight files' hashes.
    pub fn checksum(&self) -> String {
        let mut hasher = Sha256::new();
        for (name, hash) in self.files.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            hasher.update(name.as_bytes());
            hasher.update(hash.as_bytes());
        }
        hex(&hasher.finalize())
    }
}

/// SHA-256 of a file, in lower-case hexadecimal.
///
/// # Errors
/// When the file cannot be read.
pub fn sha256_file(path: &Path) -> std::io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let read = std::io::Read::read(&mut file, &mut buffer)?;
        if read == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
    }
}

/// SHA-256 of bytes, in lower-case hexadecimal.
pub fn sha256_bytes(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
