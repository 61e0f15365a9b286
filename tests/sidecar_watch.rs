//! The watch over a fake server whose counters move as told: what does worse is taken back, what
//! only meets other traffic is not.

#![allow(clippy::unwrap_used)] // a test fails by panicking

mod support;

use std::collections::BTreeMap;

use draft_adapter::sidecar::control::client::Ask;
use serde_json::Value;
use support::fake_trainer::{self, Behaviour};
use support::looping::{FIRST_ACCEPTANCE, Loop, running, version};

#[test]
#[ignore = "started by the other tests as the trainer process"]
fn trainer_child() {
    fake_trainer::child();
}

/// A sidecar whose first published version the server accepts at `live`, after the imported one
/// at 0.8; measured on samples they reach what `measured` says.
async fn first_version_at(live: f64, measured: &[(&str, f64)]) -> Loop {
    let mut it = Loop::prepare(|settings| {
        settings.learn.round_samples = 16;
        settings.learn.round_max_wait_seconds = 1e6;
    })
    .await;
    let measured: BTreeMap<String, f64> =
        measured.iter().map(|(version, rate)| ((*version).to_owned(), *rate)).collect();
    // Later rounds make nothing new, which would hide what the watch does.
    Behaviour { measured, cap: FIRST_ACCEPTANCE + 0.1, ..Behaviour::default() }.write(it.work());
    it.fake.set_acceptance("v000000", 0.8);
    it.fake.set_acceptance("v000001", live);
    it.run_here().await;
    it.until("the first draft runs", |status| status["serving"] == "v000000").await;
    // Twice what the watch wants to know of the first draft (`watch.min_tokens`), before there is a
    // second one.
    it.ask(Ask::Pause).await.unwrap();
    let known =
        |status: &Value| version(status, "v000000")["live"]["drafted"].as_u64() >= Some(400);
    it.traffic_until("sums", "figures of the first draft", known).await;
    it.ask(Ask::Resume).await.unwrap();
    it
}

fn rolled_back(status: &Value) -> bool {
    version(status, "v000001")["state"] == "rolled_back"
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_does_worse_is_taken_back() {
    let mut it = first_version_at(0.2, &[("v000000", 0.3), ("v000001", 0.05)]).await;
    let status = it.traffic_until("sums", "the roll-back", rolled_back).await;
    let reason = version(&status, "v000001")["reason"].as_str().unwrap();
    assert!(reason.contains("standard errors"), "{reason}");
    let status = it.until("the swap back", |status| status["serving"] != "v000001").await;
    assert_eq!(it.fake.swaps()[..3], ["v000000", "v000001", "v000000"]);
    assert_eq!(status["counters"]["rollbacks"], 1);
    assert!(it.get("/metrics").await.contains("da_rollbacks_total{cause=\"watch\"} 1"));
    // Learning goes on from the version before.
    let next = |status: &Value| running(status) >= "v000002";
    let status = it.traffic_until("sums", "the next version", next).await;
    assert_eq!(version(&status, "v000002")["parent"], "v000000");
    assert!(rolled_back(&status), "a version that was taken back stays so");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_traffic_is_no_reason() {
    // Live it falls as far as in the test above, but on the same samples it beats its parent.
    let mut it = first_version_at(0.2, &[("v000000", 0.1), ("v000001", 0.15)]).await;
    let drifted = |status: &Value| status["counters"]["drifts"].as_u64() >= Some(1);
    let status = it.traffic_until("sums", "a drift", drifted).await;
    assert_eq!(status["counters"]["rollbacks"], 0);
    assert!(!rolled_back(&status));
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_that_the_server_runs_badly_is_taken_back() {
    // Its folder is as good as ever; what the server made of it is not. The parent is not better
    // on the samples, so only the collapse can tell.
    let mut it = first_version_at(0.0, &[("v000000", 0.4), ("v000001", 0.9)]).await;
    let status = it.traffic_until("sums", "the roll-back", rolled_back).await;
    let reason = version(&status, "v000001")["reason"].as_str().unwrap();
    assert!(reason.contains("its folder reaches"), "{reason}");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_holds_is_left_alone_and_its_figures_are_its_own() {
    let mut it = first_version_at(0.6, &[]).await;
    let settled = |status: &Value| {
        running(status) >= "v000001"
            && version(status, "v000001")["live"]["drafted"].as_u64() >= Some(600)
    };
    // 0.8 to 0.6 is a large drop, but on its own traffic's samples it beats the version before.
    let status = it.traffic_until("sums", "figures of the version", settled).await;
    assert_eq!(status["counters"]["rollbacks"], 0);
    let rate = |name: &str| version(&status, name)["live"]["acceptance_rate"].as_f64().unwrap();
    assert!((rate("v000000") - 0.8).abs() < 0.02, "{status:#}");
    assert!((rate("v000001") - 0.6).abs() < 0.02, "{status:#}");
    it.stop().await;
}
