//! What a model is, what it would become, and whether a draft fits it and the servers.

use serde::Serialize;
use serde_json::{Value, json};

use super::search::CostModel;
use super::{BuildError, Plan, Request};
use crate::hub::Target;
use crate::model::{Family, ModelConfig, NormKind};
use crate::vocab::{TokenMap, VocabMatch, compare};

/// A model's properties, and the shape that da-build gives its draft when nothing is asked for.
///
/// # Errors
/// When no plan can be made, which would be a defect.
pub fn describe(target: &Target) -> Result<Value, BuildError> {
    let config = &target.config;
    let plan = Plan::new(config, &Request::default())?;
    let draft = plan.config(config);
    let first = target.weights.names().first().and_then(|name| target.weights.stored_as(name));
    let bytes: u64 = target
        .weights
        .files()
        .iter()
        .filter_map(|path| std::fs::metadata(path).ok())
        .map(|file| file.len())
        .sum();
    let windows: Vec<usize> = config.anatomy.windows.iter().flatten().copied().collect();
    Ok(json!({
        "name": target.name,
        "family": config.family.model_type(),
        "architecture": config.family.architecture(),
        "parameters": config.parameters(),
        "parameters_per_step": config.parameters_per_step(),
        "stored_as": first,
        "files": target.weights.files().len(),
        "bytes": bytes,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling.map(|scaling| format!("{scaling:?}")),
        "sliding_window_layers": windows.len(),
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": config.vocab_size,
        "tokens": target.tokenizer.vocab_size(),
        "eos_token_ids": config.eos_token_ids,
        "chat_template": target.chat_template.is_some(),
        "draft": {
            "plan": plan,
            "architecture": draft.family.architecture(),
            "parameters": draft.parameters(),
            "parameters_per_step": draft.parameters_per_step(),
            "share": draft.parameters() as f64 / config.parameters() as f64,
            "latency_ratio": CostModel::default().latency_ratio(&draft, config),
            "notes": notes(config, &draft),
        },
    }))
}

/// What a draft keeps, or is carried by, for the sake of a server.
fn notes(target: &ModelConfig, draft: &ModelConfig) -> Vec<String> {
    let mut notes = Vec::new();
    if target.anatomy.post_norms {
        notes.push(
            "the width stays: vLLM insists on tied embeddings for this family, and a smaller \
             residual would break the tie; layers, heads and MLP channels are cut"
                .into(),
        );
    }
    if target.family == Family::StableLm {
        notes.push(
            "hidden size and heads shrink together: vLLM derives the head size of this family \
             from them"
                .into(),
        );
    }
    if target.family != draft.family {
        notes.push(format!(
            "the draft is a {}: vLLM derives the head size of {} from the hidden size, and would \
             cut the weights to it without a word",
            draft.family.architecture(),
            target.family.architecture()
        ));
    }
    if target.tie_word_embeddings && !draft.tie_word_embeddings {
        notes.push("the head is untied: the final norm's gain is folded into it".into());
    }
    if target.anatomy.norm == NormKind::Layer {
        notes.push("one direction of the width is left to the norms' biases".into());
    }
    notes
}

/// One thing about a pair of target and draft.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub verdict: Fit,
    pub what: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fit {
    Good,
    /// Works, with something to know.
    Mind,
    Bad,
}

