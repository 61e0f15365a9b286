//! The whole loop over a fake server and a fake trainer process: learn, gate, publish, swap,
//! refuse, and everything that an operator may ask.

#![allow(clippy::unwrap_used)] // a test fails by panicking

mod support;

use draft_adapter::sidecar::control::client::Ask;
use serde_json::json;
use support::fake_trainer::{self, Behaviour, learned_rounds};
use support::looping::{FIRST_ACCEPTANCE, Loop, running, version};

#[test]
#[ignore = "started by the other tests as the trainer process"]
fn trainer_child() {
    fake_trainer::child();
}

#[tokio::test(flavor = "multi_thread")]
async fn traffic_becomes_versions_that_the_server_runs() {
    let mut it = Loop::start(|_| {}).await;
    it.until("the server runs the first draft", |status| status["serving"] == "v000000").await;
    // What the sidecar has decided to run and what the server runs differ for a moment.
    let serves = |status: &serde_json::Value| status["serving"].as_str() >= Some("v000003");
    let status = it.traffic_until("sums", "a third version", serves).await;

    let swaps = it.fake.swaps();
    assert_eq!(swaps[..4], ["v000000", "v000001", "v000002", "v000003"]);
    it.until("the link follows", |status| it.current() == running(status)).await;
    let second = version(&status, "v000002");
    assert_eq!(second["parent"], "v000001");
    let (before, after) = (&second["gate"]["before"], &second["gate"]["after"]);
    assert!((before.as_f64().unwrap() - FIRST_ACCEPTANCE - 0.1).abs() < 1e-9, "{second:#}");
    assert!((after.as_f64().unwrap() - FIRST_ACCEPTANCE - 0.2).abs() < 1e-9, "{second:#}");
    assert_eq!(second["gate"]["domains"][0]["domain"], "sums");
    assert_eq!(second["swap_stall_ms"], 0.5);
    assert!(status["training"]["tokens"].as_u64().unwrap() > 0);
    assert_eq!(status["counters"]["upstream_errors"], 0);

    let manifest = it.manifest("v000002");
    assert_eq!(manifest["parent"], "v000001");
    assert_eq!(manifest["scores"]["gate"]["after"], *after);
    assert_eq!(manifest["settings"]["learn"]["round_samples"], 8);
    assert_ne!(manifest["data_hash"], it.manifest("v000001")["data_hash"]);
    assert_eq!(manifest["checksum"], second["checksum"]);

    // Which versions serve long enough for the counters to be read is a matter of luck; traffic
    // goes on until one has.
    let started = std::time::Instant::now();
    let mut metrics = it.get("/metrics").await;
    while !metrics.contains("da_acceptance_rate{version=\"v") {
        assert!(started.elapsed() < support::looping::DEADLINE, "no acceptance:\n{metrics}");
        it.traffic(1, "sums").await;
        metrics = it.get("/metrics").await;
    }
    for line in ["da_trainer_up 1", "da_upstream_up 1"] {
        assert!(metrics.contains(line), "{line} is missing:\n{metrics}");
    }
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worse_candidate_is_refused_and_training_starts_again() {
    let mut it = Loop::prepare(|settings| settings.gate.refusals_before_restart = 2).await;
    Behaviour { gain: -0.05, ..Behaviour::default() }.write(it.work());
    it.run_here().await;
    let refused = |count: u64| {
        move |status: &serde_json::Value| {
            status["counters"]["gate"]["refuse"].as_u64().unwrap_or(0) >= count
        }
    };
    it.traffic_until("sums", "two refusals", refused(2)).await;
    // Each restart brings the trainer back to the running draft, so no candidate is ever worse
    // than two rounds.
    let status = it.traffic_until("sums", "five refusals", refused(5)).await;
    assert_eq!(running(&status), "v000000");
    assert_eq!(status["versions"].as_array().unwrap().len(), 1);
    let after = status["trainer"]["last_scores"]["after"].as_f64().unwrap();
    assert!(after > FIRST_ACCEPTANCE - 0.11, "the trainer did not start again: {status:#}");
    assert_eq!(it.fake.swaps(), ["v000000"]);
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_finite_or_not_new_is_not_published() {
    let mut it = Loop::prepare(|_| {}).await;
    Behaviour { gain: 0.0, ..Behaviour::default() }.write(it.work());
    it.run_here().await;
    let passed = |status: &serde_json::Value| {
        status["counters"]["gate"]["publish"].as_u64().unwrap_or(0) >= 1
    };
    it.traffic_until("sums", "a gate that passes equal weights", passed).await;
    Behaviour { finite: false, ..Behaviour::default() }.write(it.work());
    let refused = |status: &serde_json::Value| {
        status["counters"]["gate"]["refuse"].as_u64().unwrap_or(0) >= 1
    };
    let status = it.traffic_until("sums", "a refusal", refused).await;
    assert_eq!(status["versions"].as_array().unwrap().len(), 1, "{status:#}");
    assert_eq!(status["trainer"]["last_verdict"]["reason"], "the candidate is not finite");
    // The number was not used up.
    Behaviour::default().write(it.work());
    let first = |status: &serde_json::Value| status["versions"][1]["version"] == "v000001";
    it.traffic_until("sums", "the first version", first).await;
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_little_held_out_data_holds() {
    let mut it = Loop::start(|settings| settings.gate.min_positions = 1_000_000).await;
    let held =
        |status: &serde_json::Value| status["counters"]["gate"]["hold"].as_u64().unwrap_or(0) >= 2;
    let status = it.traffic_until("sums", "two holds", held).await;
    assert_eq!(running(&status), "v000000");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_that_the_server_refuses_is_withdrawn() {
    let mut it = Loop::start(|_| {}).await;
    it.until("the first draft runs", |status| status["serving"] == "v000000").await;
    it.fake.fail_swaps(Some("shape differs"));
    let refused = |status: &serde_json::Value| version(status, "v000001")["state"] == "refused";
    let status = it.traffic_until("sums", "a refused swap", refused).await;
    assert_eq!(running(&status), "v000000");
    assert!(version(&status, "v000001")["reason"].as_str().unwrap().contains("shape differs"));
    assert_eq!(it.fake.draft_version(), "v000000");
    assert_eq!(it.current(), "v000000");
    it.fake.fail_swaps(None);
    let learned = |status: &serde_json::Value| {
        running(status) > "v000001" && version(status, running(status))["parent"] == "v000000"
    };
    it.traffic_until("sums", "a later version", learned).await;
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_delays_publication_and_nothing_else() {
    let mut it = Loop::prepare(|_| {}).await;
    Behaviour { fail_export: true, ..Behaviour::default() }.write(it.work());
    it.run_here().await;
    let failed = |status: &serde_json::Value| {
        let error = status["trainer"]["last_error"].as_str().unwrap_or_default();
        error.contains("no space left")
    };
    let status = it.traffic_until("sums", "a failed export", failed).await;
    assert_eq!(running(&status), "v000000");
    Behaviour::default().write(it.work());
    it.until("the version after all", |status| running(status) >= "v000001").await;
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_folder_is_enough_for_a_server_without_a_draft_route() {
    let mut it = Loop::prepare(|settings| {
        settings.publish.sink = draft_adapter::config::sidecar::SinkKind::Folder;
    })
    .await;
    it.fake.remove_draft_route();
    it.run_here().await;
    it.traffic_until("sums", "a version", |status| running(status) >= "v000001").await;
    assert!(it.current().as_str() >= "v000001");
    assert!(it.fake.swaps().is_empty());
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_draft_route_is_named() {
    let mut it = Loop::prepare(|_| {}).await;
    it.fake.remove_draft_route();
    it.run_here().await;
    let status = it.until("the error", |status| !status["upstream"]["error"].is_null()).await;
    let error = status["upstream"]["error"].as_str().unwrap();
    assert!(error.contains("no draft route") && error.contains("publish.sink"), "{error}");
    assert_eq!(it.chat("sums").await, 200, "proxying goes on");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_learning_publishes_nothing_until_it_is_resumed() {
    let mut it = Loop::start(|_| {}).await;
    it.until("the trainer is up", |status| status["trainer"]["up"] == true).await;
    assert_eq!(it.ask(Ask::Pause).await.unwrap(), "learning is paused");
    it.traffic(40, "sums").await;
    let scored = |status: &serde_json::Value| status["store"]["scored"].as_u64() >= Some(40);
    let status = it.until("all are scored", scored).await;
    assert_eq!(status["store"]["learned"], 0);
    assert_eq!(status["paused"], true);
    // The pause survives a restart.
    it.stop().await;
    it.run_here().await;
    let status = it.until("it pauses again", |s| s["trainer"]["phase"] == "paused").await;
    assert_eq!((running(&status), &status["store"]["scored"]), ("v000000", &json!(40)));
    it.ask(Ask::Resume).await.unwrap();
    it.until("a version", |status| running(status) >= "v000001").await;
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_rolls_back_and_pins() {
    let mut it = Loop::start(|_| {}).await;
    it.traffic_until("sums", "two versions", |status| running(status) >= "v000002").await;
    it.ask(Ask::Pause).await.unwrap();
    let status = it.until("it pauses", |s| s["trainer"]["phase"] == "paused").await;
    let taken_back = running(&status).to_owned();
    let parent = version(&status, &taken_back)["parent"].as_str().unwrap().to_owned();

    let message = it.ask(Ask::Rollback(None)).await.unwrap();
    assert!(message.starts_with(&format!("rolled back to {parent}")), "{message}");
    assert_eq!(it.fake.draft_version(), parent);
    let error = it.ask(Ask::Pin(Some(taken_back.clone()))).await.unwrap_err().to_string();
    assert!(error.contains("rolled_back and never runs again"), "{error}");
    let error = it.ask(Ask::Pin(Some("v000099".into()))).await.unwrap_err().to_string();
    assert!(error.contains("no version v000099"), "{error}");

    it.ask(Ask::Pin(Some("v000000".into()))).await.unwrap();
    assert_eq!(it.fake.draft_version(), "v000000");
    let error = it.ask(Ask::Rollback(None)).await.unwrap_err().to_string();
    assert!(error.contains("v000000 is pinned"), "{error}");
    it.ask(Ask::Resume).await.unwrap();
    let rounds = |status: &serde_json::Value| status["counters"]["rounds"]["done"].as_u64();
    let before = rounds(&it.status().await);
    let status =
        it.traffic_until("sums", "rounds while pinned", |status| rounds(status) > before).await;
    assert_eq!(running(&status), "v000000");
    it.ask(Ask::Pin(None)).await.unwrap();
    let fresh = |status: &serde_json::Value| running(status) > taken_back.as_str();
    let status = it.traffic_until("sums", "a version after unpinning", fresh).await;
    assert_eq!(version(&status, &taken_back)["state"], "rolled_back");

    let versions = it.ask(Ask::Versions).await.unwrap();
    assert!(versions.contains("rolled_back") && versions.contains("running"), "{versions}");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_leaves_no_sample() {
    let mut it = Loop::start(|settings| settings.learn.enabled = false).await;
    it.traffic(6, "sums").await;
    it.until("all are stored", |status| status["store"]["scored"] == 6).await;
    let message = it.ask(Ask::Purge).await.unwrap();
    assert!(message.starts_with("deleted 6 samples"), "{message}");
    assert_eq!(it.status().await["store"]["samples"], 0);
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_brings_older_samples_back() {
    let mut it = Loop::start(|settings| settings.learn.window_samples = 4).await;
    let rounds = |status: &serde_json::Value| status["training"]["rounds"].as_u64();
    it.traffic_until("sums", "three rounds", |status| rounds(status) >= Some(3)).await;
    let before = learned_rounds(it.work()).len();
    it.traffic_until("queries", "more rounds", |status| rounds(status) >= Some(before as u64 + 3))
        .await;
    let logged = learned_rounds(it.work());
    let (early, late): (Vec<_>, Vec<_>) =
        (logged[..before].concat(), logged[before + 1..].concat());
    assert!(early.iter().any(|id| late.contains(id)), "{logged:?}");
    it.stop().await;
}
