//! From what goes over the wire to samples.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::{Arc, LazyLock};

use draft_adapter::distill::Sample;
use draft_adapter::sidecar::capture::{CaptureSettings, DropReason, to_sample};
use draft_adapter::sidecar::exchange::{Api, Body, Exchange};
use draft_adapter::sidecar::render::Renderer;
use draft_adapter::sidecar::sse::{SseParser, parse_all};
use draft_adapter::sidecar::store::SampleStore as _;
use proptest::prelude::*;
use serde_json::{Value, json};
use support::fake_vllm::{FakeVllm, Fault, MODEL, sim};
use support::front::Front;

/// The renderer of a draft folder with the fake's tokenizer.
fn renderer() -> Renderer {
    let folder = tempfile::tempdir().unwrap();
    sim::write_tokenizer(folder.path());
    Renderer::from_draft_folder(folder.path()).unwrap()
}

/// One for the tests that need no front of their own: making it takes a while.
static RENDERER: LazyLock<Renderer> = LazyLock::new(renderer);

const SSE: &str = "text/event-stream; charset=utf-8";

fn exchange(api: Api, request: &Value, content_type: &str, response: &str) -> Exchange {
    Exchange {
        api,
        request: Body::new(request.to_string(), "application/json"),
        response: Body::new(response.to_owned(), content_type),
        domain: String::new(),
        started_unix_ms: 5,
        draft_version: None,
    }
}

/// A chat and its answer, both changed by the test.
fn chat(request: Value, choice: Value, top: Value) -> Result<Sample, DropReason> {
    let mut full_request = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    merge(&mut full_request, request);
    let mut full_choice = json!({"index": 0, "finish_reason": "stop", "stop_reason": null,
        "message": {"role": "assistant", "content": "fine"}});
    merge(&mut full_choice, choice);
    let mut response = json!({"choices": [full_choice]});
    merge(&mut response, top);
    let exchange = exchange(Api::Chat, &full_request, "application/json", &response.to_string());
    to_sample(&exchange, &RENDERER, &CaptureSettings::default())
}

fn merge(into: &mut Value, from: Value) {
    for (name, value) in from.as_object().unwrap() {
        into[name] = value.clone();
    }
}

fn chat_prompt(content: &str) -> Vec<u32> {
    sim::encode(&sim::render_chat(&json!([{"role": "user", "content": content}])))
}

fn with_end(text: &str) -> Vec<u32> {
    [sim::encode(text), vec![sim::EOS]].concat()
}

#[tokio::test]
async fn every_way_of_asking_gives_the_same_sample() {
    let fake = FakeVllm::start().await;
    let front = Front::with(fake.addr, renderer(), CaptureSettings::default(), |_| {}).await;
    front.draft_version.store(Arc::new(Some("v000007".into())));
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut sent = 0;
    for (path, prompt) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "grüße 😊"}]})),
        ("/v1/completions", json!({"prompt": "once <|im_start|> upon"})),
        ("/v1/completions", json!({"prompt": sim::encode("as ids")})),
    ] {
        for max_tokens in [9, 300] {
            for (stream, usage, ids) in [
                (false, true, true),
                (false, true, false),
                (true, true, true),
                (true, true, false),
                (true, false, true),
                (true, false, false),
            ] {
                let mut body = json!({"model": MODEL, "stream": stream, "temperature": 0.25,
                    "max_tokens": max_tokens, "return_token_ids": ids});
                if stream {
                    body["stream_options"] = json!({"include_usage": usage});
                }
                merge(&mut body, prompt.clone());
                let request = http.post(front.url() + path).json(&body);
                let request = request.header("x-draft-adapter-domain", "greetings");
                let response = request.send().await.unwrap();
                assert_eq!(response.status(), 200);
                response.bytes().await.unwrap();
                sent += 1;
            }
        }
    }
    let told = front.until("all captured", |told| {
        told.captured.len() as u64 + told.dropped.values().sum::<u64>() == sent
    });
    assert_eq!(told.await.dropped, Default::default());
    let samples = front.store.unscored(1000).unwrap();
    assert_eq!(samples.len() as u64, sent);
    for group in samples.chunks(6) {
        for sample in group {
            assert_eq!(sample.prompt_ids, group[0].prompt_ids);
            assert_eq!(sample.held_out, group[0].held_out);
            let own = &sample.output_ids;
            let exact = &group[0].output_ids;
            // An answer that was cut inside a character cannot be rebuilt from its text.
            let cut = exact.len() == 9 && std::str::from_utf8(&sim::bytes(exact)).is_err();
            assert!(own == exact || (cut && sample.ids_estimated), "{own:?} is not {exact:?}");
            assert_eq!(sample.temperature, 0.25);
            assert_eq!(sample.domain, "greetings");
            assert_eq!(sample.draft_version.as_deref(), Some("v000007"));
            assert!(sample.captured_unix_ms > 1_600_000_000_000);
        }
        assert!(!group[0].ids_estimated && group[1].ids_estimated);
    }
    let whole = &samples[6];
    assert_eq!(whole.output_ids, sim::answer(&whole.prompt_ids));
    assert_eq!(whole.prompt_ids, chat_prompt("grüße 😊"));
    // Equal prompts are on one side, whole and cut answers alike.
    assert_eq!(samples[0].held_out, samples[6].held_out);
}

