//! Reads `prompt_logprobs`, whose shape differs between versions.

use serde_json::{Map, Value};

/// Room for rounding in the sum of probabilities.
const SUM_TOLERANCE: f64 = 1e-2;

/// Log-probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Most likely first. The token that stands at the position is always there: last, when it is
    /// not among the `k` most likely.
    pub ids: Vec<u32>,
    /// Natural log-probabilities, one for each id.
    pub logprobs: Vec<f32>,
}

/// Reads an answer to a prompt of `ids`, which asked for `k` tokens at each position.
pub(super) fn parse(
    answer: &Value,
    ids: &[u32],
    k: usize,
) -> Result<Vec<Option<TokenLogprobs>>, String> {
    let per_choice = &answer["choices"][0]["prompt_logprobs"];
    let place = if per_choice.is_null() { &answer["prompt_logprobs"] } else { per_choice };
    let Value::Array(rows) = place else {
        return Err("it has no prompt_logprobs".into());
    };
    if rows.len() != ids.len() {
        return Err(format!("{} prompt_logprobs for {} tokens", rows.len(), ids.len()));
    }
    let mut parsed = Vec::with_capacity(rows.len());
    for (position, (row, id)) in rows.iter().zip(ids).enumerate() {
        parsed.push(match row {
            Value::Null if position == 0 => None,
            Value::Object(row) => Some(
                parse_row(row, *id, k)
                    .map_err(|reason| format!("position {position}: {reason}"))?,
            ),
            _ => return Err(format!("position {position} has no log-probabilities")),
        });
    }
    // Servers have answered with zeros under speculation; a model that is certain of every single
    // token does not exist.
    let mut chosen = parsed.iter().flatten().flat_map(|row| row.logprobs.iter());
    if parsed.len() > 2 && k > 0 && chosen.all(|p| *p == 0.0) {
        return Err("all log-probabilities are zero".into());
    }
    Ok(parsed)
}

fn parse_row(row: &Map<String, Value>, id: u32, k: usize) -> Result<TokenLogprobs, String> {
    if row.len() > k + 1 {
        return Err(format!("{} entries, expected at most {}", row.len(), k + 1));
    }
    let mut entries = Vec::with_capacity(row.len());
    for (key, entry) in row {
        let key = key.strip_prefix("token_id:").unwrap_or(key);
        let token: u32 = key.parse().map_err(|_| format!("`{key}` is not a token id"))?;
        let logprob = entry["logprob"].as_f64().or(entry.as_f64());
        let logprob = logprob.filter(|p| *p <= 1e-6).ok_or("a log-probability is missing")?;
        // Ranks count from 1; a version without them has its order from the values.
        let rank = entry["rank"].as_u64().unwrap_or(u64::MAX);
        entries.push((rank, logprob.min(0.0), token));
    }
    entries.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)).then(a.2.cmp(&b.2)));
    if !entries.iter().any(|entry| entry.2 == id) {
        return Err(format!("token {id} that was sent is not in it"));
    }
    let sum: f64 = entries.iter().map(|entry| entry.1.exp()).sum();
    if sum > 1.0 + SUM_TOLERANCE {
        return Err(format!("probabilities sum to {sum:.3}"));
    }
    Ok(TokenLogprobs {
        ids: entries.iter().map(|entry| entry.2).collect(),
        logprobs: entries.iter().map(|entry| entry.1 as f32).collect(),
    })
}
