//! The proxy beyond single messages: disconnects, outages, load, other protocols.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use axum::body::Bytes;
use draft_adapter::sidecar::capture;
use draft_adapter::sidecar::proxy::{ProxyError, ProxySettings};
use futures::StreamExt as _;
use serde_json::{Value, json};
use support::fake_vllm::{FakeVllm, Fault, MODEL};
use support::front::{Front, eventually};
use support::raw::{RawUpstream, Script, exchange};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

fn chat(content: &str, stream: bool) -> Value {
    json!({"model": MODEL, "stream": stream,
        "messages": [{"role": "user", "content": content}]})
}

fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().build().unwrap()
}

async fn post(front: &Front, body: &Value) -> reqwest::Response {
    client().post(front.url() + "/v1/chat/completions").json(body).send().await.unwrap()
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_ends_it_at_the_engine() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    fake.hold_after(2);
    let response = post(&front, &chat("leave early", true)).await;
    let mut body = response.bytes_stream();
    body.next().await.unwrap().unwrap();
    assert_eq!(fake.with(|inner| inner.active), 1);
    drop(body);
    eventually("the engine notices", || fake.with(|inner| (inner.cancelled == 1).then_some(())))
        .await;
    let told = front.until("counted", |told| told.finished.len() == 1).await;
    assert_eq!((told.started, told.finished, told.upstream_errors), (1, vec![200], 0));
    front.until("not captured", |told| told.dropped.get("aborted") == Some(&1)).await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_ends_it_too() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    fake.hold_after(0);
    let body = chat("leave even earlier", false);
    let request = tokio::spawn({
        let url = front.url() + "/v1/chat/completions";
        async move { client().post(url).json(&body).send().await }
    });
    eventually("it arrives", || fake.with(|inner| (inner.active == 1).then_some(()))).await;
    request.abort();
    eventually("the engine notices", || fake.with(|inner| (inner.cancelled == 1).then_some(())))
        .await;
    let told = front.until("counted", |told| told.finished.len() == 1).await;
    assert_eq!((told.finished, told.upstream_errors), (vec![499], 0));
}

#[tokio::test]
async fn a_client_that_leaves_while_it_uploads_is_no_fault_of_the_engine() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let mut stream = TcpStream::connect(front.addr).await.unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf";
    stream.write_all(head.as_bytes()).await.unwrap();
    front.until("it began", |told| told.started == 1).await;
    drop(stream);
    let told = front.until("it is over", |told| told.finished.len() == 1).await;
    assert!(matches!(told.finished[..], [499 | 400]), "{:?}", told.finished);
    assert_eq!(told.upstream_errors, 0);
    assert_eq!(post(&front, &chat("next", false)).await.status(), 200);
}

#[tokio::test]
async fn an_upstream_that_is_down_is_a_502_until_it_is_back() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    assert_eq!(post(&front, &chat("a", false)).await.status(), 200);
    fake.down().await;
    for _ in 0..3 {
        let response = post(&front, &chat("b", false)).await;
        assert_eq!(response.status(), 502);
        let error: Value = response.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(&fake.addr.to_string()), "{message}");
        assert_eq!(error["error"]["type"], "upstream_error");
        assert_eq!(error["error"]["code"], 502);
    }
    fake.up().await;
    for n in 0..3 {
        assert_eq!(post(&front, &chat(&format!("c{n}"), false)).await.status(), 200);
    }
    let told = front.until("all counted", |told| told.finished.len() == 7).await;
    assert_eq!(told.finished, [200, 502, 502, 502, 200, 200, 200]);
    assert_eq!((told.started, told.upstream_errors), (7, 3));
}

#[tokio::test]
async fn an_outage_in_the_middle_of_a_stream_ends_the_stream() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    fake.hold_after(2);
    let response = post(&front, &chat("outage", true)).await;
    let mut body = response.bytes_stream();
    body.next().await.unwrap().unwrap();
    fake.down().await;
    let rest: Vec<_> = body.collect().await;
    assert!(rest.last().unwrap().is_err(), "the client must see that the stream was cut");
    fake.release();
    fake.up().await;
    assert_eq!(post(&front, &chat("again", true)).await.status(), 200);
    let told = front.until("counted", |told| told.finished.len() == 2).await;
    assert_eq!(told.upstream_errors, 1);
}