#[tokio::test]
async fn what_cannot_be_used_is_counted_by_reason() {
    let fake = FakeVllm::start().await;
    let front = Front::with(fake.addr, renderer(), CaptureSettings::default(), |_| {}).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let post = async |body: Value| {
        let request = http.post(front.url() + "/v1/chat/completions").json(&body);
        let _ = request.send().await.unwrap().bytes().await;
    };
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}],
        "stream": true});
    for fault in
        [Fault::NoDone, Fault::ResetMidStream { after_events: 2 }, Fault::status(503, "loading")]
    {
        fake.inject(fault, 1);
        post(body.clone()).await;
    }
    let told = front.until("three", |told| told.dropped.values().sum::<u64>() == 3).await;
    for reason in ["incomplete", "aborted", "error_status"] {
        assert_eq!(told.dropped.get(reason), Some(&1), "{:?}", told.dropped);
    }
    // And what can be used still is.
    post(body).await;
    front.until("captured", |told| told.captured.len() == 1).await;
}

#[test]
fn a_chat_without_ids_is_rendered_with_the_template() {
    let sample = chat(json!({}), json!({}), json!({})).unwrap();
    assert_eq!(sample.prompt_ids, chat_prompt("hi"));
    assert_eq!(sample.output_ids, with_end("fine"));
    assert!(sample.ids_estimated);
    assert_eq!(sample.temperature, 1.0);
    let parts = json!([{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]);
    let sample = chat(json!({"messages": parts}), json!({}), json!({})).unwrap();
    assert_eq!(sample.prompt_ids, chat_prompt("a\nb"));
}

#[test]
fn an_end_token_is_added_only_where_the_model_ended() {
    let fine = sim::encode("fine");
    let output =
        |request: Value, choice: Value, top: Value| chat(request, choice, top).unwrap().output_ids;
    let none = || json!({});
    let usage = |tokens: usize| json!({"usage": {"completion_tokens": tokens}});
    assert_eq!(output(none(), json!({"finish_reason": "length"}), none()), fine);
    assert_eq!(output(none(), json!({"stop_reason": "\n"}), none()), fine);
    assert_eq!(output(none(), json!({"stop_reason": 1}), none()), [fine.clone(), vec![1]].concat());
    // A server that gives no stop reason.
    let silent = |request: Value, top: Value| {
        let request_text = {
            let mut full = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
            merge(&mut full, request);
            full
        };
        let mut response = json!({"choices": [{"index": 0, "finish_reason": "stop",
            "message": {"content": "fine"}}]});
        merge(&mut response, top);
        let exchange =
            exchange(Api::Chat, &request_text, "application/json", &response.to_string());
        to_sample(&exchange, &RENDERER, &CaptureSettings::default()).unwrap().output_ids
    };
    assert_eq!(silent(none(), none()), with_end("fine"));
    assert_eq!(silent(json!({"stop": ["x"]}), none()), fine);
    assert_eq!(silent(json!({"stop": ["x"]}), usage(5)), with_end("fine"));
    assert_eq!(silent(json!({"stop": ["x"]}), usage(4)), fine);
    // The server shows special tokens: the end is in the text already.
    let shown = json!({"message": {"content": "fine<|im_end|>"}});
    assert_eq!(output(none(), shown, none()), with_end("fine"));
}

#[test]
fn each_kind_of_exchange_that_is_skipped_says_why() {
    let none = || json!({});
    let cases: Vec<(DropReason, Value, Value, Value)> = vec![
        (DropReason::SeveralAnswers, json!({"n": 2}), none(), none()),
        (DropReason::SeveralAnswers, none(), json!({"index": 1}), none()),
        (DropReason::SeveralAnswers, json!({"use_beam_search": true}), none(), none()),
        (DropReason::Tools, json!({"tools": [{"type": "function"}]}), none(), none()),
        (DropReason::Tools, json!({"tool_choice": "required"}), none(), none()),
        (
            DropReason::Tools,
            none(),
            json!({"message": {"content": null, "tool_calls": [{"id": "x"}]}}),
            none(),
        ),
        (
            DropReason::Media,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            none(),
            none(),
        ),
        (DropReason::LogitProcessors, json!({"logit_bias": {"5": 1}}), none(), none()),
        (
            DropReason::LogitProcessors,
            json!({"response_format": {"type": "json_object"}}),
            none(),
            none(),
        ),
        (DropReason::LogitProcessors, json!({"guided_regex": "a+"}), none(), none()),
        (DropReason::Echo, json!({"echo": true}), none(), none()),
        (
            DropReason::Reasoning,
            none(),
            json!({"message": {"content": "fine", "reasoning": "let me see"}}),
            none(),
        ),
        (
            DropReason::Reasoning,
            none(),
            json!({"message": {"content": "fine", "reasoning_content": "let me see"}}),
            none(),
        ),
        (DropReason::TemplateOptions, json!({"chat_template": "x"}), none(), none()),
        (DropReason::TemplateOptions, json!({"add_generation_prompt": false}), none(), none()),
        (DropReason::TemplateOptions, json!({"truncate_prompt_tokens": 5}), none(), none()),
        (DropReason::EmptyOutput, none(), json!({"message": {"content": ""}}), none()),
        (DropReason::EmptyOutput, none(), json!({"message": {"content": null}}), none()),
        (
            DropReason::OutputTooShort,
            none(),
            json!({"message": {"content": "x"}, "finish_reason": "length"}),
            none(),
        ),
        (DropReason::Incomplete, none(), json!({"finish_reason": null}), none()),
        (DropReason::Incomplete, none(), json!({"finish_reason": "abort"}), none()),
        (DropReason::Incomplete, none(), none(), json!({"error": {"message": "late"}})),
        (DropReason::Incomplete, none(), none(), json!({"choices": []})),
        (DropReason::Incomplete, none(), none(), json!({"choices": null})),
        (DropReason::Malformed, json!({"messages": "hi"}), none(), none()),
        (DropReason::Malformed, json!({"temperature": -1}), none(), none()),
        (DropReason::PromptMismatch, none(), none(), json!({"usage": {"prompt_tokens": 3}})),
        (DropReason::OutputMismatch, none(), none(), json!({"usage": {"completion_tokens": 50}})),
        (
            DropReason::OutputMismatch,
            none(),
            json!({"token_ids": [5, 6]}),
            json!({"usage": {"completion_tokens": 3}}),
        ),
        (
            DropReason::PromptTooLong,
            json!({"messages": [{"role": "user", "content": "x".repeat(5000)}]}),
            none(),
            none(),
        ),
    ];
    for (expected, request, choice, top) in cases {
        let what = format!("{request} {choice} {top}");
        assert_eq!(chat(request, choice, top).err(), Some(expected), "{what}");
    }
}

#[test]
fn with_reported_ids_tools_reasoning_and_templates_are_no_obstacle() {
    let ids = json!({"prompt_token_ids": [7, 8, 9]});
    for (request, message) in [
        (
            json!({"tools": [{"type": "function"}]}),
            json!({"content": null, "tool_calls": [{"id": "x"}]}),
        ),
        (json!({}), json!({"content": "x", "reasoning": "let me see"})),
        (json!({"chat_template": "own"}), json!({"content": "x"})),
    ] {
        let choice = json!({"message": message, "token_ids": [5, 6, 2]});
        let sample = chat(request, choice, ids.clone()).unwrap();
        assert_eq!(sample.prompt_ids, [7, 8, 9]);
        assert_eq!(sample.output_ids, [5, 6, 2]);
        assert!(!sample.ids_estimated);
    }
}

#[test]
fn completions_follow_the_same_rules() {
    let take = |request: Value, response: Value| {
        let text = response.to_string();
        let exchange = exchange(Api::Completion, &request, "application/json", &text);
        to_sample(&exchange, &RENDERER, &CaptureSettings::default())
    };
    let answer = json!({"choices": [{"index": 0, "text": "fine", "finish_reason": "length",
        "stop_reason": null}]});
    for (prompt, expected) in [
        (json!("ab"), sim::encode("ab")),
        (json!(["ab"]), sim::encode("ab")),
        (json!([5, 6]), vec![5, 6]),
        (json!([[5, 6]]), vec![5, 6]),
    ] {
        let sample = take(json!({"model": "m", "prompt": prompt}), answer.clone()).unwrap();
        assert_eq!(sample.prompt_ids, expected);
        assert_eq!(sample.output_ids, sim::encode("fine"));
    }
    for (prompt, expected) in [
        (json!(["a", "b"]), DropReason::SeveralAnswers),
        (json!([[1], [2]]), DropReason::SeveralAnswers),
        (json!(null), DropReason::Malformed),
        (json!([]), DropReason::Malformed),
        (json!([1, "a"]), DropReason::Malformed),
        (json!([-1]), DropReason::Malformed),
    ] {
        let reason = take(json!({"model": "m", "prompt": prompt}), answer.clone()).err();
        assert_eq!(reason, Some(expected));
    }
    let echo = take(json!({"model": "m", "prompt": "ab", "echo": true}), answer);
    assert_eq!(echo.err(), Some(DropReason::Echo));
}

#[test]
fn compressed_bodies_and_other_models_are_skipped() {
    let request = json!({"model": "an-adapter", "prompt": "ab"});
    let answer = json!({"choices": [{"text": "fine", "finish_reason": "length"}]}).to_string();
    let settings = CaptureSettings::default();
    let mut one = exchange(Api::Completion, &request, "application/json", &answer);
    assert!(to_sample(&one, &RENDERER, &settings).is_ok());
    settings.models.store(Arc::new(vec!["m".into(), "alias".into()]));
    assert_eq!(to_sample(&one, &RENDERER, &settings).err(), Some(DropReason::Adapter));
    one.response.content_encoding = "gzip".into();
    assert_eq!(to_sample(&one, &RENDERER, &settings).err(), Some(DropReason::Encoded));
    let garbage = exchange(Api::Chat, &request, SSE, "data: {\n\ndata: [DONE]\n\n");
    settings.models.store(Arc::default());
    let reason = to_sample(&garbage, &Renderer::none(), &settings).err();
    assert_eq!(reason, Some(DropReason::Malformed));
    let no_tokenizer = exchange(Api::Completion, &request, "application/json", &answer);
    let reason = to_sample(&no_tokenizer, &Renderer::none(), &settings).err();
    assert_eq!(reason, Some(DropReason::NoTokenizer));
}

#[test]
fn streams_of_other_servers_are_read() {
    let request = json!({"model": "m", "prompt": [5, 6]});
    // Comments, CRLF, a chunk without choices, one with null, usage in the middle, no stop reason.
    let stream = ": ping\r\n\r\ndata: {\"choices\":[{\"index\":0,\"text\":\"fi\"}]}\r\n\r\n\
        data: {\"id\":\"x\"}\r\n\r\ndata: {\"choices\":null}\r\n\r\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":5}}\r\n\r\n\
        data: {\"choices\":[{\"index\":0,\"text\":\"ne\",\"finish_reason\":\"stop\"}]}\r\n\r\n\
        data: [DONE]";
    let one = exchange(Api::Completion, &request, SSE, stream);
    let sample = to_sample(&one, &RENDERER, &CaptureSettings::default()).unwrap();
    assert_eq!(sample.output_ids, with_end("fine"));
}

