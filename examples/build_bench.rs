//! Compares ways to slice and heal on one target: each variant's draft is judged by its exact
//! overlap with the target on held-out answers. `benches/build.py` drives it.
//!
//! build_bench TARGET CALIBRATION.jsonl HELD_OUT.jsonl CACHE_DIR < variants.jsonl
//!
//! Prompt files hold `{"prompt": .., "domain": ..}` lines. A variant is a line like
//! `{"name": "x", "hidden": 288, "mlp": 768, "layers": [0, 1, 8, 15, 22, 29], "gather": "own",
//! "readers": 0.1, "writers": 0.1, "tokens": 12000}`; its result is the same with scores.
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used)]

use std::path::Path;
use std::time::Instant;

use candle_core::Device;
use draft_adapter::build::calibrate::{States, Window, states, statistics, windows};
use draft_adapter::build::generate::{Generation, answer};
use draft_adapter::build::heal::{Ridge, heal};
use draft_adapter::build::plan::Plan;
use draft_adapter::build::prune::{Gather, Selection};
use draft_adapter::build::slice::{WriteMap, slice};
use draft_adapter::distill::{Reference, Sample};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::runtime::Runtime;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const WINDOW: usize = 512;

/// The target's sampled answers to the prompts of a file, made once.
fn answers(target: &Target, prompts: &str, cache: &Path, temperature: f32) -> Vec<Sample> {
    if let Ok(bytes) = std::fs::read(cache) {
        return serde_json::from_slice(&bytes).unwrap();
    }
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let template = target.chat_template.as_ref().unwrap();
    let text = std::fs::read_to_string(prompts).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prompts: Vec<Vec<u32>> = lines
        .iter()
        .map(|line| {
            let messages = json!([{"role": "user", "content": line["prompt"]}]);
            let text = template.render(&messages, None, true).unwrap();
            let mut ids = target.tokenizer.encode(&text, false).unwrap();
            ids.truncate(384);
            ids
        })
        .collect();
    let started = Instant::now();
    let generation = Generation { temperature, max_tokens: 160, top_k: 0 };
    let mut made = 0;
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut samples =
        answer(&runtime, &prompts, generation, &mut rng, &mut |units| made += units).unwrap();
    eprintln!("answered {made} tokens, {:.0}/s", made as f64 / started.elapsed().as_secs_f64());
    for sample in &mut samples {
        sample.domain = lines[sample.id as usize]["domain"].as_str().unwrap_or("").to_string();
    }
    std::fs::write(cache, serde_json::to_vec(&samples).unwrap()).unwrap();
    samples
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let target = Target::open(&args[1]).unwrap();
    let cache = Path::new(&args[4]);
    std::fs::create_dir_all(cache).unwrap();
    let calibration = answers(&target, &args[2], &cache.join("calibration.json"), 0.8);
    let held_out = answers(&target, &args[3], &cache.join("held_out.json"), 0.7);
    let decoder =
        Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
    let reference = Reference::new(&decoder, &held_out, WINDOW).unwrap();
    let (mut tokens, mut text) = (0, Vec::<(Window, States)>::new());
    let mut measured = None;
    let mut last_k = 0;
    let mut map = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        if line.trim().is_empty() {
            continue;
        }
        let mut variant: Value = serde_json::from_str(&line).unwrap();
        let number = |key: &str, default: f64| variant[key].as_f64().unwrap_or(default);
        let started = Instant::now();
        let wanted = number("tokens", 12_000.0) as usize;
        if wanted != tokens {
            text.clear();
            let mut sum = 0;
            let chosen: Vec<Sample> = calibration
                .iter()
                .take_while(|s| {
                    sum += s.prompt_ids.len() + s.output_ids.len();
                    sum <= wanted
                })
                .cloned()
                .collect();
            let windows = windows(&chosen, 8, WINDOW, &Device::Cpu).unwrap();
            measured = Some(statistics(&decoder, &windows).unwrap());
            let all = (0..target.config.num_hidden_layers).collect();
            for window in windows {
                let states = states(&decoder, &window, &all).unwrap();
                text.push((window, states));
            }
            (tokens, last_k) = (wanted, 0);
            eprintln!("recorded {wanted} tokens in {:.0} s", started.elapsed().as_secs_f64());
        }
        let statistics = measured.as_ref().unwrap();
        let layers: Vec<usize> = serde_json::from_value(variant["layers"].clone()).unwrap();
        let plan = Plan {
            hidden_size: number("hidden", 288.0) as usize,
            intermediate_size: number("mlp", 768.0) as usize,
            num_hidden_layers: layers.len(),
            num_key_value_heads: number("groups", 3.0) as usize,
        };
        if last_k != plan.hidden_size {
            let norm = target.config.anatomy.norm;
            map = Some(WriteMap::new(statistics, plan.hidden_size, norm, &Device::Cpu).unwrap());
            last_k = plan.hidden_size;
        }
        let map = map.as_ref().unwrap();
        let gather: Gather = serde_json::from_value(variant["gather"].clone()).unwrap();
        let selection = Selection::new(statistics, &plan, &layers, gather);
        let ridge = Ridge { readers: number("readers", 0.1), writers: number("writers", 0.1) };
        let started = Instant::now();
        let draft = if variant["heal"] == json!(false) {
            slice(&decoder, &plan, &selection, map).unwrap()
        } else {
            heal(&decoder, &plan, &selection, map, &text, ridge, &mut |_| ()).unwrap()
        };
        let seconds = started.elapsed().as_secs_f64();
        let fraction = draft.config.parameters() as f64 / target.config.parameters() as f64;
        variant["params_fraction"] = json!(fraction);
        variant["seconds"] = json!(seconds);
        for domain in reference.domains() {
            let scores = reference.compare(&draft, Some(domain), 0.0, 4).unwrap();
            variant[format!("{domain}_alpha")] = json!(scores.alpha);
            variant[format!("{domain}_match")] = json!(scores.acceptance_rate);
            variant[format!("{domain}_perplexity")] = json!(scores.perplexity);
            variant[format!("{domain}_positions")] = json!(scores.positions);
        }
        println!("{variant}");
    }
}
