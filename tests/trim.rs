//! Trimmed vocabularies: the tokenizer that is left, and the draft over it.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use draft_adapter::build::trim::{Kept, UNKNOWN, coverage, trim};
use draft_adapter::build::{self, Request, Settings};
use draft_adapter::hub::Target;
use draft_adapter::model::Tokenizer;
use draft_adapter::model::decoder::Decoder;
use golden::{path, target};
use serde_json::{Value, json};

const TEXT: &str = "the then there thin this that these";

fn counts(tokenizer: &Tokenizer, text: &str) -> BTreeMap<u32, u64> {
    let ids = tokenizer.encode(text, false).unwrap();
    build::trim::count([ids.as_slice()].into_iter())
}

fn tokenizer_of(companions: &[(String, Vec<u8>)]) -> Tokenizer {
    let (_, bytes) = companions.iter().find(|(name, _)| name == "tokenizer.json").unwrap();
    Tokenizer::from_bytes(bytes).unwrap()
}

/// What stays has its text, its merges and its bytes; both kinds of BPE.
#[test]
fn the_tokenizer_that_is_left_reads_and_writes_the_same() {
    for file in ["tiny_llama/tokenizer.json", "tokenizers/byte_fallback.json"] {
        let json = std::fs::read(path(file)).unwrap();
        let whole = Tokenizer::from_bytes(&json).unwrap();
        let counts = counts(&whole, TEXT);
        let kept = Kept::choose(&json, &counts, 4).unwrap();
        let files = [("tokenizer.json".to_string(), json.clone())];
        let part = tokenizer_of(&kept.companions(&files, None).unwrap());
        assert!(part.vocab_size() < whole.vocab_size(), "{file}");
        assert_eq!(part.vocab_size(), kept.ids().len(), "{file}");
        for (new, old) in kept.ids().iter().enumerate() {
            let piece = old.map_or(Some(UNKNOWN.to_string()), |old| whole.piece(old));
            assert_eq!(part.piece(new as u32), piece, "{file}: id {new}");
            let special = old.is_none_or(|old| whole.is_special(old));
            assert_eq!(part.is_special(new as u32), special, "{file}: id {new}");
        }
        // The most used tokens are among them, and are still reached.
        let mut by_use: Vec<(&u32, &u64)> = counts.iter().collect();
        by_use.sort_by_key(|(id, count)| (std::cmp::Reverse(**count), **id));
        for (id, _) in by_use.iter().take(4) {
            assert!(kept.renumber(**id).is_some(), "{file}: {:?}", whole.piece(**id));
        }
        // Bytes make every text encodable, and it comes back as it was.
        for text in [TEXT, "Ünï¢ode 火车 🚂", "x = {1: 'a'}\n"] {
            let ids = part.encode(text, false).unwrap();
            let want = whole.decode(&whole.encode(text, false).unwrap(), false).unwrap();
            assert_eq!(part.decode(&ids, false).unwrap(), want, "{file}");
        }
        let all: Vec<Option<u32>> = (0..whole.vocab_size() as u32).map(Some).collect();
        assert_eq!(coverage(&whole, &all, TEXT).unwrap(), 1.0);
        assert!(coverage(&whole, kept.ids(), TEXT).unwrap() > 0.2);
    }
}

