//! The calls that the sidecar makes of its own accord. User traffic never goes through here.

use std::time::Duration;

use reqwest::{Method, RequestBuilder, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::metrics_text::MetricsText;

mod logprobs;
#[cfg(test)]
mod tests;

pub use logprobs::TokenLogprobs;

/// Longest part of a server's message that is kept; it may quote a prompt.
const MAX_DETAIL: usize = 300;

/// Why a call did not give what was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Down, restarting, overloaded or too slow: the same call may work later.
    #[error("{url} is not available: {reason}")]
    Unavailable { url: String, reason: String },
    /// The server understood and said no.
    #[error("{url} refused with status {status}: {detail}")]
    Refused { url: String, status: u16, detail: String },
    /// The server said yes, but with an answer that cannot be right.
    #[error("{url} gave an answer that cannot be used: {reason}")]
    Unexpected { url: String, reason: String },
    #[error(
        "`{url}` is not a usable base URL: {reason}\nhint: it looks like http://127.0.0.1:8000"
    )]
    BadUrl { url: String, reason: String },
}

/// One entry of `/v1/models`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Model {
    pub id: String,
    /// Set for LoRA adapters: the model that they change.
    #[serde(default)]
    pub parent: Option<String>,
    #[serde(default)]
    pub max_model_len: Option<u64>,
}

/// What the draft route says about the running draft.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DraftInfo {
    /// `startup` when the server cannot know better.
    pub version: String,
    #[serde(default)]
    pub checksum: Option<String>,
    #[serde(default)]
    pub path: Option<String>,
    #[serde(default)]
    pub state: Option<String>,
}

/// What the draft route says after a swap.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct SwapReply {
    pub version: String,
    #[serde(default)]
    pub checksum: Option<String>,
    /// Time spent reading and checking, while serving went on, in milliseconds.
    #[serde(default)]
    pub stage_ms: f64,
    /// Time that serving stood still for, in milliseconds.
    #[serde(default)]
    pub commit_ms: f64,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct Tokens {
    tokens: Vec<u32>,
}

#[derive(Serialize)]
struct SwapRequest<'a> {
    path: &'a str,
    version: &'a str,
}

/// A client of one server. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base_url: String,
    api_key: Option<String>,
}

impl Client {
    /// `base_url` is without `/v1`; the key, where the server has one, is sent as a bearer token.
    ///
    /// # Errors
    /// When the URL is not one.
    pub fn new(base_url: &str, api_key: Option<String>) -> Result<Self, ClientError> {
        let bad = |reason: String| ClientError::BadUrl { url: base_url.into(), reason };
        let url = reqwest::Url::parse(base_url).map_err(|e| bad(e.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(bad("expected http or https and a host".into()));
        }
        // A proxy from the environment must not stand between a sidecar and its server.
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(Duration::from_secs(5))
            .pool_idle_timeout(Duration::from_secs(2))
            .build()
            .map_err(|e| bad(e.to_string()))?;
        Ok(Self { http, base_url: base_url.trim_end_matches('/').into(), api_key })
    }

    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// # Errors
    /// See [`ClientError`].
    pub async fn version(&self) -> Result<String, ClientError> {
        let answer: Version = self.json(self.get("/version")).await?;
        Ok(answer.version)
    }

    /// # Errors
    /// See [`ClientError`].
    pub async fn models(&self) -> Result<Vec<Model>, ClientError> {
        let answer: Models = self.json(self.get("/v1/models")).await?;
        Ok(answer.data)
    }

    /// # Errors
    /// See [`ClientError`]; a server that runs but says it is unhealthy is an error too.
    pub async fn health(&self) -> Result<(), ClientError> {
        self.send(self.get("/health")).await.map(|_| ())
    }

    /// # Errors
    /// See [`ClientError`].
    pub async fn metrics(&self) -> Result<MetricsText, ClientError> {
        let body = self.send(self.get("/metrics")).await?;
        Ok(MetricsText::parse(&String::from_utf8_lossy(&body)))
    }

    /// Token ids of a plain text, as the server's tokenizer has them.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tokenize(
        &self,
        model: &str,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, ClientError> {
        let body =
            json!({"model": model, "prompt": text, "add_special_tokens": add_special_tokens});
        let answer: Tokens = self.json(self.post("/tokenize", &body)).await?;
        Ok(answer.tokens)
    }

    /// Token ids of a chat, rendered with the server's template and ready for an answer.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn tokenize_chat(
        &self,
        model: &str,
        messages: &Value,
    ) -> Result<Vec<u32>, ClientError> {
        let body = json!({"model": model, "messages": messages, "add_generation_prompt": true});
        let answer: Tokens = self.json(self.post("/tokenize", &body)).await?;
        Ok(answer.tokens)
    }

