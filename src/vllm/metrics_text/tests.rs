use proptest::prelude::*;

use super::*;

/// The lines of a vLLM 0.32 scrape that matter here, with two engines.
const SCRAPE: &str = r#"# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \"quoted\" name, {x}"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 1.5e1
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 15 1712345678000
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="10"} 1
vllm:num_requests_waiting 3
not a series
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 4
vllm:broken NaN
"#;

#[test]
fn sums_over_engines_and_reads_escaped_labels() {
    let text = MetricsText::parse(SCRAPE);
    assert_eq!(text.sum("vllm:num_requests_waiting"), Some(3.0));
    assert_eq!(text.sum("vllm:broken"), None);
    assert_eq!(text.sum("absent"), None);
    let name = "vllm:spec_decode_num_drafts_total";
    assert_eq!(text.sum_where(name, &[("engine", "1"), ("model_name", "m")]), Some(5.0));
    assert_eq!(text.sum_where(name, &[("model_name", "a \"quoted\" name, {x}")]), Some(10.0));
    assert_eq!(text.by_label(name, "engine")["0"], 10.0);
    let spec = text.spec_decode().unwrap();
    assert_eq!((spec.drafts, spec.draft_tokens, spec.accepted_tokens), (15.0, 60.0, 30.0));
    assert_eq!(spec.per_pos.len(), 11);
    assert_eq!((spec.per_pos[0], spec.per_pos[1], spec.per_pos[10]), (14.0, 6.0, 1.0));
}

#[test]
fn rates_are_of_the_difference() {
    let before = MetricsText::parse(SCRAPE).spec_decode().unwrap();
    let after = SpecDecode {
        drafts: 25.0,
        draft_tokens: 100.0,
        accepted_tokens: 50.0,
        per_pos: [&[22.0, 10.0][..], &[0.0; 8], &[3.0, 1.0]].concat(),
    };
    let delta = after.since(&before);
    assert!(!delta.reset);
    assert_eq!(delta.acceptance_rate(), Some(0.5));
    assert_eq!(delta.mean_accepted_length(), Some(3.0));
    assert_eq!(delta.acceptance_per_pos()[..2], [0.8, 0.4]);
}

#[test]
fn no_data_is_none_and_never_zero() {
    let spec = MetricsText::parse(SCRAPE).spec_decode().unwrap();
    let nothing = spec.since(&spec);
    assert_eq!(nothing.acceptance_rate(), None);
    assert_eq!(nothing.mean_accepted_length(), None);
    assert!(nothing.acceptance_per_pos().is_empty());
    assert_eq!(MetricsText::parse("vllm:num_requests_running 1\n").spec_decode(), None);
    assert_eq!(MetricsText::parse("").spec_decode(), None);
}

#[test]
fn a_restarted_server_is_counted_from_zero() {
    let before = MetricsText::parse(SCRAPE).spec_decode().unwrap();
    let after = SpecDecode {
        drafts: 2.0,
        draft_tokens: 8.0,
        accepted_tokens: 4.0,
        per_pos: vec![2.0, 1.0],
    };
    let delta = after.since(&before);
    assert!(delta.reset);
    assert_eq!(delta.acceptance_rate(), Some(0.5));
}

#[test]
fn counters_of_the_v0_engine_are_read() {
    let text = "vllm:spec_decode_num_draft_tokens_total{model_name=\"m\"} 40\n\
        vllm:spec_decode_num_accepted_tokens_total{model_name=\"m\"} 20\n\
        vllm:spec_decode_num_emitted_tokens_total{model_name=\"m\"} 30\n";
    let spec = MetricsText::parse(text).spec_decode().unwrap();
    assert_eq!((spec.drafts, spec.draft_tokens, spec.accepted_tokens), (10.0, 40.0, 20.0));
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "([a-z:]{0,6}[{}=\",\\\\ #\n]{0,4}[0-9.]{0,3}){0,20}") {
        let _ = MetricsText::parse(&text).spec_decode();
    }

    #[test]
    fn labels_survive_escaping(value in "[a-z\"\\\\\n{},= ]{0,20}", number in -1e9_f64..1e9) {
        let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let text = MetricsText::parse(&format!("x{{l=\"{escaped}\",m=\"k\"}} {number}\n"));
        prop_assert_eq!(text.sum_where("x", &[("l", &value), ("m", "k")]), Some(number));
    }
}
