//! Scoring by the upstream, and the client's calls, against the fake engine.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use draft_adapter::distill::Sample;
use draft_adapter::distill::teacher::{Teacher as _, TeacherError};
use draft_adapter::sidecar::teacher::{LiveTeacher, RescoreSettings, RescoreTeacher};
use draft_adapter::vllm::{Client, ClientError};
use serde_json::{Value, json};
use support::fake_vllm::{FakeVllm, Fault, MODEL, sim};

fn client(fake: &FakeVllm) -> Client {
    Client::new(&fake.url(), None).unwrap()
}

fn teacher(fake: &FakeVllm, change: impl FnOnce(&mut RescoreSettings)) -> RescoreTeacher {
    let mut settings = RescoreSettings::new(MODEL);
    change(&mut settings);
    RescoreTeacher::new(client(fake), settings)
}

fn sample(prompt: usize, output: usize) -> Sample {
    Sample {
        id: 1,
        prompt_ids: (0..prompt).map(|n| 10 + (n % 200) as u32).collect(),
        output_ids: (0..output).map(|n| 20 + (n % 200) as u32).collect(),
        ..Sample::default()
    }
}

fn scoring_requests(fake: &FakeVllm) -> Vec<Value> {
    let seen = fake.recorded("/v1/completions");
    seen.iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
}

#[tokio::test]
async fn only_the_output_rows_are_kept() {
    let fake = FakeVllm::start().await;
    let sample = sample(5, 3);
    let rows = teacher(&fake, |_| {}).score(&sample).await.unwrap();
    assert_eq!(rows.len(), 3);
    for (row, id) in rows.iter().zip(&sample.output_ids) {
        assert_eq!(row.ids[0], *id);
        assert_eq!((row.ids.len(), row.logprobs.len()), (20, 20));
        assert!((row.logprobs[0] - 0.75_f32.ln()).abs() < 1e-6);
        assert!(row.logprobs.is_sorted_by(|a, b| a >= b));
    }
    let request = &scoring_requests(&fake)[0];
    assert_eq!(request["prompt"], json!([10, 11, 12, 13, 14, 20, 21, 22]));
    assert_eq!(request["max_tokens"], 1);
    assert_eq!(request["temperature"], 0);
    assert_eq!(request["prompt_logprobs"], 20);
    assert_eq!(request["add_special_tokens"], false);
    assert_eq!(request["priority"], 1000);
}

#[tokio::test]
async fn top_k_is_lowered_once_to_what_the_server_allows() {
    let fake = FakeVllm::start().await;
    fake.with(|inner| inner.max_logprobs = 7);
    let teacher = teacher(&fake, |settings| settings.top_k = 64);
    for _ in 0..2 {
        let rows = teacher.score(&sample(2, 2)).await.unwrap();
        assert_eq!(rows[0].ids.len(), 7);
    }
    assert_eq!(teacher.top_k(), 7);
    let asked: Vec<_> =
        scoring_requests(&fake).iter().map(|r| r["prompt_logprobs"].clone()).collect();
    assert_eq!(asked, [64, 7, 7]);
}

#[tokio::test]
async fn long_samples_are_cut_from_the_left_and_too_long_ones_refused() {
    let fake = FakeVllm::start().await;
    let teacher = teacher(&fake, |settings| settings.window = 20);
    assert_eq!(teacher.score(&sample(100, 8)).await.unwrap().len(), 8);
    let sent = scoring_requests(&fake)[0]["prompt"].clone();
    assert_eq!(sent.as_array().unwrap().len(), 20);
    assert_eq!(sent[0], 10 + 88);
    for (prompt, output) in [(100, 20), (0, 5), (5, 0)] {
        let refused = teacher.score(&sample(prompt, output)).await;
        assert!(matches!(refused, Err(TeacherError::Rejected(_))), "{prompt} {output}");
    }
}

#[tokio::test]
async fn wrong_answers_reject_the_sample_and_not_the_server() {
    let fake = FakeVllm::start().await;
    let teacher = teacher(&fake, |settings| settings.max_failures = 1);
    let spoils: [fn(&mut Value); 4] = [
        |answer| answer["choices"][0]["prompt_logprobs"] = Value::Null,
        |answer| {
            answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap().pop();
        },
        |answer| answer["choices"][0]["prompt_logprobs"][2] = json!({"999": {"logprob": -1.0}}),
        |answer| {
            for row in answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap() {
                for entry in row.as_object_mut().into_iter().flatten() {
                    entry.1["logprob"] = 0.0.into();
                }
            }
        },
    ];
    for spoil in spoils {
        fake.with(|inner| inner.spoil_logprobs = Some(spoil));
        let outcome = teacher.score(&sample(3, 3)).await;
        assert!(matches!(outcome, Err(TeacherError::Rejected(_))), "{outcome:?}");
    }
    fake.with(|inner| inner.spoil_logprobs = None);
    assert!(teacher.score(&sample(3, 3)).await.is_ok());
}

#[tokio::test]
async fn waiting_users_go_first() {
    let fake = FakeVllm::start().await;
    let polite = teacher(&fake, |_| {});
    fake.with(|inner| inner.requests_waiting = 2);
    let outcome = polite.score(&sample(3, 3)).await;
    assert!(matches!(outcome, Err(TeacherError::Unavailable(_))));
    assert!(scoring_requests(&fake).is_empty());
    // Asked not to look, it does not.
    let eager = teacher(&fake, |settings| settings.yield_to_traffic = false);
    assert!(eager.score(&sample(3, 3)).await.is_ok());
    fake.with(|inner| inner.requests_waiting = 0);
    assert!(polite.score(&sample(3, 3)).await.is_ok());
}

