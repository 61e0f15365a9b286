use serde_json::json;

use super::*;

fn answer(rows: Value) -> Value {
    json!({"choices": [{"index": 0, "text": "x", "prompt_logprobs": rows}]})
}

fn entry(logprob: f64, rank: u64) -> Value {
    json!({"logprob": logprob, "rank": rank, "decoded_token": "?"})
}

#[test]
fn prompt_logprobs_are_keyed_by_id_and_sorted() {
    let rows = json!([null,
        {"7": entry(-2.0, 2), "8": entry(-0.5, 1)},
        {"5": entry(-0.1, 1), "6": entry(-3.0, 2), "9": entry(-9999.0, 4321)}]);
    let parsed = logprobs::parse(&answer(rows), &[1, 7, 9], 2).unwrap();
    assert_eq!(parsed[0], None);
    let first = parsed[1].clone().unwrap();
    assert_eq!((first.ids, first.logprobs), (vec![8, 7], vec![-0.5, -2.0]));
    // The token that was sent is outside the top 2 and stands last.
    assert_eq!(parsed[2].clone().unwrap().ids, [5, 6, 9]);
}

#[test]
fn other_places_and_spellings_are_read() {
    let rows = json!([null, {"token_id:7": -0.5}]);
    let top_level = json!({"choices": [{"text": "x"}], "prompt_logprobs": rows});
    let parsed = logprobs::parse(&top_level, &[1, 7], 1).unwrap();
    assert_eq!(parsed[1].clone().unwrap().ids, [7]);
}

#[test]
fn answers_that_cannot_be_right_are_refused() {
    for (rows, part) in [
        (json!(null), "no prompt_logprobs"),
        (json!([null]), "1 prompt_logprobs for 2 tokens"),
        (json!([null, null]), "position 1"),
        (json!([null, {"8": entry(-0.5, 1)}]), "token 7"),
        (json!([null, {" has": entry(-0.5, 1)}]), "not a token id"),
        (json!([null, {"7": entry(-0.1, 1), "8": entry(-0.2, 2)}]), "sum to 1.7"),
        (json!([null, {"7": {"rank": 1}}]), "missing"),
        (json!([null, {"7": entry(0.5, 1)}]), "missing"),
        (
            json!([null, {"7": entry(-1.0, 1), "8": entry(-2.0, 2), "9": entry(-3.0, 3),
                "10": entry(-4.0, 4)}]),
            "4 entries",
        ),
    ] {
        let error = logprobs::parse(&answer(rows), &[1, 7], 2).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    let zeros = json!([null, {"7": entry(0.0, 1)}, {"8": entry(0.0, 1)}]);
    let error = logprobs::parse(&answer(zeros), &[1, 7, 8], 1).unwrap_err();
    assert!(error.contains("zero"), "{error}");
}

#[test]
fn the_detail_of_an_error_is_found_in_every_shape() {
    for (body, expected) in [
        (r#"{"detail":"shape differs"}"#, "shape differs"),
        (r#"{"error":{"message":"too many","code":400}}"#, "too many"),
        (r#"{"object":"error","message":"old shape"}"#, "old shape"),
        (r#"{"error":"just text"}"#, "just text"),
        (r#"{"detail":[{"loc":["body"],"msg":"missing"}]}"#, "missing"),
        ("<html>bad gateway</html>", "<html>bad gateway</html>"),
        ("", ""),
    ] {
        let found = detail(body.as_bytes());
        assert!(found.contains(expected), "{found}");
    }
    assert_eq!(detail(&b"x".repeat(10_000)).len(), MAX_DETAIL);
}

#[test]
fn a_base_url_must_be_one() {
    for url in ["", "localhost:8000", "ftp://x", "http://", "/v1"] {
        let error = Client::new(url, None).err().unwrap();
        assert!(matches!(error, ClientError::BadUrl { .. }), "{url}");
    }
    assert_eq!(Client::new("http://h:1/", None).unwrap().base_url(), "http://h:1");
}
