//! The HTTP API: vLLM's OpenAI-compatible routes, and the draft route of its plugin.
//!
//! Routes: `/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/v1/models/{id}`,
//! `/tokenize`, `/detokenize`, `/health`, `/ping`, `/version`, `/metrics`,
//! `/v1/draft_adapter/draft`, `/v1/draft_adapter/engine`.

use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::drafts::DraftHandle;
use super::engine::EngineHandle;
use super::metrics::EngineMetrics;
use crate::model::Tokenizer;
use crate::model::chat::ChatTemplate;
use error::ApiError;
use fields::Fields;
use logprobs::TokenTexts;

mod chat;
mod choices;
mod completions;
mod draft_route;
mod error;
mod fields;
mod info;
mod logprobs;
mod params;
mod respond;
mod tokenize;

/// Largest request body. A prompt that fills any supported context as a list of ids is smaller.
const BODY_LIMIT: usize = 16 << 20;

/// Sampling parameters of requests that leave them out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Defaults {
    pub temperature: f64,
    pub top_p: f64,
    /// -1 or 0 is off.
    pub top_k: i64,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0 }
    }
}

/// What every handler reads. Nothing in it changes, except behind the handles.
pub struct App {
    pub engine: EngineHandle,
    pub drafts: DraftHandle,
    pub metrics: Arc<EngineMetrics>,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
    pub model_name: String,
    /// The model as the server was started with it.
    pub root: String,
    pub max_model_len: usize,
    /// Ids that a prompt may hold.
    pub vocab_size: usize,
    pub max_logprobs: usize,
    pub defaults: Defaults,
    pub eos_ids: Arc<[u32]>,
    pub api_key: Option<String>,
    /// Adds `metrics.speculative_decoding` to answers with one choice.
    pub request_speculation_metrics: bool,
    /// Start of the server, in seconds since the epoch.
    pub created: u64,
    texts: TokenTexts,
}

/// The parts of an [`App`] that have no default.
pub struct Parts {
    pub engine: EngineHandle,
    pub drafts: DraftHandle,
    pub metrics: Arc<EngineMetrics>,
    pub tokenizer: Arc<Tokenizer>,
    pub model_name: String,
    pub max_model_len: usize,
    pub vocab_size: usize,
}

impl App {
    /// An application with vLLM's defaults for everything else.
    pub fn new(parts: Parts) -> Self {
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            texts: TokenTexts::new(Arc::clone(&parts.tokenizer)),
            engine: parts.engine,
            drafts: parts.drafts,
            metrics: parts.metrics,
            tokenizer: parts.tokenizer,
            chat_template: None,
            root: parts.model_name.clone(),
            model_name: parts.model_name,
            max_model_len: parts.max_model_len,
            vocab_size: parts.vocab_size,
            max_logprobs: 20,
            defaults: Defaults::default(),
            eos_ids: Arc::new([]),
            api_key: None,
            request_speculation_metrics: false,
            created: created.map_or(0, |since| since.as_secs()),
        }
    }

    /// Refuses a request for a model that is not served here.
    fn check_model(&self, fields: &Fields) -> Result<(), ApiError> {
        match fields.text("model")? {
            None => Ok(()),
            Some(name) if name == self.model_name => Ok(()),
            Some(name) => Err(ApiError {
                param: Some("model".into()),
                ..ApiError::new(
                    StatusCode::NOT_FOUND,
                    format!("The model `{name}` does not exist."),
                )
            }),
        }
    }

    /// Encodes text off the async threads.
    async fn encode(self: &Arc<Self>, text: String, special: bool) -> Result<Vec<u32>, ApiError> {
        let app = Arc::clone(self);
        tokio::task::spawn_blocking(move || app.tokenizer.encode(&text, special))
            .await
            .map_err(|error| ApiError::internal(format!("the tokenizer panicked: {error}")))?
            .map_err(|error| ApiError::bad_request(format!("cannot tokenize the text: {error}")))
    }
}

/// All routes over one application.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{*id}", get(info::model))
        .route("/v1/draft_adapter/draft", get(draft_route::show).post(draft_route::swap))
        .route("/v1/draft_adapter/engine", get(draft_route::engine))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(info::health))
        .route("/ping", get(info::health).post(info::health))
        .route("/version", get(info::version))
        .route("/metrics", get(info::metrics))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "Not Found") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), authenticate))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(app)
}

/// As in vLLM, the key guards `/v1` and nothing else, so that probes and scrapers need none.
async fn authenticate(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let Some(key) = &app.api_key else { return next.run(request).await };
    let path = request.uri().path();
    let guarded = path == "/v1" || path.starts_with("/v1/");
    if guarded && !bears(request.headers(), key) {
        return ApiError::new(StatusCode::UNAUTHORIZED, "Unauthorized").into_response();
    }
    next.run(request).await
}

fn bears(headers: &HeaderMap, key: &str) -> bool {
    let value = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let Some(token) = value.and_then(|value| value.strip_prefix(b"Bearer ")) else { return false };
    // Takes the same time wherever the first difference is.
    let difference = token.iter().zip(key.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
    token.len() == key.len() && difference == 0
}

/// A JSON object as the body, whatever its content type says.
struct JsonBody(Fields);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| {
            let status = rejection.status();
            let message = match (status, &rejection) {
                (StatusCode::PAYLOAD_TOO_LARGE, _) => {
                    format!("the body is larger than {BODY_LIMIT} bytes")
                }
                (_, BytesRejection::FailedToBufferBody(inner)) => inner.body_text(),
                (_, other) => other.body_text(),
            };
            ApiError::new(status, message)
        })?;
        Fields::parse(&bytes).map(Self)
    }
}

#[cfg(test)]
mod tests;