#[tokio::test]
async fn errors_of_the_engine_pass_through() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    fake.inject(Fault::status(429, "slow down"), 1);
    let response = post(&front, &chat("x", false)).await;
    assert_eq!(response.status(), 429);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["message"], "slow down");
    let told = front.until("counted", |told| told.dropped.contains_key("error_status")).await;
    assert_eq!((told.finished, told.upstream_errors), (vec![429], 0));
}

#[tokio::test]
async fn admin_routes_are_closed_however_they_are_spelt() {
    let upstream = RawUpstream::start().await;
    let (sender, _receiver) = capture::channel(1);
    let front = Front::without_capture(upstream.addr, sender, |_| {}).await;
    for path in [
        "/collective_rpc",
        "/sleep?level=1",
        "/pause/",
        "//update_weights",
        "/v1/../sleep",
        "/%73leep",
        "/v1/draft_adapter/draft",
        "/v1/draft_adapter",
    ] {
        let request = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
        let answer = exchange(front.addr, request.as_bytes()).await;
        assert!(answer.start.starts_with("HTTP/1.1 403"), "{path}: {}", answer.start);
        assert!(String::from_utf8(answer.body).unwrap().contains("\"error\""));
    }
    assert!(upstream.seen.lock().is_empty());
    // Names that only begin alike are other routes.
    for path in ["/sleepy", "/v1/draft_adapter_x", "/v1/sleep"] {
        upstream.script(Script::new("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        let answer = exchange(front.addr, request.as_bytes()).await;
        assert_eq!(answer.start, "HTTP/1.1 200 OK", "{path}");
    }
    // The list is a setting.
    let (sender, _receiver) = capture::channel(1);
    let open = Front::without_capture(upstream.addr, sender, |s| s.denied_paths.clear()).await;
    upstream.script(Script::new("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
    let answer = exchange(open.addr, b"GET /sleep HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!(answer.start, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn upgrades_are_refused_cleanly_and_h2c_offers_are_ignored() {
    let upstream = RawUpstream::start().await;
    let front = Front::start(upstream.addr).await;
    let websocket = b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\n\
        Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n";
    let answer = exchange(front.addr, websocket).await;
    assert!(answer.start.starts_with("HTTP/1.1 501"), "{}", answer.start);
    upstream.script(Script::new("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"));
    let offer = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n\
        Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n";
    let answer = exchange(front.addr, offer).await;
    assert_eq!(answer.start, "HTTP/1.1 200 OK");
    let seen = upstream.seen.lock().clone();
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].header("http2-settings"), None);
}

#[tokio::test]
async fn our_own_headers_stop_here() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let response = client()
        .post(front.url() + "/v1/chat/completions")
        .header("x-draft-adapter-no-train", "1")
        .header("x-draft-adapter-domain", "secret-project")
        .header("x-request-id", "7")
        .json(&chat("do not learn this", true))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    response.bytes().await.unwrap();
    let told = front.until("counted", |told| told.opted_out == 1).await;
    assert!(told.captured.is_empty() && told.dropped.is_empty());
    let seen = &fake.recorded("/v1/chat/completions")[0];
    assert_eq!(seen.headers["x-request-id"], "7");
    assert!(seen.headers.keys().all(|name| !name.as_str().starts_with("x-draft-adapter")));
}

#[tokio::test]
async fn http2_clients_are_served() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let http2 = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build();
    let http2 = http2.unwrap();
    let streams = (0..20).map(|n| {
        let request = http2.post(front.url() + "/v1/chat/completions");
        let request = request.json(&chat(&format!("over http/2, {n}"), n % 2 == 0));
        async move {
            let response = request.send().await.unwrap();
            assert_eq!(response.version(), reqwest::Version::HTTP_2);
            assert_eq!(response.status(), 200);
            response.text().await.unwrap()
        }
    });
    let bodies: Vec<String> = futures::future::join_all(streams).await;
    assert!(bodies.iter().step_by(2).all(|body| body.ends_with("data: [DONE]\n\n")));
    let seen = fake.recorded("/v1/chat/completions");
    assert_eq!(seen.len(), 20);
    assert!(seen.iter().all(|r| r.headers["host"] == front.addr.to_string()));
}

#[tokio::test]
async fn many_requests_at_once_get_their_own_answers() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let http = client();
    let requests = (0..200).map(|n| {
        let (http, url) = (http.clone(), [fake.url(), front.url()]);
        async move {
            let mut answers = Vec::new();
            for url in url {
                let body = json!({"model": MODEL, "prompt": format!("prompt {n}"),
                    "stream": n % 3 == 0, "max_tokens": 40});
                let request = http.post(url + "/v1/completions").json(&body);
                let text = request.send().await.unwrap().text().await.unwrap();
                // All but the request's own number must be equal.
                let at = text.find("cmpl-").unwrap();
                let id = text[at..at + 13].to_owned();
                answers.push(text.replace(&id, ""));
            }
            assert_eq!(answers[0], answers[1], "request {n}");
        }
    });
    futures::future::join_all(requests).await;
    let told = front.until("all counted", |told| told.finished.len() == 200).await;
    assert!(told.finished.iter().all(|status| *status == 200));
    assert!(told.overheads.iter().all(|seconds| *seconds < 5.0));
}

