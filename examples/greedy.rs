//! Greedy answers of a model folder in f32, for comparing with another engine's.
//!
//! greedy MODEL COUNT < prompts.json, where prompts are a list of lists of token ids. Prints the
//! tokens after each prompt, and for each the distance of its logit from the second best.
#![allow(clippy::print_stdout, clippy::unwrap_used)]
use candle_core::{Device, Tensor};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use serde_json::json;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let count: usize = args[2].parse().unwrap();
    let target = Target::open(&args[1]).unwrap();
    let decoder =
        Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
    let prompts: Vec<Vec<u32>> = serde_json::from_reader(std::io::stdin()).unwrap();
    let answers: Vec<_> =
        prompts.into_iter().map(|prompt| answer(&decoder, prompt, count)).collect();
    println!("{}", json!(answers));
}

fn answer(decoder: &Decoder, mut ids: Vec<u32>, count: usize) -> serde_json::Value {
    let (mut tokens, mut margins) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let input = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
        let logits = decoder.logits(&input).unwrap().squeeze(0).unwrap();
        let last: Vec<f32> = logits.get(ids.len() - 1).unwrap().to_vec1().unwrap();
        let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
        let second = (0..last.len()).filter(|id| *id != best).map(|id| last[id]);
        margins.push(last[best] - second.fold(f32::NEG_INFINITY, f32::max));
        tokens.push(best as u32);
        ids.push(best as u32);
    }
    json!({"tokens": tokens, "margins": margins})
}
