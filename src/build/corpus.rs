//! Calibration prompts and texts, from a file or built in.

use std::path::Path;

use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::pipeline::Settings;
use super::{BuildError, prompts};
use crate::distill::Sample;
use crate::hub::Target;

/// What to let the target answer, and what to take as it is.
pub struct Corpus {
    /// Prompts to answer for calibration, as token ids.
    pub prompts: Vec<Vec<u32>>,
    /// Texts to calibrate on as they are; their ids stand in `prompt_ids`.
    pub texts: Vec<Sample>,
    /// Prompts whose answers acceptance is measured on.
    pub held_out: Vec<Vec<u32>>,
}

/// Tokens of one window of plain text.
const TEXT_WINDOW: usize = 256;
/// Tokens of plain text that the target continues for the held-out answers.
const TEXT_PROMPT: usize = 48;
/// Prompt tokens that a built-in prompt comes to with its template, about.
const PROMPT: usize = 40;

/// Reads `settings.calibration`, or makes built-in prompts. `.jsonl` files hold one object for
/// each line with `prompt` (a string to answer), `messages` (a chat to answer) or `text`; any
/// other file is plain text.
///
/// # Errors
/// When the file cannot be read or holds nothing usable.
pub fn read(
    target: &Target,
    settings: &Settings,
    held_out: usize,
    answer: usize,
    rng: &mut ChaCha8Rng,
) -> Result<Corpus, BuildError> {
    let Some(path) = &settings.calibration else {
        let count = settings.calibration_tokens.div_ceil(answer + PROMPT);
        let mut prompts = prompts::builtin(count + held_out, rng)
            .iter()
            .map(|prompt| chat(target, &json!([{"role": "user", "content": prompt}])))
            .collect::<Result<Vec<_>, _>>()?;
        let held_out = prompts.split_off(prompts.len().saturating_sub(held_out));
        return Ok(Corpus { prompts, texts: Vec::new(), held_out });
    };
    let fail =
        |reason: String| BuildError::Calibration { path: path.display().to_string(), reason };
    let content = std::fs::read_to_string(path).map_err(|e| fail(e.to_string()))?;
    let mut corpus = Corpus { prompts: Vec::new(), texts: Vec::new(), held_out: Vec::new() };
    let mut tokens = 0;
    if path.extension().is_some_and(|extension| extension == "jsonl") {
        for (number, line) in
            content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty())
        {
            if tokens >= settings.calibration_tokens && corpus.held_out.len() >= held_out {
                break;
            }
            let object: Value = serde_json::from_str(line)
                .map_err(|e| fail(format!("line {}: {e}", number + 1)))?;
            let ids = match (object.get("prompt"), object.get("messages"), object.get("text")) {
                (Some(Value::String(prompt)), ..) => {
                    chat(target, &json!([{"role": "user", "content": prompt}]))?
                }
                (_, Some(messages), _) => chat(target, messages)?,
                (.., Some(Value::String(text))) => {
                    let ids = target.tokenizer.encode(text, true)?;
                    tokens += ids.len();
                    corpus.texts.extend(ids.chunks(TEXT_WINDOW).map(text_sample));
                    continue;
                }
                _ => {
                    return Err(fail(format!(
                        "line {} has neither \"prompt\", \"messages\" nor \"text\"",
                        number + 1
                    )));
                }
            };
            // Every eighth prompt judges, until there are enough.
            if number % 8 == 7 && corpus.held_out.len() < held_out {
                corpus.held_out.push(ids);
            } else {
                tokens += ids.len() + answer;
                corpus.prompts.push(ids);
            }
        }
    } else {
        let ids = target.tokenizer.encode(&content, true)?;
        let limit = settings.calibration_tokens + held_out * TEXT_WINDOW;
        corpus.texts = ids[..ids.len().min(limit)].chunks(TEXT_WINDOW).map(text_sample).collect();
    }
    while corpus.held_out.len() < held_out && corpus.texts.len() > 1 {
        if let Some(text) = corpus.texts.pop() {
            let cut = text.prompt_ids.len().min(TEXT_PROMPT);
            corpus.held_out.push(text.prompt_ids[..cut].to_vec());
        }
    }
    if corpus.held_out.is_empty() {
        corpus.held_out.extend(corpus.prompts.pop());
    }
    if corpus.held_out.is_empty() {
        return Err(fail("it holds no text to calibrate on".into()));
    }
    Ok(corpus)
}

fn chat(target: &Target, messages: &Value) -> Result<Vec<u32>, BuildError> {
    match &target.chat_template {
        Some(template) => {
            let text = template.render(messages, None, true)?;
            Ok(target.tokenizer.encode(&text, false)?)
        }
        None => {
            let content = messages.pointer("/0/content").and_then(Value::as_str).unwrap_or("");
            Ok(target.tokenizer.encode(content, true)?)
        }
    }
}

fn text_sample(ids: &[u32]) -> Sample {
    Sample {
        prompt_ids: ids.to_vec(),
        temperature: 1.0,
        domain: "calibration".into(),
        ..Sample::default()
    }
}

/// Whether a path looks like something [`read`] can use, checked before any work is done.
///
/// # Errors
/// When the file does not exist or cannot be opened.
pub fn check(path: &Path) -> Result<(), BuildError> {
    std::fs::File::open(path).map(drop).map_err(|e| BuildError::Calibration {
        path: path.display().to_string(),
        reason: e.to_string(),
    })
}
