use proptest::prelude::*;
use serde_json::{Value, json};

use super::{TokenStream, Tokenizer, TokenizerError};

const BYTE_LEVEL: &[u8] = include_bytes!("../../../tests/golden/tiny_llama/tokenizer.json");
const BYTE_FALLBACK: &[u8] = include_bytes!("../../../tests/golden/tokenizers/byte_fallback.json");

fn byte_level() -> Tokenizer {
    Tokenizer::from_bytes(BYTE_LEVEL).unwrap()
}

fn byte_fallback() -> Tokenizer {
    Tokenizer::from_bytes(BYTE_FALLBACK).unwrap()
}

/// The increments of a stream over `ids`, one for each id and one for the end.
fn increments(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
    let mut stream = TokenStream::new(skip_special);
    let mut parts: Vec<String> =
        ids.iter().map(|id| stream.push(tokenizer, *id).unwrap()).collect();
    parts.push(stream.finish(tokenizer).unwrap());
    parts
}

proptest! {
    #[test]
    fn increments_of_any_text_are_the_text(text in any::<String>()) {
        let tokenizer = byte_level();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(increments(&tokenizer, &ids, false).concat(), text);
    }

    #[test]
    fn increments_of_any_ids_are_the_whole_decode(
        ids in prop::collection::vec(0u32..288, 0..40),
        skip_special in any::<bool>(),
    ) {
        let tokenizer = byte_level();
        let whole = tokenizer.decode(&ids, skip_special).unwrap();
        prop_assert_eq!(increments(&tokenizer, &ids, skip_special).concat(), whole);
    }

    #[test]
    fn increments_with_byte_fallback_are_the_whole_decode(
        // Ids 0 to 2 are special, 3 to 258 are bytes, the rest text.
        ids in prop::collection::vec(prop_oneof![0u32..3, 100u32..259, 259u32..295], 0..40),
        skip_special in any::<bool>(),
    ) {
        let tokenizer = byte_fallback();
        let whole = tokenizer.decode(&ids, skip_special).unwrap();
        prop_assert_eq!(increments(&tokenizer, &ids, skip_special).concat(), whole);
    }

    #[test]
    fn increments_of_any_text_with_byte_fallback_are_its_decode(text in any::<String>()) {
        let tokenizer = byte_fallback();
        let ids = tokenizer.encode(&text, true).unwrap();
        let whole = tokenizer.decode(&ids, true).unwrap();
        prop_assert_eq!(increments(&tokenizer, &ids, true).concat(), whole);
    }

    #[test]
    fn damaged_files_never_panic(at in 0..BYTE_LEVEL.len(), byte in any::<u8>(), cut in any::<bool>()) {
        let mut json = BYTE_LEVEL.to_vec();
        json[at] = byte;
        if cut {
            json.truncate(at);
        }
        if let Ok(tokenizer) = Tokenizer::from_bytes(&json) {
            let ids = tokenizer.encode("the train 12 <|im_end|>", true).unwrap();
            let _ = tokenizer.decode(&ids, false);
        }
    }
}

#[test]
fn character_split_over_tokens_comes_out_whole() {
    let tokenizer = byte_level();
    let ids = tokenizer.encode("é🦀", false).unwrap();
    assert_eq!(ids.len(), 6, "one token for each byte");
    assert_eq!(increments(&tokenizer, &ids, false), ["", "é", "", "", "", "🦀", ""]);
    // The same, cut off within the crab, and with a byte that no character begins with.
    assert_eq!(increments(&tokenizer, &ids[..4], false), ["", "é", "", "", "\u{fffd}"]);
    let text = increments(&tokenizer, &[ids[2], ids[0], ids[1]], false);
    assert_eq!(text, ["", "\u{fffd}", "é", ""]);
}

#[test]
fn leading_space_is_dropped_at_the_start_only() {
    let tokenizer = byte_fallback();
    let ids = tokenizer.encode("the the", false).unwrap();
    assert_eq!(increments(&tokenizer, &ids, false), ["the", " the", ""]);
    let mut stream = TokenStream::after(&tokenizer, &ids[..1], true);
    assert_eq!(stream.push(&tokenizer, ids[1]).unwrap(), " the");
}

