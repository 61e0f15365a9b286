//! A fake engine that speaks the part of vLLM's API that the sidecar uses.
//!
//! It answers deterministically (equal prompts, equal answers), frames its streams as vLLM does,
//! moves the speculative counters at an acceptance that is set for each draft version, swaps
//! drafts through the draft route, and fails on demand.
//!
//! ```ignore
//! let fake = FakeVllm::start().await;
//! fake.set_acceptance("v000001", 0.8);
//! let draft = fake.draft_version();            // "startup"
//! fake.inject(Fault::status(429, "slow down"), 2);
//! fake.down().await; fake.up().await;          // same port
//! fake.fail_swaps(Some("shape differs"));      // 409 from now on; None: works again
//! ```

mod engine;
mod openai;
pub mod sim;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

pub const MODEL: &str = "fake-target";

/// What goes wrong with the next requests for an answer.
#[derive(Debug, Clone)]
pub enum Fault {
    /// An error answer in the OpenAI shape.
    Status { status: u16, message: String },
    /// The connection breaks after this many stream events.
    ResetMidStream { after_events: usize },
    /// Nothing is sent for this long.
    SlowFirstToken(Duration),
    /// A stream that ends without `[DONE]`.
    NoDone,
}

impl Fault {
    pub fn status(status: u16, message: &str) -> Self {
        Self::Status { status, message: message.into() }
    }
}

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Recorded {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// The speculative counters and the others that move.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    pub drafts: u64,
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
    pub per_pos: Vec<u64>,
    pub generation_tokens: u64,
    pub prompt_tokens: u64,
    pub requests_finished: u64,
}

/// Everything that tests may set or look at.
pub struct Inner {
    pub num_speculative_tokens: usize,
    /// Acceptance by draft version; [`Inner::default_acceptance`] for the others.
    pub acceptance: BTreeMap<String, f64>,
    pub default_acceptance: f64,
    pub counters: Counters,
    /// Fraction of an accepted token carried to the next step, so that rates come out exact.
    carry: f64,
    pub draft_version: String,
    pub draft_checksum: Option<String>,
    pub draft_path: Option<String>,
    /// Versions swapped in, in order.
    pub swaps: Vec<String>,
    fail_swaps: Option<String>,
    swap_delay: Duration,
    has_draft_route: bool,
    speculates: bool,
    faults: VecDeque<Fault>,
    pub recorded: Vec<Recorded>,
    /// Highest `logprobs` and `prompt_logprobs` that are served.
    pub max_logprobs: usize,
    pub max_model_len: usize,
    pub requests_waiting: u64,
    pub active: u64,
    /// Answers whose client went away before the end.
    pub cancelled: u64,
    /// When set, `prompt_logprobs` answers are passed through it, to make them wrong.
    pub spoil_logprobs: Option<fn(&mut Value)>,
    pub api_key: Option<String>,
    token_delay: Duration,
    next_id: u64,
}

/// State shared by the routes.
pub struct Shared {
    pub inner: Mutex<Inner>,
    /// Tokens that may be sent; streams wait at it. `usize::MAX` when nothing is held.
    hold: watch::Sender<usize>,
}

/// The running fake. Dropping it stops the server and breaks its connections.
pub struct FakeVllm {
    pub addr: SocketAddr,
    pub shared: Arc<Shared>,
    server: Mutex<Option<JoinHandle<()>>>,
}

