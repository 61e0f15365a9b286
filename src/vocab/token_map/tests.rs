use serde_json::{Value, json};

use super::*;

const BYTE_LEVEL: &[u8] = include_bytes!("../../../tests/golden/tiny_llama/tokenizer.json");
const BYTE_FALLBACK: &[u8] = include_bytes!("../../../tests/golden/tokenizers/byte_fallback.json");

fn whole(json: &[u8]) -> Tokenizer {
    Tokenizer::from_bytes(json).unwrap()
}

/// The byte-level tokenizer cut to its first ids, with a token for the rest behind them.
fn part(ids: usize) -> Tokenizer {
    let mut document: Value = serde_json::from_slice(BYTE_LEVEL).unwrap();
    let vocab = document["model"]["vocab"].as_object_mut().unwrap();
    vocab.retain(|_, id| id.as_u64().unwrap() < ids as u64);
    document["model"]["merges"] = json!([]);
    let unknown = json!({"id": ids, "content": "<|unknown|>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    document["added_tokens"].as_array_mut().unwrap().push(unknown);
    whole(document.to_string().as_bytes())
}

fn table(ids: &[Option<u32>]) -> Vec<u8> {
    serde_json::to_vec(ids).unwrap()
}

fn first(ids: u32) -> Vec<Option<u32>> {
    (0..ids).map(Some).chain([None]).collect()
}

#[test]
fn ids_go_there_and_back_and_the_rest_is_one_token() {
    let (draft, target) = (part(259), whole(BYTE_LEVEL));
    let map = TokenMap::new(&table(&first(259)), &draft, &target).unwrap();
    assert_eq!(map.target_ids(), 288);
    for id in 0..300 {
        assert_eq!(map.to_draft(id), id.min(259));
    }
}

#[test]
fn logits_are_spread_over_the_targets_ids() {
    let map = TokenMap::with_unknown(vec![Some(3), None, Some(0)], 5, 1);
    // Two rows; the last column is padding.
    let spread = map.spread(&[1.0, 9.0, 2.0, 9.0, 3.0, 9.0, 4.0, 9.0], 4);
    let none = f32::NEG_INFINITY;
    assert_eq!(spread, [2.0, none, none, 1.0, none, 4.0, none, none, 3.0, none]);
    assert!(map.spread(&[], 4).is_empty());
}

#[test]
fn a_tokenizer_with_an_unknown_token_needs_no_other() {
    let tokenizer = whole(BYTE_FALLBACK);
    let all: Vec<Option<u32>> = (0..tokenizer.vocab_size() as u32).map(Some).collect();
    let map = TokenMap::new(&table(&all), &tokenizer, &tokenizer).unwrap();
    assert_eq!(map.to_draft(1_000_000), tokenizer.token_id("<unk>").unwrap());
}

#[test]
fn a_table_that_does_not_fit_is_refused_with_the_reason() {
    let (draft, target) = (part(259), whole(BYTE_LEVEL));
    let refused = |json: &[u8]| TokenMap::new(json, &draft, &target).unwrap_err();
    assert!(matches!(refused(b"{}"), TokenMapError::Syntax(_)));
    assert!(matches!(refused(b"[-1]"), TokenMapError::Syntax(_)));
    let error = refused(&table(&first(200)));
    assert!(matches!(error, TokenMapError::Length { expected: 260, got: 201 }), "{error}");

    let mut swapped = first(259);
    swapped.swap(70, 71);
    let error = refused(&table(&swapped));
    assert!(matches!(error, TokenMapError::Piece { id: 70, target_id: 71, .. }), "{error}");
    let mut outside = first(259);
    outside[5] = Some(u32::MAX);
    assert!(matches!(refused(&table(&outside)), TokenMapError::Piece { target: None, .. }));

    let all: Vec<Option<u32>> = (0..288).map(Some).collect();
    let error = TokenMap::new(&table(&all), &target, &target).unwrap_err();
    assert!(matches!(error, TokenMapError::NoUnknown), "{error}");
}
