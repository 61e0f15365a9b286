//! The crate's only unsafe code: mapping a file of weights into memory.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::HubError;

/// A file whose bytes are read from the page cache on demand.
pub(super) struct MappedFile {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps a file for reading; refuses an empty one, which is never a model.
    pub(super) fn open(path: &Path) -> Result<Self, HubError> {
        let read_error = |source| HubError::Read { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(read_error)?;
        if file.metadata().map_err(read_error)?.len() == 0 {
            return Err(HubError::damaged(path, "the file is empty"));
        }
        // SAFETY: the map is read-only and private to this type. What cannot be ruled out is that
        // another process truncates the file while it is mapped, which ends this process with
        // SIGBUS. Model files are replaced by rename, never cut in place, as every tool that
        // maps them assumes.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(read_error)?;
        Ok(Self { path: path.to_path_buf(), map })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }
}
