//! A running `da-serve`, for black-box tests. Use it with `#[path = "support/serving.rs"]`.
#![allow(dead_code)] // every test target uses a part of it

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// How long anything may take on a busy machine before a test fails.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// A model of `tests/golden`.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Copies a golden model's folder to `to`, its expected values left out.
pub fn copy_model(name: &str, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(golden(name)).unwrap() {
        let from = entry.unwrap().path();
        let file = from.file_name().unwrap().to_str().unwrap().to_owned();
        if !file.starts_with("expected") && !file.ends_with(".gguf") {
            std::fs::copy(&from, to.join(file)).unwrap();
        }
    }
}

pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_da-serve"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DA_SERVE_")) {
        command.env_remove(name);
    }
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a server that is expected to give up; returns its status and what it wrote to stderr.
pub fn fails(arguments: &[&str]) -> (Option<i32>, String) {
    let output = command(arguments).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Kills the process when a test ends early.
pub struct Server {
    child: Child,
    pub base: String,
}

impl Server {
    /// Starts a server of the golden model `tiny_llama` on a free port.
    pub fn start(arguments: &[&str]) -> Self {
        let model = golden("tiny_llama");
        let fixed =
            ["--model", model.to_str().unwrap(), "--served-model-name", "tiny", "--port", "0"];
        let mut child = command(&[&fixed, arguments].concat()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Some(base) = line.trim().strip_prefix("listening on ") else {
            let mut errors = String::new();
            child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
            panic!("da-serve did not start: {errors}");
        };
        let base = base.to_owned();
        // An unread pipe would block the server once it is full.
        let mut stderr = child.stderr.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Self { child, base }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(reqwest::get(self.url(path)).await.unwrap()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let client = reqwest::Client::new();
        answer(client.post(self.url(path)).json(&body).send().await.unwrap()).await
    }

    /// The value of a metric without further labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = reqwest::get(self.url("/metrics")).await.unwrap().text().await.unwrap();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    pub fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "da-serve does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn answer(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}
