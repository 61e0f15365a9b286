use super::*;

#[tokio::test]
async fn a_completion_is_the_models_text() {
    for draft in [None, Some(0), Some(60)] {
        let api = Api::with(Setup { draft, ..Setup::default() });
        let want = api.target.greedy(&encode("Hello"), 40);
        let got = api
            .complete(json!({"model": "fake", "prompt": "Hello", "max_tokens": 40,
                             "temperature": 0, "return_token_ids": true}))
            .await;
        let choice = &got["choices"][0];
        assert_eq!(got["object"], "text_completion");
        assert!(got["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!(choice["text"], decode(&want));
        assert_eq!(choice["token_ids"], json!(want));
        assert_eq!(choice["prompt_token_ids"], json!(encode("Hello")));
        assert_eq!(choice["finish_reason"], "length");
        assert_eq!(
            got["usage"],
            json!({"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45})
        );
    }
}

#[tokio::test]
async fn prompts_come_in_four_forms() {
    let api = Api::new();
    let ids = encode("abc");
    let text = |value: &Value| value["choices"][0]["text"].clone();
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
    let one = api.complete(body(json!("abc"))).await;
    assert_eq!(text(&api.complete(body(json!(ids))).await), text(&one));
    let strings = api.complete(body(json!(["abc", "x"]))).await;
    let lists = api.complete(body(json!([ids, encode("x")]))).await;
    assert_eq!(strings["choices"], lists["choices"]);
    assert_eq!(text(&strings), text(&one));
    assert_eq!(strings["choices"][1]["index"], 1);
    assert_eq!(strings["usage"]["prompt_tokens"], 4);
    assert_eq!(strings["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn a_stream_adds_up_to_the_whole_answer() {
    let api = Api::new();
    let body = json!({"prompt": "Hello", "max_tokens": 50, "temperature": 0.9, "seed": 3,
                      "return_token_ids": true});
    let whole = api.complete(body.clone()).await;
    let mut streamed = body;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = api.stream("/v1/completions", streamed).await;
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"], whole["usage"]);
    let text: String = chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(json!(text), whole["choices"][0]["text"]);
    let ids: Vec<Value> = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"][0]["token_ids"].as_array().unwrap().clone())
        .collect();
    assert_eq!(json!(ids), whole["choices"][0]["token_ids"]);
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!(encode("Hello")));
    assert!(chunks[1]["choices"][0].get("prompt_token_ids").is_none());
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk["id"] == usage["id"]));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_chat_has_the_chats_layout() {
    let api = Api::new();
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": "x"}]}]);
    let prompt = [&[95][..], &encode("user: x"), &[95]].concat();
    let want = api.target.greedy(&prompt, 12);
    let body = json!({"messages": messages, "max_completion_tokens": 12, "temperature": 0,
                      "return_token_ids": true, "tool_choice": "none"});
    let (status, whole) = api.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(status, StatusCode::OK, "{whole}");
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    assert_eq!(whole["choices"][0]["message"]["content"], decode(&want));
    assert_eq!(whole["prompt_token_ids"], json!(prompt));
    assert_eq!(whole["choices"][0]["token_ids"], json!(want));

    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = api.stream("/v1/chat/completions", streamed).await;
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[0]["prompt_token_ids"], json!(prompt));
    let text: String =
        events.iter().map(|e| e["choices"][0]["delta"]["content"].as_str().unwrap()).collect();
    assert_eq!(text, decode(&want));
    assert!(events.iter().all(|event| event.get("usage").is_none()));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn a_chat_without_a_limit_ends_at_the_model_length_or_the_end_token() {
    let body = json!({"messages": [{"role": "user", "content": "x"}], "temperature": 0});
    let api = Api::new();
    let (_, full) = api.post("/v1/chat/completions", body.clone()).await;
    assert_eq!(full["usage"]["total_tokens"], 512);
    assert_eq!(full["choices"][0]["finish_reason"], "length");

    let api = Api::with(Setup { eos: true, ..Setup::default() });
    let (_, ended) = api.post("/v1/chat/completions", body).await;
    assert_eq!(ended["choices"][0]["finish_reason"], "stop");
    assert!(ended["choices"][0]["stop_reason"].is_null());
    assert!(!ended["choices"][0]["message"]["content"].as_str().unwrap().contains("<|end|>"));
    assert!(ended["usage"]["total_tokens"].as_u64().unwrap() < 512);
}

#[tokio::test]
async fn the_end_token_can_be_ignored_or_put_off() {
    let api = Api::with(Setup { eos: true, ..Setup::default() });
    let run = async |extra: Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 400, "temperature": 0,
                              "return_token_ids": true});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let got = api.complete(body).await;
        let ids = got["choices"][0]["token_ids"].as_array().unwrap().clone();
        (ids, got["choices"][0]["finish_reason"].clone())
    };
    let (natural, reason) = run(json!({})).await;
    assert_eq!((natural.last().unwrap(), reason), (&json!(END), json!("stop")));
    let (ignored, reason) = run(json!({"ignore_eos": true})).await;
    assert_eq!((ignored.len(), reason), (400, json!("length")));
    assert_eq!(ignored[..natural.len()], natural);
    let (later, _) = run(json!({"min_tokens": natural.len() + 3})).await;
    assert!(later.len() > natural.len());
    assert!(!later[..natural.len() + 3].contains(&json!(END)));
}

#[tokio::test]
async fn stop_strings_end_the_text_before_them() {
    let api = Api::new();
    let ids = api.target.greedy(&encode("Hello"), 60);
    let text = decode(&ids);
    // Three characters are three tokens, so the stop string spans tokens and steps.
    let stop = &text[20..23];
    let at = text.find(stop).unwrap();
    for (stops, stream) in [(json!(stop), false), (json!(["\u{1}never", stop]), true)] {
        let body = json!({"prompt": "Hello", "max_tokens": 60, "temperature": 0, "stop": stops,
                          "return_token_ids": true, "stream": stream});
        let (got, last, count) = if stream {
            let events = api.stream("/v1/completions", body).await;
            let choices: Vec<&Value> = events.iter().map(|event| &event["choices"][0]).collect();
            let text: String = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
            let count = choices.iter().map(|c| c["token_ids"].as_array().unwrap().len()).sum();
            (text, choices[choices.len() - 1].clone(), count)
        } else {
            let choice = api.complete(body).await["choices"][0].clone();
            let text = choice["text"].as_str().unwrap().to_owned();
            let count = choice["token_ids"].as_array().unwrap().len();
            (text, choice, count)
        };
        assert_eq!(got, text[..at]);
        assert_eq!(last["finish_reason"], "stop");
        assert_eq!(last["stop_reason"], stop);
        // Up to and with the token that completed the stop string.
        assert_eq!(count, at + stop.len());
    }
    use crate::metrics::VLLM_REQUEST_SUCCESS;
    assert_eq!(api.metric(VLLM_REQUEST_SUCCESS, "finished_reason=\"stop\"").await, 2.0);
}

#[tokio::test]
async fn several_choices() {
    let api = Api::new();
    let sampled =
        api.complete(json!({"prompt": ["a", "b"], "n": 3, "max_tokens": 20, "seed": 1})).await;
    let texts: Vec<&str> =
        (0..6).map(|i| sampled["choices"][i]["text"].as_str().unwrap()).collect();
    let distinct: std::collections::HashSet<&&str> = texts.iter().collect();
    assert_eq!((texts.len(), distinct.len()), (6, 6));
    assert_eq!(sampled["usage"]["completion_tokens"], 120);
    let greedy =
        api.complete(json!({"prompt": "a", "n": 2, "max_tokens": 20, "temperature": 0})).await;
    assert_eq!(greedy["choices"][0]["text"], greedy["choices"][1]["text"]);
    let events = api
        .stream(
            "/v1/completions",
            json!({"prompt": "a", "n": 3, "max_tokens": 20, "seed": 1,
                                          "stream": true}),
        )
        .await;
    for (index, expected) in texts.iter().take(3).enumerate() {
        let text: String = events
            .iter()
            .map(|event| &event["choices"][0])
            .filter(|choice| choice["index"] == index)
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(&text, expected);
    }
}

#[tokio::test]
async fn prompt_logprobs_have_vllms_layout() {
    let api = Api::new();
    let ids = encode("score me");
    let body = json!({"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 5,
                      "return_token_ids": true, "add_special_tokens": false});
    let got = api.complete(body.clone()).await;
    let scores = got["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), ids.len());
    assert!(scores[0].is_null());
    for (position, entry) in scores.iter().enumerate().skip(1) {
        let entry = entry.as_object().unwrap();
        let actual = &entry[&ids[position].to_string()];
        assert_eq!(actual["decoded_token"], decode(&ids[position..=position]));
        let rank = actual["rank"].as_u64().unwrap();
        assert_eq!(entry.len(), if rank <= 5 { 5 } else { 6 });
        let ranks: std::collections::BTreeSet<u64> =
            entry.values().map(|value| value["rank"].as_u64().unwrap()).collect();
        assert_eq!(ranks.into_iter().take(5).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        let mass: f64 = entry.values().map(|v| v["logprob"].as_f64().unwrap().exp()).sum();
        assert!(mass > 0.0 && mass <= 1.0 + 1e-4);
    }
    assert_eq!(got["usage"]["completion_tokens"], 1);
    assert_eq!(api.metric(crate::metrics::VLLM_NUM_DRAFTS, "").await, 0.0);
    // A chat has them at the top level.
    let (_, chat) = api
        .post(
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}],
                                             "max_tokens": 1, "prompt_logprobs": 0}),
        )
        .await;
    assert_eq!(chat["prompt_logprobs"].as_array().unwrap().len(), 9);
}

