//! The reverse proxy in front of the engine: bytes in, the same bytes out.
//!
//! Architecture invariant: a request never waits for anything but the engine. The proxy takes no
//! lock, writes no file, and hands copies to the capture task through a queue that drops when it
//! is full.

mod headers;
mod serve;
mod tee;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse as _, Response};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Method, StatusCode, Uri, Version, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::json;
use tracing::debug;

use super::capture::CaptureSender;
use super::exchange::Api;

pub use headers::{DOMAIN_HEADER, MAX_DOMAIN_CHARS, OPT_OUT_HEADER};
pub use serve::serve;
use tee::{Collector, Ending, TeeBody};

/// nginx's code for "the client went away"; reported to the observer, never sent.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Routes that change or stop the engine. They are for the sidecar and for operators, who reach the
/// engine directly.
pub const ADMIN_PATHS: &[&str] = &[
    "/collective_rpc",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/pause",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/sleep",
    "/start_draft_weight_update",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/v1/draft_adapter",
    "/wake_up",
];

/// Told about every request. Calls happen on the request path and must not block.
pub trait ProxyObserver: Send + Sync {
    /// A request arrived.
    fn started(&self);

    /// It is over; called once for every [`ProxyObserver::started`]. `status` is what was sent, or
    /// 499 when the client left before a status was known. `overhead_seconds` is the time from
    /// arrival to the response's head that was not spent waiting for the upstream.
    fn finished(&self, status: u16, overhead_seconds: f64);

    /// The upstream could not be reached, or broke off.
    fn upstream_error(&self);
}

/// What can be wrong with [`ProxySettings`].
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error(
        "upstream `{got}` is not usable: expected http://HOST:PORT\nhint: the proxy speaks plain HTTP to the engine beside it"
    )]
    Upstream { got: String },
    #[error("path `{got}` must start with a slash")]
    Path { got: String },
}

/// How to proxy.
#[derive(Debug, Clone)]
pub struct ProxySettings {
    /// `http://HOST:PORT`, with a path in front of all paths where there is one.
    pub upstream: Uri,
    /// Answered with 403, and every path below them too.
    pub denied_paths: Vec<String>,
    pub chat_path: String,
    pub completion_path: String,
    /// A larger request is forwarded but not captured.
    pub max_request_bytes: usize,
    /// A larger answer is forwarded but not captured.
    pub max_response_bytes: usize,
    pub connect_timeout: Duration,
    /// Idle upstream connections are dropped after this. Shorter than the five seconds after which
    /// uvicorn drops them, so that no request is sent into a connection that is being closed.
    pub idle_timeout: Duration,
}

impl ProxySettings {
    /// The defaults in front of `upstream`.
    pub fn new(upstream: Uri) -> Self {
        Self {
            upstream,
            denied_paths: ADMIN_PATHS.iter().map(|path| (*path).to_owned()).collect(),
            chat_path: "/v1/chat/completions".into(),
            completion_path: "/v1/completions".into(),
            max_request_bytes: 1 << 20,
            max_response_bytes: 4 << 20,
            connect_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(2),
        }
    }
}

type UpstreamRequest = http::Request<TeeBody<Body>>;

struct Proxy {
    client: Client<HttpConnector, TeeBody<Body>>,
    authority: Authority,
    /// The upstream's own path, without a final slash.
    base_path: String,
    denied: Vec<Vec<String>>,
    settings: ProxySettings,
    capture: CaptureSender,
    observer: Arc<dyn ProxyObserver>,
}

/// Builds the proxy. Serve it with [`serve()`], which also keeps the case of header names, or with
/// any other hyper-based server.
///
/// # Errors
/// When the upstream's URI has no host or is not plain HTTP, or a path has no leading slash.
pub fn router(
    settings: ProxySettings,
    capture: CaptureSender,
    observer: Arc<dyn ProxyObserver>,
) -> Result<Router, ProxyError> {
    let bad_upstream = || ProxyError::Upstream { got: settings.upstream.to_string() };
    if settings.upstream.scheme() != Some(&Scheme::HTTP) {
        return Err(bad_upstream());
    }
    let authority = settings.upstream.authority().ok_or_else(bad_upstream)?.clone();
    let base_path = settings.upstream.path().trim_end_matches('/').to_owned();
    if let Some(path) = settings.denied_paths.iter().find(|path| !path.starts_with('/')) {
        return Err(ProxyError::Path { got: path.clone() });
    }
    let denied = settings.denied_paths.iter().map(|path| headers::segments(path)).collect();

    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(settings.connect_timeout));
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(settings.idle_timeout)
        .http1_preserve_header_case(true)
        .build(connector);
    let proxy = Proxy { client, authority, base_path, denied, settings, capture, observer };
    Ok(Router::new().fallback(forward).with_state(Arc::new(proxy)))
}

/// Reports the end of a request exactly once, however it ends.
struct InFlight {
    observer: Arc<dyn ProxyObserver>,
    arrived: Instant,
    upstream_seconds: f64,
    overhead_seconds: f64,
    status: u16,
}

impl InFlight {
    fn new(observer: Arc<dyn ProxyObserver>) -> Self {
        observer.started();
        Self {
            observer,
            arrived: Instant::now(),
            upstream_seconds: 0.0,
            overhead_seconds: 0.0,
            status: CLIENT_CLOSED_REQUEST,
        }
    }

    fn answered(&mut self, status: StatusCode) {
        self.status = status.as_u16();
        let total = self.arrived.elapsed().as_secs_f64();
        self.overhead_seconds = (total - self.upstream_seconds).max(0.0);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.observer.finished(self.status, self.overhead_seconds);
    }
}

