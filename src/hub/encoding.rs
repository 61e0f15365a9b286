//! How a tensor's numbers are stored in a file.

use std::fmt;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, ggml_file};
use half::{bf16, f16};

/// Storage format of one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Encoding {
    F32,
    F16,
    Bf16,
    /// A block format of llama.cpp that candle dequantises.
    Blocks(GgmlDType),
    /// Known by name at best; reported when the tensor is asked for, so that a file with an odd
    /// tensor that nobody needs still opens.
    Unreadable(String),
}

impl Encoding {
    /// From a tensor type number of the GGUF format.
    pub(super) fn from_ggml_type(number: u32) -> Self {
        match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Blocks(GgmlDType::Q4_0),
            3 => Self::Blocks(GgmlDType::Q4_1),
            6 => Self::Blocks(GgmlDType::Q5_0),
            7 => Self::Blocks(GgmlDType::Q5_1),
            8 => Self::Blocks(GgmlDType::Q8_0),
            10 => Self::Blocks(GgmlDType::Q2K),
            11 => Self::Blocks(GgmlDType::Q3K),
            12 => Self::Blocks(GgmlDType::Q4K),
            13 => Self::Blocks(GgmlDType::Q5K),
            14 => Self::Blocks(GgmlDType::Q6K),
            30 => Self::Bf16,
            16..=23 | 29 => Self::Unreadable(format!("IQ type {number}")),
            _ => Self::Unreadable(format!("ggml type {number}")),
        }
    }

    /// From a dtype of the safetensors format.
    pub(super) fn from_safetensors(dtype: safetensors::Dtype) -> Self {
        match dtype {
            safetensors::Dtype::F32 => Self::F32,
            safetensors::Dtype::F16 => Self::F16,
            safetensors::Dtype::BF16 => Self::Bf16,
            other => Self::Unreadable(format!("{other:?}")),
        }
    }

    pub(super) fn is_readable(&self) -> bool {
        !matches!(self, Self::Unreadable(_))
    }

    /// Bytes that `shape` takes up; none when the shape does not fit the format, overflows, or
    /// the format is unknown.
    pub(super) fn byte_len(&self, shape: &[usize]) -> Option<usize> {
        let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
        match self {
            Self::F32 => elements.checked_mul(4),
            Self::F16 | Self::Bf16 => elements.checked_mul(2),
            Self::Blocks(dtype) => {
                let row = shape.last().copied().unwrap_or(1);
                if !row.is_multiple_of(dtype.block_size()) {
                    return None;
                }
                (elements / dtype.block_size()).checked_mul(dtype.type_size())
            }
            Self::Unreadable(_) => None,
        }
    }

    /// The numbers as f32, in the order of the file. `bytes` starts on an 8-byte boundary for
    /// block formats, which candle reads in place; a copy is made where it does not.
    pub(super) fn decode(&self, bytes: &[u8], shape: &[usize]) -> Result<Vec<f32>, String> {
        let expected = self.byte_len(shape);
        if expected != Some(bytes.len()) && self.is_readable() {
            return Err(format!("shape {shape:?} does not take up {} bytes", bytes.len()));
        }
        match self {
            Self::F32 => {
                let (numbers, _) = bytes.as_chunks::<4>();
                Ok(numbers.iter().map(|number| f32::from_le_bytes(*number)).collect())
            }
            Self::F16 => {
                let (numbers, _) = bytes.as_chunks::<2>();
                Ok(numbers.iter().map(|number| f16::from_le_bytes(*number).to_f32()).collect())
            }
            Self::Bf16 => {
                let (numbers, _) = bytes.as_chunks::<2>();
                Ok(numbers.iter().map(|number| bf16::from_le_bytes(*number).to_f32()).collect())
            }
            Self::Blocks(dtype) => {
                let aligned: Vec<u64>;
                let bytes = if bytes.as_ptr().align_offset(align_of::<u64>()) == 0 {
                    bytes
                } else {
                    aligned = copy_aligned(bytes);
                    &bytemuck::cast_slice(&aligned)[..bytes.len()]
                };
                ggml_file::qtensor_from_ggml(*dtype, bytes, shape.to_vec(), &Device::Cpu)
                    .and_then(|blocks| blocks.dequantize(&Device::Cpu))
                    .and_then(|tensor| tensor.flatten_all()?.to_vec1::<f32>())
                    .map_err(|error| error.to_string())
            }
            Self::Unreadable(_) => Err("this version reads f32, f16, bf16 and the GGUF formats \
                                        Q4_0 to Q8_0 and Q2_K to Q6_K"
                .to_string()),
        }
    }
}

fn copy_aligned(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0u64; bytes.len().div_ceil(8)];
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

impl fmt::Display for Encoding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => formatter.write_str("f32"),
            Self::F16 => formatter.write_str("f16"),
            Self::Bf16 => formatter.write_str("bf16"),
            Self::Blocks(dtype) => write!(formatter, "{dtype:?}"),
            Self::Unreadable(name) => formatter.write_str(name),
        }
    }
}
