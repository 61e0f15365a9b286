//! The Prometheus text format, as far as reading vLLM's counters needs it.

use std::collections::BTreeMap;

use crate::metrics::{
    VLLM_ACCEPTED_PER_POS, VLLM_NUM_ACCEPTED_TOKENS, VLLM_NUM_DRAFT_TOKENS, VLLM_NUM_DRAFTS,
};

#[cfg(test)]
mod tests;

/// Servers before the V1 engine count emitted tokens instead of drafts.
const V0_EMITTED_TOKENS: &str = "vllm:spec_decode_num_emitted_tokens_total";

/// One line of a scrape.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// A parsed scrape.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MetricsText {
    series: Vec<Series>,
}

impl MetricsText {
    /// Reads a scrape. Lines that are not series (comments, blank or malformed ones) are skipped,
    /// as are values that are not numbers.
    pub fn parse(text: &str) -> Self {
        Self { series: text.lines().filter_map(parse_line).collect() }
    }

    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// Sum over all label sets of one name; `None` when the name does not occur.
    pub fn sum(&self, name: &str) -> Option<f64> {
        self.sum_where(name, &[])
    }

    /// Sum over the label sets that contain all of `labels`; `None` when there is none.
    pub fn sum_where(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let matching = self.series.iter().filter(|s| {
            let has = |(k, v): &(&str, &str)| s.labels.get(*k).is_some_and(|value| value == v);
            s.name == name && labels.iter().all(has)
        });
        matching.map(|s| s.value).fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    }

    /// Sums of one name by the value of `label`; series without the label are left out.
    pub fn by_label(&self, name: &str, label: &str) -> BTreeMap<String, f64> {
        let mut sums = BTreeMap::new();
        for series in self.series.iter().filter(|s| s.name == name) {
            if let Some(value) = series.labels.get(label) {
                *sums.entry(value.clone()).or_insert(0.0) += series.value;
            }
        }
        sums
    }

    /// The speculative counters; `None` when the server exports none (no speculation, or its log
    /// statistics are off).
    pub fn spec_decode(&self) -> Option<SpecDecode> {
        let draft_tokens = self.sum(VLLM_NUM_DRAFT_TOKENS)?;
        let accepted_tokens = self.sum(VLLM_NUM_ACCEPTED_TOKENS).unwrap_or(0.0);
        // A step emits its accepted tokens and one more, so the difference is the steps.
        let v0_drafts = || Some((self.sum(V0_EMITTED_TOKENS)? - accepted_tokens).max(0.0));
        let drafts = self.sum(VLLM_NUM_DRAFTS).or_else(v0_drafts).unwrap_or(0.0);
        let mut per_pos = Vec::new();
        for (position, value) in self.by_label(VLLM_ACCEPTED_PER_POS, "position") {
            // No server drafts thousands of tokens: a bound on what a scrape may allocate.
            if let Some(position) = position.parse::<usize>().ok().filter(|p| *p < 1024) {
                if per_pos.len() <= position {
                    per_pos.resize(position + 1, 0.0);
                }
                per_pos[position] = value;
            }
        }
        Some(SpecDecode { drafts, draft_tokens, accepted_tokens, per_pos })
    }
}

/// The speculative counters of one scrape, summed over engines and models.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpecDecode {
    /// Verification steps.
    pub drafts: f64,
    pub draft_tokens: f64,
    pub accepted_tokens: f64,
    /// Accepted tokens by draft position, from 0.
    pub per_pos: Vec<f64>,
}

impl SpecDecode {
    /// What happened between an earlier scrape and this one. When any counter went down the server
    /// was restarted in between: then the difference is from zero, and says so.
    pub fn since(&self, earlier: &Self) -> SpecDecodeDelta {
        let before = |position: usize| earlier.per_pos.get(position).copied().unwrap_or(0.0);
        let reset = self.drafts < earlier.drafts
            || self.draft_tokens < earlier.draft_tokens
            || self.accepted_tokens < earlier.accepted_tokens
            || self.per_pos.len() < earlier.per_pos.len()
            || self.per_pos.iter().enumerate().any(|(n, value)| *value < before(n));
        if reset {
            return SpecDecodeDelta { counts: self.clone(), reset };
        }
        let counts = Self {
            drafts: self.drafts - earlier.drafts,
            draft_tokens: self.draft_tokens - earlier.draft_tokens,
            accepted_tokens: self.accepted_tokens - earlier.accepted_tokens,
            per_pos: self.per_pos.iter().enumerate().map(|(n, v)| v - before(n)).collect(),
        };
        SpecDecodeDelta { counts, reset }
    }
}

/// The difference of two scrapes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpecDecodeDelta {
    pub counts: SpecDecode,
    /// The server was restarted in between.
    pub reset: bool,
}

impl SpecDecodeDelta {
    /// Accepted share of the drafted tokens; `None` when nothing was drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        ratio(self.counts.accepted_tokens, self.counts.draft_tokens)
    }

    /// Tokens that a verification step yields, the bonus token included; `None` without steps.
    pub fn mean_accepted_length(&self) -> Option<f64> {
        ratio(self.counts.accepted_tokens, self.counts.drafts).map(|accepted| 1.0 + accepted)
    }

    /// Share of the steps that accepted the token at each draft position; empty without steps.
    pub fn acceptance_per_pos(&self) -> Vec<f64> {
        let rates = self.counts.per_pos.iter().map(|n| ratio(*n, self.counts.drafts));
        rates.collect::<Option<_>>().unwrap_or_default()
    }
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn parse_line(line: &str) -> Option<Series> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return None;
    }
    let name_end = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(name_end);
    if name.is_empty() {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(labels) => parse_labels(labels)?,
        None => (BTreeMap::new(), rest),
    };
    // A timestamp or an exemplar may follow the value.
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then(|| Series { name: name.into(), labels, value })
}

/// Reads `a="x",b="y"}` and returns the labels with what follows the brace.
fn parse_labels(mut text: &str) -> Option<(BTreeMap<String, String>, &str)> {
    let mut labels = BTreeMap::new();
    loop {
        text = text.trim_start_matches([',', ' ', '\t']);
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once('=')?;
        let mut value = String::new();
        let mut chars = rest.trim_start().strip_prefix('"')?.chars();
        loop {
            match chars.next()? {
                '"' => break,
                '\\' => match chars.next()? {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                other => value.push(other),
            }
        }
        labels.insert(name.trim().to_owned(), value);
        text = chars.as_str();
    }
}
