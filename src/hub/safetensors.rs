//! Weights in safetensors files: one file, or shards with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::HubError;
use super::encoding::Encoding;
use super::mapped::MappedFile;
use super::weights::{RowOrder, StoredTensor, Weights};

pub(super) const SINGLE_FILE: &str = "model.safetensors";
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Opens the weights of a folder: `model.safetensors`, or the shards that its index names.
pub(super) fn open_folder(folder: &Path) -> Result<Weights, HubError> {
    let index = folder.join(INDEX_FILE);
    if index.is_file() {
        return open_shards(folder, &index);
    }
    let single = folder.join(SINGLE_FILE);
    if single.is_file() {
        return open_files(&[single]);
    }
    let hint = if ["pytorch_model.bin", "pytorch_model.bin.index.json"]
        .iter()
        .any(|name| folder.join(name).is_file())
    {
        "it has weights in PyTorch's own format; convert them with save_pretrained"
    } else {
        "give the folder that config.json and the weights are in"
    };
    Err(HubError::MissingFile {
        folder: folder.to_path_buf(),
        name: format!("{SINGLE_FILE} or {INDEX_FILE}"),
        hint: hint.to_string(),
    })
}

/// File names of the shards that an index lists, in name order.
pub(super) fn shard_names(index: &Path, text: &[u8]) -> Result<Vec<String>, HubError> {
    Ok(weight_map(index, text)?.into_values().collect::<BTreeSet<_>>().into_iter().collect())
}

fn weight_map(index: &Path, text: &[u8]) -> Result<BTreeMap<String, String>, HubError> {
    let document: Value = serde_json::from_slice(text)
        .map_err(|error| HubError::damaged(index, format!("it is not valid JSON: {error}")))?;
    let Some(entries) = document.get("weight_map").and_then(Value::as_object) else {
        return Err(HubError::damaged(index, "it has no object weight_map"));
    };
    entries
        .iter()
        .map(|(name, shard)| match shard.as_str().filter(|shard| is_plain_name(shard)) {
            Some(shard) => Ok((name.clone(), shard.to_string())),
            None => {
                let what = format!("tensor {name} has {shard} for a file name");
                Err(HubError::damaged(index, what))
            }
        })
        .collect()
}

/// An index may only name files beside itself.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != ".." && name != "." && !name.contains(['/', '\\'])
}

fn open_shards(folder: &Path, index: &Path) -> Result<Weights, HubError> {
    let text = std::fs::read(index)
        .map_err(|source| HubError::Read { path: index.to_path_buf(), source })?;
    let map = weight_map(index, &text)?;
    let names = shard_names(index, &text)?;
    for name in &names {
        if !folder.join(name).is_file() {
            return Err(HubError::MissingFile {
                folder: folder.to_path_buf(),
                name: name.clone(),
                hint: format!("{INDEX_FILE} lists this shard; download or copy it"),
            });
        }
    }
    let paths: Vec<PathBuf> = names.iter().map(|name| folder.join(name)).collect();
    let weights = open_files(&paths)?;
    for (name, shard) in &map {
        if weights.shape(name).is_none() {
            let what = format!("{INDEX_FILE} says that it has tensor {name}, which it has not");
            return Err(HubError::damaged(&folder.join(shard), what));
        }
    }
    Ok(weights)
}

/// Opens files that together hold the tensors of one model.
pub(super) fn open_files(paths: &[PathBuf]) -> Result<Weights, HubError> {
    let mut files = Vec::new();
    let mut tensors = BTreeMap::new();
    for path in paths {
        let file = MappedFile::open(path)?;
        read_header(&file, files.len(), &mut tensors)?;
        files.push(file);
    }
    Ok(Weights::from_files(files, tensors))
}

fn read_header(
    file: &MappedFile,
    index: usize,
    tensors: &mut BTreeMap<String, StoredTensor>,
) -> Result<(), HubError> {
    let bytes = file.bytes();
    let (header_len, metadata) = ::safetensors::SafeTensors::read_metadata(bytes)
        .map_err(|error| HubError::damaged(file.path(), explain(&error, bytes)))?;
    let data_start = 8 + header_len;
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let range = data_start.checked_add(start).zip(data_start.checked_add(end));
        let range = range.filter(|(start, end)| start <= end && *end <= bytes.len());
        let Some((start, end)) = range else {
            let what = format!("tensor {name} lies at {:?}, beyond the file", info.data_offsets);
            return Err(HubError::damaged(file.path(), what));
        };
        let stored = StoredTensor {
            file: index,
            range: start..end,
            encoding: Encoding::from_safetensors(info.dtype),
            shape: info.shape.clone(),
            rows: RowOrder::Same,
            add: 0.0,
        };
        if tensors.insert(name.clone(), stored).is_some() {
            let what = format!("tensor {name} is in another shard as well");
            return Err(HubError::damaged(file.path(), what));
        }
    }
    Ok(())
}

/// What the library's error means for the person who holds the file.
fn explain(error: &::safetensors::SafeTensorError, bytes: &[u8]) -> String {
    use ::safetensors::SafeTensorError as Error;
    let pointer = b"version https://git-lfs";
    if bytes.starts_with(pointer) {
        return "it is a Git LFS pointer, not the file itself (git lfs pull)".to_string();
    }
    match error {
        Error::HeaderTooSmall | Error::InvalidHeaderLength => {
            format!("it ends within its header, at {} bytes", bytes.len())
        }
        Error::MetadataIncompleteBuffer => {
            format!("its header describes another size than its {} bytes", bytes.len())
        }
        Error::HeaderTooLarge => "it does not begin with a safetensors header".to_string(),
        other => format!("its header is not readable: {}", super::shorten(&other.to_string())),
    }
}
