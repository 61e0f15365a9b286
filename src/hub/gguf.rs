//! Models in one GGUF file, as llama.cpp writes them: tensors, configuration, tokenizer and chat
//! template.
//!
//! The header is parsed here rather than by candle's reader, so that every count and offset of a
//! damaged file is checked against the file's length before anything is allocated, and so that a
//! tensor type that candle does not know costs that tensor, not the file.

use std::collections::BTreeMap;
use std::path::Path;

use super::HubError;
use super::encoding::Encoding;
use super::mapped::MappedFile;
use super::weights::{RowOrder, StoredTensor, Weights};
use crate::model::{Family, ModelConfig, NormKind};

mod config;
mod header;
mod names;
mod tokenizer;

use header::{Header, Metadata};
pub(super) use tokenizer::GgufTokenizer;

/// An opened GGUF file.
pub(super) struct GgufFile {
    file: MappedFile,
    header: Header,
}

impl GgufFile {
    /// Maps the file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, HubError> {
        let file = MappedFile::open(path)?;
        let header = Header::parse(file.bytes()).map_err(|what| HubError::damaged(path, what))?;
        Ok(Self { file, header })
    }

    pub(super) fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// The configuration that the file's metadata describes.
    pub(super) fn config(&self) -> Result<ModelConfig, HubError> {
        config::read(&self.header, self.file.path(), self.rope_factors()?)
    }

    /// The tensors under their Hugging Face names and in Hugging Face's row order.
    pub(super) fn into_weights(self, config: &ModelConfig) -> Result<Weights, HubError> {
        let mut tensors = BTreeMap::new();
        for info in &self.header.tensors {
            if info.name == names::ROPE_FACTORS {
                continue;
            }
            let name = names::hugging_face_name(&info.name, config.anatomy.post_norms);
            let rows = row_order(&name, &info.shape, config);
            // Gains that Hugging Face stores less 1 are whole in these files.
            let offset_gain =
                config.anatomy.norm == NormKind::RmsOffset && (name.ends_with("norm.weight"));
            let range = self.range_of(info)?;
            let stored = StoredTensor {
                file: 0,
                range,
                encoding: Encoding::from_ggml_type(info.ggml_type),
                shape: info.shape.clone(),
                rows,
                add: if offset_gain { -1.0 } else { 0.0 },
            };
            if tensors.insert(name, stored).is_some() {
                let what = format!("tensor {} appears twice", info.name);
                return Err(HubError::damaged(self.file.path(), what));
            }
        }
        Ok(Weights::from_files(vec![self.file], tensors))
    }

    /// Frequency divisors of Llama 3's rope scaling, where the file carries them.
    fn rope_factors(&self) -> Result<Option<Vec<f32>>, HubError> {
        let Some(info) = self.header.tensors.iter().find(|info| info.name == names::ROPE_FACTORS)
        else {
            return Ok(None);
        };
        let range = self.range_of(info)?;
        let bytes = self.file.bytes().get(range).unwrap_or_default();
        Encoding::from_ggml_type(info.ggml_type).decode(bytes, &info.shape).map(Some).map_err(
            |reason| HubError::damaged(self.file.path(), format!("{}: {reason}", info.name)),
        )
    }

    fn range_of(&self, info: &header::TensorInfo) -> Result<std::ops::Range<usize>, HubError> {
        let encoding = Encoding::from_ggml_type(info.ggml_type);
        let damaged = |what: String| HubError::damaged(self.file.path(), what);
        let start = usize::try_from(info.offset)
            .ok()
            .and_then(|offset| self.header.data_start.checked_add(offset))
            .ok_or_else(|| damaged(format!("tensor {} has offset {}", info.name, info.offset)))?;
        if !encoding.is_readable() {
            return Ok(start..start);
        }
        let size = encoding.byte_len(&info.shape).ok_or_else(|| {
            damaged(format!("tensor {} has shape {:?} in {encoding}", info.name, info.shape))
        })?;
        let end = start.checked_add(size).filter(|end| *end <= self.file.bytes().len());
        let end = end.ok_or_else(|| {
            damaged(format!(
                "tensor {} needs {size} bytes from byte {start}, but the file has {} bytes",
                info.name,
                self.file.bytes().len()
            ))
        })?;
        Ok(start..end)
    }
}

fn row_order(name: &str, shape: &[usize], config: &ModelConfig) -> RowOrder {
    // The other families keep the order that they were trained with.
    if !matches!(config.family, Family::Llama | Family::Mistral) {
        return RowOrder::Same;
    }
    let heads = if name.contains(".self_attn.q_proj.") {
        config.num_attention_heads
    } else if name.contains(".self_attn.k_proj.") {
        config.num_key_value_heads
    } else {
        return RowOrder::Same;
    };
    // A row count that contradicts the configuration is left as it is: the check of the weights
    // against the configuration reports it with both numbers.
    let rows = shape.first().copied().unwrap_or(0);
    if heads > 0 && rows == heads * config.head_dim && config.head_dim.is_multiple_of(2) {
        RowOrder::HalvesInterleaved { heads }
    } else {
        RowOrder::Same
    }
}

#[cfg(test)]
mod tests;
