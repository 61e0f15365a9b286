//! What a build keeps beside its output while it runs, so that a stopped one can be taken up again.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::BuildError;
use crate::model::manifest::sha256_bytes;

/// `<output>.partial`: JSON documents and folders that belong to one command.
pub struct WorkFolder {
    path: PathBuf,
}

const KEY_FILE: &str = "key";

impl WorkFolder {
    /// Opens the work of `output`. What an earlier build left is kept when it was started with the
    /// same `settings`, else removed.
    ///
    /// # Errors
    /// When the folder cannot be made or cleared.
    pub fn open(output: &Path, settings: &impl Serialize) -> Result<Self, BuildError> {
        let mut name = output.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let this = Self { path: output.with_file_name(name) };
        let key = sha256_bytes(&serde_json::to_vec(settings).unwrap_or_default());
        let same = std::fs::read(this.path.join(KEY_FILE)).is_ok_and(|own| own == key.as_bytes());
        if !same {
            this.clear()?;
            std::fs::create_dir_all(&this.path)
                .and_then(|()| std::fs::write(this.path.join(KEY_FILE), &key))
                .map_err(|e| this.error(e))?;
        }
        Ok(this)
    }

    /// A path inside.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// A document that [`WorkFolder::keep`] wrote; none when there is none or it is damaged.
    pub fn load<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let bytes = std::fs::read(self.join(name)).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Keeps a document, replacing the one of that name in one step.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn keep(&self, name: &str, document: &impl Serialize) -> Result<(), BuildError> {
        let staging = self.join(&format!("{name}.new"));
        std::fs::write(&staging, serde_json::to_vec(document).unwrap_or_default())
            .and_then(|()| std::fs::rename(&staging, self.join(name)))
            .map_err(|e| self.error(e))
    }

    /// Keeps named tensors, as [`WorkFolder::keep`] does documents.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn keep_tensors(
        &self,
        name: &str,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> Result<(), BuildError> {
        let tensors: HashMap<String, Tensor> = tensors.into_iter().collect();
        let staging = self.join(&format!("{name}.new"));
        candle_core::safetensors::save(&tensors, &staging)?;
        std::fs::rename(&staging, self.join(&format!("{name}.safetensors")))
            .map_err(|e| self.error(e))
    }

    /// Tensors that [`WorkFolder::keep_tensors`] wrote; none when there are none or the file is
    /// damaged.
    pub fn load_tensors(&self, name: &str) -> Option<HashMap<String, Tensor>> {
        let path = self.join(&format!("{name}.safetensors"));
        candle_core::safetensors::load(path, &Device::Cpu).ok()
    }

    /// Removes a folder inside, if it is there: a build that was stopped before it said that the
    /// folder is complete makes it again.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn drop_folder(&self, name: &str) -> Result<(), BuildError> {
        let path = self.join(name);
        if path.exists() {
            std::fs::remove_dir_all(&path).map_err(|e| self.error(e))?;
        }
        Ok(())
    }

    /// Removes everything.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn clear(&self) -> Result<(), BuildError> {
        if self.path.exists() {
            std::fs::remove_dir_all(&self.path).map_err(|e| self.error(e))?;
        }
        Ok(())
    }

    fn error(&self, source: std::io::Error) -> BuildError {
        BuildError::Work { path: self.path.clone(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_command_finds_its_work_and_another_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("draft");
        let work = WorkFolder::open(&output, &("a", 1)).unwrap();
        work.keep("answers.json", &vec![1, 2, 3]).unwrap();
        assert!(folder.path().join("draft.partial").exists());
        let again = WorkFolder::open(&output, &("a", 1)).unwrap();
        assert_eq!(again.load::<Vec<u32>>("answers.json"), Some(vec![1, 2, 3]));
        let other = WorkFolder::open(&output, &("a", 2)).unwrap();
        assert_eq!(other.load::<Vec<u32>>("answers.json"), None);
        other.clear().unwrap();
        assert!(!folder.path().join("draft.partial").exists());
    }
}
