//! The target's own answers to calibration prompts: text that slicing and healing look at, and
//! text that acceptance is measured on.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::BuildError;
use crate::distill::{Sample, TopK};
use crate::model::kernels;
use crate::model::kv_cache::KvCache;
use crate::model::runtime::{LogitsOf, Runtime, Segment};

/// Sequences that are decoded together.
const BATCH: usize = 16;

/// How answers are made.
#[derive(Debug, Clone, Copy)]
pub struct Generation {
    pub temperature: f32,
    pub max_tokens: usize,
    /// Teacher's tokens kept at each position; 0 keeps none.
    pub top_k: usize,
}

struct Stream {
    sample: Sample,
    cache: KvCache,
    next: Vec<u32>,
    done: bool,
}

/// Answers `prompts` (token ids) with the target, sampling with `rng`. `on_token` is told how many
/// tokens each step made.
///
/// # Errors
/// When a prompt does not fit the context or holds an unknown id.
pub fn answer(
    runtime: &Runtime,
    prompts: &[Vec<u32>],
    generation: Generation,
    rng: &mut ChaCha8Rng,
    on_token: &mut dyn FnMut(usize),
) -> Result<Vec<Sample>, BuildError> {
    let mut samples = Vec::with_capacity(prompts.len());
    for (group, prompts) in prompts.chunks(BATCH).enumerate() {
        let mut streams: Vec<Stream> = prompts
            .iter()
            .enumerate()
            .map(|(index, prompt)| Stream {
                sample: blank((group * BATCH + index) as u64, prompt, generation.temperature),
                cache: KvCache::new(runtime.config()),
                next: prompt.clone(),
                done: false,
            })
            .collect();
        while streams.iter().any(|stream| !stream.done) {
            let made = step(runtime, &mut streams, generation, rng)?;
            on_token(made);
        }
        samples.extend(streams.into_iter().map(|stream| stream.sample));
    }
    samples.retain(|sample| !sample.output_ids.is_empty());
    Ok(samples)
}

fn step(
    runtime: &Runtime,
    streams: &mut [Stream],
    generation: Generation,
    rng: &mut ChaCha8Rng,
) -> Result<usize, BuildError> {
    let config = runtime.config();
    let mut live: Vec<&mut Stream> = streams.iter_mut().filter(|stream| !stream.done).collect();
    let mut segments: Vec<Segment<'_>> = live
        .iter_mut()
        .map(|stream| Segment {
            tokens: &stream.next,
            cache: &mut stream.cache,
            logits: LogitsOf::Last,
        })
        .collect();
    let logits = runtime.forward(&mut segments)?;
    let made = live.len();
    for (stream, row) in live.into_iter().zip(logits.chunks(config.vocab_size)) {
        let token = pick(row, generation.temperature, rng);
        stream.sample.output_ids.push(token);
        if generation.top_k > 0 {
            stream.sample.teacher.push(top_k(row, generation.top_k));
        }
        stream.next = vec![token];
        let full = stream.sample.prompt_ids.len() + stream.sample.output_ids.len()
            >= config.max_position_embeddings;
        stream.done = config.eos_token_ids.contains(&token)
            || full
            || stream.sample.output_ids.len() == generation.max_tokens;
    }
    Ok(made)
}

fn blank(id: u64, prompt: &[u32], temperature: f32) -> Sample {
    Sample {
        id,
        prompt_ids: prompt.to_vec(),
        temperature,
        domain: "calibration".into(),
        held_out: true,
        ..Sample::default()
    }
}

fn pick(logits: &[f32], temperature: f32, rng: &mut ChaCha8Rng) -> u32 {
    if temperature <= 0.0 {
        return kernels::argmax(logits) as u32;
    }
    let mut probabilities: Vec<f32> = logits.iter().map(|logit| logit / temperature).collect();
    kernels::softmax(&mut probabilities);
    let mut left: f32 = rng.random();
    for (id, probability) in probabilities.iter().enumerate() {
        left -= probability;
        if left < 0.0 {
            return id as u32;
        }
    }
    kernels::argmax(logits) as u32
}

/// The target's opinion of an answer that it did not write: one row for each output position.
///
/// # Errors
/// When the sample does not fit the context or holds an unknown id.
pub fn score(runtime: &Runtime, sample: &Sample, k: usize) -> Result<Vec<TopK>, BuildError> {
    let (prompt, output) = (&sample.prompt_ids, &sample.output_ids);
    let tokens: Vec<u32> =
        prompt.iter().chain(&output[..output.len().saturating_sub(1)]).copied().collect();
    let mut cache = KvCache::new(runtime.config());
    let segment = Segment { tokens: &tokens, cache: &mut cache, logits: LogitsOf::All };
    let logits = runtime.forward(&mut [segment])?;
    let rows = logits.chunks(runtime.config().vocab_size).skip(prompt.len().saturating_sub(1));
    Ok(rows.map(|row| top_k(row, k)).collect())
}

/// The `k` most likely tokens with their log-probabilities at temperature 1.
pub fn top_k(logits: &[f32], k: usize) -> TopK {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let k = k.min(order.len());
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]);
    if k < order.len() {
        order.select_nth_unstable_by(k, by_logit);
        order.truncate(k);
    }
    order.sort_unstable_by(by_logit);
    let max = order.first().map_or(0.0, |id| logits[*id as usize]);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let normaliser = max + sum.ln() as f32;
    let logprobs = order.iter().map(|id| logits[*id as usize] - normaliser).collect();
    TopK { ids: order, logprobs }
}
