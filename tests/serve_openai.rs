//! The `openai` Python package against `da-serve`. `make test` installs it into `.venv-test`;
//! without it the test says so and passes, unless `DA_REQUIRE_OPENAI=1`.

#![allow(clippy::unwrap_used)] // a test fails by panicking

#[path = "support/serving.rs"]
mod serving;

use std::path::Path;
use std::process::Command;

use serving::{Server, golden};

/// A Python that has the package.
fn python() -> Option<String> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv-test/bin/python");
    let candidates = [venv.to_str()?.to_owned(), "python3".to_owned()];
    candidates.into_iter().find(|python| {
        let imported = Command::new(python).args(["-c", "import openai"]).output();
        imported.is_ok_and(|output| output.status.success())
    })
}

#[test]
fn the_openai_client_works_unchanged() {
    let Some(python) = python() else {
        let required = std::env::var("DA_REQUIRE_OPENAI").is_ok_and(|value| value == "1");
        assert!(!required, "DA_REQUIRE_OPENAI is set, but no python3 has the openai package");
        eprintln!("skipped: no python3 with the openai package (make test installs it)");
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
