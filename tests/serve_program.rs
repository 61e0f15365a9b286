//! `da-serve` as a program, with real models: exit codes, messages, draining, and the promise
//! that a draft changes the speed and nothing else.

#![allow(clippy::unwrap_used)] // a test fails by panicking

#[path = "support/serving.rs"]
mod serving;

use draft_adapter::metrics as names;
use futures::StreamExt;
use serde_json::{Value, json};
use serving::{Server, copy_model, fails, golden};
use tempfile::TempDir;

/// A folder of drafts with `v0` in it, a copy of a golden model.
fn drafts(model: &str) -> (TempDir, String) {
    let root = tempfile::tempdir().unwrap();
    let v0 = root.path().join("v0");
    copy_model(model, &v0);
    let v0 = v0.to_str().unwrap().to_owned();
    (root, v0)
}

async fn completions(server: &Server, temperature: f64) -> Vec<Value> {
    let mut choices = Vec::new();
    for prompt in ["the rain", "12 and", "she said that they", "x"] {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 60, "seed": 5,
                          "temperature": temperature, "top_p": 0.95, "ignore_eos": true,
                          "return_token_ids": true});
        let (status, answer) = server.post("/v1/completions", body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 60);
        choices.push(answer["choices"].clone());
    }
    choices
}

#[tokio::test]
async fn a_draft_changes_no_output_and_an_equal_one_is_accepted_at_one() {
    let plain = Server::start(&[]);
    let (_equal_root, equal_draft) = drafts("tiny_llama");
    let (_other_root, other_draft) = drafts("tiny_llama_tied");
    let equal = Server::start(&["--draft", &equal_draft, "--num-speculative-tokens", "4"]);
    let other = Server::start(&["--draft", &other_draft, "--num-speculative-tokens", "3"]);
    for temperature in [0.0, 0.7] {
        let want = completions(&plain, temperature).await;
        assert_eq!(completions(&equal, temperature).await, want);
        assert_eq!(completions(&other, temperature).await, want);
        if temperature == 0.0 {
            let drafted = equal.metric(names::VLLM_NUM_DRAFT_TOKENS).await;
            assert!(drafted > 100.0);
            assert_eq!(drafted, equal.metric(names::VLLM_NUM_ACCEPTED_TOKENS).await);
        }
    }
    assert!(other.metric(names::VLLM_NUM_DRAFT_TOKENS).await > 100.0);
    assert_eq!(plain.metric(names::VLLM_NUM_DRAFT_TOKENS).await, 0.0);
}

#[tokio::test]
async fn batches_change_no_output() {
    let (_root, draft) = drafts("tiny_llama_tied");
    let server = Server::start(&["--draft", &draft, "--num-speculative-tokens", "4"]);
    let one_by_one = completions(&server, 0.0).await;
    let all = ["the rain", "12 and", "she said that they", "x"];
    let body = json!({"prompt": all, "n": 3, "max_tokens": 60, "temperature": 0,
                      "ignore_eos": true, "return_token_ids": true});
    let (_, together) = server.post("/v1/completions", body).await;
    for (index, choices) in one_by_one.iter().enumerate() {
        for copy in 0..3 {
            let choice = &together["choices"][index * 3 + copy];
            assert_eq!(choice["token_ids"], choices[0]["token_ids"]);
        }
    }
}

