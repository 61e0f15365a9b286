//! Draft folders on disk: import, staging, putting in place, the `current` link, retention.
//!
//! Architecture invariant: a folder under its final name is whole. It is written beside its
//! place, flushed, then renamed; a kill leaves at most a `.tmp-` folder, removed at the start.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::versions::{FIRST_VERSION, Ledger, VersionState};
use crate::model::manifest::{DraftManifest, MANIFEST_FILE, ManifestError, sha256_file};
use crate::vocab::VOCAB_FILE;

mod files;

pub use files::write_atomically;
use files::{make_private, remove, sync_folder, sync_tree};

const STAGED_PREFIX: &str = ".tmp-";
/// Name of the link to the version that runs.
pub const CURRENT_LINK: &str = "current";

/// What can go wrong with the work folder.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("cannot {what} {path}: {reason}{}", hint(.reason))]
    Io { what: &'static str, path: String, reason: std::io::Error },
    #[error(
        "{path} is not a ledger of this build: {reason}\nhint: restore it, or start with another work folder"
    )]
    Ledger { path: String, reason: String },
    #[error(
        "no draft at {path}: {reason}\nhint: make one with `da-build --model TARGET --output DIR` and pass it with --draft"
    )]
    NoDraft { path: String, reason: String },
    #[error(
        "no draft is given\nhint: make one with `da-build --model TARGET --output DIR` and pass it with --draft"
    )]
    NotGiven,
    #[error(
        "{path} has a vocabulary of its own ({VOCAB_FILE}), expected the target's: the sidecar does not learn on such a draft yet\nhint: build one without --vocab"
    )]
    OwnVocabulary { path: String },
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("another sidecar uses {path}\nhint: stop it, or give this one its own --work-dir")]
    Locked { path: String },
}

impl FolderError {
    pub(super) fn io(what: &'static str, path: &Path, reason: std::io::Error) -> Self {
        Self::Io { what, path: path.display().to_string(), reason }
    }

    /// Whether the command line is at fault rather than the machine.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::NoDraft { .. } | Self::NotGiven | Self::OwnVocabulary { .. })
    }
}

fn hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => {
            "\nhint: give a --work-dir that this user may write to"
        }
        std::io::ErrorKind::StorageFull => "\nhint: free space or lower publish.keep_versions",
        _ => "",
    }
}

/// The folders of one sidecar, held for as long as it runs.
pub struct WorkDir {
    root: PathBuf,
    /// Locks the folder against a second sidecar; released by the kernel, also after a kill.
    _lock: File,
}

