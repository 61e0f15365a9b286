use serde_json::{Value, json};

use super::{VocabMatch, compare};
use crate::model::Tokenizer;

const BYTE_LEVEL: &[u8] = include_bytes!("../../tests/golden/tiny_llama/tokenizer.json");
const BYTE_FALLBACK: &[u8] = include_bytes!("../../tests/golden/tokenizers/byte_fallback.json");

fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut document: Value = serde_json::from_slice(BYTE_LEVEL).unwrap();
    change(&mut document);
    Tokenizer::from_bytes(document.to_string().as_bytes()).unwrap()
}

fn original() -> Tokenizer {
    Tokenizer::from_bytes(BYTE_LEVEL).unwrap()
}

fn special(id: u32, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    })
}

fn both_ways(other: &Tokenizer) -> VocabMatch {
    let result = compare(&original(), other);
    assert_eq!(compare(other, &original()), result, "the order does not matter");
    result
}

#[test]
fn a_tokenizer_is_identical_to_itself_however_it_is_written() {
    assert_eq!(both_ways(&original()), VocabMatch::Identical);
    let padded = changed(|document| document["truncation"] = Value::Null);
    assert_eq!(both_ways(&padded), VocabMatch::Identical);
}

#[test]
fn differing_special_tokens_are_listed() {
    let added = changed(|document| {
        document["added_tokens"].as_array_mut().unwrap().push(special(288, "<|tool|>"));
    });
    let expected = VocabMatch::IdenticalUpToSpecial(vec!["<|tool|>".to_string()]);
    assert_eq!(both_ways(&added), expected);
    let ordinary = changed(|document| document["added_tokens"][0]["special"] = json!(false));
    let expected = VocabMatch::IdenticalUpToSpecial(vec!["<|endoftext|>".to_string()]);
    assert_eq!(both_ways(&ordinary), expected);
}

#[test]
fn a_token_put_before_every_text_is_a_difference() {
    let with_bos = changed(|document| {
        document["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]},
            },
        });
    });
    let expected = VocabMatch::IdenticalUpToSpecial(vec!["<|im_start|>".to_string()]);
    assert_eq!(both_ways(&with_bos), expected);
}

#[test]
fn same_size_and_other_content_is_different() {
    let swapped = changed(|document| {
        let vocabulary = &mut document["model"]["vocab"];
        (vocabulary["a"], vocabulary["b"]) = (vocabulary["b"].clone(), vocabulary["a"].clone());
    });
    assert_eq!(swapped.vocab_size(), original().vocab_size());
    // The same texts under other ids: nothing can be passed on directly.
    assert_eq!(both_ways(&swapped), VocabMatch::Different { overlap: 1.0 });
}

#[test]
fn one_ordinary_token_more_is_different() {
    let longer = changed(|document| {
        document["model"]["vocab"]["zq"] = json!(288);
    });
    assert!(matches!(both_ways(&longer), VocabMatch::Different { overlap } if overlap == 1.0));
}

#[test]
fn overlap_compares_texts_rather_than_spellings() {
    let other = Tokenizer::from_bytes(BYTE_FALLBACK).unwrap();
    let VocabMatch::Different { overlap } = both_ways(&other) else { panic!("they differ") };
    // Both have the 256 bytes; of the longer texts they share a few, such as " t" and "he".
    assert!(overlap > 256.0 / 292.0 && overlap < 1.0, "{overlap}");
}
