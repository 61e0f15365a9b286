//! What a client and an engine see of each other is the same with the proxy in between.
#![allow(clippy::unwrap_used)]

mod support;

use std::time::Duration;

use support::front::Front;
use support::raw::{RawUpstream, Script, Wire, exchange};

/// A request, and what the engine writes for it.
struct Shape {
    name: &'static str,
    request: Vec<u8>,
    script: Script,
}

fn shape(name: &'static str, request: impl Into<Vec<u8>>, response: impl Into<Vec<u8>>) -> Shape {
    Shape { name, request: request.into(), script: Script::new(response) }
}

fn post(path: &str, extra: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: engine.test:8000\r\nContent-Type: application/json\r\n\
         {extra}Content-Length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: engine.test\r\nAccept: */*\r\n\r\n")
}

fn ok(extra: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\n{extra}Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn chunked(extra: &str, chunks: &[&[u8]], trailers: &str) -> Vec<u8> {
    let mut wire =
        format!("HTTP/1.1 200 OK\r\n{extra}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
    for chunk in chunks {
        wire.extend(format!("{:x}\r\n", chunk.len()).bytes());
        wire.extend_from_slice(chunk);
        wire.extend(b"\r\n");
    }
    wire.extend(format!("0\r\n{trailers}\r\n").bytes());
    wire
}

const SSE: &str = "Date: Thu, 01 Jan 2026 00:00:00 GMT\r\nServer: uvicorn\r\n\
    Content-Type: text/event-stream; charset=utf-8\r\n";

/// A gzip member of `hello`, stored; no decoder is needed to see that it passes unchanged.
const GZIP: &[u8] = &[
    0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1, 5, 0, 0xfa, 0xff, b'h', b'e', b'l', b'l', b'o', 0x86,
    0xa6, 0x10, 0x36, 5, 0, 0, 0,
];

fn shapes() -> Vec<Shape> {
    let chat = "/v1/chat/completions";
    let json = b"{\"model\":\"m\",  \"messages\":[{\"role\":\"user\",\"content\":\"h\\u00e9 \xc3\xa9\"}],\"n\":1}";
    let large: Vec<u8> = (0..600_000_u32).map(|n| (n % 251) as u8).collect();
    let mut shapes = vec![
        shape("get", get("/health"), ok("", b"")),
        shape("get with query", get("/v1/models?a=%20b&c=1+2&d=%C3%A9;x=[1]"), ok("", b"{}")),
        shape("odd path", get("/a//b/../c/%2F%7e/."), ok("X-A: 1\r\n", b"ok")),
        shape(
            "absolute form",
            "GET http://engine.test/v1/models HTTP/1.1\r\nHost: engine.test\r\n\r\n",
            ok("", b"{}"),
        ),
        shape("chat json", post(chat, "", json), ok("Content-Type: application/json\r\n", json)),
        shape("json that is no json", post(chat, "", b"{\"a\":"), ok("", b"\x00\xff not json")),
        shape(
            "stream",
            post(chat, "", b"{\"stream\":true}"),
            chunked(
                SSE,
                &[b"data: {\"a\":", b"1}\n\n", b": ping\r\n\r\n", b"data: [DONE]\n\n"],
                "",
            ),
        ),
        shape(
            "stream with trailers",
            post(chat, "TE: trailers\r\nConnection: TE\r\n", b"{}"),
            chunked("Trailer: X-Sum\r\n", &[b"data: x\n\n"], "X-Sum: 42\r\n"),
        ),
        shape("large body", post("/v1/embeddings", "", &large), ok("", &large)),
        shape(
            "gzip both ways",
            post(chat, "Content-Encoding: gzip\r\nAccept-Encoding: gzip, br\r\n", GZIP),
            ok("Content-Encoding: gzip\r\nVary: Accept-Encoding\r\n", GZIP),
        ),
        shape("error 400", post(chat, "", b"{}"), {
            let body = b"{\"error\":{\"message\":\"no\",\"code\":400}}";
            let head =
                format!("HTTP/1.1 400 Bad Request\r\nContent-Length: {}\r\n\r\n", body.len());
            [head.as_bytes(), body].concat()
        }),
        shape(
            "429 with retry-after",
            post(chat, "", b"{}"),
            "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nslow",
        ),
        shape(
            "503 with its own reason",
            get("/health"),
            "HTTP/1.1 503 Engine Is Loading\r\nContent-Length: 0\r\n\r\n",
        ),
        shape("unusual status", get("/x"), "HTTP/1.1 299 Fine\r\nContent-Length: 2\r\n\r\nhm"),
        shape("no content", post("/x", "", b"{}"), "HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n"),
        shape("not modified", get("/x"), "HTTP/1.1 304 Not Modified\r\nETag: \"e\"\r\n\r\n"),
        shape(
            "redirect is not followed",
            get("/old"),
            "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://elsewhere.test/new\r\n\
             Content-Length: 0\r\n\r\n",
        ),
        shape(
            "head with a length",
            "HEAD /v1/models HTTP/1.1\r\nHost: engine.test\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1234\r\nContent-Type: application/json\r\n\r\n",
        ),
        shape(
            "head of a stream",
            "HEAD /v1/stream HTTP/1.1\r\nHost: engine.test\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n",
        ),
        shape(
            "options",
            "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: engine.test\r\nOrigin: http://a.test\r\n\
             Access-Control-Request-Method: POST\r\n\r\n",
            ok("Access-Control-Allow-Origin: *\r\n", b""),
        ),
        shape(
            "delete, and a method of its own",
            "DELETE /v1/files/1 HTTP/1.1\r\nHost: engine.test\r\n\r\n",
            ok("", b"{}"),
        ),
        shape("unknown method", "BREW /pot HTTP/1.1\r\nHost: engine.test\r\n\r\n", ok("", b"")),
        shape(
            "headers: repeated, empty, odd case and bytes",
            [b"GET /h HTTP/1.1\r\nHost: engine.test\r\nX-Twice: a\r\nx-twice: b\r\nX-EMPTY:\r\n\
                  X-Latin: caf\xc3\xa9\r\nAuthorization: Bearer sk-1\r\nCookie: a=1; b=2\r\n\
                  User-Agent: openai/1.0\r\nX-Request-ID: 77\r\n\r\n"
                .as_slice()]
            .concat(),
            ok("Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nx-lower: 1\r\nX-UPPER: 2\r\n", b"x"),
        ),
        shape(
            "chunked request",
            "POST /v1/completions HTTP/1.1\r\nHost: engine.test\r\nTransfer-Encoding: chunked\r\n\r\n\
             5\r\n{\"a\":\r\n3;ext=1\r\n1}\n\r\n0\r\n\r\n",
            ok("", b"{}"),
        ),
        shape("empty post", post("/tokenize", "", b""), ok("", b"{}")),
        shape(
            "multipart",
            post(
                "/v1/audio/transcriptions",
                "",
                b"--b\r\nContent-Disposition: x\r\n\r\n\0\r\n--b--",
            ),
            ok("Content-Disposition: attachment; filename=\"a\"\r\n", b"\0\x01\x02"),
        ),
    ];
    let mut close = shape(
        "delimited by the end of the connection",
        get("/old-server"),
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nuntil the end",
    );
    close.script.close = true;
    shapes.push(close);
    // One byte at a time.
    let mut slow = shape(
        "in single bytes",
        post(chat, "", json),
        chunked(SSE, &[b"data: \xf0\x9f\x98\x8a\n\n"], ""),
    );
    slow.script.pieces = slow.script.pieces[0].chunks(1).map(<[u8]>::to_vec).collect();
    slow.script.pause = Duration::from_millis(1);
    shapes.push(slow);
    shapes
}

/// What must be equal. Names of HTTP/1.1 headers are compared with their case.
#[derive(Debug, PartialEq)]
struct Compared<'a> {
    start: &'a str,
    headers: Vec<(String, String)>,
    body: &'a [u8],
    trailers: Vec<(String, &'a str)>,
}

fn compared(wire: &Wire) -> Compared<'_> {
    let trailers = wire.trailers.iter().map(|(name, value)| (name.to_lowercase(), value.as_str()));
    Compared {
        start: &wire.start,
        headers: wire.end_to_end(),
        body: &wire.body,
        trailers: trailers.collect(),
    }
}

#[tokio::test]
async fn bytes_and_headers_pass_unchanged_both_ways() {
    let upstream = RawUpstream::start().await;
    let front = Front::start(upstream.addr).await;
    let shapes = shapes();
    assert!(shapes.len() >= 20);
    for Shape { name, request, script } in shapes {
        upstream.script(script.clone());
        let direct = exchange(upstream.addr, &request).await;
        upstream.script(script);
        let proxied = exchange(front.addr, &request).await;
        assert!(direct.complete && proxied.complete, "{name}");
        assert_eq!(compared(&direct), compared(&proxied), "response of `{name}`");

        let seen = std::mem::take(&mut *upstream.seen.lock());
        let [mut direct, proxied] = <[Wire; 2]>::try_from(seen).unwrap();
        if let Some((method, rest)) = direct.start.split_once(" http://engine.test") {
            // A server is sent the origin form, a proxy may be sent the absolute one.
            direct.start = format!("{method} {rest}");
        }
        assert_eq!(compared(&direct), compared(&proxied), "request of `{name}`");
    }
}

#[tokio::test]
async fn a_response_that_breaks_off_breaks_off_for_the_client_too() {
    let upstream = RawUpstream::start().await;
    let front = Front::start(upstream.addr).await;
    let request = post("/v1/chat/completions", "", b"{}");
    for broken in [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this".to_vec(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n".to_vec(),
    ] {
        let mut script = Script::new(broken);
        script.close = true;
        upstream.script(script.clone());
        let direct = exchange(upstream.addr, &request).await;
        upstream.script(script);
        let proxied = exchange(front.addr, &request).await;
        assert!(!direct.complete);
        assert!(!proxied.complete, "the client must see that the answer is cut");
        assert_eq!(proxied.body, direct.body);
    }
    let told = front.until("both were counted", |told| told.finished.len() == 2).await;
    assert_eq!(told.upstream_errors, 2);
    let told = front.until("no sample", |t| t.dropped.get("aborted") == Some(&2)).await;
    assert!(told.captured.is_empty());
}

#[tokio::test]
async fn the_first_bytes_are_passed_on_at_once() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let upstream = RawUpstream::start().await;
    let front = Front::start(upstream.addr).await;
    let head = format!("HTTP/1.1 200 OK\r\n{SSE}Transfer-Encoding: chunked\r\n\r\n");
    let mut script = Script::new(head + "9\r\ndata: 1\n\n\r\n");
    // The rest never comes while the test runs.
    script.pause = Duration::from_secs(600);
    upstream.script(script);
    let mut client = tokio::net::TcpStream::connect(front.addr).await.unwrap();
    client.write_all(&post("/v1/chat/completions", "", b"{}")).await.unwrap();
    let mut seen: Vec<u8> = Vec::new();
    let read = async {
        while !seen.windows(7).any(|w| w == b"data: 1") {
            let mut piece = [0; 4096];
            let n = client.read(&mut piece).await.unwrap();
            assert!(n > 0);
            seen.extend(&piece[..n]);
        }
    };
    tokio::time::timeout(Duration::from_secs(30), read).await.expect("the event is not held back");
}