async fn forward(State(proxy): State<Arc<Proxy>>, request: Request) -> Response {
    let mut in_flight = InFlight::new(proxy.observer.clone());
    let refused = proxy.refuse(&request);
    if let Some(response) = refused {
        in_flight.answered(response.status());
        return response;
    }
    let (request, capture) = match proxy.prepare(request) {
        Ok(prepared) => prepared,
        Err(response) => {
            in_flight.answered(response.status());
            return *response;
        }
    };

    let sent = Instant::now();
    let outcome = proxy.client.request(request).await;
    in_flight.upstream_seconds = sent.elapsed().as_secs_f64();
    let response = match outcome {
        Ok(response) => response,
        Err(error) => {
            let response = proxy.upstream_failed(&error);
            in_flight.answered(response.status());
            return response;
        }
    };

    let (mut parts, body) = response.into_parts();
    headers::strip_hop_by_hop(&mut parts.headers);
    // The version is each connection's own affair.
    parts.version = Version::HTTP_11;
    in_flight.answered(parts.status);
    let has_length = parts.headers.contains_key(header::CONTENT_LENGTH);
    let ending = Ending::response(in_flight, capture, &parts);
    Response::from_parts(parts, Body::new(TeeBody::new(body, ending, has_length)))
}

impl Proxy {
    /// Answers what must not reach the engine.
    fn refuse(&self, request: &Request) -> Option<Response> {
        let path = headers::segments(request.uri().path());
        if self.denied.iter().any(|denied| path.starts_with(denied)) {
            let message = format!("{} is not served through the proxy", request.uri().path());
            return Some(error(StatusCode::FORBIDDEN, "forbidden", &message));
        }
        if request.method() == Method::CONNECT || headers::is_websocket(request.headers()) {
            let message =
                "the proxy forwards no upgraded connections; connect to the engine itself";
            return Some(error(StatusCode::NOT_IMPLEMENTED, "not_implemented", message));
        }
        None
    }

    /// Turns an inbound request into the upstream one, with a copy on the way when it is captured.
    fn prepare(
        &self,
        request: Request,
    ) -> Result<(UpstreamRequest, Option<tee::Pending>), Box<Response>> {
        let (mut parts, body) = request.into_parts();
        let inbound_authority = parts.uri.authority().cloned();
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        let uri = Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.authority.clone())
            .path_and_query(format!("{}{path}", self.base_path))
            .build();
        let Ok(uri) = uri else {
            let message = "the request target cannot be forwarded";
            return Err(Box::new(error(StatusCode::BAD_REQUEST, "bad_request", message)));
        };
        let api = self.api(&parts);
        parts.uri = uri;

        let opted_out = headers::take_opt_out(&mut parts.headers);
        let domain = headers::take_domain(&mut parts.headers);
        headers::strip_hop_by_hop(&mut parts.headers);
        headers::http2_to_http1(&mut parts.headers, parts.version, inbound_authority.as_ref());
        parts.version = Version::HTTP_11;

        let mut pending = None;
        let mut ending = Ending::nothing();
        match api {
            Some(_) if opted_out => self.capture.opted_out(),
            Some(api) if self.capture.is_open() => {
                let collector =
                    Collector::new(self.capture.budget(), self.settings.max_request_bytes);
                let (request_ending, collected) = Ending::request(collector, &parts);
                ending = request_ending;
                pending = Some(tee::Pending {
                    api,
                    domain,
                    started_unix_ms: unix_ms(),
                    draft_version: self.capture.draft_version(),
                    request: collected,
                    sender: self.capture.clone(),
                    max_response_bytes: self.settings.max_response_bytes,
                });
            }
            _ => {}
        }
        let body = TeeBody::new(body, ending, true);
        Ok((http::Request::from_parts(parts, body), pending))
    }

    /// Which API a request belongs to, if one whose traffic is captured.
    fn api(&self, parts: &http::request::Parts) -> Option<Api> {
        match parts.uri.path() {
            _ if parts.method != Method::POST => None,
            path if path == self.settings.chat_path => Some(Api::Chat),
            path if path == self.settings.completion_path => Some(Api::Completion),
            _ => None,
        }
    }

    fn upstream_failed(&self, cause: &hyper_util::client::legacy::Error) -> Response {
        let source = std::error::Error::source(cause);
        // The body came from the client: when it fails, the client broke off.
        let by_client = source
            .and_then(|source| source.downcast_ref::<hyper::Error>())
            .is_some_and(hyper::Error::is_user);
        if by_client {
            let message = "the request body broke off";
            return error(StatusCode::BAD_REQUEST, "bad_request", message);
        }
        self.observer.upstream_error();
        let reason = innermost(cause);
        debug!(upstream = %self.authority, reason, "upstream request failed");
        let what = if cause.is_connect() { "is not reachable" } else { "broke off" };
        let message = format!("upstream http://{} {what}: {reason}", self.authority);
        error(StatusCode::BAD_GATEWAY, "upstream_error", &message)
    }
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

/// An error of the proxy's own, in the shape that OpenAI clients show.
fn error(status: StatusCode, kind: &str, message: &str) -> Response {
    let body = json!({"error": {
        "message": message, "type": kind, "param": null, "code": status.as_u16()
    }});
    (status, axum::Json(body)).into_response()
}

fn unix_ms() -> u64 {
    // A clock before 1970 is as good as none.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
