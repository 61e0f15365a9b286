//! Targets from a hub, imitated by a local server.
#![allow(clippy::unwrap_used)] // helpers of tests may stop the test

#[path = "support/golden.rs"]
mod golden;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, Response, StatusCode};
use axum::routing::get;
use draft_adapter::hub::{HubError, HubSettings, HubToken, Target};
use draft_adapter::model::manifest::sha256_bytes;
use serde_json::json;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

/// One repository, `tiny/llama`, with the branch `main`.
struct Hub {
    files: BTreeMap<String, Vec<u8>>,
    requests: AtomicUsize,
    /// Answers weights with a part of them.
    cut: AtomicBool,
    /// Answers weights with one byte changed.
    changed: AtomicBool,
    /// Wants the token.
    private: AtomicBool,
}

impl Hub {
    fn allows(&self, headers: &HeaderMap) -> bool {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let expected = format!("Bearer {TOKEN}");
        let given = headers.get("authorization").and_then(|value| value.to_str().ok());
        !self.private.load(Ordering::SeqCst) || given == Some(expected.as_str())
    }
}

fn answer(status: StatusCode, body: impl Into<Body>) -> Response<Body> {
    Response::builder().status(status).body(body.into()).unwrap()
}

async fn info(
    State(hub): State<Arc<Hub>>,
    Path((owner, name, revision)): Path<(String, String, String)>,
    headers: HeaderMap,
) -> Response<Body> {
    if !hub.allows(&headers) {
        return answer(StatusCode::UNAUTHORIZED, "");
    }
    if (owner.as_str(), name.as_str()) != ("tiny", "llama") || revision != "main" {
        return answer(StatusCode::NOT_FOUND, "{}");
    }
    answer(StatusCode::OK, json!({"id": "tiny/llama", "sha": COMMIT}).to_string())
}

async fn tree(State(hub): State<Arc<Hub>>, headers: HeaderMap) -> Response<Body> {
    if !hub.allows(&headers) {
        return answer(StatusCode::UNAUTHORIZED, "");
    }
    let entry = |(path, content): (&String, &Vec<u8>)| {
        let large = path.ends_with(".safetensors");
        let lfs = json!({"oid": sha256_bytes(content), "sha256": sha256_bytes(content),
                         "size": content.len(), "pointerSize": 100});
        json!({"type": "file", "oid": "x", "size": content.len(), "path": path,
               "lfs": if large { lfs } else { json!(null) }})
    };
    let mut entries: Vec<_> = hub.files.iter().map(entry).collect();
    entries.push(json!({"type": "directory", "oid": "x", "path": "onnx"}));
    answer(StatusCode::OK, json!(entries).to_string())
}

async fn file(
    State(hub): State<Arc<Hub>>,
    Path((_, _, revision, name)): Path<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response<Body> {
    if !hub.allows(&headers) {
        return answer(StatusCode::UNAUTHORIZED, "");
    }
    let Some(content) = hub.files.get(&name).filter(|_| revision == COMMIT) else {
        return answer(StatusCode::NOT_FOUND, "");
    };
    let mut sent = content.clone();
    if name.ends_with(".safetensors") {
        if hub.cut.load(Ordering::SeqCst) {
            sent.truncate(content.len() / 2);
        }
        if hub.changed.load(Ordering::SeqCst) {
            sent[content.len() - 1] ^= 1;
        }
    }
    let length = sent.len();
    let body = if method == Method::HEAD { Body::empty() } else { Body::from(sent) };
    Response::builder()
        .header("etag", format!("\"{}\"", sha256_bytes(content)))
        .header("x-repo-commit", COMMIT)
        .header("content-length", length)
        .body(body)
        .unwrap()
}

/// A running hub, its cache and the settings that lead to them.
struct World {
    hub: Arc<Hub>,
    settings: HubSettings,
    cache: tempfile::TempDir,
    _runtime: tokio::runtime::Runtime,
}

impl World {
    fn new() -> Self {
        let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for entry in std::fs::read_dir(golden::path("tiny_llama")).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            files.insert(name, std::fs::read(entry.path()).unwrap());
        }
        files.insert("README.md".to_string(), b"not needed".to_vec());
        Self::with(files)
    }

    fn with(files: BTreeMap<String, Vec<u8>>) -> Self {
        let hub = Arc::new(Hub {
            files,
            requests: AtomicUsize::new(0),
            cut: AtomicBool::new(false),
            changed: AtomicBool::new(false),
            private: AtomicBool::new(false),
        });
        let routes = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(info))
            .route("/api/models/{owner}/{name}/tree/{revision}", get(tree))
            .route("/{owner}/{name}/resolve/{revision}/{file}", get(file))
            .with_state(Arc::clone(&hub));
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(async { axum::serve(listener, routes).await });
        let cache = tempfile::tempdir().unwrap();
        let settings = HubSettings {
            endpoint: Some(endpoint),
            token: None,
            cache: Some(cache.path().to_path_buf()),
            offline: false,
        };
        Self { hub, settings, cache, _runtime: runtime }
    }

    fn open(&self, spec: &str) -> Result<Target, HubError> {
        Target::open_with(spec, &self.settings)
    }

    fn refusal(&self, spec: &str) -> String {
        match self.open(spec) {
            Ok(_) => panic!("{spec} opened"),
            Err(error) => error.to_string(),
        }
    }

    fn requests(&self) -> usize {
        self.hub.requests.load(Ordering::SeqCst)
    }

    fn snapshot(&self) -> std::path::PathBuf {
        self.cache.path().join("models--tiny--llama/snapshots").join(COMMIT)
    }
}

