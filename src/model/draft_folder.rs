//! Writing a draft folder so that it appears whole or not at all.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use safetensors::tensor::{Dtype, View};
use serde_json::{Map, Value};

use super::manifest::{DraftManifest, MANIFEST_FILE, sha256_bytes, sha256_file};

/// Name of the weight file inside a draft folder.
pub const WEIGHTS_FILE: &str = "model.safetensors";

/// Why a draft folder could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error(
        "{path} exists already\nhint: draft folders are never overwritten; choose another place or remove it"
    )]
    Exists { path: PathBuf },
    #[error(
        "cannot write {path}: {source}\nhint: check the permissions and the free space there; nothing was left behind"
    )]
    Io { path: PathBuf, source: std::io::Error },
    #[error("cannot convert tensor {name}: {source}")]
    Tensor { name: String, source: candle_core::Error },
    #[error("tensor {name} holds values that are not finite; such a draft is never written")]
    NotFinite { name: String },
    #[error(
        "cannot write {path}: {reason}\nhint: check the permissions and the free space there; nothing was left behind"
    )]
    Weights { path: PathBuf, reason: String },
}

/// What goes into a draft folder.
pub struct DraftFolder<'a> {
    pub config: &'a Map<String, Value>,
    pub tensors: &'a BTreeMap<String, Tensor>,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Files to carry over byte for byte, and the model card.
    pub companions: &'a [(String, Vec<u8>)],
    /// Its `files` are filled in here.
    pub manifest: DraftManifest,
}

impl DraftFolder<'_> {
    /// Writes everything beside `directory`, flushes it to disk and renames it into place.
    /// Returns the manifest as written.
    ///
    /// # Errors
    /// See [`WriteError`]; nothing is left behind.
    pub fn write(mut self, directory: &Path) -> Result<DraftManifest, WriteError> {
        if directory.exists() {
            return Err(WriteError::Exists { path: directory.into() });
        }
        let parent = directory.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let io = |path: &Path| {
            let path = path.to_path_buf();
            move |source| WriteError::Io { path, source }
        };
        std::fs::create_dir_all(parent).map_err(io(parent))?;
        // Removed when it is dropped on an error.
        let staging =
            tempfile::Builder::new().prefix(".draft-").tempdir_in(parent).map_err(io(parent))?;
        let mut files = BTreeMap::new();

        let weights = staging.path().join(WEIGHTS_FILE);
        self.write_weights(&weights)?;
        files.insert(WEIGHTS_FILE.to_string(), sha256_file(&weights).map_err(io(&weights))?);

        let config = serde_json::to_vec_pretty(self.config).unwrap_or_default();
        let texts = self.companions.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()));
        for (name, bytes) in texts.chain([("config.json", config.as_slice())]) {
            let path = staging.path().join(name);
            write_synced(&path, bytes).map_err(io(&path))?;
            files.insert(name.to_string(), sha256_bytes(bytes));
        }

        self.manifest.files = files;
        let manifest = serde_json::to_vec_pretty(&self.manifest).unwrap_or_default();
        let path = staging.path().join(MANIFEST_FILE);
        write_synced(&path, &manifest).map_err(io(&path))?;

        set_readable(staging.path()).map_err(io(staging.path()))?;
        sync_directory(staging.path()).map_err(io(staging.path()))?;
        std::fs::rename(staging.path(), directory).map_err(io(directory))?;
        let _renamed_away = staging.keep();
        sync_directory(parent).map_err(io(parent))?;
        Ok(self.manifest)
    }

    fn write_weights(&self, path: &Path) -> Result<(), WriteError> {
        let mut views = Vec::with_capacity(self.tensors.len());
        for (name, tensor) in self.tensors {
            let bytes = Bytes::new(tensor, self.dtype)
                .map_err(|source| WriteError::Tensor { name: name.clone(), source })?;
            views.push((name, bytes.ok_or_else(|| WriteError::NotFinite { name: name.clone() })?));
        }
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        safetensors::serialize_to_file(views, Some(metadata), path)
            .map_err(|e| WriteError::Weights { path: path.into(), reason: e.to_string() })?;
        File::open(path)
            .and_then(|file| file.sync_all())
            .map_err(|source| WriteError::Io { path: path.into(), source })
    }
}

/// Writes a file and flushes it to disk.
fn write_synced(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

/// Temporary folders are private to their owner; a draft is read by the server's user too.
fn set_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

/// One tensor as bytes in the file's dtype.
struct Bytes {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Bytes {
    /// None when a value is not finite in the target dtype.
    fn new(tensor: &Tensor, dtype: DType) -> candle_core::Result<Option<Self>> {
        let flat = tensor.detach().to_dtype(dtype)?.flatten_all()?;
        let (name, bytes, finite) = match dtype {
            DType::F16 => {
                let values = flat.to_vec1::<half::f16>()?;
                let finite = values.iter().all(|v| v.is_finite());
                (Dtype::F16, bytemuck::cast_slice(&values).to_vec(), finite)
            }
            DType::BF16 => {
                let values = flat.to_vec1::<half::bf16>()?;
                let finite = values.iter().all(|v| v.is_finite());
                (Dtype::BF16, bytemuck::cast_slice(&values).to_vec(), finite)
            }
            _ => {
                let values = flat.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                let finite = values.iter().all(|v| v.is_finite());
                (Dtype::F32, bytemuck::cast_slice(&values).to_vec(), finite)
            }
        };
        Ok(finite.then(|| Self { dtype: name, shape: tensor.dims().to_vec(), bytes }))
    }
}

impl View for Bytes {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