    /// Log-probabilities of the `k` most likely tokens at each position of `ids`, the token that
    /// stands there always among them. The first entry is `None`: nothing predicts it.
    ///
    /// `priority` is for servers that schedule by priority: higher numbers wait longer.
    ///
    /// # Errors
    /// See [`ClientError`]; an answer that does not fit `ids` is [`ClientError::Unexpected`].
    pub async fn prompt_logprobs(
        &self,
        model: &str,
        ids: &[u32],
        k: usize,
        priority: Option<i64>,
    ) -> Result<Vec<Option<TokenLogprobs>>, ClientError> {
        let mut body = json!({
            "model": model, "prompt": ids, "max_tokens": 1, "temperature": 0,
            "prompt_logprobs": k, "return_token_ids": true, "add_special_tokens": false,
        });
        if let Some(priority) = priority {
            body["priority"] = priority.into();
        }
        let answer: Value = self.json(self.post("/v1/completions", &body)).await?;
        logprobs::parse(&answer, ids, k).map_err(|reason| ClientError::Unexpected {
            url: format!("{}/v1/completions", self.base_url),
            reason,
        })
    }

    /// Which draft the server runs.
    ///
    /// # Errors
    /// See [`ClientError`]; 404 means that the server has no draft route.
    pub async fn draft(&self) -> Result<DraftInfo, ClientError> {
        self.json(self.get("/v1/draft_adapter/draft")).await
    }

    /// Makes the server run the draft in the folder `path`, as the server sees that path.
    ///
    /// # Errors
    /// See [`ClientError`]; 409 means that the draft does not fit, and the old one still runs.
    pub async fn swap_draft(&self, path: &str, version: &str) -> Result<SwapReply, ClientError> {
        let request = self.post("/v1/draft_adapter/draft", &SwapRequest { path, version });
        let reply: SwapReply = self.json(request.timeout(Duration::from_secs(300))).await?;
        if reply.version != version {
            return Err(ClientError::Unexpected {
                url: self.base_url.clone(),
                reason: format!("asked for draft {version}, got {}", reply.version),
            });
        }
        Ok(reply)
    }

    fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path).timeout(Duration::from_secs(10))
    }

    fn post(&self, path: &str, body: &impl Serialize) -> RequestBuilder {
        self.request(Method::POST, path).timeout(Duration::from_secs(120)).json(body)
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.base_url));
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn json<T: serde::de::DeserializeOwned>(
        &self,
        request: RequestBuilder,
    ) -> Result<T, ClientError> {
        let body = self.send(request).await?;
        serde_json::from_slice(&body).map_err(|e| ClientError::Unexpected {
            url: self.base_url.clone(),
            reason: e.to_string(),
        })
    }

    async fn send(&self, request: RequestBuilder) -> Result<bytes::Bytes, ClientError> {
        let unavailable =
            |reason: String| ClientError::Unavailable { url: self.base_url.clone(), reason };
        let response = request.send().await.map_err(|e| unavailable(chain(&e)))?;
        let (status, url) = (response.status(), response.url().to_string());
        let body = response.bytes().await.map_err(|e| unavailable(chain(&e)))?;
        if status.is_success() {
            return Ok(body);
        }
        let detail = detail(&body);
        let later = status.is_server_error()
            || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
        if later {
            return Err(unavailable(format!("status {}: {detail}", status.as_u16())));
        }
        Err(ClientError::Refused { url, status: status.as_u16(), detail })
    }
}

/// An error with its causes; reqwest hides the interesting one at the bottom.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// The message in an error answer, in any of the shapes that servers use.
fn detail(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    let places = [&value["detail"], &value["error"]["message"], &value["message"], &value["error"]];
    let text = match places.into_iter().find(|place| !place.is_null()) {
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => String::from_utf8_lossy(body).trim().to_owned(),
    };
    text.chars().take(MAX_DETAIL).collect()
}
