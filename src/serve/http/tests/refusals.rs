use super::*;

/// Sends a body and expects an error in OpenAI's form that mentions `part`.
async fn refused(api: &Api, path: &str, body: &str, status: StatusCode, part: &str) {
    let (got, value) = read(api.post_raw(path, body.to_owned()).await).await;
    assert_eq!(got, status, "{body}: {value}");
    let error = &value["error"];
    let message = error["message"].as_str().unwrap_or_default();
    assert!(message.contains(part), "{body}: {message:?} does not mention {part:?}");
    assert_eq!(error["code"], status.as_u16());
    assert!(error["type"].is_string());
}

#[tokio::test]
async fn bad_completion_requests_are_named() {
    let api = Api::new();
    let long = format!("[{}1]", "1,".repeat(600));
    let too_long = format!(r#"{{"prompt":{long}}}"#);
    for (body, part) in [
        ("{", "not valid JSON"),
        ("[1]", "JSON object"),
        ("{}", "prompt is required"),
        (r#"{"prompt":""}"#, "at least one token"),
        (r#"{"prompt":[]}"#, "prompt"),
        (r#"{"prompt":7}"#, "prompt"),
        (r#"{"prompt":[1,"a"]}"#, "token ids"),
        (r#"{"prompt":["a",1]}"#, "must not mix"),
        (r#"{"prompt":[[1],[]]}"#, "at least one token"),
        (r#"{"prompt":[100]}"#, "token id 100 is outside the vocabulary of 100"),
        (r#"{"prompt":[-1]}"#, "token ids"),
        (too_long.as_str(), "maximum context length is 512"),
        (r#"{"prompt":"a","max_tokens":0}"#, "max_tokens must be at least 1"),
        (r#"{"prompt":"a","max_tokens":512}"#, "512 > 512 - 1"),
        (r#"{"prompt":"a","max_tokens":"5"}"#, "max_tokens must be an integer, got a string"),
        (r#"{"prompt":"a","max_tokens":2,"min_tokens":3}"#, "min_tokens"),
        (r#"{"prompt":"a","temperature":-1}"#, "temperature"),
        (r#"{"prompt":"a","temperature":"hot"}"#, "temperature must be a number"),
        (r#"{"prompt":"a","top_p":0}"#, "top_p"),
        (r#"{"prompt":"a","top_p":1.1}"#, "top_p"),
        (r#"{"prompt":"a","top_k":-2}"#, "top_k"),
        (r#"{"prompt":"a","n":0}"#, "n must be at least 1"),
        (r#"{"prompt":"a","n":1000}"#, "n must be at most"),
        (r#"{"prompt":"a","best_of":2}"#, "best_of"),
        (r#"{"prompt":"a","stop":""}"#, "stop"),
        (r#"{"prompt":"a","stop":[1]}"#, "stop"),
        (r#"{"prompt":"a","stop_token_ids":["a"]}"#, "stop_token_ids"),
        (r#"{"prompt":"a","stream":"yes"}"#, "stream must be true or false"),
        (r#"{"prompt":"a","stream_options":1}"#, "stream_options"),
        (
            r#"{"prompt":"a","logprobs":21}"#,
            "Requested sample logprobs of 21, which is greater than max allowed: 20",
        ),
        (
            r#"{"prompt":"a","prompt_logprobs":64}"#,
            "Requested prompt logprobs of 64, which is greater than max allowed: 20",
        ),
        (r#"{"prompt":"a","prompt_logprobs":-1}"#, "prompt_logprobs"),
        (r#"{"prompt":"a","prompt_logprobs":1,"stream":true}"#, "stream"),
        (r#"{"prompt":"a","echo":true}"#, "echo"),
        (r#"{"prompt":"a","presence_penalty":0.5}"#, "presence_penalty"),
        (r#"{"prompt":"a","repetition_penalty":1.1}"#, "repetition_penalty"),
        (r#"{"prompt":"a","logit_bias":{"5":1}}"#, "logit_bias"),
        (r#"{"prompt":"a","min_p":0.1}"#, "min_p"),
        (r#"{"prompt":"a","response_format":{"type":"json_object"}}"#, "response_format"),
        (r#"{"prompt":"a","suffix":"z"}"#, "suffix"),
    ] {
        refused(&api, "/v1/completions", body, StatusCode::BAD_REQUEST, part).await;
    }
}

#[tokio::test]
async fn what_is_off_is_no_reason_to_refuse() {
    let api = Api::new();
    api.complete(json!({
        "prompt": "a", "max_tokens": 2, "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "min_p": 0, "logit_bias": {}, "echo": false, "suffix": null,
        "best_of": 1, "response_format": {"type": "text"}, "top_k": -1, "user": "someone",
        "stop": null, "logprobs": null, "seed": 18446744073709551615u64,
    }))
    .await;
}

#[tokio::test]
async fn bad_chat_requests_are_named() {
    let api = Api::new();
    let message = r#""messages":[{"role":"user","content":"x"}]"#;
    for (body, part) in [
        ("{}".to_owned(), "messages is required"),
        (r#"{"messages":[]}"#.to_owned(), "at least one message"),
        (r#"{"messages":"hi"}"#.to_owned(), "messages"),
        (r#"{"messages":[{"content":"x"}]}"#.to_owned(), "role"),
        (
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#
                .to_owned(),
            "image_url",
        ),
        (format!(r#"{{{message},"top_logprobs":2}}"#), "logprobs"),
        (
            format!(r#"{{{message},"logprobs":true,"top_logprobs":21}}"#),
            "greater than max allowed: 20",
        ),
        (format!(r#"{{{message},"tools":[{{"type":"function"}}]}}"#), "tool"),
        (format!(r#"{{{message},"tool_choice":"required"}}"#), "tool"),
    ] {
        refused(&api, "/v1/chat/completions", &body, StatusCode::BAD_REQUEST, part).await;
    }
    let base = Api::with(Setup { change: |app| app.chat_template = None, ..Setup::default() });
    let body = format!("{{{message}}}");
    let path = "/v1/chat/completions";
    refused(&base, path, &body, StatusCode::BAD_REQUEST, "no chat template").await;
}

#[tokio::test]
async fn wrong_model_route_method_and_size() {
    let api = Api::new();
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        let body = r#"{"model":"other","prompt":"a"}"#;
        refused(&api, path, body, StatusCode::NOT_FOUND, "`other` does not exist").await;
    }
    refused(&api, "/v2/nothing", "{}", StatusCode::NOT_FOUND, "Not Found").await;
    refused(&api, "/v1/models", "{}", StatusCode::METHOD_NOT_ALLOWED, "Method").await;
    let huge = "x".repeat(BODY_LIMIT + 1);
    refused(&api, "/v1/completions", &huge, StatusCode::PAYLOAD_TOO_LARGE, "larger").await;
}

#[tokio::test]
async fn the_api_key_guards_v1_only() {
    let api =
        Api::with(Setup { change: |app| app.api_key = Some("secret".into()), ..Setup::default() });
    let get = async |path: &str, key: Option<&str>| {
        let mut request = axum::http::Request::get(path);
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        api.send(request.body(Body::empty()).unwrap()).await.status()
    };
    for path in ["/v1/models", "/v1/draft_adapter/draft"] {
        assert_eq!(get(path, None).await, StatusCode::UNAUTHORIZED);
        assert_eq!(get(path, Some("wrong!")).await, StatusCode::UNAUTHORIZED);
        assert_eq!(get(path, Some("secre")).await, StatusCode::UNAUTHORIZED);
        assert_eq!(get(path, Some("secret")).await, StatusCode::OK);
    }
    assert_eq!(get("/health", None).await, StatusCode::OK);
    assert_eq!(get("/metrics", None).await, StatusCode::OK);
}