#[tokio::test]
async fn failures_in_a_row_open_the_breaker_and_time_closes_it() {
    let fake = FakeVllm::start().await;
    let teacher = teacher(&fake, |settings| {
        settings.max_failures = 2;
        settings.pause = Duration::from_millis(200);
        settings.yield_to_traffic = false;
    });
    fake.inject(Fault::status(500, "engine is dead"), 2);
    for _ in 0..2 {
        let outcome = teacher.score(&sample(3, 3)).await;
        assert!(matches!(outcome, Err(TeacherError::Unavailable(_))));
    }
    assert!(teacher.is_paused());
    let outcome = teacher.score(&sample(3, 3)).await;
    assert!(matches!(outcome, Err(TeacherError::Unavailable(reason)) if reason.contains("paused")));
    assert_eq!(scoring_requests(&fake).len(), 2);
    while teacher.is_paused() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(teacher.score(&sample(3, 3)).await.is_ok());
}

#[tokio::test]
async fn one_request_is_under_way_at_a_time() {
    let fake = FakeVllm::start().await;
    let teacher = teacher(&fake, |settings| settings.yield_to_traffic = false);
    fake.hold_after(0);
    let samples: Vec<Sample> = (0..5).map(|n| sample(3 + n, 3)).collect();
    let scoring = futures::future::join_all(samples.iter().map(|sample| teacher.score(sample)));
    let most = std::cell::Cell::new(0);
    let watching = async {
        support::front::eventually("one arrives", || {
            fake.with(|inner| (inner.active > 0).then_some(()))
        })
        .await;
        for _ in 0..20 {
            most.set(most.get().max(fake.with(|inner| inner.active)));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        fake.release();
    };
    let (outcomes, ()) = tokio::join!(scoring, watching);
    assert!(outcomes.iter().all(Result::is_ok));
    assert_eq!(most.get(), 1);
}

#[tokio::test]
async fn a_down_server_makes_samples_wait() {
    let fake = FakeVllm::start().await;
    let teacher = teacher(&fake, |_| {});
    fake.down().await;
    let outcome = teacher.score(&sample(3, 3)).await;
    assert!(matches!(outcome, Err(TeacherError::Unavailable(_))), "{outcome:?}");
    fake.up().await;
    assert!(teacher.score(&sample(3, 3)).await.is_ok());
}

#[tokio::test]
async fn live_rows_need_no_second_look() {
    let mut one = sample(3, 2);
    assert!(matches!(LiveTeacher.score(&one).await, Err(TeacherError::Rejected(_))));
    one.teacher = vec![Default::default(); 2];
    assert_eq!(LiveTeacher.score(&one).await.unwrap(), one.teacher);
}

#[tokio::test]
async fn the_client_reads_what_the_server_says() {
    let fake = FakeVllm::start().await;
    let client = client(&fake);
    assert_eq!(client.version().await.unwrap(), "0.32.0");
    client.health().await.unwrap();
    let models = client.models().await.unwrap();
    assert_eq!((models[0].id.as_str(), models[0].max_model_len), (MODEL, Some(2048)));
    assert_eq!(models[1].parent.as_deref(), Some(MODEL));
    assert_eq!(client.tokenize(MODEL, "ab", false).await.unwrap(), sim::encode("ab"));
    let messages = json!([{"role": "user", "content": "x"}]);
    let chat = client.tokenize_chat(MODEL, &messages).await.unwrap();
    assert_eq!(chat, sim::encode(&sim::render_chat(&messages)));

    let before = client.metrics().await.unwrap().spec_decode().unwrap();
    fake.set_acceptance("startup", 0.75);
    let body = json!({"model": MODEL, "prompt": "x", "max_tokens": 64});
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    for _ in 0..4 {
        http.post(fake.url() + "/v1/completions").json(&body).send().await.unwrap();
    }
    let after = client.metrics().await.unwrap().spec_decode().unwrap();
    let delta = after.since(&before);
    assert!((delta.acceptance_rate().unwrap() - 0.75).abs() < 0.05);
    assert!((delta.mean_accepted_length().unwrap() - 4.0).abs() < 0.2);
    assert_eq!(delta.acceptance_per_pos().len(), 4);
    fake.stop_speculating();
    assert_eq!(client.metrics().await.unwrap().spec_decode(), None);
}

#[tokio::test]
async fn drafts_are_swapped_and_refusals_say_why() {
    let fake = FakeVllm::start().await;
    let client = client(&fake);
    assert_eq!(client.draft().await.unwrap().version, "startup");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let reply = client.swap_draft(path, "v000001").await.unwrap();
    assert_eq!((reply.version.as_str(), reply.commit_ms), ("v000001", 0.5));
    assert_eq!(client.draft().await.unwrap().version, "v000001");
    assert_eq!(fake.swaps(), ["v000001"]);
    let missing = client.swap_draft("/no/such/folder", "v000002").await;
    let Err(ClientError::Refused { status: 409, detail, .. }) = missing else {
        panic!("{missing:?}")
    };
    assert!(detail.contains("/no/such/folder"), "{detail}");
    assert_eq!(client.draft().await.unwrap().version, "v000001");
    fake.remove_draft_route();
    let gone = client.draft().await;
    assert!(matches!(gone, Err(ClientError::Refused { status: 404, .. })), "{gone:?}");
    fake.down().await;
    assert!(matches!(client.health().await, Err(ClientError::Unavailable { .. })));
}

#[tokio::test]
async fn the_key_is_sent() {
    let fake = FakeVllm::start().await;
    fake.with(|inner| inner.api_key = Some("sk-1".into()));
    let without = client(&fake).models().await;
    assert!(matches!(without, Err(ClientError::Refused { status: 401, .. })));
    let with = Client::new(&fake.url(), Some("sk-1".into())).unwrap();
    assert_eq!(with.models().await.unwrap().len(), 2);
}