/// A vocabulary as conversions write it: every split of a token is a merge, by the left side's
/// place. `abc` is read as `ab` and `c`, though `a` and `bc` is listed first.
#[test]
fn kept_tokens_are_reached_the_way_they_are_read() {
    let pieces = ["a", "b", "c", "d", "e", "f", "ab", "abc", "cd", "bc", "ef", "def", "abcdef"];
    let vocab: serde_json::Map<String, Value> =
        pieces.iter().enumerate().map(|(id, piece)| (piece.to_string(), id.into())).collect();
    let merges = [
        ["a", "b"],
        ["a", "bc"],
        ["ab", "c"],
        ["c", "d"],
        ["b", "c"],
        ["e", "f"],
        ["d", "ef"],
        ["abc", "def"],
    ];
    let json = json!({
        "version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    })
    .to_string();
    let counts = BTreeMap::from([(12, 5), (8, 3)]);
    let kept = Kept::choose(json.as_bytes(), &counts, 2).unwrap();
    let files = [("tokenizer.json".to_string(), json.into_bytes())];
    let part = tokenizer_of(&kept.companions(&files, None).unwrap());
    for (new, old) in kept.ids().iter().enumerate() {
        let Some(old) = old else { continue };
        let piece = pieces[*old as usize];
        assert_eq!(part.encode(piece, false).unwrap(), [new as u32], "{piece}");
    }
    assert_eq!(part.token_id("bc"), None, "nothing passes through it");
}

#[test]
fn the_number_that_was_asked_for_is_kept_whatever_was_seen() {
    let json = std::fs::read(path("tiny_llama/tokenizer.json")).unwrap();
    let whole = Tokenizer::from_bytes(&json).unwrap();
    // Special tokens and bytes come first, 259 of them; the last merge needs two others.
    let last = whole.vocab_size() as u32 - 1;
    let ordinary = |most_used| {
        let kept = Kept::choose(&json, &BTreeMap::from([(last, 9)]), most_used).unwrap();
        let ids: Vec<u32> = kept.ids().iter().flatten().copied().collect();
        ids.into_iter().filter(|id| *id >= 259).collect::<Vec<u32>>()
    };
    assert!(ordinary(0).is_empty());
    assert!(ordinary(1).contains(&last));
    let ten = ordinary(10);
    assert!(ten.contains(&last) && ten.len() >= 10, "{ten:?}");
    assert!((259..268).all(|id| ten.contains(&id)), "the first that were learned: {ten:?}");
    assert_eq!(ordinary(1000).len(), whole.vocab_size() - 259);
}

#[test]
fn kept_rows_give_the_same_logits() {
    for model in ["tiny_llama", "tiny_llama_tied"] {
        let target = target(model);
        let whole =
            Decoder::new(&target.config, |name| target.weights.tensor(name, &Device::Cpu)).unwrap();
        let trimmed = trim(&whole, &target, &counts(&target.tokenizer, TEXT), 6).unwrap();
        assert!(trimmed.draft.config.vocab_size < target.config.vocab_size);
        assert!(trimmed.draft.config.parameters() < target.config.parameters());
        let inputs: Vec<u32> = (0..5).map(|at| at * 3 + 1).collect();
        let old: Vec<u32> = inputs.iter().map(|at| trimmed.ids[*at as usize].unwrap()).collect();
        let logits = |decoder: &Decoder, ids: &[u32]| -> Vec<Vec<f32>> {
            let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap();
            decoder.logits(&ids).unwrap().squeeze(0).unwrap().to_vec2().unwrap()
        };
        let rows = logits(&trimmed.draft, &inputs).into_iter().zip(logits(&whole, &old));
        for (part, all) in rows {
            for (new, old) in trimmed.ids.iter().enumerate() {
                if let Some(old) = old {
                    assert!((part[new] - all[*old as usize]).abs() < 1e-5, "{model}: {new}");
                }
            }
        }
    }
}

#[test]
fn a_build_with_a_trimmed_vocabulary_is_a_model_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("draft");
    let settings = Settings {
        output: output.clone(),
        request: Request { layers: Some(0.67), ..Request::default() },
        calibration_tokens: 2000,
        dtype: DType::F32,
        vocab: Some(10),
        ..Settings::default()
    };
    let report = build::run(&target("tiny_llama"), &settings, &mut |_| ()).unwrap();
    assert!(report.vllm_command.contains("use_heterogeneous_vocab"), "{}", report.vllm_command);
    let (last, scores) = report.story.steps.last().unwrap();
    assert_eq!(last, "trim");
    assert!(scores.finite && scores.alpha > 0.0);
    assert_eq!(report.story.coverage.len(), 13);

    let draft = Target::open(output.to_str().unwrap()).unwrap();
    let ids: Vec<Option<u32>> =
        serde_json::from_slice(&std::fs::read(output.join("da_vocab.json")).unwrap()).unwrap();
    assert_eq!(draft.config.vocab_size, ids.len());
    assert_eq!(draft.tokenizer.vocab_size(), ids.len());
    let target = target("tiny_llama");
    let ends = draft.config.eos_token_ids.iter().map(|id| ids[*id as usize].unwrap());
    assert_eq!(ends.collect::<Vec<_>>(), target.config.eos_token_ids);
    let config: Value =
        serde_json::from_slice(&std::fs::read(output.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["vocab_size"], ids.len());
    assert!(build::verify::verify(&output).problems.is_empty());
}
