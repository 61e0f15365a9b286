//! Reads the metric names out of a PromQL expression.

/// Words that are neither a function (those are followed by a parenthesis) nor a metric.
const KEYWORDS: &[&str] = &["and", "or", "unless", "offset", "bool", "inf", "nan", "start", "end"];
/// Words whose parenthesis holds labels.
const LABEL_LISTS: &[&str] = &["by", "without", "on", "ignoring", "group_left", "group_right"];

/// Every metric that `expression` selects, in order. Understands strings, label matchers, ranges,
/// durations, groupings and Grafana's `label_values`.
pub fn metric_names(expression: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = expression;
    while let Some(first) = rest.chars().next() {
        rest = match first {
            '"' | '\'' | '`' => after_string(rest, first),
            '{' => after(rest, '}'),
            '[' => after(rest, ']'),
            // A number with what belongs to it: 0.95, 1e3, 15m.
            '0'..='9' => rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '.'),
            '#' => rest.find('\n').map_or("", |end| &rest[end..]),
            _ if starts_name(first) => {
                let end = rest.find(|c: char| !continues_name(c)).unwrap_or(rest.len());
                let (word, follows) = rest.split_at(end);
                read_word(word, follows, &mut names)
            }
            _ => &rest[first.len_utf8()..],
        };
    }
    names
}

/// Takes one word; returns where to read on.
fn read_word<'a>(word: &str, follows: &'a str, names: &mut Vec<String>) -> &'a str {
    let next = follows.trim_start();
    let open = next.starts_with('(');
    // `sum by (instance) (…)`: the function's parenthesis comes later.
    let grouped = next.starts_with("by") || next.starts_with("without");
    let lower = word.to_ascii_lowercase();
    if LABEL_LISTS.contains(&lower.as_str()) {
        return if open { after(follows, ')') } else { follows };
    }
    if word == "label_values" && open {
        // label_values(metric, label): the label is no metric.
        let end = next.find(')').unwrap_or(next.len());
        let selector = next[1..end].rsplit_once(',').map_or("", |(selector, _)| selector);
        names.extend(metric_names(selector));
        return &next[end..];
    }
    if !open && !grouped && !KEYWORDS.contains(&lower.as_str()) {
        names.push(word.to_owned());
    }
    follows
}

fn starts_name(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_' || c == ':'
}

fn continues_name(c: char) -> bool {
    starts_name(c) || c.is_ascii_digit()
}

/// What comes after the next `close` that is not inside a string.
fn after(text: &str, close: char) -> &str {
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        match first {
            '"' | '\'' | '`' => rest = after_string(rest, first),
            _ => {
                rest = &rest[first.len_utf8()..];
                if first == close {
                    return rest;
                }
            }
        }
    }
    ""
}

fn after_string(text: &str, quote: char) -> &str {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            '\\' if quote != '`' && !escaped => escaped = true,
            _ if c == quote && !escaped => return &text[at + 1..],
            _ => escaped = false,
        }
    }
    ""
}

#[test]
fn only_metrics_are_names() {
    for (expression, expected) in [
        ("up", &["up"][..]),
        ("rate(a_total[5m])", &["a_total"]),
        (
            "sum by (le, x) (rate(a_bucket{x=\"b_total\", y=~\"c}d\"}[1h:5m] offset 15m))",
            &["a_bucket"],
        ),
        (
            "sum(a) by (x) / ignoring (p) group_left () sum(vllm:b_total) > 1e3",
            &["a", "vllm:b_total"],
        ),
        ("a == bool 0 and on (i) b unless c # d", &["a", "b", "c"]),
        ("histogram_quantile(0.99, a) or vector(0)", &["a"]),
        ("label_values(a{x=\"y\"}, instance)", &["a"]),
        ("increase(a[$__rate_interval])", &["a"]),
        ("", &[]),
    ] {
        assert_eq!(metric_names(expression), expected, "in {expression}");
    }
}
