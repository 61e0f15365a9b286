use std::path::{Path, PathBuf};

use arc_swap::ArcSwap;
use axum::body::Body;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::*;
use crate::serve::drafts::DraftError;
use crate::serve::engine::{Engine, EngineSettings, pool};
use crate::speculate::decode::Draft;
use crate::speculate::fake::FakeDecoder;
use crate::speculate::neural::NeuralProposer;
use crate::speculate::{DraftLength, DraftSampleMethod, Proposer};

mod answers;
mod drafts;
mod refusals;

/// Ids 0 to 94 are the printable ASCII characters, 95 and 96 special tokens; the model has three
/// columns of padding behind them.
const VOCAB: usize = 97;
const END: u32 = 96;

fn tokenizer() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for id in 0..95u8 {
        // Byte-level vocabularies spell the space as U+0120.
        let piece = if id == 0 { '\u{120}' } else { char::from(32 + id) };
        vocab.insert(piece.to_string(), id.into());
    }
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                            "use_regex": true});
    let document = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(95, "<|turn|>"), special(END, "<|end|>")],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(document.to_string().as_bytes()).unwrap()
}

fn decode(ids: &[u32]) -> String {
    ids.iter().filter(|&&id| id < 95).map(|&id| char::from(32 + id as u8)).collect()
}

fn encode(text: &str) -> Vec<u32> {
    text.bytes().map(|byte| u32::from(byte) - 32).collect()
}

/// A server over fake models, reached without a socket.
struct Api {
    router: Router,
    target: Arc<FakeDecoder>,
}

/// How a test wants its server.
struct Setup {
    /// Percentage of contexts in which the draft disagrees; none serves without a draft.
    draft: Option<u64>,
    k: usize,
    eos: bool,
    seqs: usize,
    change: fn(&mut App),
}

impl Default for Setup {
    fn default() -> Self {
        Self { draft: Some(30), k: 4, eos: false, seqs: 8, change: |_| {} }
    }
}

impl Api {
    fn new() -> Self {
        Self::with(Setup::default())
    }