#[test]
fn about_one_in_n_is_held_out_and_by_prompt_alone() {
    let sample = |n: u32, every: u64, output: &str| {
        let request = json!({"model": "m", "prompt": [n, n + 1]});
        let answer = json!({"choices": [{"text": output, "finish_reason": "length"}]});
        let one = exchange(Api::Completion, &request, "application/json", &answer.to_string());
        let settings = CaptureSettings { held_out_every: every, ..CaptureSettings::default() };
        to_sample(&one, &RENDERER, &settings).unwrap()
    };
    let held_out: Vec<bool> = (0..400).map(|n| sample(n, 10, "fine").held_out).collect();
    let count = held_out.iter().filter(|held| **held).count();
    assert!((20..=65).contains(&count), "{count} of 400");
    let again: Vec<bool> = (0..400).map(|n| sample(n, 10, "another").held_out).collect();
    assert_eq!(held_out, again);
    assert!((0..50).all(|n| !sample(n, 0, "fine").held_out));
    assert!((0..50).all(|n| sample(n, 1, "fine").held_out));
}

#[tokio::test]
async fn live_log_probabilities_become_teacher_rows() {
    let fake = FakeVllm::start().await;
    let settings = CaptureSettings { use_live_logprobs: true, ..CaptureSettings::default() };
    let front = Front::with(fake.addr, renderer(), settings, |_| {}).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut sent = 0;
    for stream in [false, true] {
        for (path, mut body) in [
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true,
                    "top_logprobs": 6}),
            ),
            ("/v1/completions", json!({"prompt": "x", "logprobs": 6})),
        ] {
            // Without ids for the tokens the rows are of no use.
            for as_ids in [true, false] {
                body["model"] = MODEL.into();
                body["stream"] = stream.into();
                body["return_tokens_as_token_ids"] = as_ids.into();
                let request = http.post(front.url() + path).json(&body);
                request.send().await.unwrap().bytes().await.unwrap();
                sent += 1;
                front.until("captured", |told| told.captured.len() == sent).await;
            }
        }
    }
    let scored = front.store.get(&[1, 3, 5, 7]).unwrap();
    for sample in &scored {
        assert!(sample.is_scored());
        let first = &sample.teacher[0];
        assert_eq!(first.ids[0], sample.output_ids[0]);
        assert!((first.logprobs[0] - 0.75_f32.ln()).abs() < 1e-6);
        assert!(first.ids.len() >= 6);
    }
    let unscored = front.store.unscored(9).unwrap();
    assert_eq!(unscored.iter().map(|s| s.id).collect::<Vec<_>>(), [2, 4, 6, 8]);
}

