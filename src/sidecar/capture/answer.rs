//! What the server answered, put together from one document or from a stream of chunks.

use serde_json::Value;

use super::DropReason;
use crate::distill::TopK;
use crate::sidecar::sse;

/// Why generation ended, as far as it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Stop {
    /// The server does not say (it is not vLLM, or the answer was cut off).
    #[default]
    Unknown,
    /// The model ended its answer itself.
    Eos,
    /// A stop string, which the text may not contain.
    Text,
    /// One of the request's stop tokens.
    Token(u32),
}

/// Everything about the only choice.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Answer {
    pub text: String,
    pub prompt_ids: Option<Vec<u32>>,
    /// Reported output ids, all of them or none.
    pub output_ids: Option<Vec<u32>>,
    /// Reported log-probabilities, one entry for each token; only rows that name tokens by id.
    pub rows: Option<Vec<Row>>,
    pub finish_reason: Option<String>,
    pub stop: Stop,
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub has_reasoning: bool,
    pub has_tool_calls: bool,
}

/// Log-probabilities of one sampled token and its alternatives.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub id: u32,
    pub top: TopK,
}

#[derive(Default)]
struct Builder {
    answer: Answer,
    ids: Vec<u32>,
    /// Text came without the ids it was made of.
    ids_missing: bool,
    rows: Vec<Row>,
    rows_missing: bool,
}

impl Answer {
    /// Reads a response body: a stream when its type says so, else one document.
    pub fn read(body: &[u8], content_type: &str) -> Result<Self, DropReason> {
        let mut builder = Builder::default();
        if content_type.starts_with("text/event-stream") {
            let events = sse::parse_all(body, body.len()).map_err(|_| DropReason::TooLarge)?;
            let mut done = false;
            for event in &events {
                if event.data.trim_ascii() == b"[DONE]" {
                    done = true;
                    break;
                }
                let chunk: Value =
                    serde_json::from_slice(&event.data).map_err(|_| DropReason::Malformed)?;
                builder.chunk(&chunk)?;
            }
            if !done {
                return Err(DropReason::Incomplete);
            }
        } else {
            let document: Value =
                serde_json::from_slice(body).map_err(|_| DropReason::Malformed)?;
            builder.chunk(&document)?;
        }
        builder.finish()
    }
}

impl Builder {
    /// Takes a chunk of a stream or a whole document: they differ in where the text is.
    fn chunk(&mut self, chunk: &Value) -> Result<(), DropReason> {
        if !chunk["error"].is_null() {
            return Err(DropReason::Incomplete);
        }
        self.prompt_ids(chunk);
        let usage = &chunk["usage"];
        if let Some(tokens) = usage["prompt_tokens"].as_u64() {
            self.answer.prompt_tokens = Some(tokens);
        }
        if let Some(tokens) = usage["completion_tokens"].as_u64() {
            self.answer.completion_tokens = Some(tokens);
        }
        // The usage chunk has no choices; some servers leave the member out, or send null.
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            if choice["index"].as_u64().unwrap_or(0) != 0 {
                return Err(DropReason::SeveralAnswers);
            }
            self.choice(choice);
        }
        Ok(())
    }

    fn choice(&mut self, choice: &Value) {
        self.prompt_ids(choice);
        let message =
            ["message", "delta"].iter().map(|name| &choice[name]).find(|value| value.is_object());
        let text = message.map_or(&choice["text"], |message| &message["content"]);
        let text = text.as_str().unwrap_or_default();
        self.answer.text += text;
        let mut said = !text.is_empty();
        if let Some(message) = message {
            let filled = |name: &str| message[name].as_str().is_some_and(|text| !text.is_empty());
            let reasoning = filled("reasoning") || filled("reasoning_content");
            let called = message["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
                || message["function_call"].is_object();
            self.answer.has_reasoning |= reasoning;
            self.answer.has_tool_calls |= called;
            said |= reasoning || called;
        }
        match choice["token_ids"].as_array().and_then(|list| ids(list)) {
            Some(ids) => self.ids.extend(ids),
            None => self.ids_missing |= said,
        }
        match rows(&choice["logprobs"]) {
            Some(rows) => self.rows.extend(rows),
            None => self.rows_missing |= said,
        }
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.answer.finish_reason = Some(reason.to_owned());
            self.answer.stop = match (reason, choice.get("stop_reason")) {
                ("stop", Some(Value::Null)) => Stop::Eos,
                ("stop", Some(Value::String(_))) => Stop::Text,
                ("stop", Some(token)) => {
                    token.as_u64().map_or(Stop::Unknown, |id| Stop::Token(id as u32))
                }
                _ => Stop::Unknown,
            };
        }
    }

    fn prompt_ids(&mut self, place: &Value) {
        if let Some(ids) = place["prompt_token_ids"].as_array().and_then(|list| ids(list)) {
            self.answer.prompt_ids = Some(ids);
        }
    }

    fn finish(mut self) -> Result<Answer, DropReason> {
        match self.answer.finish_reason.as_deref() {
            // Without a reason the answer was cut off; `abort` is vLLM's word for it.
            None | Some("abort" | "error" | "content_filter") => {
                return Err(DropReason::Incomplete);
            }
            Some(_) => {}
        }
        self.answer.output_ids = (!self.ids_missing && !self.ids.is_empty()).then_some(self.ids);
        self.answer.rows = (!self.rows_missing && !self.rows.is_empty()).then_some(self.rows);
        Ok(self.answer)
    }
}

/// Token ids; `None` when an entry is not one.
pub(super) fn ids(list: &[Value]) -> Option<Vec<u32>> {
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// Log-probabilities in the form of either API; `None` where tokens are not named by id.
fn rows(logprobs: &Value) -> Option<Vec<Row>> {
    if let Some(content) = logprobs["content"].as_array() {
        return content
            .iter()
            .map(|entry| {
                let own = (&entry["token"], &entry["logprob"]);
                let top = entry["top_logprobs"].as_array().map_or(&[][..], Vec::as_slice);
                row(own, top.iter().map(|entry| (entry["token"].as_str(), &entry["logprob"])))
            })
            .collect();
    }
    let tokens = logprobs["tokens"].as_array()?;
    let values = logprobs["token_logprobs"].as_array()?;
    let tops = logprobs["top_logprobs"].as_array()?;
    if tokens.len() != values.len() || tokens.len() != tops.len() {
        return None;
    }
    let rows = tokens.iter().zip(values).zip(tops).map(|(own, top)| {
        let top = top.as_object()?;
        row(own, top.iter().map(|(token, logprob)| (Some(token.as_str()), logprob)))
    });
    rows.collect()
}

fn row<'a>(
    own: (&Value, &Value),
    top: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
) -> Option<Row> {
    let id = token_id(own.0.as_str())?;
    let mut entries: Vec<(u32, f32)> = top
        .map(|(token, logprob)| Some((token_id(token)?, logprob.as_f64()? as f32)))
        .collect::<Option<_>>()?;
    entries.sort_by(|a, b| b.1.total_cmp(&a.1));
    if !entries.iter().any(|entry| entry.0 == id) {
        entries.push((id, own.1.as_f64()? as f32));
    }
    let (ids, logprobs) = entries.into_iter().unzip();
    Some(Row { id, top: TopK { ids, logprobs } })
}

fn token_id(token: Option<&str>) -> Option<u32> {
    token?.strip_prefix("token_id:")?.parse().ok()
}