impl WorkDir {
    /// Makes what is missing and takes the lock. Paths are absolute from here on, because the
    /// server reads them too.
    ///
    /// # Errors
    /// When it cannot be written to, or another sidecar holds it.
    pub fn open(root: &Path) -> Result<Self, FolderError> {
        std::fs::create_dir_all(root).map_err(|error| FolderError::io("make", root, error))?;
        let root = root.canonicalize().map_err(|error| FolderError::io("resolve", root, error))?;
        let lock_path = root.join("lock");
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&lock_path)
            .map_err(|error| FolderError::io("write to", &lock_path, error))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| FolderError::Locked { path: root.display().to_string() })?;
        make_private(&root)?;
        let work = Self { root, _lock: lock };
        for folder in [work.drafts(), work.trainer()] {
            std::fs::create_dir_all(&folder)
                .map_err(|error| FolderError::io("make", &folder, error))?;
        }
        Ok(work)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn drafts(&self) -> PathBuf {
        self.root.join("drafts")
    }

    pub fn trainer(&self) -> PathBuf {
        self.root.join("trainer")
    }

    pub fn trainer_socket(&self) -> PathBuf {
        self.root.join("trainer.sock")
    }

    pub fn version(&self, version: &str) -> PathBuf {
        self.drafts().join(version)
    }

    /// Where a version is written before it is put in place.
    pub fn staged(&self, version: &str) -> PathBuf {
        self.drafts().join(format!("{STAGED_PREFIX}{version}"))
    }

    /// Removes what a killed predecessor left half-written.
    ///
    /// # Errors
    /// When a leftover cannot be removed.
    pub fn remove_leftovers(&self) -> Result<usize, FolderError> {
        let mut removed = 0;
        for folder in [self.root().to_owned(), self.drafts()] {
            let listing = std::fs::read_dir(&folder)
                .map_err(|error| FolderError::io("list", &folder, error))?;
            for entry in listing.flatten() {
                if entry.file_name().to_string_lossy().starts_with(STAGED_PREFIX) {
                    remove(&entry.path())?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }

    /// Copies a draft folder in as the first version. Its manifest is checked, or made when the
    /// folder has none. Copied rather than linked: a version must not change with its source.
    ///
    /// # Errors
    /// When the folder is not a draft, is damaged, or cannot be copied.
    pub fn import(&self, draft: &Path) -> Result<DraftManifest, FolderError> {
        let manifest = check_draft(draft)?;
        let staged = self.staged(FIRST_VERSION);
        remove(&staged)?;
        std::fs::create_dir(&staged).map_err(|error| FolderError::io("make", &staged, error))?;
        for name in manifest.files.keys() {
            let (from, to) = (draft.join(name), staged.join(name));
            if let Some(folder) = to.parent() {
                std::fs::create_dir_all(folder)
                    .map_err(|error| FolderError::io("make", folder, error))?;
            }
            std::fs::copy(&from, &to).map_err(|error| FolderError::io("copy", &from, error))?;
        }
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| FolderError::Ledger {
            path: MANIFEST_FILE.into(),
            reason: error.to_string(),
        })?;
        let path = staged.join(MANIFEST_FILE);
        std::fs::write(&path, text).map_err(|error| FolderError::io("write", &path, error))?;
        self.place(FIRST_VERSION)?;
        Ok(manifest)
    }

    /// The manifest of a version whose folder is there and undamaged.
    pub fn whole(&self, version: &str) -> Option<DraftManifest> {
        let folder = self.version(version);
        let manifest = DraftManifest::read(&folder).ok()?;
        manifest.verify(&folder).is_ok().then_some(manifest)
    }

    /// The first version number that no folder has.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn next_number(&self) -> Result<u64, FolderError> {
        let drafts = self.drafts();
        let listing =
            std::fs::read_dir(&drafts).map_err(|error| FolderError::io("list", &drafts, error))?;
        let numbers = listing
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix('v')?.parse::<u64>().ok());
        Ok(numbers.max().map_or(0, |highest| highest + 1))
    }

    /// Puts a staged folder in place: checks it against its manifest, flushes it, renames it.
    ///
    /// # Errors
    /// When it is damaged or cannot be written; nothing is under the final name then.
    pub fn place(&self, version: &str) -> Result<DraftManifest, FolderError> {
        let (staged, place) = (self.staged(version), self.version(version));
        let manifest = DraftManifest::read(&staged)?;
        manifest.verify(&staged)?;
        sync_tree(&staged)?;
        std::fs::rename(&staged, &place)
            .map_err(|error| FolderError::io("rename to", &place, error))?;
        sync_folder(&self.drafts())?;
        Ok(manifest)
    }

    /// Moves the `current` link, atomically.
    ///
    /// # Errors
    /// When the link cannot be made or renamed.
    pub fn point_current(&self, version: &str) -> Result<(), FolderError> {
        let (link, fresh) =
            (self.drafts().join(CURRENT_LINK), self.drafts().join(format!("{STAGED_PREFIX}link")));
        if std::fs::read_link(&link).is_ok_and(|target| target == Path::new(version)) {
            return Ok(());
        }
        remove(&fresh)?;
        std::os::unix::fs::symlink(version, &fresh)
            .map_err(|error| FolderError::io("link", &fresh, error))?;
        std::fs::rename(&fresh, &link)
            .map_err(|error| FolderError::io("rename to", &link, error))?;
        sync_folder(&self.drafts())
    }

    /// Deletes version folders beyond the newest `keep`, never one of `protect`. Marks them in
    /// the ledger and returns how many went.
    pub fn retain(&self, ledger: &mut Ledger, keep: usize, protect: &[String]) -> usize {
        let mut kept = 0;
        let mut removed = 0;
        let running_parent = ledger.find(&ledger.running).and_then(|record| record.parent.clone());
        let (running, pinned) = (ledger.running.clone(), ledger.pinned.clone());
        for record in ledger.versions.iter_mut().rev().filter(|record| record.on_disk) {
            let name = Some(&record.version);
            let needed = record.version == running
                || record.version == FIRST_VERSION
                || name == running_parent.as_ref()
                || name == pinned.as_ref()
                || protect.contains(&record.version);
            kept += 1;
            if needed || kept <= keep {
                continue;
            }
            match self.discard(&record.version) {
                Ok(()) => {
                    record.on_disk = false;
                    removed += 1;
                }
                Err(error) => {
                    tracing::warn!(version = record.version, %error, "cannot delete an old version")
                }
            }
        }
        removed
    }

    /// Deletes a version. It is renamed first, so that no half-deleted folder has a final name.
    fn discard(&self, version: &str) -> Result<(), FolderError> {
        let (place, doomed) = (self.version(version), self.staged(&format!("old-{version}")));
        remove(&doomed)?;
        match std::fs::rename(&place, &doomed) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(FolderError::io("rename", &place, error)),
            Ok(()) => {}
        }
        remove(&doomed)
    }

    /// Brings ledger and folders in line after a start: a gated version whose folder is whole is
    /// published, one without a folder is forgotten, and the link follows the ledger.
    ///
    /// # Errors
    /// When no version is left that could run, or the folder cannot be written.
    pub fn recover(&self, ledger: &mut Ledger) -> Result<(), FolderError> {
        self.remove_leftovers()?;
        let mut rejoined = None;
        for record in &mut ledger.versions {
            if record.state == VersionState::Publishing {
                match self.whole(&record.version) {
                    Some(manifest) => {
                        record.state = VersionState::Published;
                        record.checksum = manifest.checksum();
                        rejoined = Some(record.version.clone());
                    }
                    None => record.on_disk = false,
                }
            } else if record.on_disk && !self.version(&record.version).join(MANIFEST_FILE).is_file()
            {
                tracing::warn!(version = record.version, "the folder of this version is gone");
                record.on_disk = false;
            }
        }
        ledger.versions.retain(|record| record.state != VersionState::Publishing || record.on_disk);
        if let Some(version) = rejoined {
            tracing::info!(version, "completing a publication that was cut short");
            ledger.running = version;
        }
        let runs = ledger.find(&ledger.running).is_some_and(|record| ledger.can_run(record));
        if !runs {
            let fallback = ledger.versions.iter().rev().find(|record| ledger.can_run(record));
            let Some(record) = fallback else {
                return Err(FolderError::NoDraft {
                    path: self.drafts().display().to_string(),
                    reason: "no version is left that could run".into(),
                });
            };
            tracing::error!(missing = ledger.running, version = record.version, "falling back");
            ledger.running = record.version.clone();
            ledger.restart_from = Some(ledger.running.clone());
        }
        self.point_current(&ledger.running)
    }
}

