use candle_core::{Device, Tensor};

use super::{Weights, separate_halves};
use crate::hub::HubError;

#[test]
fn interleaved_halves_are_separated_head_by_head() {
    // Two heads of four rows: the file has first half and second half in turn.
    let file: Vec<f32> = [0, 2, 1, 3, 4, 6, 5, 7].map(|row| row as f32).to_vec();
    let ordered: Vec<f32> = (0..8).map(|row| row as f32).collect();
    assert_eq!(separate_halves(&file, &[8, 1], 2), ordered);
    // With another head count it is another order: each projection has its own.
    assert_ne!(separate_halves(&file, &[8, 1], 1), ordered);
}

#[test]
fn separation_undoes_llama_cpps_order_for_any_shape() {
    for (heads, head_dim, width) in [(1, 2, 3), (3, 4, 1), (9, 64, 2), (2, 16, 5)] {
        let rows = heads * head_dim;
        let ordered: Vec<f32> = (0..rows * width).map(|value| value as f32).collect();
        // reshape(heads, 2, head_dim / 2, width).swapaxes(1, 2)
        let mut file = Vec::new();
        for head in 0..heads {
            for i in 0..head_dim / 2 {
                for half in 0..2 {
                    let row = head * head_dim + half * head_dim / 2 + i;
                    file.extend_from_slice(&ordered[row * width..(row + 1) * width]);
                }
            }
        }
        assert_eq!(separate_halves(&file, &[rows, width], heads), ordered);
    }
}

#[test]
fn weights_in_memory_are_read_as_f32() {
    let tensor = Tensor::new(&[[1.5f64, 2.0]], &Device::Cpu).unwrap();
    let weights = Weights::from_tensors([("a".to_string(), tensor)]);
    assert_eq!(weights.names(), ["a"]);
    assert_eq!(weights.shape("a"), Some(vec![1, 2]));
    let read = weights.tensor("a", &Device::Cpu).unwrap();
    assert_eq!(read.to_vec2::<f32>().unwrap(), [[1.5, 2.0]]);
    let error = weights.tensor("b", &Device::Cpu).unwrap_err();
    assert!(matches!(error, HubError::MissingTensor { name, .. } if name == "b"));
}

#[test]
fn weights_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Weights>();
    shared::<crate::hub::Target>();
}
