//! GGUF headers written by hand: what metadata is understood, and how the rest is refused.

use std::path::Path;

use super::header::Header;
use super::{GgufTokenizer, config};
use crate::hub::HubError;
use crate::model::config::RopeScaling;
use crate::model::{ModelConfig, Tokenizer};

/// A file without tensor data.
#[derive(Clone, Default)]
struct Builder {
    entries: Vec<(String, Vec<u8>)>,
    tensors: Vec<(&'static str, Vec<u64>)>,
}

impl Builder {
    /// A model of two layers with four heads of eight.
    fn llama() -> Self {
        let mut builder = Self::default();
        builder.tensors.push(("token_embd.weight", vec![32, 260]));
        builder
            .text("general.architecture", "llama")
            .integer("llama.block_count", 2)
            .integer("llama.context_length", 128)
            .integer("llama.embedding_length", 32)
            .integer("llama.feed_forward_length", 48)
            .integer("llama.attention.head_count", 4)
            .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
            .float("llama.rope.freq_base", 500_000.0)
    }

    /// All bytes, two words and two control tokens.
    fn tokenizer(pre: &str) -> Self {
        let mut tokens: Vec<String> = (0..=255u8).map(|byte| stand_in(byte).to_string()).collect();
        tokens.extend(["ab", "<|bos|>", "<|eos|>", "[PAD259]"].map(str::to_string));
        let kinds: Vec<u32> =
            (0..260).map(|id| [1, 3, 5][usize::from(id > 256) + usize::from(id == 259)]).collect();
        Self::default()
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", pre)
            .texts("tokenizer.ggml.tokens", &tokens)
            .integers("tokenizer.ggml.token_type", &kinds)
            .texts("tokenizer.ggml.merges", &["a b".to_string()])
            .integer("tokenizer.ggml.bos_token_id", 257)
            .integer("tokenizer.ggml.eos_token_id", 258)
    }