#[test]
fn repository_is_fetched_once_and_pinned() {
    let world = World::new();
    let target = world.open("tiny/llama").unwrap();
    assert_eq!(target.commit.as_deref(), Some(COMMIT));
    assert_eq!(target.name, "tiny/llama");
    assert_eq!(target.hash().unwrap(), golden::target("tiny_llama").hash().unwrap());
    assert!(!world.snapshot().join("README.md").exists(), "only what is needed is fetched");
    let before = world.requests();
    world.open("tiny/llama").unwrap();
    assert!(world.requests() - before <= 2, "the second time only the commit is asked for");
}

#[test]
fn offline_mode_uses_a_filled_cache_and_no_network() {
    let mut world = World::new();
    world.settings.offline = true;
    let message = world.refusal("tiny/llama");
    assert!(message.contains("HF_HUB_OFFLINE") && message.contains("main"), "{message}");
    world.settings.offline = false;
    world.open("tiny/llama").unwrap();
    world.settings.offline = true;
    let before = world.requests();
    let target = world.open("tiny/llama").unwrap();
    assert_eq!(target.commit.as_deref(), Some(COMMIT));
    world.open(&format!("tiny/llama@{COMMIT}")).unwrap();
    assert!(world.refusal("tiny/llama@other").contains("other"));
    assert_eq!(world.requests(), before);
}

#[test]
fn cache_serves_when_the_hub_is_away() {
    let mut world = World::new();
    world.open("tiny/llama").unwrap();
    // A port that was free a moment ago: nothing listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    world.settings.endpoint = Some(format!("http://{free}"));
    let target = world.open("tiny/llama").unwrap();
    assert_eq!(target.commit.as_deref(), Some(COMMIT));
    let message = world.refusal("tiny/other");
    assert!(message.contains("cannot be reached") && message.contains("hint: "), "{message}");
}

#[test]
fn private_repository_wants_the_token() {
    let mut world = World::new();
    world.hub.private.store(true, Ordering::SeqCst);
    let message = world.refusal("tiny/llama");
    assert!(message.contains("refuses access") && message.contains("HF_TOKEN"), "{message}");
    world.settings.token = Some(HubToken(TOKEN.to_string()));
    world.open("tiny/llama").unwrap();
    assert!(!format!("{:?}", world.settings).contains(TOKEN), "a token is never shown");
}

#[test]
fn cut_or_changed_download_is_noticed_removed_and_repeated() {
    let world = World::new();
    for (fault, name) in [(&world.hub.cut, "bytes"), (&world.hub.changed, "sha256")] {
        fault.store(true, Ordering::SeqCst);
        let message = world.refusal("tiny/llama");
        assert!(message.contains("model.safetensors") && message.contains(name), "{message}");
        assert!(!world.snapshot().join("model.safetensors").exists());
        fault.store(false, Ordering::SeqCst);
    }
    world.open("tiny/llama").unwrap();
}

/// Runs one test of this program in a process whose environment has these variables only.
fn run_alone(test: &str, variables: &[(&str, &str)]) -> std::process::Output {
    std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env_clear()
        .env("CHILD_OF_HUB_TEST", "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn child_opens_what_the_environment_names() {
    if std::env::var_os("CHILD_OF_HUB_TEST").is_some() {
        let target = Target::open("tiny/llama").unwrap();
        assert_eq!(target.commit.as_deref(), Some(COMMIT));
    }
}

#[test]
fn environment_alone_is_enough_and_no_home_is_needed() {
    let world = World::new();
    world.hub.private.store(true, Ordering::SeqCst);
    let endpoint = world.settings.endpoint.clone().unwrap();
    let home = tempfile::tempdir().unwrap();
    let home_path = home.path().to_str().unwrap();
    let child = "child_opens_what_the_environment_names";
    let online = [("HF_ENDPOINT", endpoint.as_str()), ("HF_HOME", home_path), ("HF_TOKEN", TOKEN)];
    let output = run_alone(child, &online);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(home.path().join("hub/models--tiny--llama/refs/main").is_file());
    let before = world.requests();
    let offline = [("HF_HUB_OFFLINE", "1"), ("HF_HOME", home_path), ("HF_ENDPOINT", "")];
    let output = run_alone(child, &offline);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let elsewhere = [("HF_HUB_OFFLINE", "1"), ("HF_HUB_CACHE", "/nonexistent")];
    let output = run_alone(child, &elsewhere);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("/nonexistent"));
    assert_eq!(world.requests(), before);
}

#[test]
fn unknown_names_and_revisions_are_explained() {
    let world = World::new();
    let message = world.refusal("tiny/none");
    assert!(message.contains("tiny/none") && message.contains("hint: "), "{message}");
    let message = world.refusal("tiny/llama@none");
    assert!(message.contains("none") && message.contains("hint: "), "{message}");
}

#[test]
fn repository_without_a_model_is_explained() {
    let world = World::with([("data.csv".to_string(), b"x".to_vec())].into());
    assert!(world.refusal("tiny/llama").contains("no config.json"));
    let config = std::fs::read(golden::path("tiny_llama/config.json")).unwrap();
    let world = World::with([("config.json".to_string(), config)].into());
    assert!(world.refusal("tiny/llama").contains("no weights in safetensors"));
}

#[test]
fn path_that_exists_never_touches_the_network() {
    let world = World::new();
    let folder = golden::path("tiny_llama");
    assert!(world.open(folder.to_str().unwrap()).unwrap().commit.is_none());
    assert_eq!(world.requests(), 0);
}