    fn with(setup: Setup) -> Self {
        let mut target = FakeDecoder::new(VOCAB + 3, 11);
        target.ordinary = 95;
        target.eos = setup.eos.then_some(END);
        let target = Arc::new(target);
        let metrics = Arc::new(EngineMetrics::new("fake").unwrap());
        let shared = setup.draft.map(|percent| {
            Arc::new(ArcSwap::from_pointee(Draft {
                model: FakeDecoder::draft_of(&target, percent),
                version: "startup".into(),
                checksum: None,
                path: PathBuf::from("/drafts/startup"),
            }))
        });
        let proposer = shared.as_ref().map(|shared| -> Box<dyn Proposer> {
            let method = DraftSampleMethod::Greedy;
            Box::new(NeuralProposer::new(Arc::clone(shared), method, VOCAB, 64))
        });
        let engine = Engine::start(
            pool(1).unwrap(),
            EngineSettings::new(setup.seqs, 512, VOCAB),
            Arc::clone(&target),
            proposer,
            DraftLength::fixed(setup.k, None),
            Arc::clone(&metrics),
        );
        let model = Arc::clone(&target);
        let drafts = shared.map_or_else(DraftHandle::none, |shared| {
            let stage = move |path: &Path, version: Option<&str>| stage(&model, path, version);
            DraftHandle::start(shared, Arc::new(stage), engine.clone(), &TaskTracker::new())
        });
        let mut app = App::new(Parts {
            engine,
            drafts,
            metrics,
            tokenizer: Arc::new(tokenizer()),
            model_name: "fake".into(),
            max_model_len: 512,
            vocab_size: VOCAB + 3,
        });
        let template = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}\
                        {% if add_generation_prompt %}<|turn|>{% endif %}";
        app.chat_template = Some(ChatTemplate::new(template, "", "<|end|>").unwrap());
        app.eos_ids = Arc::new([END]);
        (setup.change)(&mut app);
        Self { router: router(Arc::new(app)), target }
    }

    async fn send(&self, request: axum::http::Request<Body>) -> Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn post_raw(&self, path: &str, body: impl Into<Body>) -> Response {
        self.send(axum::http::Request::post(path).body(body.into()).unwrap()).await
    }

    async fn post(&self, path: &str, body: Value) -> (StatusCode, Value) {
        read(self.post_raw(path, body.to_string()).await).await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let request = axum::http::Request::get(path).body(Body::empty()).unwrap();
        read(self.send(request).await).await
    }

    /// A completion of token ids, which must succeed.
    async fn complete(&self, body: Value) -> Value {
        let (status, value) = self.post("/v1/completions", body).await;
        assert_eq!(status, StatusCode::OK, "{value}");
        value
    }

    /// The JSON of every event of a stream, after checking its framing.
    async fn stream(&self, path: &str, body: Value) -> Vec<Value> {
        let response = self.post_raw(path, body.to_string()).await;
        assert_eq!(response.status(), StatusCode::OK);
        let kind = response.headers()[header::CONTENT_TYPE].to_str().unwrap();
        assert!(kind.starts_with("text/event-stream"));
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let text = std::str::from_utf8(&bytes).unwrap();
        let frames: Vec<&str> = text.strip_suffix("\n\n").unwrap().split("\n\n").collect();
        let (last, frames) = frames.split_last().unwrap();
        assert_eq!(*last, "data: [DONE]");
        let json = |frame: &&str| serde_json::from_str(frame.strip_prefix("data: ").unwrap());
        frames.iter().map(|frame| json(frame).unwrap()).collect()
    }

    /// The value of a metric with exactly these labels behind the model's.
    async fn metric(&self, name: &str, label: &str) -> f64 {
        let request = axum::http::Request::get("/metrics").body(Body::empty()).unwrap();
        let body = self.send(request).await.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label))
            .unwrap_or_else(|| panic!("{name} {label} is not in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }
}

/// Stands for reading a folder: the folder's name says what is wrong with it.
fn stage(
    target: &FakeDecoder,
    path: &Path,
    version: Option<&str>,
) -> Result<Draft<FakeDecoder>, DraftError> {
    if path.ends_with("wrong") {
        return Err(DraftError::Mismatch {
            what: "hidden_size".into(),
            expected: "288".into(),
            got: "576".into(),
        });
    }
    Ok(Draft {
        model: FakeDecoder::draft_of(target, 0),
        version: version.unwrap_or("unnamed").into(),
        checksum: Some("c0ffee".into()),
        path: path.to_path_buf(),
    })
}

async fn read(response: Response) -> (StatusCode, Value) {
    let status = response.status();
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
}

#[tokio::test]
async fn information_routes() {
    let api = Api::new();
    let (status, models) = api.get("/v1/models").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(models["data"][0]["id"], "fake");
    assert_eq!(models["data"][0]["max_model_len"], 512);
    assert_eq!(api.get("/v1/models/fake").await.1["object"], "model");
    assert_eq!(api.get("/v1/models/other/name").await.0, StatusCode::NOT_FOUND);
    assert_eq!(api.get("/health").await.0, StatusCode::OK);
    assert!(api.get("/version").await.1["version"].is_string());
}

#[tokio::test]
async fn tokenize_and_detokenize_are_inverse() {
    let api = Api::new();
    let (_, got) =
        api.post("/tokenize", json!({"prompt": "Hi there", "return_token_strs": true})).await;
    assert_eq!(got["tokens"], json!(encode("Hi there")));
    assert_eq!((&got["count"], &got["max_model_len"]), (&json!(8), &json!(512)));
    assert_eq!(got["token_strs"][2], "\u{120}");
    let (_, text) = api.post("/detokenize", json!({"tokens": got["tokens"]})).await;
    assert_eq!(text["prompt"], "Hi there");
    let (_, chat) =
        api.post("/tokenize", json!({"messages": [{"role": "user", "content": "x"}]})).await;
    let want = [&[95][..], &encode("user: x"), &[95]].concat();
    assert_eq!(chat["tokens"], json!(want));
}

#[tokio::test]
async fn every_vllm_metric_is_exported() {
    let api = Api::new();
    api.complete(json!({"prompt": "abc", "max_tokens": 30, "temperature": 0})).await;
    use crate::metrics as names;
    let drafts = api.metric(names::VLLM_NUM_DRAFTS, "").await;
    let drafted = api.metric(names::VLLM_NUM_DRAFT_TOKENS, "").await;
    let accepted = api.metric(names::VLLM_NUM_ACCEPTED_TOKENS, "").await;
    assert!(drafts > 0.0 && drafted > accepted && accepted > 0.0);
    let mut positions = 0.0;
    for position in 0..8 {
        let label = format!("position=\"{position}\"");
        positions += api.metric(names::VLLM_ACCEPTED_PER_POS, &label).await;
    }
    assert_eq!(positions, accepted);
    assert_eq!(api.metric(names::VLLM_PROMPT_TOKENS, "model_name=\"fake\"").await, 3.0);
    assert_eq!(api.metric(names::VLLM_GENERATION_TOKENS, "engine=\"0\"").await, 30.0);
    assert_eq!(api.metric(names::VLLM_REQUEST_SUCCESS, "finished_reason=\"length\"").await, 1.0);
    for gauge in
        [names::VLLM_REQUESTS_RUNNING, names::VLLM_REQUESTS_WAITING, names::VLLM_KV_CACHE_USAGE]
    {
        // The engine counts a sequence out after its answer has been sent.
        while api.metric(gauge, "").await >= 1.0 {
            tokio::task::yield_now().await;
        }
    }
    for histogram in [
        names::VLLM_TIME_TO_FIRST_TOKEN,
        names::VLLM_INTER_TOKEN_LATENCY,
        names::VLLM_E2E_LATENCY,
        names::VLLM_REQUEST_QUEUE_TIME,
        names::VLLM_ITERATION_TOKENS,
    ] {
        assert!(api.metric(&format!("{histogram}_count"), "").await > 0.0, "{histogram}");
    }
}
