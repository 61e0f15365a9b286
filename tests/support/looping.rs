//! A whole sidecar over the fake server and the fake trainer, in this process or in its own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use draft_adapter::config::sidecar::{SidecarSettings, StoreKind};
use draft_adapter::sidecar::control::ControlAddress;
use draft_adapter::sidecar::control::client::{Ask, ControlError, ask};
use draft_adapter::sidecar::run::{RunError, Sidecar};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::fake_trainer::{launch, write_draft};
use super::fake_vllm::{FakeVllm, MODEL};

/// Generous: a loaded machine may take long, a right answer never waits for it.
pub const DEADLINE: Duration = Duration::from_secs(120);
const SETTINGS: &str = "DA_TEST_SIDECAR_SETTINGS";
/// Acceptance that the first draft is measured at.
pub const FIRST_ACCEPTANCE: f64 = 0.3;

/// Settings that make everything happen soon.
pub fn settings(folder: &Path, upstream: &str) -> SidecarSettings {
    let mut settings = SidecarSettings {
        work_dir: folder.join("work"),
        draft: folder.join("draft"),
        grace_seconds: 20.0,
        ..SidecarSettings::default()
    };
    settings.upstream.url = upstream.to_owned();
    settings.upstream.poll_seconds = 0.05;
    settings.proxy.listen = "127.0.0.1:0".into();
    settings.admin.listen = "127.0.0.1:0".into();
    settings.capture.held_out_every = 3;
    settings.store.kind = StoreKind::Disk;
    settings.teacher.yield_to_traffic = false;
    settings.learn.round_samples = 8;
    settings.learn.round_max_wait_seconds = 0.5;
    settings.learn.epochs = 1;
    settings.gate.min_positions = 1;
    settings.watch.settle_seconds = 0.0;
    settings.watch.min_tokens = 200;
    settings.trainer.restart_max_seconds = 0.1;
    settings
}

/// A running sidecar with what it runs on.
pub struct Loop {
    pub fake: FakeVllm,
    pub folder: tempfile::TempDir,
    pub settings: SidecarSettings,
    pub admin: String,
    pub proxy: String,
    pub control: ControlAddress,
    pub http: reqwest::Client,
    running: Option<Running>,
    asked: usize,
}

enum Running {
    Here { stop: Option<oneshot::Sender<()>>, task: JoinHandle<Result<(), RunError>> },
    Process(Child),
}

impl Loop {
    pub async fn start(configure: impl FnOnce(&mut SidecarSettings)) -> Self {
        let mut this = Self::prepare(configure).await;
        this.run_here().await;
        this
    }

    /// Everything but the sidecar itself.
    pub async fn prepare(configure: impl FnOnce(&mut SidecarSettings)) -> Self {
        // For looking into a failure: `DA_TEST_LOG=draft_adapter=debug`.
        if let Ok(filter) = std::env::var("DA_TEST_LOG") {
            tracing_subscriber::fmt().with_env_filter(filter).with_test_writer().try_init().ok();
        }
        let fake = FakeVllm::start().await;
        let folder = tempfile::tempdir().unwrap();
        write_draft(&folder.path().join("draft"), FIRST_ACCEPTANCE);
        let mut settings = settings(folder.path(), &fake.url());
        configure(&mut settings);
        Self {
            fake,
            folder,
            settings,
            admin: String::new(),
            proxy: String::new(),
            control: ControlAddress::Tcp(String::new()),
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
            running: None,
            asked: 0,
        }
    }

    pub fn work(&self) -> &Path {
        &self.settings.work_dir
    }

    pub fn draft_folder(&self, version: &str) -> PathBuf {
        self.work().join("drafts").join(version)
    }

    pub async fn run_here(&mut self) {
        let sidecar = Sidecar::start(self.settings.clone(), launch(self.work())).await.unwrap();
        let addresses = sidecar.addresses().clone();
        self.take(addresses.proxy.to_string(), addresses.admin.to_string(), addresses.control);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(sidecar.run(async {
            stopped.await.ok();
        }));
        self.running = Some(Running::Here { stop: Some(stop), task });
    }