/// A megabyte a piece, more than any socket buffer on the way holds.
const PIECE: usize = 1 << 20;

#[tokio::test]
async fn a_large_answer_waits_for_a_slow_client_without_piling_up() {
    let total = 64;
    let sent = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let sent_by = sent.clone();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await.unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", total * PIECE);
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..total {
            stream.write_all(&vec![7; PIECE]).await.unwrap();
            sent_by.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    });
    let front = Front::start(upstream).await;
    let mut stream = TcpStream::connect(front.addr).await.unwrap();
    let body = b"{\"model\":\"m\",\"messages\":[]}";
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body).await.unwrap();
    // The client reads nothing: what the engine gets rid of must stop growing far below the whole.
    let mut last = usize::MAX;
    let stalled = loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = sent.load(std::sync::atomic::Ordering::SeqCst);
        if now == last {
            break now;
        }
        last = now;
    };
    assert!(stalled < total / 2, "{stalled} of {total} MiB left the engine unread");
    let mut received = 0;
    let mut piece = vec![0; PIECE];
    while received < total * PIECE {
        let n = stream.read(&mut piece).await.unwrap();
        assert!(n > 0);
        received += n;
    }
    front.until("too large to keep", |told| told.dropped.get("too_large") == Some(&1)).await;
}

#[tokio::test]
async fn a_large_request_streams_through() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let pieces = futures::stream::iter(
        (0..32).map(|n| Ok::<_, std::io::Error>(Bytes::from(vec![b'a' + n as u8 % 26; PIECE]))),
    );
    let response = client()
        .post(front.url() + "/v1/chat/completions")
        .body(reqwest::Body::wrap_stream(pieces))
        .send()
        .await
        .unwrap();
    // Not JSON, so the engine says no, after it has got all of it.
    assert_eq!(response.status(), 400);
    assert_eq!(fake.recorded("/v1/chat/completions")[0].body.len(), 32 * PIECE);
}

