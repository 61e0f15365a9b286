//! Calibration prompts and texts, from a file, a folder, or built in.

use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::{BuildError, prompts};
use crate::distill::Sample;
use crate::hub::Target;

/// What to calibrate on and what to judge by.
#[derive(Default)]
pub struct Corpus {
    /// Prompts for the target to answer.
    pub prompts: Vec<Prompt>,
    /// Answers and texts that are taken as they are; a text's ids stand in `prompt_ids`.
    pub samples: Vec<Sample>,
    /// Prompts whose answers drafts are judged by.
    pub held_out_prompts: Vec<Prompt>,
    /// Answers that drafts are judged by.
    pub held_out: Vec<Sample>,
}

/// A prompt as the target reads it.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    pub domain: String,
}

/// How much of a source is wanted.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    /// Tokens of text, answers included; reading stops there.
    pub tokens: usize,
    /// Tokens that an answer is expected to have.
    pub answer: usize,
    /// Prompts or answers to judge by.
    pub held_out: usize,
}

/// Tokens of one window of plain text.
const TEXT_WINDOW: usize = 256;
/// Tokens of a held-out text that count as the prompt of the rest.
const TEXT_PROMPT: usize = 48;
/// Prompt tokens that a built-in prompt comes to with its template, about.
pub const PROMPT: usize = 40;
/// Every so many prompts or texts one judges, until there are enough.
const HELD_OUT_EVERY: usize = 8;

/// Reads a file or a folder, or makes built-in prompts. `.jsonl` files hold one object for each
/// line with `prompt` (a string), `messages` (a chat) or `text`, and if wanted `domain`. A prompt
/// with `answer`, and a chat whose last turn is the assistant's, are taken as they are; the others
/// are for the target to answer. Every other file is plain text, and a folder is read file by file.
///
/// # Errors
/// When something cannot be read or holds nothing usable.
pub fn read(
    target: &Target,
    source: Option<&Path>,
    wanted: Wanted,
    rng: &mut ChaCha8Rng,
) -> Result<Corpus, BuildError> {
    let Some(path) = source else {
        let count = wanted.tokens.div_ceil(wanted.answer + PROMPT) + wanted.held_out;
        let mut corpus = Corpus::default();
        for prompt in prompts::builtin(count, rng) {
            let ids = chat(target, &json!([{"role": "user", "content": prompt}]))?;
            corpus.prompts.push(Prompt { ids, domain: "builtin".into() });
        }
        let from = corpus.prompts.len().saturating_sub(wanted.held_out);
        corpus.held_out_prompts = corpus.prompts.split_off(from);
        return Ok(corpus);
    };
    let mut reader = Reader { target, wanted, corpus: Corpus::default(), seen: 0, tokens: 0 };
    for file in files(path)? {
        if reader.is_full() {
            break;
        }
        let fail = |reason: String| fail(&file, reason);
        let content = std::fs::read_to_string(&file).map_err(|e| fail(e.to_string()))?;
        if file.extension().is_some_and(|extension| extension == "jsonl") {
            for (number, line) in content.lines().enumerate() {
                if line.trim().is_empty() {
                    continue;
                }
                if reader.is_full() {
                    break;
                }
                let at = |reason: String| fail(format!("line {}: {reason}", number + 1));
                let object = serde_json::from_str(line).map_err(|e| at(e.to_string()))?;
                if !reader.object(&object)? {
                    return Err(at("it has neither \"prompt\", \"messages\" nor \"text\"".into()));
                }
            }
        } else {
            reader.text(&content, "text")?;
        }
    }
    let mut corpus = reader.corpus;
    if wanted.held_out > 0 && corpus.held_out.is_empty() && corpus.held_out_prompts.is_empty() {
        match (corpus.samples.pop(), corpus.prompts.pop()) {
            (Some(sample), _) => corpus.held_out.extend(judging(sample)),
            (None, Some(prompt)) => corpus.held_out_prompts.push(prompt),
            (None, None) => return Err(fail(path, "it holds no text to calibrate on".into())),
        }
    }
    if corpus.samples.is_empty() && corpus.prompts.is_empty() && wanted.held_out == 0 {
        return Err(fail(path, "it holds neither prompts nor text".into()));
    }
    Ok(corpus)
}

struct Reader<'a> {
    target: &'a Target,
    wanted: Wanted,
    corpus: Corpus,
    /// Prompts and texts so far.
    seen: usize,
    tokens: usize,
}