    /// Starts this test executable again as the sidecar: it must have an ignored test
    /// `sidecar_child` that calls [`child`].
    pub async fn run_process(&mut self) {
        let addresses = self.folder.path().join("addresses.json");
        std::fs::remove_file(&addresses).ok();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["sidecar_child", "--exact", "--ignored", "--nocapture"])
            .env(SETTINGS, json!({"settings": self.settings, "addresses": addresses}).to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        self.running = Some(Running::Process(process));
        let started = Instant::now();
        let found: Value = loop {
            if let Ok(text) = std::fs::read(&addresses) {
                break serde_json::from_slice(&text).unwrap();
            }
            assert!(started.elapsed() < DEADLINE, "the sidecar process did not start");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let text = |name: &str| found[name].as_str().unwrap().to_owned();
        let control = ControlAddress::Socket(PathBuf::from(text("control")));
        self.take(text("proxy"), text("admin"), control);
    }

    fn take(&mut self, proxy: String, admin: String, control: ControlAddress) {
        (self.proxy, self.admin, self.control) = (proxy, admin, control);
    }

    /// Stops in order.
    pub async fn stop(&mut self) {
        self.signal();
        self.ended().await;
    }

    /// Asks the sidecar to stop: SIGTERM for a process.
    pub fn signal(&mut self) {
        match self.running.as_mut().expect("it runs") {
            Running::Here { stop, .. } => stop.take().expect("asked once").send(()).unwrap(),
            Running::Process(process) => {
                let pid = rustix::process::Pid::from_child(process);
                rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            }
        }
    }

    /// Whether a sidecar process is still there.
    pub fn lives(&mut self) -> bool {
        match self.running.as_mut().expect("it was started") {
            Running::Here { task, .. } => !task.is_finished(),
            Running::Process(process) => process.try_wait().unwrap().is_none(),
        }
    }

    /// Waits for the end, which must be a clean one.
    pub async fn ended(&mut self) {
        match self.running.take().expect("it runs") {
            Running::Here { task, .. } => {
                tokio::time::timeout(DEADLINE, task)
                    .await
                    .expect("stops in time")
                    .unwrap()
                    .unwrap();
            }
            Running::Process(mut process) => {
                let status = tokio::task::spawn_blocking(move || process.wait());
                let status = tokio::time::timeout(DEADLINE, status).await.expect("stops in time");
                assert!(status.unwrap().unwrap().success());
            }
        }
    }

    /// Kills a sidecar process with signal 9.
    pub fn kill(&mut self) {
        let Some(Running::Process(mut process)) = self.running.take() else {
            panic!("only a process can be killed");
        };
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// Sends one chat through the proxy and reads the whole answer.
    pub async fn chat(&mut self, domain: &str) -> reqwest::StatusCode {
        self.asked += 1;
        let body = json!({
            "model": MODEL, "temperature": 0, "return_token_ids": true,
            "messages": [{"role": "user", "content": format!("{domain} question {}", self.asked)}],
        });
        let response = self
            .http
            .post(format!("http://{}/v1/chat/completions", self.proxy))
            .header("x-draft-adapter-domain", domain)
            .json(&body)
            .send()
            .await
            .unwrap();
        let status = response.status();
        response.bytes().await.unwrap();
        status
    }

    pub async fn traffic(&mut self, requests: usize, domain: &str) {
        for _ in 0..requests {
            assert_eq!(self.chat(domain).await, 200);
        }
    }

    pub async fn get(&self, path: &str) -> String {
        let url = format!("http://{}{path}", self.admin);
        self.http.get(url).send().await.unwrap().text().await.unwrap()
    }

    pub async fn status(&self) -> Value {
        serde_json::from_str(&self.get("/status").await).unwrap()
    }

    /// Waits until the status fits, and returns it.
    pub async fn until(&self, what: &str, fits: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let status = self.status().await;
            if fits(&status) {
                return status;
            }
            assert!(started.elapsed() < DEADLINE, "{what} did not happen: {status:#}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Keeps traffic going until the status fits.
    pub async fn traffic_until(
        &mut self,
        domain: &str,
        what: &str,
        fits: impl Fn(&Value) -> bool,
    ) -> Value {
        let started = Instant::now();
        loop {
            let status = self.status().await;
            if fits(&status) {
                return status;
            }
            assert!(started.elapsed() < DEADLINE, "{what} did not happen: {status:#}");
            let count = |name: &str| status["store"][name].as_u64().unwrap_or(0);
            // No faster than the teacher: what is looked at must be recent.
            if count("samples") < count("scored") + 8 {
                self.traffic(4, domain).await;
            } else {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }

    pub async fn ask(&self, what: Ask) -> Result<String, ControlError> {
        ask(&self.control, what, false).await
    }

    pub fn manifest(&self, version: &str) -> Value {
        let path = self.draft_folder(version).join("da_manifest.json");
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    pub fn current(&self) -> String {
        let link = std::fs::read_link(self.draft_folder("current")).unwrap();
        link.to_string_lossy().into_owned()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Some(Running::Process(process)) = &mut self.running {
            process.kill().ok();
            process.wait().ok();
        }
    }
}

pub fn running(status: &Value) -> &str {
    status["running"].as_str().unwrap()
}

/// A version's entry in the status document.
pub fn version<'a>(status: &'a Value, version: &str) -> &'a Value {
    let versions = status["versions"].as_array().unwrap();
    versions.iter().find(|entry| entry["version"] == version).unwrap_or(&Value::Null)
}

/// The body of `sidecar_child`; does nothing when it was not started by [`Loop::run_process`].
pub fn child() {
    let Ok(text) = std::env::var(SETTINGS) else { return };
    let mut given: Value = serde_json::from_str(&text).unwrap();
    let settings: SidecarSettings = serde_json::from_value(given["settings"].take()).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate()).unwrap();
        let launch = launch(&settings.work_dir);
        let sidecar = Sidecar::start(settings, launch).await.unwrap();
        let addresses = sidecar.addresses();
        let found = json!({
            "proxy": addresses.proxy.to_string(),
            "admin": addresses.admin.to_string(),
            "control": addresses.control.to_string(),
        });
        let path = PathBuf::from(given["addresses"].as_str().unwrap());
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, found.to_string()).unwrap();
        std::fs::rename(fresh, path).unwrap();
        sidecar
            .run(async move {
                terminate.recv().await;
            })
            .await
            .unwrap();
    });
}
