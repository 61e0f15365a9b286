use candle_core::{Device, Tensor, Var};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::model::ModelConfig;

fn random(rng: &mut ChaCha8Rng, shape: &[usize]) -> Var {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| rng.random_range(-1.5f32..1.5)).collect();
    Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
}

/// Compares values and all gradients of an operation with those of its composed form.
fn assert_same(
    rng: &mut ChaCha8Rng,
    arguments: &[&Var],
    own: impl Fn(&[&Var]) -> Result<Tensor>,
    composed: impl Fn(&[&Var]) -> Result<Tensor>,
) {
    let (got, want) = (own(arguments).unwrap(), composed(arguments).unwrap());
    assert_eq!(got.dims(), want.dims());
    assert!(distance(&got, &want) < 1e-5, "values differ by {}", distance(&got, &want));
    let weights = random(rng, got.dims());
    let gradients = |result: &Tensor| {
        (result * weights.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap()
    };
    let (got, want) = (gradients(&got), gradients(&want));
    for (index, argument) in arguments.iter().enumerate() {
        let (got, want) = (got.get(argument).unwrap(), want.get(argument).unwrap());
        assert_eq!(got.dims(), want.dims(), "gradient of argument {index}");
        let largest = want.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(largest > 1e-3, "argument {index} has a gradient at all");
        let error = distance(got, want) / largest;
        assert!(error < 1e-5, "gradient of argument {index} is off by {error}");
    }
}

fn distance(a: &Tensor, b: &Tensor) -> f32 {
    (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar().unwrap()
}

#[test]
fn linear_agrees_with_matmul() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (x, w) = (random(&mut rng, &[2, 9, 33]), random(&mut rng, &[17, 33]));
    assert_same(
        &mut rng,
        &[&x, &w],
        |a| linear(a[0], a[1]),
        |a| a[0].reshape((18, 33))?.matmul(&a[1].t()?)?.reshape((2, 9, 17)),
    );
    assert!(linear(&x, &random(&mut rng, &[17, 32])).is_err());
}

#[test]
fn linear_computes_no_gradient_for_what_is_frozen() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let (x, w) = (random(&mut rng, &[3, 4]), random(&mut rng, &[5, 4]));
    let store = linear(&x, &w.detach()).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(store.get(&x).is_some() && store.get(&w).is_none());
}

#[test]
fn rms_norm_agrees_with_its_steps() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for width in [8, 13, 288] {
        let (x, gain) = (random(&mut rng, &[2, 20, width]), random(&mut rng, &[width]));
        assert_same(
            &mut rng,
            &[&x, &gain],
            |a| rms_norm(a[0], a[1], 1e-5),
            |a| rms_norm::composed(a[0], a[1], 1e-5),
        );
    }
}

#[test]
fn silu_mul_agrees_with_its_steps() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (gate, up) = (random(&mut rng, &[3, 211]), random(&mut rng, &[3, 211]));
    assert_same(
        &mut rng,
        &[&gate, &up],
        |a| silu_mul(a[0], a[1]),
        |a| a[0].silu()? * a[1].as_tensor(),
    );
}

#[test]
fn rotation_agrees_with_its_steps_and_is_undone() {
    let json = include_bytes!("../../../tests/golden/tiny_llama/config.json");
    let config = ModelConfig::from_json(json).unwrap();
    let table = RotaryTable::new(&config, 11);
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let x = random(&mut rng, &[2, 11, 3 * config.head_dim]);
    let composed = |x: &Tensor| rotary::composed(x, &table, &Device::Cpu);
    assert_same(&mut rng, &[&x], |a| rotate(a[0], &table), |a| composed(a[0]));
    let longer = random(&mut rng, &[1, 12, config.head_dim]);
    assert!(rotate(&longer, &table).is_err());
}

#[test]
fn partial_rotation_leaves_the_rest_of_a_head_alone() {
    let json = include_bytes!("../../../tests/golden/tiny_stablelm/config.json");
    let config = ModelConfig::from_json(json).unwrap();
    assert_eq!((config.head_dim, config.anatomy.rotary_dim), (16, 4));
    let table = RotaryTable::new(&config, 5);
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let x = random(&mut rng, &[1, 5, 2 * config.head_dim]);
    assert_same(
        &mut rng,
        &[&x],
        |a| rotate(a[0], &table),
        |a| rotary::composed(a[0], &table, &Device::Cpu),
    );
    let rotated = rotate(&x, &table).unwrap();
    let rest = |x: &Tensor| x.narrow(2, 4, 12).unwrap();
    assert_eq!(distance(&rest(&rotated), &rest(&x)), 0.0);
}

#[test]
fn attention_agrees_with_its_steps() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for (heads, key_value_heads, softcap, window) in [
        (1, 1, None, None),
        (4, 2, None, Some(3)),
        (6, 2, Some(0.7), None),
        (3, 3, Some(2.0), Some(1)),
        (2, 1, None, Some(50)),
    ] {
        let shape =
            AttentionShape { heads, key_value_heads, head_dim: 16, scale: 0.3, softcap, window };
        let query = random(&mut rng, &[2, 10, heads * 16]);
        let key = random(&mut rng, &[2, 10, key_value_heads * 16]);
        let value = random(&mut rng, &[2, 10, key_value_heads * 16]);
        let arguments = [&query, &key, &value];
        let own = |a: &[&Var]| attention(a[0], a[1], a[2], shape);
        let composed = |a: &[&Var]| attention::composed(a[0], a[1], a[2], shape);
        if window == Some(1) {
            // Who sees only itself learns nothing about where to look.
            let (got, want) = (own(&arguments).unwrap(), composed(&arguments).unwrap());
            assert!(distance(&got, &want) < 1e-5);
            continue;
        }
        assert_same(&mut rng, &arguments, own, composed);
    }
}

#[test]
fn layer_norm_takes_the_mean_off_and_adds_the_bias() {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let (x, gain) = (random(&mut rng, &[3, 12]), random(&mut rng, &[12]));
    let bias = random(&mut rng, &[12]);
    assert_same(
        &mut rng,
        &[&x, &gain, &bias],
        |a| layer_norm(a[0], a[1], Some(a[2]), 1e-5),
        |a| {
            let centred = a[0].broadcast_sub(&a[0].mean_keepdim(1)?)?;
            let variance = centred.sqr()?.mean_keepdim(1)?;
            let scaled = centred.broadcast_div(&(variance + 1e-5)?.sqrt()?)?;
            scaled.broadcast_mul(a[1])?.broadcast_add(a[2])
        },
    );
}