impl FakeVllm {
    /// Listens on a free port of 127.0.0.1.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let inner = Inner {
            num_speculative_tokens: 4,
            acceptance: BTreeMap::new(),
            default_acceptance: 0.5,
            counters: Counters { per_pos: vec![0; 4], ..Counters::default() },
            carry: 0.0,
            draft_version: "startup".into(),
            draft_checksum: None,
            draft_path: None,
            swaps: Vec::new(),
            fail_swaps: None,
            swap_delay: Duration::ZERO,
            has_draft_route: true,
            speculates: true,
            faults: VecDeque::new(),
            recorded: Vec::new(),
            max_logprobs: 20,
            max_model_len: 2048,
            requests_waiting: 0,
            active: 0,
            cancelled: 0,
            spoil_logprobs: None,
            api_key: None,
            token_delay: Duration::ZERO,
            next_id: 0,
        };
        let shared =
            Arc::new(Shared { inner: Mutex::new(inner), hold: watch::channel(usize::MAX).0 });
        let server = tokio::spawn(serve(listener, router(shared.clone())));
        Self { addr, shared, server: Mutex::new(Some(server)) }
    }

    /// `http://127.0.0.1:PORT`, without a final slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Stops listening and breaks every connection; state and counters stay.
    pub async fn down(&self) {
        let server = self.server.lock().take();
        if let Some(server) = server {
            server.abort();
            let _ = server.await;
        }
    }

    /// Listens again on the same port.
    pub async fn up(&self) {
        self.down().await;
        let listener = loop {
            match TcpListener::bind(self.addr).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        };
        *self.server.lock() = Some(tokio::spawn(serve(listener, router(self.shared.clone()))));
    }

    /// What a restarted server forgets: counters go to zero and the draft to `startup`.
    pub fn forget(&self) {
        let mut inner = self.shared.inner.lock();
        let k = inner.num_speculative_tokens;
        inner.counters = Counters { per_pos: vec![0; k], ..Counters::default() };
        inner.draft_version = "startup".into();
        inner.draft_checksum = None;
        inner.draft_path = None;
    }

    /// Runs `f` on the state.
    pub fn with<T>(&self, f: impl FnOnce(&mut Inner) -> T) -> T {
        f(&mut self.shared.inner.lock())
    }

    /// Share of drafted tokens that is accepted while `version` runs.
    pub fn set_acceptance(&self, version: &str, rate: f64) {
        self.with(|inner| inner.acceptance.insert(version.into(), rate));
    }

    pub fn draft_version(&self) -> String {
        self.with(|inner| inner.draft_version.clone())
    }

    pub fn swaps(&self) -> Vec<String> {
        self.with(|inner| inner.swaps.clone())
    }

    pub fn counters(&self) -> Counters {
        self.with(|inner| inner.counters.clone())
    }

    /// Refuses swaps with 409 and this detail; `None` lets them through again.
    pub fn fail_swaps(&self, detail: Option<&str>) {
        self.with(|inner| inner.fail_swaps = detail.map(str::to_owned));
    }

    pub fn set_swap_delay(&self, delay: Duration) {
        self.with(|inner| inner.swap_delay = delay);
    }

    /// A server without the plugin answers 404 there.
    pub fn remove_draft_route(&self) {
        self.with(|inner| inner.has_draft_route = false);
    }

    /// A server without speculation has no such series in its metrics.
    pub fn stop_speculating(&self) {
        self.with(|inner| inner.speculates = false);
    }

    /// The next `times` requests for an answer fail like this.
    pub fn inject(&self, fault: Fault, times: usize) {
        self.with(|inner| inner.faults.extend(std::iter::repeat_n(fault, times)));
    }

    /// Time between two steps of an answer.
    pub fn set_token_delay(&self, delay: Duration) {
        self.with(|inner| inner.token_delay = delay);
    }

    /// Every answer stops after `tokens` tokens until [`FakeVllm::release`].
    pub fn hold_after(&self, tokens: usize) {
        self.shared.hold.send_replace(tokens);
    }

    pub fn release(&self) {
        self.shared.hold.send_replace(usize::MAX);
    }

    /// Requests seen on `path`, oldest first.
    pub fn recorded(&self, path: &str) -> Vec<Recorded> {
        self.with(|inner| inner.recorded.iter().filter(|r| r.uri.path() == path).cloned().collect())
    }
}

impl Drop for FakeVllm {
    fn drop(&mut self) {
        if let Some(server) = self.server.lock().take() {
            server.abort();
        }
    }
}

impl Inner {
    /// One verification step under the running draft: how many drafted tokens are accepted.
    pub fn step(&mut self) -> usize {
        if !self.speculates {
            return 0;
        }
        let rate =
            self.acceptance.get(&self.draft_version).copied().unwrap_or(self.default_acceptance);
        let k = self.num_speculative_tokens;
        self.carry += rate * k as f64;
        let accepted = (self.carry + 1e-9).floor().min(k as f64);
        self.carry -= accepted;
        let accepted = accepted as usize;
        self.counters.drafts += 1;
        self.counters.draft_tokens += k as u64;
        self.counters.accepted_tokens += accepted as u64;
        for position in &mut self.counters.per_pos[..accepted] {
            *position += 1;
        }
        accepted
    }

    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

async fn serve(listener: TcpListener, router: Router) {
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use hyper_util::service::TowerToHyperService;
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
                .serve_connection_with_upgrades(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(|| async { "" }))
        .route("/version", get(|| async { Json(json!({"version": "0.32.0"})) }))
        .route("/v1/models", get(engine::models))
        .route("/metrics", get(engine::metrics))
        .route("/tokenize", post(openai::tokenize))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat_completions))
        .route("/v1/draft_adapter/draft", get(engine::draft).post(engine::swap))
        .fallback(|| async { error(404, "Not Found") })
        .layer(axum::middleware::from_fn_with_state(shared.clone(), record))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .with_state(shared)
}

/// Keeps a copy of every request and checks the API key where one is set.
async fn record(
    State(shared): State<Arc<Shared>>,
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else {
        return error(400, "request body broke off");
    };
    let refused = {
        let mut inner = shared.inner.lock();
        inner.recorded.push(Recorded {
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            headers: parts.headers.clone(),
            body: body.clone(),
        });
        let expected = inner.api_key.as_ref().map(|key| format!("Bearer {key}"));
        let got = parts.headers.get("authorization").and_then(|v| v.to_str().ok());
        parts.uri.path().starts_with("/v1") && expected.is_some() && expected.as_deref() != got
    };
    if refused {
        return error(401, "Unauthorized");
    }
    next.run(axum::extract::Request::from_parts(parts, body.into())).await
}

/// An error in the shape of the OpenAI API.
pub fn error(status: u16, message: &str) -> Response {
    let body = json!({"error": {
        "message": message, "type": "BadRequestError", "param": null, "code": status
    }});
    (StatusCode::from_u16(status).unwrap(), Json(body)).into_response()
}
