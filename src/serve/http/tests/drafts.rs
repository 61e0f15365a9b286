use super::*;

const ROUTE: &str = "/v1/draft_adapter/draft";

#[tokio::test]
async fn a_swap_is_reported_and_takes_effect() {
    let api = Api::with(Setup { draft: Some(100), ..Setup::default() });
    let (status, before) = api.get(ROUTE).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(before["version"], "startup");
    assert_eq!(before["state"], "ready");
    assert!(before["checksum"].is_null());

    let order = json!({"path": "/drafts/v000001", "version": "v000001"});
    let (status, swapped) = api.post(ROUTE, order).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(swapped["version"], "v000001");
    assert_eq!(swapped["checksum"], "c0ffee");
    assert!(swapped["stage_ms"].as_f64().unwrap() >= 0.0);
    assert!(swapped["commit_ms"].as_f64().unwrap() >= 0.0);
    let (_, after) = api.get(ROUTE).await;
    assert_eq!(after["version"], "v000001");
    assert_eq!(after["path"], "/drafts/v000001");

    // The new draft agrees with the target, so everything is accepted from here on.
    api.complete(json!({"prompt": "x", "max_tokens": 41, "temperature": 0})).await;
    use crate::metrics::{VLLM_NUM_ACCEPTED_TOKENS, VLLM_NUM_DRAFT_TOKENS};
    let accepted = api.metric(VLLM_NUM_ACCEPTED_TOKENS, "").await;
    assert!(accepted > 0.0);
    assert_eq!(accepted, api.metric(VLLM_NUM_DRAFT_TOKENS, "").await);
    let (_, engine) = api.get("/v1/draft_adapter/engine").await;
    assert_eq!((&engine["swaps"], &engine["num_speculative_tokens"]), (&json!(1), &json!(4)));
}

#[tokio::test]
async fn a_refused_draft_leaves_the_running_one() {
    let api = Api::new();
    let (status, answer) = api.post(ROUTE, json!({"path": "/drafts/wrong"})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    let detail = answer["detail"].as_str().unwrap();
    assert!(detail.contains("hidden_size: expected 288, got 576"), "{detail}");
    assert_eq!(api.get(ROUTE).await.1["version"], "startup");
    let (status, answer) = api.post(ROUTE, json!({"version": "v000001"})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(answer["error"]["message"].as_str().unwrap().contains("path is required"));
}

#[tokio::test]
async fn a_server_without_a_draft_says_so() {
    let api = Api::with(Setup { draft: None, ..Setup::default() });
    assert_eq!(api.get(ROUTE).await.1["state"], "none");
    let (status, answer) = api.post(ROUTE, json!({"path": "/drafts/v000001"})).await;
    assert_eq!(status, StatusCode::CONFLICT);
    assert!(answer["detail"].as_str().unwrap().contains("without a draft"));
}

#[tokio::test]
async fn a_swap_under_running_streams_changes_no_text() {
    let api = Arc::new(Api::with(Setup { draft: Some(100), ..Setup::default() }));
    let held = api.target.gate.write();
    let mut streams = tokio::task::JoinSet::new();
    for index in 0..8 {
        let api = Arc::clone(&api);
        streams.spawn(async move {
            let prompt = format!("stream {index}");
            let body = json!({"prompt": prompt, "max_tokens": 200, "temperature": 0});
            let got = api.complete(body).await;
            assert_eq!(
                got["choices"][0]["text"],
                decode(&api.target.greedy(&encode(&prompt), 200))
            );
        });
    }
    let swap = {
        let api = Arc::clone(&api);
        tokio::spawn(async move { api.post(ROUTE, json!({"path": "/drafts/v000001"})).await })
    };
    drop(held);
    while let Some(result) = streams.join_next().await {
        result.unwrap();
    }
    assert_eq!(swap.await.unwrap().0, StatusCode::OK);
}
