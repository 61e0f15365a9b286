//! `da-build inspect`, `verify`, `eval` and `completions` as a user runs them.

#![allow(clippy::unwrap_used, clippy::panic)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use golden::path;
use serde_json::Value;

fn da_build(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_da-build")).args(args).output().unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A draft of the tiny Llama in `folder`.
fn draft(folder: &Path) -> PathBuf {
    let output = folder.join("draft");
    let target = path("tiny_llama");
    let made = da_build(&[
        "--model",
        text(&target),
        "--output",
        text(&output),
        "--ls",
        "0.67",
        "--calibration-tokens",
        "2000",
        "--json",
    ]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert!(made.stderr.is_empty(), "nothing but the document when piped");
    let document = json(&made);
    let steps: Vec<&str> =
        document["steps"].as_array().unwrap().iter().map(|s| s["step"].as_str().unwrap()).collect();
    assert_eq!(steps, ["slice", "prune", "heal"]);
    assert!(document["steps"][2]["scores"]["perplexity"].as_f64().unwrap() > 1.0);
    output
}

#[test]
fn a_good_pair_fits_and_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (target, draft) = (path("tiny_llama"), draft(folder.path()));
    let seen = da_build(&["inspect", text(&target), text(&draft), "--json"]);
    assert_eq!(seen.status.code(), Some(0));
    let document = json(&seen);
    assert_eq!(document["family"], "llama");
    assert_ne!(document["pair"]["fit"], "bad", "{document}");

    let verified = da_build(&["verify", text(&draft), "--json"]);
    assert_eq!(verified.status.code(), Some(0), "{}", json(&verified));
    assert_eq!(json(&verified)["version"], "v000000");

    let prompts = folder.path().join("prompts.jsonl");
    let lines = (0..6).map(|at| {
        let domain = ["even", "odd"][at % 2];
        format!("{{\"prompt\": \"say {at}\", \"domain\": \"{domain}\"}}\n")
    });
    std::fs::write(&prompts, lines.collect::<String>()).unwrap();
    let measured = da_build(&[
        "eval",
        "--target",
        text(&target),
        "--draft",
        text(&draft),
        "--prompts",
        text(&prompts),
        "--temperature",
        "0,0.7",
        "--latency-ratio",
        "0.1",
        "--num-speculative-tokens",
        "3",
        "--max-tokens",
        "16",
        "--json",
    ]);
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
    let document = json(&measured);
    let rows = document["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r["domain"].as_str().unwrap_or("all")).collect();
    assert_eq!(names, ["even", "odd", "all", "even", "odd", "all"]);
    for row in rows {
        let scores = &row["scores"];
        let (a, c) = (scores["acceptance_rate"].as_f64().unwrap(), 0.1);
        let expected = (0..=3).map(|i| f64::powi(a, i)).sum::<f64>() / (3.0 * c + 1.0);
        assert!((row["expected_speedup"].as_f64().unwrap() - expected).abs() < 1e-9);
        assert_eq!(scores["by_position"].as_array().unwrap().len(), 3);
    }
    let both = rows[2]["scores"]["positions"].as_u64().unwrap();
    let parts = |at: usize| rows[at]["scores"]["positions"].as_u64().unwrap();
    assert_eq!(both, parts(0) + parts(1));
    // The target as its own draft is accepted always.
    let own = da_build(&[
        "eval",
        "--target",
        text(&target),
        "--draft",
        text(&target),
        "--max-prompts",
        "4",
        "--json",
    ]);
    for row in json(&own)["rows"].as_array().unwrap() {
        assert!(row["scores"]["acceptance_rate"].as_f64().unwrap() > 0.999, "{row}");
    }
}

#[test]
fn a_changed_folder_is_found_out() {
    let folder = tempfile::tempdir().unwrap();
    let draft = draft(folder.path());
    let weights = draft.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x41;
    std::fs::write(&weights, &bytes).unwrap();
    let problems = json(&da_build(&["verify", text(&draft), "--json"]))["problems"].to_string();
    assert!(problems.contains("model.safetensors was changed"), "{problems}");

    std::fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let verified = da_build(&["verify", text(&draft)]);
    assert_eq!(verified.status.code(), Some(1));
    let said = String::from_utf8_lossy(&verified.stdout);
    assert!(said.contains("BAD"), "{said}");

    std::fs::remove_file(draft.join("da_manifest.json")).unwrap();
    let problems = json(&da_build(&["verify", text(&draft), "--json"]))["problems"].to_string();
    assert!(problems.contains("was not made by da-build"), "{problems}");
}

#[test]
fn a_pair_that_does_not_fit_is_said_to_be_bad() {
    let folder = tempfile::tempdir().unwrap();
    let (target, other) = (path("tiny_llama"), folder.path().join("other"));
    std::fs::create_dir(&other).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(target.join(name), other.join(name)).unwrap();
    }
    let config = std::fs::read_to_string(other.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = 16.into();
    std::fs::write(other.join("config.json"), config.to_string()).unwrap();
    let seen = da_build(&["inspect", text(&target), text(&other)]);
    assert_eq!(seen.status.code(), Some(1));
    let said = String::from_utf8_lossy(&seen.stdout);
    assert!(said.contains("BAD") && said.contains("--max-model-len 16"), "{said}");
}

/// Rows beyond the tokenizer's ids stay the target's, in number and in content.
#[test]
fn a_padded_vocabulary_is_kept_and_is_no_reason_to_refuse() {
    let folder = tempfile::tempdir().unwrap();
    let (target, padded) = (path("tiny_llama"), folder.path().join("padded"));
    std::fs::create_dir(&padded).unwrap();
    std::fs::copy(target.join("tokenizer.json"), padded.join("tokenizer.json")).unwrap();
    let device = candle_core::Device::Cpu;
    let mut tensors =
        candle_core::safetensors::load(target.join("model.safetensors"), &device).unwrap();
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let table = tensors[name].clone();
        let more = table.narrow(0, 0, 8).unwrap();
        tensors.insert(name.into(), candle_core::Tensor::cat(&[&table, &more], 0).unwrap());
    }
    candle_core::safetensors::save(&tensors, padded.join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(target.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let rows = config["vocab_size"].as_u64().unwrap() + 8;
    config["vocab_size"] = rows.into();
    std::fs::write(padded.join("config.json"), config.to_string()).unwrap();

    let seen = da_build(&["inspect", text(&padded), text(&target)]);
    assert_eq!(seen.status.code(), Some(0));
    let said = String::from_utf8_lossy(&seen.stdout);
    assert!(said.contains("same tokenizer, padding differs by 8"), "{said}");

    let output = folder.path().join("draft");
    let options = ["--ls", "0.67", "--calibration-tokens", "2000", "--json"];
    let made =
        da_build(&[&["--model", text(&padded), "--output", text(&output)], &options[..]].concat());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let config = std::fs::read_to_string(output.join("config.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&config).unwrap()["vocab_size"], rows);
    let verified = json(&da_build(&["verify", text(&output), "--json"]));
    assert_eq!(verified["problems"], serde_json::json!([]));
    assert!(verified["good"].to_string().contains("8 of padding"), "{verified}");
    let pair =
        ["--target", text(&padded), "--draft", text(&output), "--max-prompts", "2", "--json"];
    let measured = da_build(&[&["eval"], &pair[..]].concat());
    assert!(measured.status.success(), "{}", String::from_utf8_lossy(&measured.stderr));
}

#[test]
fn a_draft_over_a_part_of_the_vocabulary_is_inspected_and_measured() {
    let folder = tempfile::tempdir().unwrap();
    let (target, draft) = (path("tiny_llama"), folder.path().join("draft"));
    let options = ["--es", "1", "--ls", "1", "--vocab", "20", "--dtype", "f32"];
    let made = ["--model", text(&target), "--output", text(&draft), "--calibration-tokens", "1500"];
    let made = da_build(&[&made[..], &options[..]].concat());
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let seen = da_build(&["inspect", text(&target), text(&draft)]);
    let said = String::from_utf8_lossy(&seen.stdout);
    assert_eq!(seen.status.code(), Some(0), "{said}");
    assert!(said.contains("of the target's 288 tokens"), "{said}");
    let pair = ["--target", text(&target), "--draft", text(&draft), "--max-prompts", "3", "--json"];
    let measured = json(&da_build(&[&["eval"], &pair[..]].concat()));
    let alpha = measured["rows"][0]["scores"]["alpha"].as_f64().unwrap();
    assert!(alpha > 0.5 && alpha < 1.0, "{measured:#}");

    // Another draft's table.
    std::fs::write(draft.join("da_vocab.json"), "[5,null]").unwrap();
    let seen = da_build(&["inspect", text(&target), text(&draft)]);
    let said = String::from_utf8_lossy(&seen.stdout);
    assert_eq!(seen.status.code(), Some(1), "{said}");
    assert!(said.contains("da_vocab.json has 2 ids"), "{said}");
}

#[test]
fn completions_and_usage() {
    for shell in ["bash", "zsh", "fish"] {
        let script = da_build(&["completions", shell]);
        assert!(script.status.success());
        assert!(String::from_utf8_lossy(&script.stdout).contains("--calibration"), "{shell}");
    }
    let wrong = da_build(&["eval", "--target", "x", "--draft", "y", "--max-tokens", "0"]);
    assert_eq!(wrong.status.code(), Some(64), "{}", String::from_utf8_lossy(&wrong.stderr));
    assert_eq!(da_build(&[]).status.code(), Some(64));
    assert_eq!(da_build(&["inspect", "/no/such/model"]).status.code(), Some(1));
    let plan = da_build(&["--model", "x", "--output", "y", "--plan", "z", "--es", "1"]);
    assert_eq!(plan.status.code(), Some(64), "a plan fixes the shape");
}
