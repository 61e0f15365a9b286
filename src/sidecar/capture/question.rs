//! What a request asks for, as far as it decides whether and how it becomes a sample.

use serde_json::Value;

use super::DropReason;
use crate::sidecar::exchange::Api;

/// Members that change which tokens can be sampled.
const CONSTRAINTS: &[&str] = &[
    "logit_bias",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
];

/// Members of a chat request that only the server's own renderer can follow.
const TEMPLATE_OPTIONS: &[&str] =
    &["chat_template", "chat_template_kwargs", "documents", "mm_processor_kwargs"];

/// A request that one sample can be made of.
#[derive(Debug)]
pub(super) struct Question<'a> {
    pub prompt: Prompt<'a>,
    pub temperature: Option<f32>,
    /// Whether the client set stop strings or stop tokens.
    pub has_stop: bool,
    /// Why the prompt's text cannot be rebuilt from the request; fine when its ids are reported.
    pub needs_ids: Option<DropReason>,
}

#[derive(Debug)]
pub(super) enum Prompt<'a> {
    /// OpenAI messages, with only text in them.
    Chat(&'a Value),
    Text {
        text: &'a str,
        add_special: bool,
    },
    Ids(Vec<u32>),
}

impl<'a> Question<'a> {
    /// Reads a request body; `models` are the names of the target, empty for any.
    pub fn read(api: Api, request: &'a Value, models: &[String]) -> Result<Self, DropReason> {
        if !request.is_object() {
            return Err(DropReason::Malformed);
        }
        let model = request["model"].as_str().unwrap_or_default();
        if !models.is_empty() && !models.iter().any(|name| name == model) {
            return Err(DropReason::Adapter);
        }
        if ["n", "best_of"].iter().any(|name| request[name].as_u64().unwrap_or(1) > 1)
            || is_set(&request["use_beam_search"])
        {
            return Err(DropReason::SeveralAnswers);
        }
        let format = &request["response_format"]["type"];
        let constrained = CONSTRAINTS.iter().any(|name| is_set(&request[name]));
        if constrained || !(format.is_null() || format == "text") {
            return Err(DropReason::LogitProcessors);
        }
        if is_set(&request["echo"]) {
            return Err(DropReason::Echo);
        }
        let (prompt, needs_ids) = match api {
            Api::Chat => chat_prompt(request)?,
            Api::Completion => (text_prompt(request)?, None),
        };
        let truncated = is_set(&request["truncate_prompt_tokens"]);
        Ok(Self {
            prompt,
            temperature: request["temperature"].as_f64().map(|t| t as f32),
            has_stop: is_set(&request["stop"]) || is_set(&request["stop_token_ids"]),
            needs_ids: needs_ids.or(truncated.then_some(DropReason::TemplateOptions)),
        })
    }
}

fn chat_prompt(request: &Value) -> Result<(Prompt<'_>, Option<DropReason>), DropReason> {
    let messages = &request["messages"];
    let list = messages.as_array().filter(|list| !list.is_empty()).ok_or(DropReason::Malformed)?;
    for message in list {
        let parts = message["content"].as_array().into_iter().flatten();
        if parts.into_iter().any(|part| part["type"] != "text") {
            return Err(DropReason::Media);
        }
    }
    let choice = &request["tool_choice"];
    if !(choice.is_null() || choice == "auto" || choice == "none") {
        // The server forces the shape of the call with a grammar.
        return Err(DropReason::Tools);
    }
    let has_tools = is_set(&request["tools"]) || is_set(&request["functions"]);
    let is_call = |m: &Value| is_set(&m["tool_calls"]) || m["role"] == "tool";
    if has_tools || list.iter().any(is_call) {
        return Ok((Prompt::Chat(messages), Some(DropReason::Tools)));
    }
    let own_options = TEMPLATE_OPTIONS.iter().any(|name| is_set(&request[name]))
        || is_set(&request["continue_final_message"])
        || is_set(&request["add_special_tokens"])
        || request["add_generation_prompt"] == false
        || list.iter().any(|message| is_set(&message["reasoning"]));
    Ok((Prompt::Chat(messages), own_options.then_some(DropReason::TemplateOptions)))
}

fn text_prompt(request: &Value) -> Result<Prompt<'_>, DropReason> {
    if is_set(&request["prompt_embeds"]) {
        return Err(DropReason::Media);
    }
    if is_set(&request["suffix"]) {
        return Err(DropReason::Malformed);
    }
    let add_special = request["add_special_tokens"] != false;
    let text = |text| Ok(Prompt::Text { text, add_special });
    match &request["prompt"] {
        Value::String(prompt) => text(prompt),
        Value::Array(list) => match list.as_slice() {
            [Value::String(prompt)] => text(prompt),
            [Value::Array(ids)] => ids_prompt(ids),
            [Value::String(_) | Value::Array(_), ..] => Err(DropReason::SeveralAnswers),
            ids => ids_prompt(ids),
        },
        _ => Err(DropReason::Malformed),
    }
}

fn ids_prompt(list: &[Value]) -> Result<Prompt<'_>, DropReason> {
    match super::answer::ids(list) {
        Some(ids) if !ids.is_empty() => Ok(Prompt::Ids(ids)),
        _ => Err(DropReason::Malformed),
    }
}

/// Whether a member says anything: not absent, null, false, zero, or empty.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}
