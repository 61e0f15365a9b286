//! What completions and chat completions have in common, checked.

use serde_json::Value;

use super::App;
use super::error::ApiError;
use super::fields::{Fields, token_ids};
use crate::serve::engine::GenerateRequest;
use crate::serve::output::OutputSettings;
use crate::speculate::Sampling;

/// Choices that one request may ask for.
const MAX_CHOICES: usize = 64;
const MAX_STOPS: usize = 16;

/// The parameters of one request, valid and complete but for the length.
#[derive(Debug, Clone)]
pub(super) struct Params {
    pub n: usize,
    pub sampling: Sampling,
    /// As asked for; none means the route's default.
    pub max_tokens: Option<usize>,
    pub min_tokens: usize,
    pub stops: Vec<String>,
    pub stop_ids: Vec<u32>,
    pub seed: Option<u64>,
    pub prompt_logprobs: Option<usize>,
    pub priority: i64,
    pub stream: bool,
    pub include_usage: bool,
    pub return_token_ids: bool,
    pub tokens_as_ids: bool,
    pub skip_special_tokens: bool,
}

/// Parameters that would change the output and that this engine does not have, with the value
/// that means "off", if any.
const UNSUPPORTED: &[(&str, Option<f64>)] = &[
    ("presence_penalty", Some(0.0)),
    ("frequency_penalty", Some(0.0)),
    ("repetition_penalty", Some(1.0)),
    ("min_p", Some(0.0)),
    ("logit_bias", None),
    ("suffix", None),
    ("bad_words", None),
    ("allowed_token_ids", None),
    ("logits_processors", None),
    ("prompt_embeds", None),
    ("structured_outputs", None),
    ("guided_json", None),
    ("guided_regex", None),
    ("guided_choice", None),
    ("guided_grammar", None),
    ("truncate_prompt_tokens", None),
    ("kv_transfer_params", None),
    ("functions", None),
    ("echo", None),
    ("use_beam_search", None),
    ("include_stop_str_in_output", None),
    ("continue_final_message", None),
    ("chat_template", None),
    ("chat_template_kwargs", None),
    ("documents", None),
];

impl Params {
    pub fn read(fields: &Fields, app: &App) -> Result<Self, ApiError> {
        refuse_unsupported(fields)?;
        let defaults = &app.defaults;
        let n = fields.count("n", 1)?.unwrap_or(1);
        if n > MAX_CHOICES {
            return Err(ApiError::field("n", format!("n must be at most {MAX_CHOICES}, got {n}")));
        }
        if let Some(best_of) = fields.count("best_of", 1)?.filter(|&best_of| best_of != n) {
            let message = format!("best_of must equal n (ranking is not supported), got {best_of}");
            return Err(ApiError::field("best_of", message));
        }
        let sampling = Sampling {
            temperature: fields.float("temperature")?.unwrap_or(defaults.temperature) as f32,
            top_p: fields.float("top_p")?.unwrap_or(defaults.top_p) as f32,
            top_k: match fields.integer("top_k")?.unwrap_or(defaults.top_k) {
                -1 | 0 => 0,
                k if k > 0 => usize::try_from(k).unwrap_or(0),
                k => {
                    let message = format!("top_k must be -1, 0 (both off) or at least 1, got {k}");
                    return Err(ApiError::field("top_k", message));
                }
            },
        };
        // The largest f32 temperature still gives a distribution; NaN cannot come from JSON.
        if !(0.0..=1e6).contains(&sampling.temperature) {
            let message = format!("temperature must be non-negative, got {}", sampling.temperature);
            return Err(ApiError::field("temperature", message));
        }
        if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
            let message = format!("top_p must be in (0, 1], got {}", sampling.top_p);
            return Err(ApiError::field("top_p", message));
        }
        let stream = fields.flag("stream", false)?;
        let prompt_logprobs = logprobs_count(fields, "prompt_logprobs", "prompt", app)?;
        if stream && prompt_logprobs.is_some() {
            let message = "`prompt_logprobs` are not available when `stream=True`.";
            return Err(ApiError::field("prompt_logprobs", message));
        }
        Ok(Self {
            n,
            sampling,
            max_tokens: match fields.count("max_completion_tokens", 1)? {
                Some(tokens) => Some(tokens),
                None => fields.count("max_tokens", 1)?,
            },
            min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
            stops: stops(fields)?,
            stop_ids: stop_ids(fields, app)?,
            seed: fields.integer("seed")?.map(|seed| seed as u64),
            prompt_logprobs,
            priority: fields.integer("priority")?.unwrap_or(0),
            stream,
            include_usage: include_usage(fields)?,
            return_token_ids: fields.flag("return_token_ids", false)?,
            tokens_as_ids: fields.flag("return_tokens_as_token_ids", false)?,
            skip_special_tokens: fields.flag("skip_special_tokens", true)?,
        })
    }

    /// Tokens to generate after a prompt of `prompt_len` tokens.
    pub fn output_len(
        &self,
        prompt_len: usize,
        default: Option<usize>,
        app: &App,
    ) -> Result<usize, ApiError> {
        let limit = app.max_model_len;
        if prompt_len == 0 {
            return Err(ApiError::field("prompt", "the prompt must hold at least one token"));
        }
        if prompt_len >= limit {
            return Err(ApiError::bad_request(format!(
                "This model's maximum context length is {limit} tokens. However, your request \
                 has {prompt_len} input tokens and needs room for at least one more. Please \
                 reduce the length of the input."
            )));
        }
        let room = limit - prompt_len;
        let tokens = match self.max_tokens {
            Some(tokens) if tokens > room => {
                let message = format!(
                    "'max_tokens' or 'max_completion_tokens' is too large: {tokens}. This \
                     model's maximum context length is {limit} tokens and your request has \
                     {prompt_len} input tokens ({tokens} > {limit} - {prompt_len})."
                );
                return Err(ApiError::field("max_tokens", message));
            }
            Some(tokens) => tokens,
            None => default.unwrap_or(room).min(room),
        };
        if self.min_tokens > tokens {
            let message = format!(
                "min_tokens must be less than or equal to max_tokens={tokens}, got {}",
                self.min_tokens
            );
            return Err(ApiError::field("min_tokens", message));
        }
        Ok(tokens)
    }

    /// The engine's request of the choice number `choice` of a prompt.
    pub fn generate(
        &self,
        prompt: &[u32],
        max_tokens: usize,
        logprobs: Option<usize>,
        choice: usize,
        events: tokio::sync::mpsc::UnboundedSender<crate::serve::engine::Event>,
    ) -> GenerateRequest {
        GenerateRequest {
            prompt: prompt.to_vec(),
            sampling: self.sampling,
            max_tokens,
            min_tokens: self.min_tokens,
            stop_ids: self.stop_ids.clone(),
            seed: self.seed.map(|seed| seed.wrapping_add(choice as u64)),
            logprobs,
            // Every choice has the same prompt, so its scores are computed once.
            prompt_logprobs: self.prompt_logprobs.filter(|_| choice == 0),
            priority: self.priority,
            events,
        }
    }

    pub fn output_settings(&self, app: &App) -> OutputSettings {
        OutputSettings {
            stops: self.stops.clone(),
            min_tokens: self.min_tokens,
            eos_ids: app.eos_ids.clone(),
            skip_special_tokens: self.skip_special_tokens,
        }
    }
}

