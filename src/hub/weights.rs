//! Tensors by Hugging Face name, read one at a time, always as f32.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use sha2::{Digest, Sha256};

use super::HubError;
use super::encoding::Encoding;
use super::mapped::MappedFile;

/// Read access to a model's tensors without holding them all in memory.
pub struct Weights {
    source: Source,
}

enum Source {
    Files { files: Vec<MappedFile>, tensors: BTreeMap<String, StoredTensor> },
    Memory(BTreeMap<String, Tensor>),
}

/// Where one tensor lies and how to read it.
pub(super) struct StoredTensor {
    /// Index into the list of files.
    pub(super) file: usize,
    /// Bytes within the file; checked against its length when the file was opened.
    pub(super) range: Range<usize>,
    pub(super) encoding: Encoding,
    pub(super) shape: Vec<usize>,
    pub(super) rows: RowOrder,
    /// Added to every value when it is read.
    pub(super) add: f32,
}

/// Order of a matrix's rows in the file, compared with Hugging Face's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowOrder {
    Same,
    /// Within each of `heads` groups the two halves are interleaved, as llama.cpp stores the
    /// query and key projections of Llama models.
    HalvesInterleaved {
        heads: usize,
    },
}

impl Weights {
    pub(super) fn from_files(
        files: Vec<MappedFile>,
        tensors: BTreeMap<String, StoredTensor>,
    ) -> Self {
        Self { source: Source::Files { files, tensors } }
    }

    /// Weights that are in memory already, for drafts under construction and for tests.
    pub fn from_tensors(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        Self { source: Source::Memory(tensors.into_iter().collect()) }
    }

    /// The text model alone, under its own names, where the files hold it beside other models
    /// (`language_model.model.…` and `language_model.lm_head.…`, or `model.language_model.…`).
    pub(super) fn of_text_model(self) -> Self {
        let Source::Files { files, tensors } = self.source else { return self };
        let within = |name: &str| -> Option<String> {
            let inner = name.strip_prefix("model.language_model.");
            let outer = name.strip_prefix("language_model.");
            inner.map(|rest| format!("model.{rest}")).or_else(|| outer.map(String::from))
        };
        if !tensors.keys().any(|name| within(name).is_some()) {
            return Self { source: Source::Files { files, tensors } };
        }
        let tensors = tensors
            .into_iter()
            .filter_map(|(name, tensor)| match within(&name) {
                Some(name) => Some((name, tensor)),
                None => (name == "lm_head.weight").then_some((name, tensor)),
            })
            .collect();
        Self { source: Source::Files { files, tensors } }
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        match &self.source {
            Source::Files { tensors, .. } => tensors.keys().cloned().collect(),
            Source::Memory(tensors) => tensors.keys().cloned().collect(),
        }
    }