/// Whether a draft fits its target and the servers: the worst finding is the verdict.
pub fn fit(target: &Target, draft: &Target) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut say = |verdict, what: String| findings.push(Finding { verdict, what });
    let (asked, drafted) = (&target.config, &draft.config);
    let table = TokenMap::of_folder(&draft.location, &draft.tokenizer, &target.tokenizer);
    let mut ends = asked.eos_token_ids.clone();
    match &table {
        Ok(Some(table)) => {
            ends.iter_mut().for_each(|id| *id = table.to_draft(*id));
            let what = format!(
                "the draft has {} of the target's {} tokens: da-serve serves the pair, and vLLM \
                 with use_heterogeneous_vocab",
                table.shared().count(),
                table.target_ids()
            );
            say(Fit::Good, what);
        }
        Ok(None) => fit_vocabulary(target, draft, &mut say),
        Err(error) => say(Fit::Bad, error.to_string().replace('\n', "; ")),
    }
    if drafted.eos_token_ids == ends {
        say(Fit::Good, format!("both end with {:?}", asked.eos_token_ids));
    } else {
        let what = format!(
            "the target ends with {:?}, the draft with {:?}; servers use the target's",
            asked.eos_token_ids, drafted.eos_token_ids
        );
        say(Fit::Mind, what);
    }
    if drafted.max_position_embeddings >= asked.max_position_embeddings {
        say(Fit::Good, format!("the draft sees {} tokens", drafted.max_position_embeddings));
    } else {
        say(
            Fit::Bad,
            format!(
                "the draft sees {} tokens, the target {}: some versions of vLLM read past the \
                 draft's rotary table on longer requests, others lower the target's limit; serve \
                 with --max-model-len {}",
                drafted.max_position_embeddings,
                asked.max_position_embeddings,
                drafted.max_position_embeddings
            ),
        );
    }
    let derived = drafted.head_dim * drafted.num_attention_heads == drafted.hidden_size;
    if matches!(drafted.family, Family::Qwen2 | Family::StableLm) && !derived {
        say(
            Fit::Bad,
            format!(
                "head_dim is {} and not hidden_size / num_attention_heads: vLLM ignores it for {} \
                 and cuts the weights without a word",
                drafted.head_dim,
                drafted.family.architecture()
            ),
        );
    }
    let share = drafted.parameters_per_step() as f64 / asked.parameters_per_step() as f64;
    let what =
        format!("a step of the draft reads {:.1} % of the target's parameters", 100.0 * share);
    say(if share < 0.6 { Fit::Good } else { Fit::Mind }, what);
    findings
}

/// Whether a draft without a table of its own has the target's vocabulary.
fn fit_vocabulary(target: &Target, draft: &Target, say: &mut impl FnMut(Fit, String)) {
    let (asked, drafted) = (&target.config, &draft.config);
    let tokens = compare(&target.tokenizer, &draft.tokenizer);
    let padding = asked.vocab_size.abs_diff(drafted.vocab_size);
    match (padding, &tokens) {
        (0, _) => say(Fit::Good, format!("both have {} rows of vocabulary", asked.vocab_size)),
        (_, VocabMatch::Identical) => say(
            Fit::Mind,
            format!(
                "compatible: same tokenizer, padding differs by {padding} ({} and {} rows); vLLM \
                 compares the numbers, and a draft that da-build makes has the target's",
                asked.vocab_size, drafted.vocab_size
            ),
        ),
        _ => say(
            Fit::Bad,
            format!(
                "the target has {} rows of vocabulary, the draft {}: vLLM and da-serve refuse the \
                 pair, unless vLLM drafts across vocabularies (use_heterogeneous_vocab)",
                asked.vocab_size, drafted.vocab_size
            ),
        ),
    }
    match tokens {
        VocabMatch::Identical => say(Fit::Good, "every id is the same token in both".into()),
        VocabMatch::IdenticalUpToSpecial(tokens) => {
            say(Fit::Mind, format!("special tokens differ: {}", shorten(&tokens)));
        }
        VocabMatch::Different { overlap } => say(
            Fit::Bad,
            format!(
                "the tokenizers differ; they share {:.1} % of the smaller vocabulary. vLLM does \
                 not compare them, and every drafted token would be wrong",
                100.0 * overlap
            ),
        ),
    }
}

fn shorten(tokens: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = tokens.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(" ");
    match tokens.len().checked_sub(SHOWN) {
        Some(more) if more > 0 => format!("{shown} and {more} more"),
        _ => shown,
    }
}