/// Reads `logprobs` or `prompt_logprobs` as a number within the server's limit.
pub(super) fn logprobs_count(
    fields: &Fields,
    name: &str,
    kind: &str,
    app: &App,
) -> Result<Option<usize>, ApiError> {
    let Some(k) = fields.count(name, 0)? else { return Ok(None) };
    check_logprobs(k, name, kind, app)?;
    Ok(Some(k))
}

pub(super) fn check_logprobs(k: usize, name: &str, kind: &str, app: &App) -> Result<(), ApiError> {
    let limit = app.max_logprobs;
    if k > limit {
        let message =
            format!("Requested {kind} logprobs of {k}, which is greater than max allowed: {limit}");
        return Err(ApiError::field(name, message));
    }
    Ok(())
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    for &(name, off) in UNSUPPORTED {
        let Some(value) = fields.get(name) else { continue };
        let harmless = match (value, off) {
            (Value::Number(number), Some(off)) => number.as_f64() == Some(off),
            (Value::Bool(on), _) => !on,
            (Value::Array(items), _) => items.is_empty(),
            (Value::Object(items), _) => items.is_empty(),
            (Value::String(text), _) => text.is_empty(),
            _ => false,
        };
        if !harmless {
            let message = format!("{name} is not supported by this engine; leave it out");
            return Err(ApiError::field(name, message));
        }
    }
    if let Some(format) = fields.get("response_format")
        && format.get("type").and_then(Value::as_str) != Some("text")
    {
        let message = "response_format other than text is not supported by this engine";
        return Err(ApiError::field("response_format", message));
    }
    Ok(())
}

fn stops(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let stops = fields.texts("stop")?;
    if stops.iter().any(String::is_empty) {
        return Err(ApiError::field("stop", "stop cannot contain an empty string."));
    }
    if stops.len() > MAX_STOPS {
        let message = format!("stop must hold at most {MAX_STOPS} strings, got {}", stops.len());
        return Err(ApiError::field("stop", message));
    }
    Ok(stops)
}

fn stop_ids(fields: &Fields, app: &App) -> Result<Vec<u32>, ApiError> {
    let mut ids = match fields.get("stop_token_ids") {
        None => Vec::new(),
        Some(value) => token_ids("stop_token_ids", value, app.vocab_size)?,
    };
    if !fields.flag("ignore_eos", false)? {
        ids.extend(app.eos_ids.iter());
    }
    Ok(ids)
}

fn include_usage(fields: &Fields) -> Result<bool, ApiError> {
    let Some(options) = fields.get("stream_options") else { return Ok(false) };
    match (options, options.get("include_usage")) {
        (Value::Object(_), None | Some(Value::Null)) => Ok(false),
        (Value::Object(_), Some(Value::Bool(include))) => Ok(*include),
        _ => Err(ApiError::field(
            "stream_options",
            "stream_options must be an object with include_usage true or false",
        )),
    }
}
