//! The golden files of `tests/golden`, which `make_tiny_llama.py` writes with transformers.
//!
//! Use it with `#[path = "support/golden.rs"] mod golden;`.
#![allow(dead_code, clippy::unwrap_used)] // every test target uses a part; a bad golden file must fail

use std::path::PathBuf;

use draft_adapter::hub::Target;

/// A file or folder below `tests/golden`.
pub fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Opens one of the models: `tiny_llama`, `tiny_llama_tied` or `tiny_llama/tiny_llama.gguf`.
pub fn target(name: &str) -> Target {
    Target::open(path(name).to_str().unwrap()).unwrap()
}

/// Token ids of one sequence and the logits that transformers computes for it in f32.
pub struct Expected {
    pub tokens: Vec<u32>,
    /// `(tokens.len(), vocab_size)`, row-major.
    pub logits: Vec<f32>,
    pub vocab_size: usize,
}

/// Reads `expected.safetensors` of a model, or for example
/// `tiny_llama_tied/expected_llama3_rope.safetensors`, which belongs to
/// `config_llama3_rope.json` beside it.
pub fn expected(file: &str) -> Expected {
    let bytes = std::fs::read(path(file)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| {
        let (words, rest) = tensors.tensor(name).unwrap().data().as_chunks::<4>();
        assert!(rest.is_empty());
        words.to_vec()
    };
    Expected {
        tokens: words("tokens").into_iter().map(u32::from_le_bytes).collect(),
        logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
        vocab_size: tensors.tensor("logits").unwrap().shape()[1],
    }
}

/// Largest difference between two sets of logits, divided by the largest expected magnitude.
pub fn relative_error(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len(), "number of logits");
    let scale = expected.iter().fold(0.0f32, |scale, value| scale.max(value.abs()));
    let difference = |(got, expected): (&f32, &f32)| (got - expected).abs();
    // NaN would be lost by `max`.
    assert!(got.iter().all(|value| value.is_finite()), "logits are not finite");
    got.iter().zip(expected).map(difference).fold(0.0f32, f32::max) / scale
}