/// The manifest that an imported draft will have, without writing anything.
///
/// # Errors
/// When the folder is not a draft or does not match its manifest.
pub fn check_draft(draft: &Path) -> Result<DraftManifest, FolderError> {
    let no_draft =
        |reason: String| FolderError::NoDraft { path: draft.display().to_string(), reason };
    if draft.as_os_str().is_empty() {
        return Err(FolderError::NotGiven);
    }
    if !draft.is_dir() {
        return Err(no_draft("there is no such folder".into()));
    }
    for name in ["config.json", "tokenizer.json"] {
        if !draft.join(name).is_file() {
            return Err(no_draft(format!("it has no {name}")));
        }
    }
    // Teachers speak in the target's ids; read as the draft's they would teach it nonsense.
    if draft.join(VOCAB_FILE).is_file() {
        return Err(FolderError::OwnVocabulary { path: draft.display().to_string() });
    }
    let mut manifest = if draft.join(MANIFEST_FILE).is_file() {
        let manifest = DraftManifest::read(draft)?;
        manifest.verify(draft)?;
        manifest
    } else {
        foreign_manifest(draft)?
    };
    if !manifest.files.keys().any(|name| name.ends_with(".safetensors")) {
        return Err(no_draft("it has no safetensors file".into()));
    }
    manifest.version = FIRST_VERSION.into();
    manifest.parent = None;
    Ok(manifest)
}

/// A manifest for a draft that another tool made: nothing is known but its files.
fn foreign_manifest(draft: &Path) -> Result<DraftManifest, FolderError> {
    let listing =
        std::fs::read_dir(draft).map_err(|error| FolderError::io("list", draft, error))?;
    let mut files = std::collections::BTreeMap::new();
    for entry in listing.flatten().filter(|entry| entry.path().is_file()) {
        let hash = sha256_file(&entry.path())
            .map_err(|error| FolderError::io("read", &entry.path(), error))?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), hash);
    }
    Ok(DraftManifest {
        schema: 1,
        version: FIRST_VERSION.into(),
        parent: None,
        created_unix: unix_ms() / 1000,
        target: String::new(),
        target_hash: String::new(),
        tokenizer_hash: files.get("tokenizer.json").cloned().unwrap_or_default(),
        data_hash: String::new(),
        seed: 0,
        settings: Value::Null,
        scores: Value::Null,
        files,
    })
}

/// Milliseconds since the epoch.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
