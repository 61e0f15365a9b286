//! The `openai` Python package against `da-serve`, with the Python that `DA_TEST_PYTHON` names;
//! `make test` sets it.

#![allow(clippy::unwrap_used, clippy::print_stderr)] // a test fails by panicking, or says it is skipped

#[path = "support/serving.rs"]
mod serving;

use std::path::Path;
use std::process::Command;

use serving::{Server, golden};

#[test]
fn the_openai_client_works_unchanged() {
    let Ok(python) = std::env::var("DA_TEST_PYTHON") else {
        eprintln!("skipped: set DA_TEST_PYTHON to a Python with the openai package");
        return;
    };
    let draft = golden("tiny_llama_tied");
    let draft = draft.to_str().unwrap();
    let server = Server::start(&["--draft", draft, "--api-key", "key", "--max-model-len", "256"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_client.py");
    let output =
        Command::new(python).arg(script).args([&server.url("/v1"), "key"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}{errors}");
}