#[tokio::test]
async fn drafts_are_swapped_or_refused_with_the_reason() {
    const ROUTE: &str = "/v1/draft_adapter/draft";
    let (root, v0) = drafts("tiny_llama");
    let server = Server::start(&["--draft", &v0, "--num-speculative-tokens", "auto"]);
    let folder = |name: &str| root.path().join(name);
    copy_model("tiny_llama_tied", &folder("shape"));
    copy_model("tiny_llama", &folder("nan"));
    // The last value of the last tensor.
    let weights = folder("nan").join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&weights, &bytes).unwrap();
    copy_model("tiny_llama", &folder("cut"));
    std::fs::write(folder("cut").join("model.safetensors"), &bytes[..end / 2]).unwrap();
    copy_model("tiny_llama", &folder("vocabulary"));
    let tokenizer = folder("vocabulary").join("tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text.replace("<|im_end|>", "<|another|>")).unwrap();
    let outside = tempfile::tempdir().unwrap();
    copy_model("tiny_llama", outside.path());

    let before = completions(&server, 0.0).await;
    let path = |name: &str| folder(name).to_str().unwrap().to_owned();
    for (path, part) in [
        (path("shape"), "expected 3, got 2"),
        (path("nan"), "not finite"),
        (path("cut"), "model.safetensors"),
        (path("vocabulary"), "<|another|>"),
        (path("absent"), "absent"),
        (outside.path().to_str().unwrap().to_owned(), "outside"),
    ] {
        let (status, answer) = server.post(ROUTE, json!({"path": path, "version": "v1"})).await;
        assert_eq!(status, 409, "{path}: {answer}");
        let detail = answer["detail"].as_str().unwrap();
        assert!(detail.contains(part), "{detail:?} does not mention {part:?}");
        assert_eq!(server.get(ROUTE).await.1["version"], "startup");
    }
    copy_model("tiny_llama", &folder("v1"));
    let order = json!({"path": path("v1"), "version": "v1"});
    let (status, answer) = server.post(ROUTE, order.clone()).await;
    assert_eq!((status, &answer["version"]), (200, &json!("v1")), "{answer}");
    assert!(answer["stage_ms"].as_f64().unwrap() > 0.0);
    // The same again is a no-op.
    let (status, answer) = server.post(ROUTE, order).await;
    assert_eq!((status, &answer["stage_ms"]), (200, &json!(0.0)));
    assert_eq!(server.get(ROUTE).await.1["version"], "v1");
    assert_eq!(completions(&server, 0.0).await, before);
    let (_, engine) = server.get("/v1/draft_adapter/engine").await;
    assert_eq!(engine["swaps"], 1);
    assert_eq!(engine["cost_curve"]["verify_ms"].as_array().unwrap().len(), 9);
}

#[test]
fn bad_settings_exit_with_64_and_name_themselves() {
    let tiny = golden("tiny_llama");
    let tiny = tiny.to_str().unwrap();
    let (root, wrong) = drafts("tiny_llama");
    let tokenizer = root.path().join("v0/tokenizer.json");
    let text = std::fs::read_to_string(&tokenizer).unwrap();
    std::fs::write(&tokenizer, text.replace("<|im_end|>", "<|another|>")).unwrap();
    for (arguments, part) in [
        (vec!["--model", "/does/not/exist"], "/does/not/exist"),
        (vec!["--model", tiny, "--draft", "/does/not/exist"], "/does/not/exist"),
        (vec!["--model", tiny, "--draft", wrong.as_str()], "<|another|>"),
        (vec!["--model", tiny, "--max-model-len", "100000"], "256 positions"),
        (vec!["--model", tiny, "--max-num-seqs", "1000000000"], "--max-num-seqs"),
        (vec!["--model", tiny, "--num-speculative-tokens", "many"], "--num-speculative-tokens"),
        (vec!["--model", tiny, "--unknown"], "--unknown"),
        (vec![], "--model"),
    ] {
        let arguments = [&["--port", "0"], arguments.as_slice()].concat();
        let (code, errors) = fails(&arguments);
        assert_eq!(code, Some(64), "{arguments:?}: {errors}");
        assert!(errors.contains(part), "{arguments:?}: {errors}");
    }
}

#[test]
fn a_port_in_use_exits_with_1() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let tiny = golden("tiny_llama");
    let (code, errors) = fails(&["--model", tiny.to_str().unwrap(), "--port", &port]);
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains(&port) && errors.contains("hint: "), "{errors}");
}

#[tokio::test]
async fn sigterm_lets_running_requests_finish() {
    let mut server = Server::start(&[]);
    let body = json!({"prompt": "the rain", "max_tokens": 200, "temperature": 0, "stream": true,
                      "ignore_eos": true, "stream_options": {"include_usage": true}});
    let response = reqwest::Client::new()
        .post(server.url("/v1/completions"))
        .json(&body)
        .send()
        .await
        .unwrap();
    let mut stream = response.bytes_stream();
    let mut text = stream.next().await.unwrap().unwrap().to_vec();
    server.terminate();
    while let Some(bytes) = stream.next().await {
        text.extend(bytes.unwrap());
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert!(text.contains("\"completion_tokens\":200"));
    assert_eq!(server.wait().code(), Some(0));
}