#[tokio::test]
async fn the_draft_version_is_the_one_at_the_beginning() {
    let fake = FakeVllm::start().await;
    let front = Front::with(fake.addr, renderer(), CaptureSettings::default(), |_| {}).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    front.draft_version.store(Arc::new(Some("v000001".into())));
    // The task that knows the version may not have run yet: the first request tells.
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}],
        "stream": true});
    let post = || http.post(front.url() + "/v1/chat/completions").json(&body).send();
    post().await.unwrap().bytes().await.unwrap();
    front.until("captured", |told| told.captured.len() == 1).await;
    fake.hold_after(2);
    let response = post().await.unwrap();
    front.draft_version.store(Arc::new(Some("v000002".into())));
    fake.release();
    response.bytes().await.unwrap();
    front.until("captured", |told| told.captured.len() == 2).await;
    let samples = front.store.unscored(9).unwrap();
    assert_eq!(samples[1].draft_version.as_deref(), Some("v000001"));
}

#[tokio::test]
async fn a_part_of_the_traffic_is_enough_when_asked_for() {
    let fake = FakeVllm::start().await;
    let settings = CaptureSettings { sample_rate: 0.25, ..CaptureSettings::default() };
    let front = Front::with(fake.addr, renderer(), settings, |_| {}).await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for n in 0..20 {
        let body = json!({"model": MODEL, "prompt": format!("{n}")});
        let request = http.post(front.url() + "/v1/completions").json(&body);
        request.send().await.unwrap().bytes().await.unwrap();
    }
    front.until("a quarter", |told| told.captured.len() == 5).await;
}