    /// Shape of a tensor, without reading it.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        match &self.source {
            Source::Files { tensors, .. } => tensors.get(name).map(|tensor| tensor.shape.clone()),
            Source::Memory(tensors) => tensors.get(name).map(|tensor| tensor.dims().to_vec()),
        }
    }

    /// How a tensor is stored, for example `bf16` or `Q4_1`, without reading it.
    pub fn stored_as(&self, name: &str) -> Option<String> {
        match &self.source {
            Source::Files { tensors, .. } => {
                tensors.get(name).map(|tensor| tensor.encoding.to_string())
            }
            Source::Memory(tensors) => {
                tensors.get(name).map(|tensor| tensor.dtype().as_str().to_string())
            }
        }
    }

    /// Whether [`Weights::tensor`] understands how the tensor is stored.
    pub fn is_readable(&self, name: &str) -> bool {
        match &self.source {
            Source::Files { tensors, .. } => {
                tensors.get(name).is_some_and(|tensor| tensor.encoding.is_readable())
            }
            Source::Memory(tensors) => tensors.contains_key(name),
        }
    }

    /// The files that hold the tensors, in name order; none when they are in memory.
    pub fn files(&self) -> Vec<PathBuf> {
        match &self.source {
            Source::Files { files, .. } => {
                let mut paths: Vec<_> =
                    files.iter().map(|file| file.path().to_path_buf()).collect();
                paths.sort();
                paths
            }
            Source::Memory(_) => Vec::new(),
        }
    }

    /// The tensor as f32 on `device`.
    ///
    /// # Errors
    /// When it is missing, or its bytes cannot be read or converted.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor, HubError> {
        let convert = |source| HubError::Convert { name: name.to_string(), source };
        match &self.source {
            Source::Files { files, tensors } => {
                let stored = tensors.get(name).ok_or_else(|| self.missing(name))?;
                let file = &files[stored.file];
                let values = stored.read(name, file)?;
                Tensor::from_vec(values, stored.shape.as_slice(), device).map_err(convert)
            }
            Source::Memory(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| self.missing(name))?;
                tensor
                    .to_dtype(DType::F32)
                    .and_then(|tensor| tensor.to_device(device))
                    .map_err(convert)
            }
        }
    }

    /// Rows `range` of a matrix as f32 on `device`, `(range.len(), columns)`: for tables that are
    /// too large to hold whole.
    ///
    /// # Errors
    /// As [`Weights::tensor`]; also when the tensor is not a matrix or has fewer rows.
    pub fn rows(
        &self,
        name: &str,
        range: Range<usize>,
        device: &Device,
    ) -> Result<Tensor, HubError> {
        let convert = |source| HubError::Convert { name: name.to_string(), source };
        match &self.source {
            Source::Files { files, tensors } => {
                let stored = tensors.get(name).ok_or_else(|| self.missing(name))?;
                let part = stored.part(range.clone()).ok_or_else(|| {
                    convert(candle_core::Error::Msg(format!(
                        "rows {range:?} cannot be taken out of {:?}",
                        stored.shape
                    )))
                })?;
                let values = part.read(name, &files[stored.file])?;
                Tensor::from_vec(values, part.shape.as_slice(), device).map_err(convert)
            }
            Source::Memory(_) => {
                let whole = self.tensor(name, device)?;
                whole.narrow(0, range.start, range.len()).map_err(convert)
            }
        }
    }

    /// SHA-256 over the bytes of [`Weights::files`], in order.
    pub(super) fn hash(&self) -> Result<String, HubError> {
        let mut hasher = Sha256::new();
        let mut buffer = vec![0u8; 1 << 20];
        for path in self.files() {
            let read_error = |source| HubError::Read { path: path.clone(), source };
            let mut file = File::open(&path).map_err(read_error)?;
            loop {
                let count = file.read(&mut buffer).map_err(read_error)?;
                if count == 0 {
                    break;
                }
                hasher.update(&buffer[..count]);
            }
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn missing(&self, name: &str) -> HubError {
        let place = match &self.source {
            Source::Files { files, .. } => files.first().map_or_else(PathBuf::new, |file| {
                let path = file.path();
                if files.len() == 1 {
                    path.to_path_buf()
                } else {
                    path.parent().unwrap_or(Path::new("")).to_path_buf()
                }
            }),
            Source::Memory(_) => PathBuf::from("memory"),
        };
        HubError::MissingTensor { name: name.to_string(), place }
    }
}

impl StoredTensor {
    /// Some rows of a matrix; none when they are not there or not stored in order.
    fn part(&self, rows: Range<usize>) -> Option<Self> {
        let [count, columns] = *self.shape.as_slice() else { return None };
        if rows.end > count || rows.start > rows.end || self.rows != RowOrder::Same {
            return None;
        }
        let width = self.encoding.byte_len(&[1, columns])?;
        let start = self.range.start + rows.start * width;
        Some(Self {
            file: self.file,
            range: start..start + rows.len() * width,
            encoding: self.encoding.clone(),
            shape: vec![rows.len(), columns],
            rows: RowOrder::Same,
            add: self.add,
        })
    }

    fn read(&self, name: &str, file: &MappedFile) -> Result<Vec<f32>, HubError> {
        let bytes = file.bytes().get(self.range.clone()).ok_or_else(|| {
            HubError::damaged(
                file.path(),
                format!("tensor {name} ends at byte {}, beyond the file", self.range.end),
            )
        })?;
        let values = self.encoding.decode(bytes, &self.shape).map_err(|reason| {
            HubError::UnreadableTensor {
                name: name.to_string(),
                path: file.path().to_path_buf(),
                stored_as: self.encoding.to_string(),
                reason,
            }
        })?;
        let mut values = match self.rows {
            RowOrder::Same => values,
            RowOrder::HalvesInterleaved { heads } => separate_halves(&values, &self.shape, heads),
        };
        if self.add != 0.0 {
            values.iter_mut().for_each(|value| *value += self.add);
        }
        Ok(values)
    }
}

/// Undoes llama.cpp's interleaving: file rows `(heads, head_dim / 2, 2, in)` become
/// `(heads, 2, head_dim / 2, in)`, that is, row `2 i + half` of a head moves to
/// `half * head_dim / 2 + i`.
///
/// `heads` is the tensor's own head count: a key projection has fewer than a query projection.
fn separate_halves(values: &[f32], shape: &[usize], heads: usize) -> Vec<f32> {
    let rows = shape.first().copied().unwrap_or(0);
    let width = values.len().checked_div(rows).unwrap_or(0);
    let head_dim = rows.checked_div(heads).unwrap_or(0);
    let half_dim = head_dim / 2;
    let mut ordered = Vec::with_capacity(values.len());
    for head in 0..heads {
        for half in 0..2 {
            for i in 0..half_dim {
                let row = head * head_dim + 2 * i + half;
                ordered.extend_from_slice(&values[row * width..(row + 1) * width]);
            }
        }
    }
    ordered
}

#[cfg(test)]
mod tests;