#[test]
fn special_token_between_words_loses_no_space() {
    let tokenizer = byte_fallback();
    let the = tokenizer.token_id("▁the").unwrap();
    assert_eq!(increments(&tokenizer, &[1, the, 2, the], true), ["", "the", "", " the", ""]);
}

#[test]
fn special_tokens_are_recognised_and_added_on_request_only() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.encode("<|im_end|>", false).unwrap(), [2]);
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(2));
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(3));
    assert_eq!(tokenizer.decode(&[2, 68], true).unwrap(), tokenizer.decode(&[68], false).unwrap());
    let tokenizer = byte_fallback();
    let plain = tokenizer.encode("the", false).unwrap();
    let with_bos = tokenizer.encode("the", true).unwrap();
    assert_eq!(with_bos, [&[1], plain.as_slice()].concat());
}

#[test]
fn pieces_and_bytes_of_ids() {
    let tokenizer = byte_level();
    assert_eq!(tokenizer.vocab_size(), 288);
    let space_t = tokenizer.token_id("Ġt").unwrap();
    assert_eq!(tokenizer.piece(space_t).as_deref(), Some("Ġt"));
    assert_eq!(tokenizer.piece_bytes(space_t).as_deref(), Some(b" t".as_slice()));
    assert_eq!(tokenizer.piece(288), None);
    assert_eq!(byte_fallback().piece_bytes(300), None);
    for id in 3..259 {
        assert_eq!(tokenizer.piece_bytes(id).unwrap().len(), 1, "id {id} is one byte");
    }
}

#[test]
fn unknown_ids_are_errors() {
    let tokenizer = byte_level();
    let error = tokenizer.decode(&[5, 288], false).unwrap_err();
    assert!(matches!(error, TokenizerError::UnknownId { id: 288, vocab_size: 288 }));
    let mut stream = TokenStream::new(false);
    assert!(stream.push(&tokenizer, 1 << 30).is_err());
    assert_eq!(stream.push(&tokenizer, 68).unwrap(), tokenizer.decode(&[68], false).unwrap());
}

#[test]
fn merges_may_be_texts_or_pairs() {
    let mut document: Value = serde_json::from_slice(BYTE_LEVEL).unwrap();
    let merges = document["model"]["merges"].as_array_mut().unwrap();
    assert!(merges[0].is_array());
    for merge in merges {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    let texts = Tokenizer::from_bytes(document.to_string().as_bytes()).unwrap();
    let text = "the rain in spain";
    assert_eq!(texts.encode(text, false).unwrap(), byte_level().encode(text, false).unwrap());
}

#[test]
fn padding_and_truncation_of_the_file_are_ignored() {
    let mut document: Value = serde_json::from_slice(BYTE_LEVEL).unwrap();
    document["truncation"] = json!({
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    });
    document["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    });
    let json = document.to_string();
    let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
    let text = "the rain in spain";
    assert_eq!(tokenizer.encode(text, false).unwrap(), byte_level().encode(text, false).unwrap());
    assert_eq!(tokenizer.json(), json.as_bytes(), "the file itself is kept as it is");
}

#[test]
fn file_of_a_newer_library_is_explained() {
    let mut document: Value = serde_json::from_slice(BYTE_LEVEL).unwrap();
    document["pre_tokenizer"] = json!({"type": "Telepathy"});
    let error = Tokenizer::from_bytes(document.to_string().as_bytes()).err().unwrap().to_string();
    assert!(error.contains("pre_tokenizer Telepathy") && error.contains("newer"), "{error}");
    let error = Tokenizer::from_bytes(b"{").err().unwrap().to_string();
    assert!(error.contains("not valid JSON"), "{error}");
    let error = Tokenizer::from_bytes(b"{}").err().unwrap().to_string();
    assert!(error.contains("version none"), "{error}");
}
