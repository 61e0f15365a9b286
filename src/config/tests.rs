use std::io::Write;

use super::sidecar::{self, ENV_PREFIX, KEYS, SidecarSettings};
use super::*;

fn layers() -> Layers {
    Layers { env_prefix: ENV_PREFIX, ..Layers::default() }
}

fn file(text: &str) -> (tempfile::NamedTempFile, PathBuf) {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_owned();
    (file, path)
}

fn with_file(text: &str) -> Result<Loaded<SidecarSettings>, ConfigError> {
    let (_keep, path) = file(text);
    sidecar::load(&Layers { file: Some(path), ..layers() })
}

#[test]
fn flags_win_over_environment_over_file_over_default() {
    let (_keep, path) = file("[learn]\nepochs = 3\nseed = 4\nround_samples = 5\n");
    let loaded = sidecar::load(&Layers {
        file: Some(path.clone()),
        env: vec![
            ("DA_LEARN_SEED".into(), "40".into()),
            ("DA_LEARN_ROUND_SAMPLES".into(), "50".into()),
        ],
        flags: vec![("--set".into(), "learn.round_samples".into(), "500".into())],
        ..layers()
    })
    .unwrap();
    let learn = &loaded.settings.learn;
    assert_eq!((learn.epochs, learn.seed, learn.round_samples, learn.rehearsal), (3, 40, 500, 1.0));
    assert_eq!(loaded.values["learn.epochs"].1, Source::File(path));
    assert_eq!(loaded.values["learn.seed"].1, Source::Env("DA_LEARN_SEED".into()));
    assert_eq!(loaded.values["learn.round_samples"].1, Source::Flag("--set".into()));
    assert_eq!(loaded.values["learn.rehearsal"].1, Source::Default);
}

#[test]
fn unknown_keys_are_refused_with_the_nearest_key() {
    let error = with_file("[gate]\nmin_gian = 0.1\n").unwrap_err().to_string();
    assert!(error.contains("unknown key `gate.min_gian`"), "{error}");
    assert!(error.contains("did you mean `gate.min_gain`?"), "{error}");
    let error = with_file("[learning]\nepochs = 1\n").unwrap_err().to_string();
    assert!(error.contains("did you mean `learn.epochs`?"), "{error}");
    let error = with_file("[gaet]\n").unwrap_err().to_string();
    assert!(error.contains("unknown key `gaet`"), "{error}");
    assert!(with_file("[gate]\n").is_ok(), "a known section may be empty");
    let error = with_file("gate = 1\n").unwrap_err().to_string();
    assert!(error.contains("gate = 1") && error.contains("expected a section"), "{error}");
}

#[test]
fn wrong_values_are_refused_with_key_value_and_source() {
    for (text, key, value, reason) in [
        ("[gate]\nmin_gain = \"much\"\n", "gate.min_gain", "\"much\"", "a number"),
        ("[learn]\nepochs = -1\n", "learn.epochs", "-1", "usize"),
        ("[learn]\nepochs = 0\n", "learn.epochs", "0", "more than 0"),
        ("[store]\nkind = \"tape\"\n", "store.kind", "\"tape\"", "unknown variant"),
        ("[learn]\nreplay_fraction = 1.5\n", "learn.replay_fraction", "1.5", "0 to 0.9"),
        ("[proxy]\nlisten = \"8080\"\n", "proxy.listen", "\"8080\"", "ADDRESS:PORT"),
        ("[upstream]\nurl = \"localhost:1\"\n", "upstream.url", "\"localhost:1\"", "http://"),
        ("[train]\nloss = \"mse\"\n", "train.loss", "\"mse\"", "forward_kl"),
        ("grace_seconds = -1.0\n", "grace_seconds", "-1.0", "0 or more"),
    ] {
        let error = with_file(text).unwrap_err().to_string();
        assert!(error.contains(&format!("{key} = {value}")), "{text}: {error}");
        assert!(error.contains("file /") && error.contains(reason), "{text}: {error}");
    }
    let error =
        sidecar::load(&Layers { env: vec![("DA_LEARN_EPOCHS".into(), "two".into())], ..layers() })
            .unwrap_err()
            .to_string();
    assert_eq!(
        error,
        "learn.epochs = \"two\" (environment variable DA_LEARN_EPOCHS): expected a whole number"
    );
}

#[test]
fn a_missing_or_malformed_file_is_named() {
    let missing = Layers { file: Some("/nonexistent/da.toml".into()), ..layers() };
    assert!(sidecar::load(&missing).unwrap_err().to_string().contains("/nonexistent/da.toml"));
    let error = with_file("[gate\n").unwrap_err().to_string();
    assert!(error.contains("is not valid TOML"), "{error}");
}

#[test]
fn every_key_is_documented_once_and_has_a_variable_of_its_own() {
    let known: Vec<String> = keys::<SidecarSettings>().into_keys().collect();
    let mut documented: Vec<String> = KEYS.iter().map(|(key, _)| (*key).to_owned()).collect();
    documented.sort();
    assert_eq!(documented, known);
    let mut variables: Vec<String> = known.iter().map(|key| env_name(ENV_PREFIX, key)).collect();
    variables.sort();
    variables.dedup();
    assert_eq!(variables.len(), known.len());
}

#[test]
fn the_reference_page_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == sidecar::reference(),
        "docs/configuration.md is stale: run `da-sidecar config --reference > docs/configuration.md`"
    );
}

#[test]
fn what_is_shown_can_be_read_back_and_hides_secrets() {
    let (_keep, path) = file("[upstream]\napi_key = \"sesame\"\n[gate]\nmin_gain = 0.25\n");
    let loaded = sidecar::load(&Layers { file: Some(path), ..layers() }).unwrap();
    let shown = loaded.render(sidecar::SECRET_KEYS);
    assert!(!shown.contains("sesame"), "{shown}");
    let again = with_file(&shown).unwrap();
    assert_eq!(again.settings.gate, loaded.settings.gate);
    assert_eq!(again.settings.train, loaded.settings.train);
}