    fn put(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.entries.retain(|(name, _)| name != key);
        self.entries.push((key.to_string(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        self.put(key, 8, &text(value))
    }

    fn integer(self, key: &str, value: u32) -> Self {
        self.put(key, 4, &value.to_le_bytes())
    }

    fn float(self, key: &str, value: f32) -> Self {
        self.put(key, 6, &value.to_le_bytes())
    }

    fn flag(self, key: &str, value: bool) -> Self {
        self.put(key, 7, &[u8::from(value)])
    }

    fn texts(self, key: &str, values: &[String]) -> Self {
        let parts: Vec<Vec<u8>> = values.iter().map(|value| text(value)).collect();
        self.put(key, 9, &array(8, &parts))
    }

    fn integers(self, key: &str, values: &[u32]) -> Self {
        let parts: Vec<Vec<u8>> = values.iter().map(|value| value.to_le_bytes().to_vec()).collect();
        self.put(key, 9, &array(4, &parts))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            bytes.extend(text(key));
            bytes.extend(value);
        }
        for (name, dimensions) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((dimensions.len() as u32).to_le_bytes());
            bytes.extend(dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
            bytes.extend([0; 12]);
        }
        bytes
    }

    fn header(&self) -> Header {
        Header::parse(&self.bytes()).unwrap()
    }

    fn config(&self, factors: Option<Vec<f32>>) -> Result<ModelConfig, HubError> {
        config::read(&self.header(), Path::new("model.gguf"), factors)
    }

    fn refusal(&self) -> String {
        self.config(None).unwrap_err().to_string()
    }
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn array(kind: u32, parts: &[Vec<u8>]) -> Vec<u8> {
    let len = (parts.len() as u64).to_le_bytes();
    [kind.to_le_bytes().as_slice(), &len, &parts.concat()].concat()
}

/// The character for a byte in byte-level vocabularies.
fn stand_in(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let index = (0..byte).filter(|byte| !printable(*byte)).count();
    char::from_u32(0x100 + index as u32).unwrap()
}

fn tokenizer(builder: &Builder) -> Tokenizer {
    let header = builder.header();
    let parts = GgufTokenizer::new(&header.metadata).unwrap();
    Tokenizer::from_bytes(&parts.json().unwrap()).unwrap()
}

#[test]
fn optional_keys_have_llamas_defaults() {
    let config = Builder::llama().config(None).unwrap();
    assert_eq!((config.num_key_value_heads, config.head_dim), (4, 8));
    assert_eq!((config.vocab_size, config.tie_word_embeddings), (260, true));
    assert_eq!((config.norm_eps, config.rope_theta), (1e-5, 5e5));
    assert_eq!((config.bos_token_id, config.eos_token_ids.as_slice()), (None, [].as_slice()));
    let wide = Builder::llama().integer("llama.attention.key_length", 16);
    let wide = wide.integer("llama.attention.value_length", 16).config(None).unwrap();
    assert_eq!(wide.query_size(), 64);
}

#[test]
fn end_of_turn_ends_a_generation_too() {
    let builder = Builder::llama().integer("tokenizer.ggml.eos_token_id", 7);
    assert_eq!(builder.config(None).unwrap().eos_token_ids, [7]);
    let builder = builder.integer("tokenizer.ggml.eot_token_id", 9);
    assert_eq!(builder.config(None).unwrap().eos_token_ids, [7, 9]);
}

#[test]
fn other_models_are_refused_by_name() {
    let llama = Builder::llama();
    let cases = [
        (llama.clone().text("general.architecture", "gemma3"), "gemma3 is not yet supported"),
        (llama.clone().text("general.architecture", "mamba"), "state-space"),
        (llama.clone().text("general.architecture", "deepseek2"), "latent attention"),
        (llama.clone().text("general.architecture", "nomic-bert"), "encoder"),
        (llama.clone().integer("llama.expert_count", 8), "mixture of experts"),
        (llama.clone().text("llama.rope.scaling.type", "yarn"), "yarn"),
        (llama.clone().integer("llama.rope.dimension_count", 4), "partial rotary"),
        (llama.clone().integer("llama.attention.value_length", 4), "value heads of 4"),
        (llama.clone().integers("llama.attention.head_count_kv", &[1, 2]), "head_count_kv"),
    ];
    for (builder, words) in cases {
        let message = builder.refusal();
        assert!(message.contains(words) && message.contains("model.gguf"), "{message}");
    }
    let mut incomplete = llama;
    incomplete.entries.retain(|(key, _)| key != "llama.block_count");
    assert!(incomplete.refusal().contains("llama.block_count is missing"));
}

#[test]
fn llama3_scaling_is_recognised_by_its_divisors() {
    // The file has frequency divisors only: those of Llama 3.2, factor 32, for heads of 64.
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let divisor = |pair: usize| {
        let frequency = 5e5f64.powf(-2.0 * pair as f64 / 64.0);
        (frequency / scaling.scale(frequency)) as f32
    };
    let factors: Vec<f32> = (0..32).map(divisor).collect();
    assert!(factors[0] == 1.0 && factors[31] == 32.0);
    let builder = Builder::llama()
        .integer("llama.attention.key_length", 64)
        .integer("llama.attention.value_length", 64);
    let config = builder.config(Some(factors.clone())).unwrap();
    assert_eq!(config.rope_scaling, Some(scaling));
    let mut other = factors;
    other[20] *= 1.1;
    let message = builder.config(Some(other)).unwrap_err().to_string();
    assert!(message.contains("rope_freqs.weight") && message.contains("hint: "), "{message}");
}

#[test]
fn linear_scaling_is_read() {
    let builder = Builder::llama().text("llama.rope.scaling.type", "linear");
    assert!(builder.refusal().contains("llama.rope.scaling.factor is missing"));
    let config = builder.float("llama.rope.scaling.factor", 4.0).config(None).unwrap();
    assert_eq!(config.rope_scaling, Some(RopeScaling::Linear { factor: 4.0 }));
}

#[test]
fn every_pre_tokenizer_gives_text_back() {
    let text = "abab it's 2024, naïve\n\n  x";
    for pre in ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"] {
        let tokenizer = tokenizer(&Builder::tokenizer(pre));
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{pre}");
        assert_eq!(ids[..2], [256, 256], "{pre} merges");
        assert_eq!(tokenizer.encode("<|eos|>", false).unwrap(), [258], "{pre}");
        assert_eq!(tokenizer.piece(259), None, "padding is no token");
    }
}

#[test]
fn bos_is_added_where_the_file_says_so() {
    let first = |builder: &Builder| tokenizer(builder).encode("a", true).unwrap();
    let a = u32::from(b'a');
    assert_eq!(first(&Builder::tokenizer("smollm")), [a]);
    let added = Builder::tokenizer("smollm").flag("tokenizer.ggml.add_bos_token", true);
    assert_eq!(first(&added), [257, a]);
    // Llama 3 adds it unless told otherwise.
    assert_eq!(first(&Builder::tokenizer("llama-bpe")), [257, a]);
    let plain = Builder::tokenizer("llama-bpe").flag("tokenizer.ggml.add_bos_token", false);
    assert_eq!(first(&plain), [a]);
}

#[test]
fn other_tokenizers_are_refused_by_name() {
    let refusal = |builder: Builder| {
        let header = builder.header();
        let result = GgufTokenizer::new(&header.metadata).and_then(|parts| parts.json());
        result.unwrap_err().to_string()
    };
    let message = refusal(Builder::tokenizer("tekken"));
    assert!(message.contains("tekken") && message.contains("hint: "), "{message}");
    let message = refusal(Builder::tokenizer("smollm").text("tokenizer.ggml.model", "llama"));
    assert!(message.contains("tokenizer model \"llama\""), "{message}");
    assert!(refusal(Builder::default()).contains("no tokenizer"));
    let twice = Builder::tokenizer("smollm")
        .texts("tokenizer.ggml.tokens", &["a".to_string(), "a".to_string()])
        .integers("tokenizer.ggml.token_type", &[1, 1]);
    assert!(refusal(twice).contains("tokens 0 and 1 are both \"a\""));
    let short = Builder::tokenizer("smollm").integers("tokenizer.ggml.token_type", &[1]);
    assert!(refusal(short).contains("260 tokens have 1 token types"));
}
