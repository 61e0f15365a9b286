//! Times training steps on made-up answers: two of 256 tokens a step, every position with a
//! teacher's top 20. Prints JSON.
//!
//! train_speed DRAFT [steps]
#![allow(clippy::print_stdout, clippy::unwrap_used)]
use draft_adapter::distill::trainer::{TrainSettings, Trainer};
use draft_adapter::distill::{Sample, TopK};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

const LENGTH: usize = 256;
const TOP_K: usize = 20;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let steps: usize = args.get(2).map_or(12, |steps| steps.parse().unwrap());
    let config = std::fs::read(format!("{}/config.json", args[1])).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let vocab_size = u32::try_from(config["vocab_size"].as_u64().unwrap()).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let samples: Vec<Sample> = (0..2 * steps as u64)
        .map(|id| Sample {
            id,
            prompt_ids: vec![1],
            output_ids: (0..LENGTH).map(|_| rng.random_range(0..vocab_size)).collect(),
            temperature: 1.0,
            teacher: (0..LENGTH)
                .map(|_| {
                    let first = rng.random_range(0..vocab_size - TOP_K as u32);
                    let ids = (first..first + TOP_K as u32).collect();
                    TopK { ids, logprobs: vec![(0.95f32 / TOP_K as f32).ln(); TOP_K] }
                })
                .collect(),
            ..Sample::default()
        })
        .collect();
    let state = tempfile::tempdir().unwrap();
    let settings = TrainSettings { batch: 2, ..TrainSettings::default() };
    let mut trainer = Trainer::open(args[1].as_ref(), state.path(), settings).unwrap();
    let mut seconds = Vec::new();
    trainer
        .train(&samples, 1, &mut |update| {
            seconds.push(update.seconds);
            true
        })
        .unwrap();
    // The first step touches every page for the first time.
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    let tokens = (2 * LENGTH) as f64;
    println!("{}", json!({"tokens_per_s": tokens / median, "step_ms": 1e3 * median}));
}
