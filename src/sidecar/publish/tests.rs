use super::*;
use crate::model::manifest::sha256_bytes;
use crate::sidecar::versions::{LiveCounters, VersionRecord};

fn draft(folder: &Path, weights: &str) {
    std::fs::create_dir_all(folder).unwrap();
    for (name, text) in
        [("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", weights)]
    {
        std::fs::write(folder.join(name), text).unwrap();
    }
}

/// Stages a version as the trainer would.
fn stage(work: &WorkDir, version: &str, weights: &str) {
    let staged = work.staged(version);
    draft(&staged, weights);
    let mut manifest = foreign_manifest(&staged).unwrap();
    manifest.version = version.into();
    let text = serde_json::to_vec(&manifest).unwrap();
    std::fs::write(staged.join(MANIFEST_FILE), text).unwrap();
}

fn record(version: &str, parent: Option<&str>, state: VersionState) -> VersionRecord {
    VersionRecord {
        version: version.into(),
        parent: parent.map(str::to_owned),
        state,
        checksum: String::new(),
        created_unix: 0,
        gate: None,
        live: LiveCounters::default(),
        stage_ms: None,
        swap_stall_ms: None,
        reason: None,
        on_disk: true,
    }
}

struct Fixture {
    work: WorkDir,
    ledger: Ledger,
    folder: tempfile::TempDir,
}

fn fixture() -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    draft(&source, "zero");
    let work = WorkDir::open(&folder.path().join("work")).unwrap();
    let manifest = work.import(&source).unwrap();
    let mut ledger = Ledger::first(manifest.checksum(), 1, String::new());
    work.recover(&mut ledger).unwrap();
    Fixture { work, ledger, folder }
}

fn current(work: &WorkDir) -> String {
    std::fs::read_link(work.drafts().join(CURRENT_LINK)).unwrap().display().to_string()
}

#[test]
fn an_import_is_a_whole_copy_under_its_own_manifest() {
    let Fixture { work, folder, .. } = fixture();
    let manifest = work.whole(FIRST_VERSION).expect("imported whole");
    assert_eq!(manifest.version, FIRST_VERSION);
    assert_eq!(manifest.files["model.safetensors"], sha256_bytes(b"zero"));
    std::fs::write(folder.path().join("source/model.safetensors"), "changed").unwrap();
    assert!(work.whole(FIRST_VERSION).is_some(), "a change of the source does not reach it");
    assert_eq!(current(&work), FIRST_VERSION);
}

#[test]
fn what_is_not_a_draft_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let work = WorkDir::open(&folder.path().join("work")).unwrap();
    let missing = work.import(Path::new("/nonexistent")).unwrap_err();
    assert!(missing.is_usage() && missing.to_string().contains("da-build"), "{missing}");
    let source = folder.path().join("source");
    draft(&source, "zero");
    std::fs::remove_file(source.join("model.safetensors")).unwrap();
    let error = work.import(&source).unwrap_err().to_string();
    assert!(error.contains("no safetensors file"), "{error}");
    draft(&source, "zero");
    std::fs::write(source.join(VOCAB_FILE), "[0,null]").unwrap();
    let error = work.import(&source).unwrap_err();
    assert!(error.is_usage() && error.to_string().contains("--vocab"), "{error}");
    assert_eq!(work.next_number().unwrap(), 0);
    assert_eq!(work.remove_leftovers().unwrap(), 0);
}

#[test]
fn a_damaged_staged_folder_does_not_get_its_name() {
    let Fixture { work, folder: _folder, .. } = fixture();
    stage(&work, "v000001", "one");
    std::fs::write(work.staged("v000001").join("model.safetensors"), "torn").unwrap();
    assert!(matches!(work.place("v000001"), Err(FolderError::Manifest(_))));
    assert!(!work.version("v000001").exists());
}

#[test]
fn a_second_sidecar_is_kept_out() {
    let Fixture { work, folder: _folder, .. } = fixture();
    assert!(matches!(WorkDir::open(work.root()), Err(FolderError::Locked { .. })));
}

#[test]
fn a_publication_cut_short_is_completed_or_forgotten() {
    for placed in [false, true] {
        let Fixture { work, mut ledger, folder: _folder } = fixture();
        ledger.versions.push(record("v000001", Some(FIRST_VERSION), VersionState::Publishing));
        ledger.next = 2;
        stage(&work, "v000001", "one");
        if placed {
            work.place("v000001").unwrap();
        }
        work.recover(&mut ledger).unwrap();
        assert!(!work.staged("v000001").exists(), "leftovers are removed");
        let expected = if placed { "v000001" } else { FIRST_VERSION };
        assert_eq!((ledger.running.as_str(), current(&work).as_str()), (expected, expected));
        assert_eq!(ledger.find("v000001").is_some(), placed);
    }
}

#[test]
fn the_link_follows_the_ledger_and_a_lost_version_falls_back() {
    let Fixture { work, mut ledger, folder: _folder } = fixture();
    stage(&work, "v000001", "one");
    work.place("v000001").unwrap();
    ledger.versions.push(record("v000001", Some(FIRST_VERSION), VersionState::Published));
    ledger.running = "v000001".into();
    work.recover(&mut ledger).unwrap();
    assert_eq!(current(&work), "v000001");
    std::fs::remove_dir_all(work.version("v000001")).unwrap();
    work.recover(&mut ledger).unwrap();
    assert_eq!(current(&work), FIRST_VERSION);
    assert_eq!(ledger.restart_from.as_deref(), Some(FIRST_VERSION));
}

#[test]
fn retention_spares_what_may_be_needed() {
    let Fixture { work, mut ledger, folder: _folder } = fixture();
    let mut parent = FIRST_VERSION.to_owned();
    for number in 1..=6 {
        let version = format!("v{number:06}");
        stage(&work, &version, &version);
        work.place(&version).unwrap();
        ledger.versions.push(record(&version, Some(&parent), VersionState::Published));
        parent = version;
    }
    ledger.running = "v000004".into();
    ledger.pinned = Some("v000001".into());
    assert_eq!(work.retain(&mut ledger, 1, &[]), 2);
    let kept: Vec<&str> = ledger
        .versions
        .iter()
        .filter(|record| record.on_disk)
        .map(|record| record.version.as_str())
        .collect();
    assert_eq!(kept, [FIRST_VERSION, "v000001", "v000003", "v000004", "v000006"]);
    for version in kept {
        assert!(work.whole(version).is_some(), "{version}");
    }
    assert!(!work.version("v000002").exists() && !work.version("v000005").exists());
}

#[test]
fn the_ledger_is_read_back_as_it_was() {
    let Fixture { work, mut ledger, folder: _folder } = fixture();
    ledger.paused = true;
    ledger.training.seconds = 1.25;
    ledger.save(work.root()).unwrap();
    assert_eq!(Ledger::load(work.root()).unwrap(), Some(ledger));
    std::fs::write(work.root().join("state.json"), "{").unwrap();
    let error = Ledger::load(work.root()).unwrap_err().to_string();
    assert!(error.contains("state.json is not a ledger of this build"), "{error}");
}