#[tokio::test]
async fn output_logprobs_in_both_layouts() {
    let api = Api::new();
    let body = json!({"prompt": "Hello", "max_tokens": 6, "temperature": 0, "logprobs": 3});
    let got = api.complete(body.clone()).await;
    let logprobs = &got["choices"][0]["logprobs"];
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3, 4, 5]));
    for position in 0..6 {
        let token = logprobs["tokens"][position].as_str().unwrap();
        let top = logprobs["top_logprobs"][position].as_object().unwrap();
        assert_eq!(top.len(), 3);
        assert_eq!(top[token], logprobs["token_logprobs"][position]);
        // Greedy: the chosen token is the most likely one.
        let best = top.values().map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert_eq!(logprobs["token_logprobs"][position], best);
    }
    let mut as_ids = body;
    as_ids["return_tokens_as_token_ids"] = true.into();
    as_ids["logprobs"] = 0.into();
    let got = api.complete(as_ids).await;
    let first = got["choices"][0]["logprobs"]["tokens"][0].as_str().unwrap();
    assert!(first.starts_with("token_id:"));

    let (_, chat) = api
        .post(
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}],
              "max_tokens": 4, "temperature": 0, "logprobs": true, "top_logprobs": 2}),
        )
        .await;
    let content = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 4);
    for entry in content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["token"], entry["token"]);
        assert_eq!(entry["bytes"], json!(entry["token"].as_str().unwrap().as_bytes()));
    }
}