#[tokio::test]
async fn a_client_that_waits_for_leave_to_upload_gets_it() {
    let fake = FakeVllm::start().await;
    let front = Front::start(fake.addr).await;
    let body = chat("curl does this", false).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(front.addr).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut leave = [0; 25];
    stream.read_exact(&mut leave).await.unwrap();
    assert_eq!(&leave, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).await.unwrap();
    let answer = support::raw::read_message(&mut stream, false).await.unwrap();
    assert_eq!(answer.start, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn capture_that_stands_still_holds_up_nobody() {
    let fake = FakeVllm::start().await;
    // Nobody takes anything out of the queue.
    let (sender, receiver) = capture::channel(2);
    let mut front = Front::without_capture(fake.addr, sender, |_| {}).await;
    for n in 0..10 {
        let response = post(&front, &chat(&format!("{n}"), true)).await;
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap();
    }
    // Once it runs, the two that fitted are there and the others are counted.
    front.capture(receiver, support_renderer(), capture::CaptureSettings::default());
    let told = front.until("all accounted for", |told| {
        told.captured.len() as u64 + told.dropped.values().sum::<u64>() == 10
    });
    assert_eq!(told.await.dropped["queue_full"], 8);
}

fn support_renderer() -> draft_adapter::sidecar::render::Renderer {
    draft_adapter::sidecar::render::Renderer::none()
}

#[tokio::test]
async fn collected_bodies_never_take_more_than_their_budget() {
    let fake = FakeVllm::start().await;
    let (sender, receiver) = capture::channel_with_budget(1000, 4096);
    let mut front = Front::without_capture(fake.addr, sender, |_| {}).await;
    for n in 0..20 {
        post(&front, &chat(&format!("{n} {}", "x".repeat(300)), false)).await;
    }
    front.capture(receiver, support_renderer(), capture::CaptureSettings::default());
    let told = front.until("all accounted for", |told| told.dropped.values().sum::<u64>() == 20);
    let told = told.await;
    assert!(told.dropped["memory"] >= 10, "{:?}", told.dropped);
    // The memory comes back.
    let before = told.dropped["memory"];
    post(&front, &chat("small", false)).await;
    let told = front.until("one more", |told| told.dropped.values().sum::<u64>() == 21).await;
    assert_eq!(told.dropped["memory"], before);
}

#[tokio::test]
async fn the_servers_that_axum_brings_work_too() {
    let fake = FakeVllm::start().await;
    let (sender, _receiver) = capture::channel(1);
    let observer = std::sync::Arc::new(support::front::Observer::default());
    let settings = ProxySettings::new(fake.url().parse().unwrap());
    let router = draft_adapter::sidecar::proxy::router(settings, sender, observer).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/models", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let models: Value = client().get(url).send().await.unwrap().json().await.unwrap();
    assert_eq!(models["data"][0]["id"], MODEL);
}

#[tokio::test]
async fn a_shutdown_lets_streams_finish() {
    let fake = FakeVllm::start().await;
    let (sender, _receiver) = capture::channel(1);
    let observer = std::sync::Arc::new(support::front::Observer::default());
    let settings = ProxySettings::new(fake.url().parse().unwrap());
    let router = draft_adapter::sidecar::proxy::router(settings, sender, observer).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let serving = tokio::spawn(draft_adapter::sidecar::proxy::serve(listener, router, async {
        let _ = stopped.await;
    }));
    fake.hold_after(2);
    let request = client().post(format!("{url}/v1/chat/completions")).json(&chat("x", true));
    let mut body = request.send().await.unwrap().bytes_stream();
    body.next().await.unwrap().unwrap();
    stop.send(()).unwrap();
    eventually("no new connections", || {
        std::net::TcpStream::connect(url.trim_start_matches("http://")).is_err().then_some(())
    })
    .await;
    assert!(!serving.is_finished());
    fake.release();
    let rest: Vec<Bytes> = body.map(|piece| piece.unwrap()).collect().await;
    assert!(rest.concat().ends_with(b"data: [DONE]\n\n"));
    tokio::time::timeout(Duration::from_secs(30), serving).await.unwrap().unwrap();
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let build = |upstream: &str, path: &str| {
        let (sender, _receiver) = capture::channel(1);
        let mut settings = ProxySettings::new(upstream.parse().unwrap());
        settings.denied_paths.push(path.into());
        let observer = std::sync::Arc::new(support::front::Observer::default());
        draft_adapter::sidecar::proxy::router(settings, sender, observer).err()
    };
    for upstream in ["/just/a/path", "https://h:1", "h:1"] {
        assert!(matches!(build(upstream, "/x"), Some(ProxyError::Upstream { .. })), "{upstream}");
    }
    assert!(matches!(build("http://h:1", "x"), Some(ProxyError::Path { .. })));
    assert!(build("http://h:1/base/", "/x").is_none());
}
