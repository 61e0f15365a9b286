//! Log-probabilities in the layouts of OpenAI and vLLM.

use std::sync::{Arc, OnceLock};

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value, json};

use crate::model::Tokenizer;
use crate::serve::engine::TokenScore;

/// vLLM's stand-in for negative infinity, which JSON does not have.
const LEAST: f32 = -9999.0;

/// The text of each token by itself, decoded once.
pub(super) struct TokenTexts {
    tokenizer: Arc<Tokenizer>,
    texts: Vec<OnceLock<Box<str>>>,
}

impl TokenTexts {
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let texts = (0..tokenizer.vocab_size()).map(|_| OnceLock::new()).collect();
        Self { tokenizer, texts }
    }

    pub fn text(&self, id: u32) -> &str {
        let Some(cell) = self.texts.get(id as usize) else { return "" };
        cell.get_or_init(|| self.tokenizer.decode(&[id], false).unwrap_or_default().into())
    }

    /// How a token is named in a list of log-probabilities.
    fn name(&self, id: u32, as_id: bool) -> String {
        if as_id { format!("token_id:{id}") } else { self.text(id).to_owned() }
    }
}

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST)
}

/// The `logprobs` object of a text completion. `offset` is the length in characters of the text
/// before these tokens, and is moved behind them.
pub(super) fn completion(
    scores: &[TokenScore],
    texts: &TokenTexts,
    as_ids: bool,
    offset: &mut usize,
) -> Value {
    let mut offsets = Vec::with_capacity(scores.len());
    let mut tops = Vec::with_capacity(scores.len());
    for score in scores {
        offsets.push(*offset);
        *offset += texts.text(score.id).chars().count();
        let mut top = Map::new();
        top.insert(texts.name(score.id, as_ids), json!(finite(score.logprob)));
        for &(id, logprob) in &score.top {
            top.entry(texts.name(id, as_ids)).or_insert_with(|| json!(finite(logprob)));
        }
        tops.push(top);
    }
    json!({
        "text_offset": offsets,
        "token_logprobs": scores.iter().map(|score| finite(score.logprob)).collect::<Vec<_>>(),
        "tokens": scores.iter().map(|score| texts.name(score.id, as_ids)).collect::<Vec<_>>(),
        "top_logprobs": tops,
    })
}

/// The `logprobs` object of a chat completion.
pub(super) fn chat(scores: &[TokenScore], texts: &TokenTexts, as_ids: bool) -> Value {
    let entry = |id: u32, logprob: f32| {
        let token = texts.name(id, as_ids);
        let bytes = token.as_bytes().to_vec();
        json!({"token": token, "logprob": finite(logprob), "bytes": bytes})
    };
    let content: Vec<Value> = scores
        .iter()
        .map(|score| {
            let mut value = entry(score.id, score.logprob);
            let top = score.top.iter().map(|&(id, logprob)| entry(id, logprob));
            value["top_logprobs"] = top.collect();
            value
        })
        .collect();
    json!({"content": content})
}

/// vLLM's `prompt_logprobs`: null for the first token, then one object for each position, keyed
/// by token id. Serialised without an intermediate tree, since it holds thousands of entries.
pub(super) struct PromptLogprobs<'a> {
    pub scores: &'a [TokenScore],
    pub texts: &'a TokenTexts,
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_seq(Some(self.scores.len() + 1))?;
        list.serialize_element(&None::<()>)?;
        for score in self.scores {
            list.serialize_element(&Position { score, texts: self.texts })?;
        }
        list.end()
    }
}

struct Position<'a> {
    score: &'a TokenScore,
    texts: &'a TokenTexts,
}

impl Serialize for Position<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(serde::Serialize)]
        struct Entry<'a> {
            logprob: f32,
            rank: u32,
            decoded_token: &'a str,
        }
        let entry = |id: u32, logprob: f32, rank: u32| Entry {
            logprob: finite(logprob),
            rank,
            decoded_token: self.texts.text(id),
        };
        let score = self.score;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(&score.id, &entry(score.id, score.logprob, score.rank))?;
        for (place, &(id, logprob)) in score.top.iter().enumerate() {
            if id != score.id {
                map.serialize_entry(&id, &entry(id, logprob, place as u32 + 1))?;
            }
        }
        map.end()
    }
}