#[tokio::test]
async fn recorded_streams_parse_the_same_at_every_split() {
    let fake = FakeVllm::start().await;
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let body = json!({"model": MODEL, "stream": true, "return_token_ids": true,
            "prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 12});
        let request = http.post(fake.url() + path).json(&body);
        let stream = request.send().await.unwrap().bytes().await.unwrap();
        let expected = parse_all(&stream, 1 << 20).unwrap();
        assert!(expected.len() > 3);
        for split in 0..=stream.len() {
            let mut parser = SseParser::new(1 << 20);
            let mut events = Vec::new();
            for piece in [&stream[..split], &stream[split..]] {
                parser.push(piece, &mut |event| events.push(event)).unwrap();
            }
            parser.finish(&mut |event| events.push(event));
            assert_eq!(events, expected, "split at {split}");
        }
    }
}

/// JSON made of the members that the readers look at, in places where they may not expect them.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3_i64..300).prop_map(Value::from),
        Just(json!(1e300)),
        prop_oneof!["[a-z<|>]{0,6}", Just("stop".to_owned()), Just("token_id:7".to_owned())]
            .prop_map(Value::from),
    ];
    let names = prop::sample::select(vec![
        "choices",
        "message",
        "delta",
        "text",
        "content",
        "token_ids",
        "prompt_token_ids",
        "logprobs",
        "top_logprobs",
        "tokens",
        "token_logprobs",
        "usage",
        "completion_tokens",
        "finish_reason",
        "stop_reason",
        "index",
        "messages",
        "prompt",
        "n",
        "temperature",
        "tools",
        "tool_calls",
        "role",
        "token",
        "logprob",
        "response_format",
        "type",
        "error",
    ]);
    leaf.prop_recursive(5, 60, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((names.clone(), inner), 0..6).prop_map(|members| {
                members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
            }),
        ]
    })
}

proptest! {
    #[test]
    fn whatever_comes_is_a_sample_or_a_reason(
        request in any_json(),
        response in any_json(),
        text in prop_oneof![any::<Vec<u8>>(), any_json().prop_map(|v| v.to_string().into_bytes())],
        chat in any::<bool>(),
    ) {
        let api = if chat { Api::Chat } else { Api::Completion };
        let settings =
            CaptureSettings { use_live_logprobs: true, ..CaptureSettings::default() };
        let stream = format!("data: {response}\n\ndata: [DONE]\n\n");
        for (content_type, body) in [
            ("application/json", response.to_string().into_bytes()),
            ("application/json", text.clone()),
            (SSE, stream.into_bytes()),
            (SSE, text),
        ] {
            let mut one = exchange(api, &request, content_type, "");
            one.response = Body::new(body, content_type);
            if let Ok(sample) = to_sample(&one, &RENDERER, &settings) {
                prop_assert!(!sample.prompt_ids.is_empty() && !sample.output_ids.is_empty());
                prop_assert!(sample.teacher.is_empty() || sample.is_scored());
            }
        }
    }
}
