//! What `benches/build.py` measures: ways to slice and heal, distillation over answer tokens, and
//! the time and memory that calibrating, slicing and writing takes.
//!
//! build_bench answers TARGET PROMPTS.jsonl OUT.json TEMPERATURE
//! build_bench variants TARGET CALIBRATION.json HELD_OUT.json < variants.jsonl
//! build_bench distil TARGET CALIBRATION.json HELD_OUT.json PROMPTS.jsonl WORK < settings.json
//! build_bench slice TARGET CALIBRATION.json OUT < variant.json
//!
//! A prompt is a line `{"prompt": .., "domain": ..}`. A variant is a line such as `{"name": "x",
//! "hidden": 288, "mlp": 768, "layers": [0, 1, 8, 15, 22, 29], "readers": 0.1, "writers": 0.1,
//! "tokens": 12000}`; its result is the same with scores.
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::time::Instant;

use candle_core::Device;
use draft_adapter::build::calibrate::{Statistics, Window, statistics, windows};
use draft_adapter::build::generate::{Generation, answer};
use draft_adapter::build::heal::{Patient, Ridge, heal};
use draft_adapter::build::linalg::Spectrum;
use draft_adapter::build::plan::Plan;
use draft_adapter::build::prune::Selection;
use draft_adapter::build::slice::{WriteMap, slice};
use draft_adapter::build::stream::Streamed;
use draft_adapter::build::teach::{TeachSettings, Teaching, UNTAUGHT};
use draft_adapter::build::work::WorkFolder;
use draft_adapter::build::{corpus, export};
use draft_adapter::distill::{Reference, Sample};
use draft_adapter::hub::Target;
use draft_adapter::model::decoder::Decoder;
use draft_adapter::model::runtime::Runtime;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const WINDOW: usize = 512;
/// Longest prompt and longest answer, in tokens.
const PROMPT: usize = 384;
const ANSWER: usize = 160;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let target = Target::open(&args[1]).unwrap();
    match args[0].as_str() {
        "answers" => answers(&target, &args[2], &args[3], args[4].parse().unwrap()),
        "variants" => variants(&target, &samples(&args[2]), &samples(&args[3])),
        "distil" => distil(&target, &samples(&args[2]), &samples(&args[3]), &args[4], &args[5]),
        "slice" => slice_only(&target, &samples(&args[2]), &args[3]),
        other => eprintln!("unknown command {other}"),
    }
}

fn samples(path: &str) -> Vec<Sample> {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Prompts of a file as token ids, with their domains.
fn prompts(target: &Target, path: &str) -> Vec<(Vec<u32>, String)> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            let messages = json!([{"role": "user", "content": line["prompt"]}]);
            let mut ids = corpus::chat(target, &messages).unwrap();
            ids.truncate(PROMPT);
            (ids, line["domain"].as_str().unwrap_or("").to_string())
        })
        .collect()
}

fn answers(target: &Target, prompts_file: &str, out: &str, temperature: f32) {
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let prompts = prompts(target, prompts_file);
    let ids: Vec<Vec<u32>> = prompts.iter().map(|(ids, _)| ids.clone()).collect();
    let generation = Generation { temperature, max_tokens: ANSWER, top_k: 0 };
    let (mut made, started) = (0, Instant::now());
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut samples =
        answer(&runtime, &ids, generation, &mut rng, &mut |units| made += units).unwrap();
    eprintln!("answered {made} tokens, {:.0}/s", made as f64 / started.elapsed().as_secs_f64());
    for sample in &mut samples {
        sample.domain.clone_from(&prompts[sample.id as usize].1);
    }
    std::fs::write(out, serde_json::to_vec(&samples).unwrap()).unwrap();
}

/// What a target told on so many tokens of text.
struct Calibrated {
    windows: Vec<Window>,
    statistics: Statistics,
    spectrum: Spectrum,
}

impl Calibrated {
    fn new(target: &Target, calibration: &[Sample], tokens: usize) -> Self {
        let mut sum = 0;
        let chosen: Vec<Sample> = calibration
            .iter()
            .take_while(|s| {
                sum += s.prompt_ids.len() + s.output_ids.len();
                sum <= tokens
            })
            .cloned()
            .collect();
        let windows = windows(&chosen, 8, WINDOW, &Device::Cpu).unwrap();
        let some: Vec<Window> = windows.iter().step_by(3).cloned().collect();
        let statistics = statistics(Streamed::new(target), &some, None, &mut |_| ()).unwrap();
        let spectrum = Spectrum::new(&statistics.covariance).unwrap();
        Self { windows, statistics, spectrum }
    }

