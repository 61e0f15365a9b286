//! The header of a GGUF file, with every length checked before it is believed.

use std::collections::HashMap;

/// Longest array that a model file has a use for; the largest vocabularies have 2^18 entries.
const MAX_ARRAY: u64 = 1 << 24;
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;

/// Metadata and tensor table of a GGUF file.
pub(crate) struct Header {
    pub(crate) metadata: Metadata,
    pub(super) tensors: Vec<TensorInfo>,
    /// Byte at which tensor data begins.
    pub(super) data_start: usize,
}

/// One line of the tensor table.
pub(super) struct TensorInfo {
    pub(super) name: String,
    /// Outermost dimension first, as Hugging Face writes shapes; the file has them reversed.
    pub(super) shape: Vec<usize>,
    pub(super) ggml_type: u32,
    /// Bytes from the beginning of the tensor data.
    pub(super) offset: u64,
}

/// A metadata value. Integers of all widths are one kind here.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Integer(i128),
    F32(f32),
    F64(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Integers(Vec<i64>),
    /// An array that nothing here reads, kept by its length.
    OtherArray(u64),
}

/// Key-value metadata with typed look-up.
#[derive(Debug, Default)]
pub(crate) struct Metadata(HashMap<String, Value>);

impl Metadata {
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        match self.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn texts(&self, key: &str) -> Option<&[String]> {
        match self.get(key) {
            Some(Value::Texts(texts)) => Some(texts),
            _ => None,
        }
    }

    pub(crate) fn integers(&self, key: &str) -> Option<&[i64]> {
        match self.get(key) {
            Some(Value::Integers(integers)) => Some(integers),
            _ => None,
        }
    }

    pub(crate) fn unsigned(&self, key: &str) -> Option<u64> {
        match self.get(key) {
            Some(Value::Integer(integer)) => u64::try_from(*integer).ok(),
            _ => None,
        }
    }

    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        }
    }

    /// A float; a 32-bit one becomes the shortest decimal that denotes it, so that 1e-5 is read
    /// as 1e-5 and not as 9.999999747e-6.
    pub(crate) fn float(&self, key: &str) -> Option<f64> {
        match self.get(key) {
            Some(Value::F32(float)) => float.to_string().parse().ok(),
            Some(Value::F64(float)) => Some(*float),
            _ => None,
        }
    }
}

impl Header {
    /// Parses the beginning of a file, given all its bytes.
    ///
    /// # Errors
    /// What is wrong, as a phrase to follow the file's name.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader { bytes, at: 0 };
        let magic = reader.take(4).map_err(|_| "it is too short for a GGUF file".to_string())?;
        if magic != b"GGUF" {
            return Err(format!("it is not a GGUF file: it begins with {magic:02x?}"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(format!("it has GGUF version {version}; this build reads 2 and 3"));
        }
        let tensor_count = reader.u64()?;
        let entry_count = reader.u64()?;
        let mut metadata = Metadata::default();
        for _ in 0..entry_count {
            let key = reader.text()?;
            let kind = reader.u32()?;
            let value = reader.value(kind).map_err(|what| format!("{what} (metadata {key})"))?;
            metadata.0.insert(key, value);
        }
        let mut tensors = Vec::new();
        for _ in 0..tensor_count {
            tensors.push(reader.tensor_info()?);
        }
        let alignment = metadata.unsigned("general.alignment").unwrap_or(DEFAULT_ALIGNMENT);
        if alignment == 0 || alignment > 1 << 20 {
            return Err(format!("it has a data alignment of {alignment} bytes"));
        }
        let data_start = (reader.at as u64).next_multiple_of(alignment);
        let data_start = usize::try_from(data_start).map_err(|error| error.to_string())?;
        Ok(Self { metadata, tensors, data_start })
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| {
            format!(
                "its header ends early: {count} bytes wanted at byte {}, the file has {}",
                self.at,
                self.bytes.len()
            )
        })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<String, String> {
        let len = self.u64()?;
        let len = usize::try_from(len).map_err(|_| format!("it has a text of {len} bytes"))?;
        Ok(String::from_utf8_lossy(without_trailing_nul(self.take(len)?)).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            6 => Value::F32(f32::from_le_bytes(self.array()?)),
            7 => Value::Bool(self.take(1)?[0] != 0),
            8 => Value::Text(self.text()?),
            9 => self.array_value()?,
            12 => Value::F64(f64::from_le_bytes(self.array()?)),
            _ => Value::Integer(self.integer(kind)?),
        })
    }

    fn integer(&mut self, kind: u32) -> Result<i128, String> {
        Ok(match kind {
            0 => i128::from(u8::from_le_bytes(self.array()?)),
            1 => i128::from(i8::from_le_bytes(self.array()?)),
            2 => i128::from(u16::from_le_bytes(self.array()?)),
            3 => i128::from(i16::from_le_bytes(self.array()?)),
            4 => i128::from(u32::from_le_bytes(self.array()?)),
            5 => i128::from(i32::from_le_bytes(self.array()?)),
            10 => i128::from(u64::from_le_bytes(self.array()?)),
            11 => i128::from(i64::from_le_bytes(self.array()?)),
            _ => return Err(format!("it has a value of unknown type {kind}")),
        })
    }

    fn array_value(&mut self) -> Result<Value, String> {
        let kind = self.u32()?;
        let len = self.u64()?;
        if len > MAX_ARRAY {
            return Err(format!("it has an array of {len} entries"));
        }
        match kind {
            8 => {
                let mut texts = Vec::new();
                for _ in 0..len {
                    texts.push(self.text()?);
                }
                Ok(Value::Texts(texts))
            }
            0..=5 | 10 | 11 => {
                let mut integers = Vec::new();
                for _ in 0..len {
                    let integer = self.integer(kind)?;
                    integers.push(i64::try_from(integer).map_err(|error| error.to_string())?);
                }
                Ok(Value::Integers(integers))
            }
            6 | 7 | 12 => {
                let width = match kind {
                    6 => 4,
                    7 => 1,
                    _ => 8,
                };
                self.take(usize::try_from(len).map_err(|error| error.to_string())? * width)?;
                Ok(Value::OtherArray(len))
            }
            _ => Err(format!("it has an array of unknown type {kind}")),
        }
    }

    fn tensor_info(&mut self) -> Result<TensorInfo, String> {
        let name = self.text()?;
        let dimensions = self.u32()?;
        if dimensions > MAX_DIMENSIONS {
            return Err(format!("tensor {name} has {dimensions} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let dimension = self.u64()?;
            shape.push(usize::try_from(dimension).map_err(|error| error.to_string())?);
        }
        shape.reverse();
        Ok(TensorInfo { name, shape, ggml_type: self.u32()?, offset: self.u64()? })
    }
}

/// Some writers end texts with NUL although the format says otherwise.
fn without_trailing_nul(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    &bytes[..end]
}
