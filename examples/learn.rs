//! Trains a draft on the target's answers to prompts from a JSONL file, pass by pass, and prints
//! held-out acceptance: the experiment behind the default loss and rate.
//!
//! learn TARGET DRAFT PROMPTS.jsonl [loss] [rate] [batch] [passes]
#![allow(clippy::print_stdout, clippy::unwrap_used)]
use std::time::Instant;

use draft_adapter::build::generate::{Generation, answer};
use draft_adapter::distill::trainer::{TrainSettings, Trainer};
use draft_adapter::hub::Target;
use draft_adapter::model::runtime::Runtime;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let get = |at: usize, default: &str| args.get(at).map_or(default, |s| s).to_string();
    let cache = format!("{}.samples.json", args[3]);
    let samples: Vec<draft_adapter::distill::Sample> = match std::fs::read(&cache) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap(),
        Err(_) => {
            let target = Target::open(&args[1]).unwrap();
            let runtime = Runtime::load(&target.config, &target.weights).unwrap();
            let template = target.chat_template.as_ref().unwrap();
            let prompts: Vec<Vec<u32>> = std::fs::read_to_string(&args[3])
                .unwrap()
                .lines()
                .map(|line| {
                    let object: Value = serde_json::from_str(line).unwrap();
                    let messages = json!([{"role": "user", "content": object["prompt"]}]);
                    let text = template.render(&messages, None, true).unwrap();
                    target.tokenizer.encode(&text, false).unwrap()
                })
                .collect();
            let started = Instant::now();
            let mut made = 0;
            let samples = answer(
                &runtime,
                &prompts,
                Generation { temperature: 0.0, max_tokens: 64, top_k: 20 },
                &mut ChaCha8Rng::seed_from_u64(0),
                &mut |units| made += units,
            )
            .unwrap();
            println!("answered: {:.0} tokens/s", made as f64 / started.elapsed().as_secs_f64());
            std::fs::write(&cache, serde_json::to_vec(&samples).unwrap()).unwrap();
            samples
        }
    };
    let (held_out, train) = samples.split_at(samples.len() / 7);
    let state = tempfile::tempdir().unwrap();
    let settings = TrainSettings {
        loss: get(4, "log_alpha").parse().unwrap(),
        learning_rate: get(5, "1.5e-4").parse().unwrap(),
        batch: get(6, "4").parse().unwrap(),
        ..TrainSettings::default()
    };
    println!("{settings:?}");
    let mut trainer =
        Trainer::open(std::path::Path::new(&args[2]), state.path(), settings).unwrap();
    let show = |trainer: &Trainer, pass: usize, seconds: f64, loss: f32| {
        let a = trainer.evaluate(held_out).unwrap();
        println!(
            "pass {pass}: loss {loss:.3} acceptance {:.3} alpha {:.3} length {:.2} ({} positions, {} tokens, {seconds:.0} s)",
            a.acceptance_rate,
            a.alpha,
            a.mean_accepted_length,
            a.positions,
            trainer.state().tokens
        );
    };
    show(&trainer, 0, 0.0, 0.0);
    for pass in 1..=get(7, "3").parse().unwrap() {
        let (mut sum, mut count) = (0.0, 0);
        let before = trainer.state().seconds;
        trainer
            .train(train, 1, &mut |update| {
                sum += update.loss;
                count += 1;
                true
            })
            .unwrap();
        show(&trainer, pass, trainer.state().seconds - before, sum / count as f32);
    }
    let state = trainer.state();
    println!("{:.0} output tokens/s", state.tokens as f64 / state.seconds);
}