impl Reader<'_> {
    fn is_full(&self) -> bool {
        let judges = self.corpus.held_out.len() + self.corpus.held_out_prompts.len();
        self.tokens >= self.wanted.tokens && judges >= self.wanted.held_out
    }

    /// Whether the next one is for judging.
    fn judges(&mut self) -> bool {
        self.seen += 1;
        let enough = self.corpus.held_out.len() + self.corpus.held_out_prompts.len();
        self.seen.is_multiple_of(HELD_OUT_EVERY) && enough < self.wanted.held_out
    }

    /// Takes one line's object; false when it has none of the keys.
    fn object(&mut self, object: &Value) -> Result<bool, BuildError> {
        let text = |key: &str| object.get(key).and_then(Value::as_str);
        let domain = text("domain").unwrap_or("calibration").to_string();
        let (messages, answer) = match (text("prompt"), object.get("messages"), text("text")) {
            (Some(prompt), ..) => {
                (json!([{"role": "user", "content": prompt}]), text("answer").map(String::from))
            }
            (_, Some(messages), _) => split_answer(messages),
            (.., Some(content)) => {
                self.text(content, &domain)?;
                return Ok(true);
            }
            _ => return Ok(false),
        };
        let ids = chat(self.target, &messages)?;
        let judges = self.judges();
        match answer {
            Some(answer) => {
                let mut output_ids = self.target.tokenizer.encode(&answer, false)?;
                output_ids.extend(self.target.config.eos_token_ids.first());
                self.tokens += ids.len() + output_ids.len();
                let sample = Sample { output_ids, ..as_is(&ids, &domain) };
                let samples =
                    if judges { &mut self.corpus.held_out } else { &mut self.corpus.samples };
                samples.push(sample);
            }
            None if judges => self.corpus.held_out_prompts.push(Prompt { ids, domain }),
            None => {
                self.tokens += ids.len() + self.wanted.answer;
                self.corpus.prompts.push(Prompt { ids, domain });
            }
        }
        Ok(true)
    }

    fn text(&mut self, content: &str, domain: &str) -> Result<(), BuildError> {
        let ids = self.target.tokenizer.encode(content, true)?;
        for window in ids.chunks(TEXT_WINDOW) {
            if self.is_full() {
                break;
            }
            let sample = as_is(window, domain);
            if window.len() > TEXT_PROMPT && self.judges() {
                self.corpus.held_out.extend(judging(sample));
            } else {
                self.tokens += window.len();
                self.corpus.samples.push(sample);
            }
        }
        Ok(())
    }
}

/// A chat without the assistant's last turn, and that turn.
fn split_answer(messages: &Value) -> (Value, Option<String>) {
    let turns = messages.as_array().map_or(&[][..], Vec::as_slice);
    if let [before @ .., last] = turns
        && last.get("role").and_then(Value::as_str) == Some("assistant")
        && !before.is_empty()
    {
        let content = last.get("content").and_then(Value::as_str).map(String::from);
        return (json!(before), content);
    }
    (messages.clone(), None)
}

/// The ids of a chat as the target's template writes it, up to where the answer begins.
///
/// # Errors
/// When the template refuses it.
pub fn chat(target: &Target, messages: &Value) -> Result<Vec<u32>, BuildError> {
    match &target.chat_template {
        Some(template) => {
            let text = template.render(messages, None, true)?;
            Ok(target.tokenizer.encode(&text, false)?)
        }
        None => {
            let turns = messages.as_array().map_or(&[][..], Vec::as_slice);
            let contents: Vec<&str> =
                turns.iter().filter_map(|turn| turn.get("content")?.as_str()).collect();
            Ok(target.tokenizer.encode(&contents.join("\n"), true)?)
        }
    }
}

fn as_is(ids: &[u32], domain: &str) -> Sample {
    Sample {
        prompt_ids: ids.to_vec(),
        temperature: 1.0,
        domain: domain.into(),
        ..Sample::default()
    }
}

/// A text whose beginning is the prompt of the rest; none when it is too short for that.
pub fn judging(mut text: Sample) -> Option<Sample> {
    if text.output_ids.is_empty() {
        let cut = text.prompt_ids.len().min(TEXT_PROMPT);
        text.output_ids = text.prompt_ids.split_off(cut);
    }
    (!text.output_ids.is_empty()).then_some(text)
}

/// The file itself, or all files below a folder in name order.
fn files(path: &Path) -> Result<Vec<PathBuf>, BuildError> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut found = Vec::new();
    let entries = std::fs::read_dir(path).map_err(|e| fail(path, e.to_string()))?;
    for entry in entries {
        let entry = entry.map_err(|e| fail(path, e.to_string()))?.path();
        let hidden = entry.file_name().is_none_or(|n| n.to_string_lossy().starts_with('.'));
        if !hidden {
            found.extend(files(&entry)?);
        }
    }
    found.sort();
    Ok(found)
}

fn fail(path: &Path, reason: String) -> BuildError {
    BuildError::Calibration { path: path.display().to_string(), reason }
}

/// Whether a path looks like something [`read`] can use, checked before any work is done.
///
/// # Errors
/// When it does not exist or cannot be opened.
pub fn check(path: &Path) -> Result<(), BuildError> {
    std::fs::File::open(path).map(drop).map_err(|e| fail(path, e.to_string()))
}
