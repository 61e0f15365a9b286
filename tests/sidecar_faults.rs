//! What goes wrong around the sidecar and inside it: dead trainers, restarted servers, signals,
//! and kill -9 of the sidecar at every stage.

#![allow(clippy::unwrap_used)] // a test fails by panicking

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::fake_trainer::{self, Behaviour, learned_rounds};
use support::looping::{self, DEADLINE, Loop, running, version};

#[test]
#[ignore = "started by the other tests as the trainer process"]
fn trainer_child() {
    fake_trainer::child();
}

#[test]
#[ignore = "started by the other tests as the sidecar process"]
fn sidecar_child() {
    looping::child();
}

fn phase(status: &Value) -> &str {
    status["trainer"]["phase"].as_str().unwrap()
}

fn kill_trainer(status: &Value) {
    let pid = i32::try_from(status["trainer"]["pid"].as_i64().expect("a trainer runs")).unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

/// How many rounds each sample was new in or repeated by; rehearsal is off in these tests.
fn times_learned(it: &Loop) -> BTreeMap<u64, usize> {
    let mut times = BTreeMap::new();
    for id in learned_rounds(it.work()).concat() {
        *times.entry(id).or_insert(0) += 1;
    }
    times
}

fn without_repetition(settings: &mut draft_adapter::config::sidecar::SidecarSettings) {
    settings.learn.rehearsal = 0.0;
    settings.learn.replay_fraction = 0.0;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_trainer_is_restarted_and_the_round_repeated() {
    let mut it = Loop::prepare(without_repetition).await;
    Behaviour { step_ms: 200, ..Behaviour::default() }.write(it.work());
    it.run_here().await;
    let training = |status: &Value| phase(status) == "training";
    let status = it.traffic_until("sums", "a round", training).await;
    kill_trainer(&status);
    // No request notices.
    it.traffic(4, "sums").await;
    Behaviour::default().write(it.work());
    let status = it.until("the round after all", |status| {
        status["training"]["rounds"].as_u64() >= Some(1) && phase(status) == "waiting"
    });
    let status = status.await;
    assert_eq!(status["trainer"]["restarts"], 1);
    assert!(status["trainer"]["ended"].as_str().unwrap().contains("signal 9"), "{status:#}");
    assert!(times_learned(&it).values().all(|times| *times == 1));
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_round_that_kills_the_trainer_is_made_smaller() {
    let mut it = Loop::prepare(|settings| {
        without_repetition(settings);
        settings.learn.round_max_wait_seconds = 1e6;
    })
    .await;
    Behaviour { die_above: Some(3), ..Behaviour::default() }.write(it.work());
    it.run_here().await;
    let learned = |status: &Value| status["store"]["learned"].as_u64() >= Some(3);
    let status = it.traffic_until("sums", "a smaller round", learned).await;
    assert!(status["trainer"]["restarts"].as_u64() >= Some(3));
    assert!(learned_rounds(it.work())[0].len() <= 3);
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sidecar_starts_before_its_server_and_outlives_it() {
    let mut it = Loop::prepare(|_| {}).await;
    it.fake.down().await;
    it.run_here().await;
    assert_eq!(it.get("/readyz").await, "ok\n");
    assert_eq!(it.chat("sums").await, 502);
    it.until("the trouble is shown", |status| !status["upstream"]["error"].is_null()).await;
    it.fake.up().await;
    it.traffic_until("sums", "two versions", |status| running(status) >= "v000002").await;

    // A server that restarts begins with its own draft and is brought to ours.
    it.ask(draft_adapter::sidecar::control::client::Ask::Pause).await.unwrap();
    it.until("it pauses", |status| phase(status) == "paused").await;
    it.fake.down().await;
    it.fake.forget();
    it.until("it is missed", |status| status["serving"].is_null()).await;
    it.fake.up().await;
    let status = it.until("it is back", |status| status["serving"] == status["running"]).await;
    assert_eq!(it.fake.draft_version(), running(&status));
    assert_eq!(status["swaps"].as_array().unwrap().last().unwrap()["cause"], "sync");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_published_while_the_server_is_down_is_swapped_later() {
    let mut it = Loop::start(|settings| settings.learn.round_samples = 12).await;
    it.until("the first draft runs", |status| status["serving"] == "v000000").await;
    it.ask(draft_adapter::sidecar::control::client::Ask::Pause).await.unwrap();
    it.traffic(20, "sums").await;
    it.until("all are scored", |status| status["store"]["scored"] == 20).await;
    it.fake.down().await;
    it.ask(draft_adapter::sidecar::control::client::Ask::Resume).await.unwrap();
    it.until("a version", |status| running(status) >= "v000001").await;
    assert_eq!(it.fake.draft_version(), "v000000");
    it.fake.up().await;
    it.until("the swap", |status| status["serving"].as_str() >= Some("v000001")).await;
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_signal_in_a_round_loses_neither_samples_nor_state() {
    let mut it = Loop::prepare(without_repetition).await;
    Behaviour { step_ms: 300, ..Behaviour::default() }.write(it.work());
    it.run_process().await;
    let training = |status: &Value| phase(status) == "training";
    let status = it.traffic_until("sums", "a round", training).await;
    let captured = status["store"]["samples"].as_u64().unwrap();
    it.stop().await;
    assert!(it.work().join("trainer/state.json").exists(), "the abandoned round was saved");
    Behaviour::default().write(it.work());
    it.run_process().await;
    let status = it.status().await;
    assert!(status["store"]["samples"].as_u64().unwrap() >= captured, "{status:#}");
    let all = |status: &Value| {
        let count = |name: &str| status["store"][name].as_u64().unwrap();
        count("learned") > 0 && count("learned") + count("held_out") == count("samples")
    };
    it.until("the round after all", all).await;
    assert!(times_learned(&it).values().all(|times| *times == 1));
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_are_finished_after_a_signal() {
    let mut it = Loop::prepare(|_| {}).await;
    it.run_process().await;
    it.fake.hold_after(1);
    let request = it
        .http
        .post(format!("http://{}/v1/completions", it.proxy))
        .json(&serde_json::json!({"model": "fake-target", "prompt": "slow", "stream": true}));
    let answer = tokio::spawn(async move { request.send().await.unwrap().text().await });
    let started = Instant::now();
    while it.fake.with(|inner| inner.active) == 0 {
        assert!(started.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    it.signal();
    // New connections are refused from here on, and the one in flight is waited for.
    while it.http.get(format!("http://{}/health", it.proxy)).send().await.is_ok() {
        assert!(started.elapsed() < DEADLINE, "it still accepts");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(it.lives(), "it stopped with a request in flight");
    it.fake.release();
    let answer = answer.await.unwrap().unwrap();
    assert!(answer.contains("[DONE]"), "{answer}");
    it.ended().await;
}

/// Kills the sidecar with signal 9 once `when` holds, starts it again and checks that it goes on
/// coherently: whole folders only, one running version everywhere, and nothing learned lost.
async fn killed_when(behaviour: Behaviour, what: &str, when: impl Fn(&Loop, &Value) -> bool) {
    let mut it = Loop::prepare(without_repetition).await;
    behaviour.write(it.work());
    it.run_process().await;
    let started = Instant::now();
    loop {
        let status = it.status().await;
        if when(&it, &status) {
            break;
        }
        assert!(started.elapsed() < DEADLINE, "{what} did not happen: {status:#}");
        if status["store"]["samples"].as_u64() < Some(30) {
            it.traffic(2, "sums").await;
        }
    }
    it.kill();
    Behaviour::default().write(it.work());
    it.fake.set_swap_delay(Duration::ZERO);
    it.run_process().await;
    let status = it
        .traffic_until("sums", "a version after the kill", |status| {
            running(status) > "v000000" && status["serving"] == status["running"]
        })
        .await;
    let now = running(&status);
    assert!(it.fake.draft_version().as_str() >= now);
    assert_eq!(version(&status, now)["state"], "running");
    it.stop().await;
    // Only whole versions have names, and nothing is left over.
    for entry in std::fs::read_dir(it.work().join("drafts")).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        assert!(!name.starts_with(".tmp-"), "{name} is left over");
        if name != "current" {
            let manifest = draft_adapter::model::DraftManifest::read(&entry.path()).unwrap();
            manifest.verify(&entry.path()).unwrap();
            assert_eq!(manifest.version, name);
        }
    }
    // At worst the round that was cut short was repeated.
    let times = times_learned(&it);
    assert!(times.values().all(|times| *times <= 2), "{times:?}");
    let ledger: Value =
        serde_json::from_slice(&std::fs::read(it.work().join("state.json")).unwrap()).unwrap();
    assert_eq!(ledger["running"], it.current().as_str());
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_while_training() {
    let slow = Behaviour { step_ms: 300, ..Behaviour::default() };
    killed_when(slow, "training", |_, status| phase(status) == "training").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_while_exporting() {
    let slow = Behaviour { export_ms: 2000, ..Behaviour::default() };
    killed_when(slow, "an export", |it, _| it.draft_folder(".tmp-v000001").exists()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_while_swapping() {
    // The folder has its name and the link points to it, but the server has not answered yet.
    killed_when(Behaviour::default(), "a swap", |it, status| {
        if status["serving"] == "v000000" {
            it.fake.set_swap_delay(Duration::from_secs(3));
        }
        it.draft_folder("v000001").exists() && it.current() == "v000001"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn kill_9_right_after_a_publication() {
    killed_when(Behaviour::default(), "a version", |it, _| it.fake.draft_version() == "v000001")
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_that_is_killed_takes_its_trainer_with_it() {
    let mut it = Loop::prepare(|_| {}).await;
    it.run_process().await;
    let status = it.until("the trainer is up", |status| status["trainer"]["up"] == true).await;
    let pid = status["trainer"]["pid"].as_i64().unwrap();
    it.kill();
    let started = Instant::now();
    // A zombie that nobody has reaped yet has ended as well.
    let lives = || {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| !stat.contains(") Z "))
    };
    while lives() {
        assert!(started.elapsed() < DEADLINE, "the trainer outlived its parent");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
