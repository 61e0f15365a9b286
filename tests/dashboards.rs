//! Every metric that `dashboards/` names exists, so that a renamed metric cannot leave an empty
//! panel or an alert that never fires.

#![allow(clippy::unwrap_used)] // a test fails by panicking

#[path = "dashboards/promql.rs"]
mod promql;

use std::collections::BTreeSet;

use promql::metric_names;
use serde_json::Value;

const NAMES: &str = include_str!("../src/metrics.rs");
const DASHBOARD: &str = include_str!("../dashboards/draft-adapter.json");
const ALERTS: &str = include_str!("../dashboards/alerts.yaml");
const ALERTS_TEST: &str = include_str!("../dashboards/alerts_test.yaml");

/// The values of the constants in `metrics.rs`.
fn known() -> BTreeSet<String> {
    let constants = NAMES.lines().filter(|line| line.starts_with("pub const "));
    constants.filter_map(|line| line.split('"').nth(1)).map(str::to_owned).collect()
}

/// The names in an expression that no constant has.
fn unknown(expression: &str, known: &BTreeSet<String>) -> Vec<String> {
    let exists = |name: &str| {
        // A histogram has three series that are named after it.
        let suffixes = ["_bucket", "_sum", "_count"];
        let base = suffixes.iter().find_map(|suffix| name.strip_suffix(suffix));
        known.contains(name) || base.is_some_and(|base| known.contains(base))
    };
    metric_names(expression).into_iter().filter(|name| !exists(name)).collect()
}

/// Every PromQL expression of a dashboard: those of panels and annotations, and the queries of
/// variables.
fn dashboard_expressions(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                match value {
                    Value::String(text) if key == "expr" || key == "definition" => {
                        found.push(text.clone());
                    }
                    Value::String(text) if key == "query" && text.contains('(') => {
                        found.push(text.clone());
                    }
                    other => dashboard_expressions(other, found),
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| dashboard_expressions(value, found)),
        _ => {}
    }
}

/// The values of `key:` in a YAML file, on one line or as an indented block.
fn yaml_values(text: &str, key: &str) -> Vec<String> {
    let indent = |line: &str| line.len() - line.trim_start_matches([' ', '-']).len();
    let lines: Vec<&str> = text.lines().collect();
    let mut values = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let Some(value) = line.trim_start_matches([' ', '-']).strip_prefix(key) else { continue };
        let Some(value) = value.strip_prefix(':') else { continue };
        let block = lines[number + 1..]
            .iter()
            .take_while(|next| next.trim().is_empty() || indent(next) > indent(line));
        values.push(match value.trim() {
            "|" | ">" | "|-" | ">-" => block.copied().collect::<Vec<_>>().join("\n"),
            value => value.trim_matches('"').to_owned(),
        });
    }
    values
}

#[test]
fn every_metric_of_the_dashboard_exists() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let mut expressions = Vec::new();
    dashboard_expressions(&dashboard, &mut expressions);
    let known = known();
    let mut named = BTreeSet::new();
    for expression in &expressions {
        assert_eq!(unknown(expression, &known), Vec::<String>::new(), "in {expression}");
        named.extend(metric_names(expression));
    }
    let panels = dashboard["panels"].as_array().expect("panels");
    let drawn = panels.iter().filter(|panel| panel["type"] != "row").count();
    assert!(expressions.len() >= drawn, "{} for {drawn} panels", expressions.len());
    for needed in ["da_acceptance_rate", "da_swaps_total", "da_training_loss"] {
        assert!(named.contains(needed), "no panel shows {needed}");
    }
}

#[test]
fn every_metric_of_the_alerts_exists() {
    let expressions = yaml_values(ALERTS, "expr");
    assert_eq!(expressions.len(), yaml_values(ALERTS, "alert").len(), "one for each alert");
    let known = known();
    for expression in &expressions {
        assert!(!metric_names(expression).is_empty(), "no metric in {expression}");
        assert_eq!(unknown(expression, &known), Vec::<String>::new(), "in {expression}");
    }
    for series in yaml_values(ALERTS_TEST, "series") {
        assert_eq!(unknown(&series, &known), Vec::<String>::new(), "in {series}");
    }
}

#[test]
fn a_name_that_does_not_exist_is_found() {
    let known = known();
    assert!(known.contains("da_swaps_total"), "the constants are read");
    for (expression, wrong) in [
        ("rate(da_swap_total[5m]) > 0", "da_swap_total"),
        ("sum by (instance) (da_swaps_total) / on () vllm:num_drafts", "vllm:num_drafts"),
        ("histogram_quantile(0.9, rate(da_stall_bucket[1h]))", "da_stall_bucket"),
        ("label_values(da_built, instance)", "da_built"),
    ] {
        assert_eq!(unknown(expression, &known), [wrong], "in {expression}");
    }
}

#[test]
fn a_broken_dashboard_fails() {
    let broken = DASHBOARD.replace("da_gate_score", "da_gate_scores");
    assert_ne!(broken, DASHBOARD);
    let mut expressions = Vec::new();
    dashboard_expressions(&serde_json::from_str(&broken).expect("JSON"), &mut expressions);
    let known = known();
    assert!(expressions.iter().any(|expression| !unknown(expression, &known).is_empty()));
}
