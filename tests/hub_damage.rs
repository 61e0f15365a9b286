//! Files with arbitrary damage: an error or a model, never a panic or a wild allocation.
#![allow(clippy::unwrap_used)] // helpers of tests may stop the test

#[path = "support/golden.rs"]
mod golden;

use std::path::Path;
use std::sync::LazyLock;

use candle_core::Device;
use draft_adapter::hub::Target;
use draft_adapter::model::ModelConfig;
use draft_adapter::model::chat::ChatTemplate;
use proptest::prelude::*;

static SAFETENSORS: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read(golden::path("tiny_llama/model.safetensors")).unwrap());
static GGUF: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read(golden::path("tiny_llama/tiny_llama.gguf")).unwrap());
static CONFIG: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read(golden::path("tiny_llama/config.json")).unwrap());

/// Bytes that replace others, and a length to cut to, as fractions of the header's length: most
/// damage is to hit the header, which has all the structure.
#[derive(Debug, Clone)]
struct Damage {
    changes: Vec<(prop::sample::Index, u8)>,
    header_only: bool,
    cut: Option<prop::sample::Index>,
}

impl Damage {
    fn apply(&self, bytes: &[u8], header: usize) -> Vec<u8> {
        let mut bytes = bytes.to_vec();
        let span = if self.header_only { header } else { bytes.len() };
        for (at, value) in &self.changes {
            bytes[at.index(span)] = *value;
        }
        if let Some(cut) = &self.cut {
            bytes.truncate(cut.index(span));
        }
        bytes
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let byte = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(0x7f)];
    let changes = prop::collection::vec((any::<prop::sample::Index>(), byte), 0..4);
    let cut = prop::option::weighted(0.3, any::<prop::sample::Index>());
    (changes, prop::bool::weighted(0.8), cut).prop_map(|(changes, header_only, cut)| Damage {
        changes,
        header_only,
        cut,
    })
}

fn open_and_read(path: &Path) {
    if let Ok(target) = Target::open(path.to_str().unwrap()) {
        for name in target.weights.names() {
            let _ = target.weights.tensor(&name, &Device::Cpu);
        }
        let ids = target.tokenizer.encode("the train <|im_end|> é", true).unwrap();
        let _ = target.tokenizer.decode(&ids, false);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn damaged_gguf_never_panics(damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, damage.apply(&GGUF, 16_000)).unwrap();
        open_and_read(&path);
    }

    #[test]
    fn damaged_safetensors_never_panic(damage in damage()) {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "tokenizer.json"] {
            let from = golden::path("tiny_llama").join(name);
            std::fs::copy(from, folder.path().join(name)).unwrap();
        }
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, damage.apply(&SAFETENSORS, 3000)).unwrap();
        open_and_read(folder.path());
    }

    #[test]
    fn damaged_config_never_panics(damage in damage()) {
        if let Ok(config) = ModelConfig::from_json(&damage.apply(&CONFIG, CONFIG.len())) {
            let _ = (config.parameters(), config.parameters_per_step(), config.query_size());
        }
    }

    #[test]
    fn any_template_compiles_or_is_refused(source in any::<String>(), tag in "[%{}a-z \n'|.-]{0,40}") {
        let _ = ChatTemplate::new(&source, "", "");
        if let Ok(template) = ChatTemplate::new(&format!("{{%{tag}%}}{{{{{tag}}}}}"), "", "") {
            let _ = template.render(&serde_json::json!([]), None, true);
        }
    }
}
