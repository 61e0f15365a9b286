//! An exchange as token ids.

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::answer::{Answer, Row, Stop};
use super::question::{Prompt, Question};
use super::{CaptureSettings, DropReason};
use crate::distill::{Sample, TopK};
use crate::sidecar::exchange::Exchange;
use crate::sidecar::render::{RenderError, Renderer};

/// Room for rounding in a sum of probabilities.
const SUM_TOLERANCE: f64 = 1e-2;

/// Makes a sample of an exchange. The store gives it its id.
///
/// Ids that the server reported are used as they are. Others are made with the draft's tokenizer
/// and marked estimated; where the server counted tokens, the prompt's count must agree exactly
/// (else the template differs), the answer's nearly (a model may spell a text in other tokens than
/// its tokenizer would).
///
/// # Errors
/// With the reason, when the exchange cannot or should not become a sample.
pub fn to_sample(
    exchange: &Exchange,
    renderer: &Renderer,
    settings: &CaptureSettings,
) -> Result<Sample, DropReason> {
    for body in [&exchange.request, &exchange.response] {
        if !matches!(body.content_encoding.as_str(), "" | "identity") {
            return Err(DropReason::Encoded);
        }
    }
    let request: Value =
        serde_json::from_slice(&exchange.request.bytes).map_err(|_| DropReason::Malformed)?;
    let question = Question::read(exchange.api, &request, &settings.models.load())?;
    let answer = Answer::read(&exchange.response.bytes, &exchange.response.content_type)?;

    let (prompt_ids, prompt_estimated) = prompt_ids(&question, &answer, renderer)?;
    if prompt_ids.len() > settings.max_prompt_tokens {
        return Err(DropReason::PromptTooLong);
    }
    let (output_ids, output_estimated) = output_ids(&question, &answer, renderer)?;
    match output_ids.len() {
        0 => return Err(DropReason::EmptyOutput),
        n if n < settings.min_output_tokens => return Err(DropReason::OutputTooShort),
        n if n > settings.max_output_tokens => return Err(DropReason::OutputTooLong),
        _ => {}
    }
    let temperature = question.temperature.unwrap_or(settings.default_temperature);
    if !temperature.is_finite() || temperature < 0.0 {
        return Err(DropReason::Malformed);
    }
    let teacher = if settings.use_live_logprobs {
        live_teacher(answer.rows.as_deref(), &output_ids, settings.min_live_top_k)
    } else {
        Vec::new()
    };
    Ok(Sample {
        id: 0,
        held_out: is_held_out(&prompt_ids, settings.held_out_every),
        prompt_ids,
        output_ids,
        temperature,
        domain: exchange.domain.clone(),
        captured_unix_ms: exchange.started_unix_ms,
        ids_estimated: prompt_estimated || output_estimated,
        draft_version: exchange.draft_version.clone(),
        teacher,
    })
}

/// The prompt's ids, and whether they were made here.
fn prompt_ids(
    question: &Question<'_>,
    answer: &Answer,
    renderer: &Renderer,
) -> Result<(Vec<u32>, bool), DropReason> {
    let (ids, estimated) = if let Some(ids) = &answer.prompt_ids {
        (ids.clone(), false)
    } else if let Some(reason) = question.needs_ids {
        return Err(reason);
    } else {
        match &question.prompt {
            Prompt::Ids(ids) => (ids.clone(), false),
            Prompt::Chat(messages) => (renderer.chat(messages).map_err(render_failed)?, true),
            Prompt::Text { text, add_special } => {
                (renderer.text(text, *add_special).map_err(render_failed)?, true)
            }
        }
    };
    if ids.is_empty() || answer.prompt_tokens.is_some_and(|counted| counted != ids.len() as u64) {
        return Err(DropReason::PromptMismatch);
    }
    Ok((ids, estimated))
}

/// The answer's ids, and whether they were made here.
fn output_ids(
    question: &Question<'_>,
    answer: &Answer,
    renderer: &Renderer,
) -> Result<(Vec<u32>, bool), DropReason> {
    let named_by_rows = || answer.rows.as_ref().map(|rows| rows.iter().map(|r| r.id).collect());
    if let Some(ids) = answer.output_ids.clone().or_else(named_by_rows) {
        let ids: Vec<u32> = ids;
        if answer.completion_tokens.is_some_and(|counted| counted != ids.len() as u64) {
            return Err(DropReason::OutputMismatch);
        }
        return Ok((ids, false));
    }
    if answer.has_tool_calls {
        return Err(DropReason::Tools);
    }
    if answer.has_reasoning {
        return Err(DropReason::Reasoning);
    }
    if answer.text.is_empty() {
        return Err(DropReason::EmptyOutput);
    }
    let mut ids = renderer.text(&answer.text, false).map_err(render_failed)?;
    if let Some(end) = end_token(question, answer, renderer, ids.len())
        && ids.last() != Some(&end)
    {
        ids.push(end);
    }
    if let Some(counted) = answer.completion_tokens {
        let allowed = 2 + counted / 20;
        if counted.abs_diff(ids.len() as u64) > allowed {
            return Err(DropReason::OutputMismatch);
        }
    }
    Ok((ids, true))
}

/// The token that ended the answer but is not in its text.
///
/// Known where the server gives a stop reason, as vLLM does. Where it does not, `finish_reason:
/// stop` means the model's own end, unless the request had stop strings; then the token count
/// decides, and without one no token is added: a missing end is a shorter sample, a wrong one would
/// teach the draft to end answers where they go on.
fn end_token(
    question: &Question<'_>,
    answer: &Answer,
    renderer: &Renderer,
    text_tokens: usize,
) -> Option<u32> {
    if answer.finish_reason.as_deref() != Some("stop") {
        return None;
    }
    let by_model = match answer.stop {
        Stop::Token(id) => return Some(id),
        Stop::Eos => true,
        Stop::Text => false,
        Stop::Unknown if !question.has_stop => true,
        Stop::Unknown => answer.completion_tokens == Some(text_tokens as u64 + 1),
    };
    renderer.eos().filter(|_| by_model)
}

fn render_failed(error: RenderError) -> DropReason {
    match error {
        RenderError::NoTokenizer | RenderError::NoTemplate => DropReason::NoTokenizer,
        _ => DropReason::Render,
    }
}

/// Whether prompts with these ids are held out. The same for the same ids, in every version.
fn is_held_out(prompt_ids: &[u32], every: u64) -> bool {
    let mut hasher = Sha256::new();
    for id in prompt_ids {
        hasher.update(id.to_le_bytes());
    }
    let digest = hasher.finalize();
    let number = digest.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte));
    every != 0 && number % every == 0
}

/// The reported rows as teacher rows, when they fit the answer and can be right; else none, and
/// the sample is scored later.
fn live_teacher(rows: Option<&[Row]>, output_ids: &[u32], min_top_k: usize) -> Vec<TopK> {
    let rows = rows.unwrap_or_default();
    let fits = rows.len() == output_ids.len()
        && rows.iter().zip(output_ids).all(|(row, id)| row.id == *id && row.top.ids.len() >= min_top_k)
        // Some servers report zeros under speculation.
        && rows.iter().any(|row| row.top.logprobs.iter().any(|p| *p < 0.0))
        && rows.iter().all(|row| {
            let sum: f64 = row.top.logprobs.iter().map(|p| f64::from(*p).exp()).sum();
            sum <= 1.0 + SUM_TOLERANCE
        });
    if fits { rows.iter().map(|row| row.top.clone()).collect() } else { Vec::new() }
}
