//! Training state on disk: weights, moments and counters, replaced in one rename.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};

use super::trainer::{TrainError, TrainState};

/// What a checkpoint says of itself; the tensors lie beside it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Header {
    pub state: TrainState,
    /// Passes over data begun so far; seeds the shuffle of the next one.
    pub rounds: u64,
}

/// What a checkpoint holds: its header, and weights and moments by name.
pub type Checkpoint = (Header, BTreeMap<String, Tensor>);

/// A folder that holds at most one checkpoint, `checkpoint/`, and leftovers of a kill.
pub struct CheckpointFolder {
    folder: PathBuf,
}

const CURRENT: &str = "checkpoint";

impl CheckpointFolder {
    /// Uses `folder`, creating it if need be and removing what a killed writer left.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn open(folder: &Path) -> Result<Self, TrainError> {
        let this = Self { folder: folder.to_path_buf() };
        std::fs::create_dir_all(folder).map_err(|e| this.error(e))?;
        // A kill between the two renames of `save` leaves only the older one: take it back.
        let (current, old) = (folder.join(CURRENT), folder.join("old"));
        if !current.exists() && old.exists() {
            std::fs::rename(&old, &current).map_err(|e| this.error(e))?;
        }
        for leftover in ["old", "new"] {
            let path = folder.join(leftover);
            if path.exists() {
                std::fs::remove_dir_all(path).map_err(|e| this.error(e))?;
            }
        }
        Ok(this)
    }

    /// Replaces the checkpoint.
    ///
    /// # Errors
    /// When it cannot be written; the one before stays.
    pub fn save(
        &self,
        header: &Header,
        tensors: &BTreeMap<String, Tensor>,
    ) -> Result<(), TrainError> {
        let [new, old, current] = ["new", "old", CURRENT].map(|name| self.folder.join(name));
        let write = || -> std::io::Result<()> {
            std::fs::create_dir_all(&new)?;
            let tensors: HashMap<String, Tensor> = tensors.clone().into_iter().collect();
            candle_core::safetensors::save(&tensors, new.join("state.safetensors"))
                .map_err(std::io::Error::other)?;
            std::fs::write(new.join("header.json"), serde_json::to_vec_pretty(header)?)?;
            if current.exists() {
                std::fs::rename(&current, &old)?;
            }
            std::fs::rename(&new, &current)?;
            if old.exists() {
                std::fs::remove_dir_all(&old)?;
            }
            Ok(())
        };
        write().map_err(|e| self.error(e))
    }

    /// The checkpoint, if there is one.
    ///
    /// # Errors
    /// When there is one that cannot be read.
    pub fn load(&self) -> Result<Option<Checkpoint>, TrainError> {
        let current = self.folder.join(CURRENT);
        if !current.exists() {
            return Ok(None);
        }
        let header = std::fs::read(current.join("header.json")).map_err(|e| self.error(e))?;
        let header = serde_json::from_slice(&header).map_err(|e| self.error(e))?;
        let file = current.join("state.safetensors");
        let tensors =
            candle_core::safetensors::load(file, &Device::Cpu).map_err(|e| self.error(e))?;
        Ok(Some((header, tensors.into_iter().collect())))
    }

    /// Forgets the checkpoint.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn clear(&self) -> Result<(), TrainError> {
        let current = self.folder.join(CURRENT);
        if current.exists() {
            std::fs::remove_dir_all(current).map_err(|e| self.error(e))?;
        }
        Ok(())
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    fn error(&self, reason: impl std::fmt::Display) -> TrainError {
        TrainError::State { path: self.folder.display().to_string(), reason: reason.to_string() }
    }
}