#[tokio::test]
async fn eight_streams_all_finish_with_their_own_text() {
    let api = Arc::new(Api::new());
    let mut streams = tokio::task::JoinSet::new();
    for index in 0..24usize {
        let api = Arc::clone(&api);
        streams.spawn(async move {
            let prompt = format!("stream {index}");
            let tokens = 20 + index;
            let body = json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0,
                              "stream": true, "stream_options": {"include_usage": true}});
            let events = api.stream("/v1/completions", body).await;
            let (usage, chunks) = events.split_last().unwrap();
            let text: String =
                chunks.iter().map(|c| c["choices"][0]["text"].as_str().unwrap()).collect();
            assert_eq!(usage["usage"]["completion_tokens"], tokens);
            assert_eq!(text, decode(&api.target.greedy(&encode(&prompt), tokens)));
        });
    }
    while let Some(result) = streams.join_next().await {
        result.unwrap();
    }
}

#[tokio::test]
// The gate holds the engine's own thread; nothing on this runtime ever takes it.
#[allow(clippy::await_holding_lock)]
async fn a_disconnect_aborts_the_sequence() {
    let api = Api::new();
    let held = api.target.gate.write();
    let body = json!({"prompt": "x", "max_tokens": 500, "stream": true});
    let response = api.post_raw("/v1/completions", body.to_string()).await;
    drop(response);
    drop(held);
    // A later request only finishes alone when the first is gone; the counters say so.
    api.complete(json!({"prompt": "y", "max_tokens": 3})).await;
    use crate::metrics::{VLLM_GENERATION_TOKENS, VLLM_REQUEST_SUCCESS};
    assert_eq!(api.metric(VLLM_REQUEST_SUCCESS, "finished_reason=\"abort\"").await, 1.0);
    assert!(api.metric(VLLM_GENERATION_TOKENS, "").await < 20.0);
}

#[tokio::test]
async fn per_request_speculation_metrics_are_sent_when_switched_on() {
    let body = json!({"prompt": "x", "max_tokens": 41, "temperature": 0});
    let off = Api::new().complete(body.clone()).await;
    assert!(off.get("metrics").is_none());
    let api = Api::with(Setup {
        draft: Some(0),
        change: |app| app.request_speculation_metrics = true,
        ..Setup::default()
    });
    let got = api.complete(body.clone()).await;
    let summary = &got["metrics"]["speculative_decoding"];
    assert_eq!(summary["draft_acceptance_rate"], 1.0);
    assert_eq!(summary["mean_acceptance_length"], 5.0);
    assert_eq!(summary["num_spec_steps"], 8);
    assert_eq!(summary["acceptance_histogram"], json!([0, 0, 0, 0, 8]));
    let mut streamed = body;
    streamed["stream"] = true.into();
    streamed["stream_options"] = json!({"include_usage": true});
    let events = api.stream("/v1/completions", streamed).await;
    assert_eq!(events.last().unwrap()["metrics"], got["metrics"]);
}
