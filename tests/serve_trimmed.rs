//! `da-serve` with a draft over a part of the target's vocabulary.

#![allow(clippy::unwrap_used)] // a test fails by panicking

#[path = "support/golden.rs"]
mod golden;
#[path = "support/serving.rs"]
mod serving;

use std::path::Path;

use candle_core::DType;
use draft_adapter::build::{self, Request, Settings};
use draft_adapter::metrics as names;
use draft_adapter::vocab::VOCAB_FILE;
use golden::target;
use serde_json::{Value, json};
use serving::{Server, fails};

const ROUTE: &str = "/v1/draft_adapter/draft";

/// `tiny_llama` with fewer tokens and nothing else cut; returns the target's ids of what is left.
fn build_trimmed(to: &Path) -> Vec<Option<u32>> {
    let settings = Settings {
        output: to.to_path_buf(),
        request: Request { embedding: Some(1.0), layers: Some(1.0), ..Request::default() },
        calibration_tokens: 1500,
        dtype: DType::F32,
        vocab: Some(10),
        ..Settings::default()
    };
    build::run(&target("tiny_llama"), &settings, &mut |_| ()).unwrap();
    table(to)
}

fn table(draft: &Path) -> Vec<Option<u32>> {
    serde_json::from_slice(&std::fs::read(draft.join(VOCAB_FILE)).unwrap()).unwrap()
}

/// Copies a draft without its manifest, with another table.
fn copy_with_table(from: &Path, to: &Path, table: &[Option<u32>]) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        if entry.file_name() != "da_manifest.json" {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    std::fs::write(to.join(VOCAB_FILE), json!(table).to_string()).unwrap();
}

async fn answers(server: &Server, temperature: f64) -> Vec<Value> {
    let mut answers = Vec::new();
    for prompt in ["the rain", "12 and", "she said that they", "x"] {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 60, "seed": 5,
                          "temperature": temperature, "ignore_eos": true,
                          "return_token_ids": true});
        let (status, answer) = server.post("/v1/completions", body).await;
        assert_eq!(status, 200, "{answer}");
        answers.push(answer["choices"][0]["token_ids"].clone());
    }
    answers
}

#[tokio::test]
async fn a_trimmed_draft_changes_no_output_and_is_accepted() {
    let root = tempfile::tempdir().unwrap();
    let v0 = root.path().join("v0");
    let kept = build_trimmed(&v0);
    let plain = Server::start(&[]);
    let arguments = ["--draft", v0.to_str().unwrap(), "--num-speculative-tokens", "3"];
    let server = Server::start(&arguments);
    let sampling =
        Server::start(&[&arguments[..], &["--draft-sample-method", "probabilistic"]].concat());
    for temperature in [0.0, 0.7] {
        let want = answers(&plain, temperature).await;
        assert_eq!(answers(&server, temperature).await, want, "at {temperature}");
    }
    let want = answers(&plain, 0.0).await;
    assert_eq!(answers(&sampling, 0.0).await, want);
    let ids = want.iter().flat_map(|ids| ids.as_array().unwrap());
    let dropped = |id: &Value| !kept.contains(&id.as_u64().map(|id| id as u32));
    assert!(
        ids.filter(|id| dropped(id)).count() > 0,
        "the draft lacks none of the answers' tokens"
    );
    answers(&sampling, 0.7).await;
    for server in [&server, &sampling] {
        let drafted = server.metric(names::VLLM_NUM_DRAFT_TOKENS).await;
        let accepted = server.metric(names::VLLM_NUM_ACCEPTED_TOKENS).await;
        // Ids taken for others would be right once in 288 times. A random model draws what the
        // draft lacks as often as anything else, and after that the two agree no more.
        assert!(
            drafted > 100.0 && accepted > 0.03 * drafted,
            "{accepted} of {drafted} were accepted"
        );
    }
}

#[tokio::test]
async fn trimmed_drafts_are_swapped_or_refused_with_the_reason() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| root.path().join(name);
    let path = |name: &str| folder(name).to_str().unwrap().to_owned();
    let table = build_trimmed(&folder("v0"));
    copy_with_table(&folder("v0"), &folder("v1"), &table);
    let mut swapped = table.clone();
    swapped.swap(70, 71);
    copy_with_table(&folder("v0"), &folder("swapped"), &swapped);
    copy_with_table(&folder("v0"), &folder("short"), &table[1..]);
    copy_with_table(&folder("v0"), &folder("none"), &table);
    std::fs::remove_file(folder("none").join(VOCAB_FILE)).unwrap();

    let server = Server::start(&["--draft", &path("v0"), "--num-speculative-tokens", "3"]);
    let before = answers(&server, 0.0).await;
    for (name, part) in [
        ("swapped", "da_vocab.json calls"),
        ("short", "da_vocab.json has"),
        ("none", "tokens in the vocabulary: expected 288"),
    ] {
        let (status, answer) = server.post(ROUTE, json!({"path": path(name)})).await;
        assert_eq!(status, 409, "{name}: {answer}");
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.contains(part), "{detail:?} does not mention {part:?}");
    }
    let (status, answer) = server.post(ROUTE, json!({"path": path("v1")})).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answers(&server, 0.0).await, before);

    let model = golden::path("tiny_llama");
    let (status, errors) = fails(&["--model", model.to_str().unwrap(), "--draft", &path("none")]);
    assert_eq!(status, Some(64), "{errors}");
    assert!(errors.contains("expected 288"), "{errors}");
}
