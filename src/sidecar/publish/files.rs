//! Files and folders that are whole, flushed and private.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::{FolderError, STAGED_PREFIX};

/// Replaces a file: written beside it, flushed, renamed.
///
/// # Errors
/// When it cannot be written; the old file is then untouched.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let failed = |error| FolderError::io("write", path, error);
    let mut file =
        tempfile::Builder::new().prefix(STAGED_PREFIX).tempfile_in(folder).map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    sync_folder(folder)
}

pub(super) fn remove(path: &Path) -> Result<(), FolderError> {
    let outcome = match std::fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
        Err(_) => return Ok(()),
    };
    outcome.map_err(|error| FolderError::io("remove", path, error))
}

pub(super) fn sync_tree(folder: &Path) -> Result<(), FolderError> {
    let listing =
        std::fs::read_dir(folder).map_err(|error| FolderError::io("list", folder, error))?;
    for entry in listing.flatten() {
        let path = entry.path();
        if path.is_dir() {
            sync_tree(&path)?;
        } else {
            let file = File::open(&path).map_err(|error| FolderError::io("open", &path, error))?;
            file.sync_all().map_err(|error| FolderError::io("flush", &path, error))?;
        }
    }
    sync_folder(folder)
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), FolderError> {
    File::open(folder)
        .and_then(|file| file.sync_all())
        .map_err(|error| FolderError::io("flush", folder, error))
}

pub(super) fn make_private(folder: &Path) -> Result<(), FolderError> {
    use std::os::unix::fs::PermissionsExt;
    // The server must be able to read the drafts, so others may pass through but not look.
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o711))
        .map_err(|error| FolderError::io("set permissions of", folder, error))
}