    /// The drafts that variants ask for; those that are healed share one walk.
    fn drafts(&self, target: &Target, variants: &[Value]) -> Vec<Decoder> {
        let (norm, streamed) = (target.config.anatomy.norm, Streamed::new(target));
        let number =
            |variant: &Value, key: &str, default: f64| variant[key].as_f64().unwrap_or(default);
        let shapes: Vec<(Plan, Selection, WriteMap)> = variants
            .iter()
            .map(|variant| {
                let layers: Vec<usize> = serde_json::from_value(variant["layers"].clone()).unwrap();
                let groups = target.config.num_key_value_heads as f64;
                let plan = Plan {
                    hidden_size: number(variant, "hidden", 288.0) as usize,
                    intermediate_size: number(variant, "mlp", 768.0) as usize,
                    num_hidden_layers: layers.len(),
                    num_key_value_heads: number(variant, "groups", groups) as usize,
                };
                let device = Device::Cpu;
                let map = WriteMap::new(&self.spectrum, plan.hidden_size, norm, &device).unwrap();
                let selection = Selection::new(&self.statistics, &plan, layers);
                (plan, selection, map)
            })
            .collect();
        let is_healed = |variant: &Value| variant["heal"] != json!(false);
        let patients: Vec<Patient<'_>> = variants
            .iter()
            .zip(&shapes)
            .filter(|(variant, _)| is_healed(variant))
            .map(|(variant, (plan, selection, map))| {
                let ridge = Ridge {
                    readers: number(variant, "readers", Ridge::default().readers),
                    writers: number(variant, "writers", Ridge::default().writers),
                };
                Patient { plan, selection, map, ridge }
            })
            .collect();
        let mut healed = heal(streamed, &self.windows, &patients, &mut |_| ()).unwrap().into_iter();
        variants
            .iter()
            .zip(&shapes)
            .map(|(variant, (plan, selection, map))| match is_healed(variant) {
                true => healed.next().unwrap(),
                false => slice(streamed, plan, selection, map).unwrap(),
            })
            .collect()
    }
}

fn reference(target: &Target, held_out: &[Sample]) -> Reference {
    let whole =
        Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
    Reference::new(&whole, held_out, WINDOW).unwrap()
}

fn variants(target: &Target, calibration: &[Sample], held_out: &[Sample]) {
    let reference = reference(target, held_out);
    let mut by_tokens: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for line in std::io::stdin().lines() {
        let variant: Value = serde_json::from_str(&line.unwrap()).unwrap();
        by_tokens.entry(variant["tokens"].as_u64().unwrap()).or_default().push(variant);
    }
    for (tokens, variants) in by_tokens.into_iter().rev() {
        let calibrated = Calibrated::new(target, calibration, tokens as usize);
        let drafts = calibrated.drafts(target, &variants);
        for (mut variant, draft) in variants.into_iter().zip(drafts) {
            let fraction = draft.config.parameters() as f64 / target.config.parameters() as f64;
            variant["params_fraction"] = json!(fraction);
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
}

/// Reads `{"variant": {..}, "init": "sliced|random", "teach": {..}}`.
fn distil(
    target: &Target,
    calibration: &[Sample],
    held_out: &[Sample],
    prompts_file: &str,
    work: &str,
) {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).unwrap();
    let mut settings: Value = serde_json::from_str(&text).unwrap();
    let teach: TeachSettings = serde_json::from_value(settings["teach"].take()).unwrap();
    let work = WorkFolder::open(Path::new(work), &text).unwrap();
    let tokens = settings["variant"]["tokens"].as_u64().unwrap_or(12_000) as usize;
    if !work.join(UNTAUGHT).exists() {
        let calibrated = Calibrated::new(target, calibration, tokens);
        let draft = calibrated.drafts(target, &[settings["variant"].clone()]).swap_remove(0);
        export::keep(target, &draft, &work.join(UNTAUGHT)).unwrap();
    }
    let reference = reference(target, held_out);
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    let prompts: Vec<Vec<u32>> =
        prompts(target, prompts_file).into_iter().map(|(ids, _)| ids).collect();
    let teaching = Teaching {
        target: &runtime,
        prompts: &prompts,
        reference: &reference,
        settings: &teach,
        work: &work,
    };
    let (mut learned, started) = (0, Instant::now());
    let mut tick = |tokens| {
        learned += tokens;
        eprintln!("{learned} tokens, {:.0} s", started.elapsed().as_secs_f64());
    };
    let (_, curve) = teaching.run(4, &mut tick).unwrap();
    let curve: Vec<Value> = curve
        .iter()
        .map(|(tokens, s)| {
            json!({
                "tokens": tokens,
                "alpha": s.alpha,
                "match": s.acceptance_rate,
                "mean_accepted_length": s.mean_accepted_length,
                "perplexity": s.perplexity,
            })
        })
        .collect();
    let seconds = started.elapsed().as_secs_f64();
    println!("{}", json!({"curve": curve, "seconds": seconds}));
}

fn slice_only(target: &Target, calibration: &[Sample], out: &str) {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).unwrap();
    let variant: Value = serde_json::from_str(&text).unwrap();
    let started = Instant::now();
    let calibrated = Calibrated::new(target, calibration, usize::MAX);
    let measured = started.elapsed().as_secs_f64();
    let draft = calibrated.drafts(target, &[variant]).swap_remove(0);
    let healed = started.elapsed().as_secs_f64();
    export::keep(target, &draft, Path::new(out)).unwrap();
    let written = started.elapsed().as_secs_f64();
    println!("{}", json!({"statistics": measured, "healed": healed, "written": written}));
}
