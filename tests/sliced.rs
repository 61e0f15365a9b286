//! Slicing against its definition, computed in float64 by transformers (`golden/make_sliced.py`).

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use candle_core::{Device, Tensor};
use draft_adapter::build::Plan;
use draft_adapter::build::prune::Selection;
use draft_adapter::build::slice::{WriteMap, slice};
use draft_adapter::build::stream::Streamed;
use faer::Mat;
use golden::{path, relative_error, target};
use safetensors::SafeTensors;

const MODELS: [&str; 7] = [
    "tiny_llama",
    "tiny_llama_bias",
    "tiny_mistral",
    "tiny_qwen2",
    "tiny_qwen3",
    "tiny_gemma2",
    "tiny_stablelm",
];

/// Rows of a tensor of 4-byte integers.
fn ids(tensors: &SafeTensors<'_>, name: &str) -> Vec<Vec<usize>> {
    let tensor = tensors.tensor(name).unwrap();
    let width = *tensor.shape().last().unwrap();
    let (words, _) = tensor.data().as_chunks::<4>();
    let ids: Vec<usize> = words.iter().map(|word| i32::from_le_bytes(*word) as usize).collect();
    ids.chunks(width).map(<[usize]>::to_vec).collect()
}

#[test]
fn a_sliced_draft_is_the_target_on_the_span_of_the_map() {
    for model in MODELS {
        let bytes = std::fs::read(path(&format!("{model}/sliced.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let target = target(model);
        let config = &target.config;

        let directions = tensors.tensor("directions").unwrap();
        let [rows, columns] = *directions.shape() else { panic!("directions are a matrix") };
        let (words, _) = directions.data().as_chunks::<8>();
        let directions = Mat::from_fn(rows, columns, |row, column| {
            f64::from_le_bytes(words[row * columns + column])
        });
        let map = WriteMap::along(directions, 1.0, config.anatomy.norm, &Device::Cpu).unwrap();
        let selection = Selection {
            layers: ids(&tensors, "layers").concat(),
            groups: ids(&tensors, "groups"),
            channels: ids(&tensors, "channels"),
        };
        let plan = Plan {
            hidden_size: map.q.ncols(),
            intermediate_size: selection.channels[0].len(),
            num_hidden_layers: selection.layers.len(),
            num_key_value_heads: selection.groups[0].len(),
        };
        let draft = slice(Streamed::new(&target), &plan, &selection, &map).unwrap();

        let tokens: Vec<u32> = ids(&tensors, "tokens").concat().iter().map(|t| *t as u32).collect();
        let shape = (1, tokens.len());
        let logits = draft.logits(&Tensor::from_vec(tokens, shape, &Device::Cpu).unwrap()).unwrap();
        let got: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
        let (words, _) = tensors.tensor("logits").unwrap().data().as_chunks::<4>();
        let expected: Vec<f32> = words.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let error = relative_error(&got, &expected);
        assert!(error < 1e-4, "{model}: relative error {error:e}");
    }
}
