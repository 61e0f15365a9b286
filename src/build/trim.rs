//! A draft over a part of the target's vocabulary: fewer rows in the two tables, which are most of
//! a small draft, and a tokenizer of its own that servers map by the tokens' texts (vLLM's
//! `use_heterogeneous_vocab`).

use std::collections::BTreeMap;

use candle_core::Tensor;
use serde_json::{Map, Value};

use super::BuildError;
use crate::hub::Target;
use crate::model::Tokenizer;
use crate::model::decoder::Decoder;
use crate::vocab::TokenMap;

mod merges;
mod tokenizer;

pub use tokenizer::{Kept, UNKNOWN};

/// A trimmed draft with what its folder needs besides.
pub struct Trimmed {
    pub draft: Decoder,
    /// The target's id of each of the draft's ids; none for the token that stands for the rest.
    pub ids: Vec<Option<u32>>,
    /// The draft's id of the token for the rest.
    unknown: u32,
    /// Files in place of the target's.
    pub companions: Vec<(String, Vec<u8>)>,
}

/// Files that repeat `tokenizer.json` in an older form and would contradict a trimmed one.
pub const CONTRADICTING: [&str; 4] =
    ["vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model"];

/// How often each token occurs in texts.
pub fn count<'a>(texts: impl Iterator<Item = &'a [u32]>) -> BTreeMap<u32, u64> {
    let mut counts = BTreeMap::new();
    for id in texts.flatten() {
        *counts.entry(*id).or_insert(0) += 1;
    }
    counts
}

/// Keeps the `most_used` most frequent tokens of `counts` besides those of [`Kept::choose`]. The
/// row of the token for all others is the mean of the dropped embeddings, by frequency; its row in
/// the head is zero, and servers do not let it be drafted.
///
/// # Errors
/// When the tokenizer is of a kind that cannot be trimmed, or a tensor computation fails.
pub fn trim(
    draft: &Decoder,
    target: &Target,
    counts: &BTreeMap<u32, u64>,
    most_used: usize,
) -> Result<Trimmed, BuildError> {
    let kept = Kept::choose(target.tokenizer.json(), counts, most_used)?;
    let config = &draft.config;
    // Rows beyond the tokenizer's ids are padding and go first.
    let rows: Vec<u32> = kept.ids().iter().flatten().copied().collect();
    let device = draft.embed_tokens.device();
    let index = Tensor::new(rows.as_slice(), device)?;
    let mut embed_tokens = draft.embed_tokens.index_select(&index, 0)?;
    let mut lm_head = draft.lm_head.index_select(&index, 0)?;
    if kept.adds_unknown() {
        let row = mean_of_dropped(draft, &kept, counts)?;
        embed_tokens = Tensor::cat(&[&embed_tokens, &row], 0)?;
        lm_head = match config.tie_word_embeddings {
            true => embed_tokens.clone(),
            false => Tensor::cat(&[&lm_head, &row.zeros_like()?], 0)?,
        };
    }
    let mut config = config.clone();
    config.vocab_size = kept.ids().len();
    config.eos_token_ids = kept.renumber_all(&config.eos_token_ids);
    config.bos_token_id = config.bos_token_id.and_then(|id| kept.renumber(id));
    let trimmed = Decoder {
        config,
        embed_tokens,
        layers: draft.layers.clone(),
        norm: draft.norm.clone(),
        lm_head,
    };
    let eos = target.config.eos_token_ids.first().and_then(|id| target.tokenizer.piece(*id));
    let companions = kept.companions(&target.companions, eos)?;
    Ok(Trimmed { draft: trimmed, ids: kept.ids().to_vec(), unknown: kept.unknown_id(), companions })
}

/// `(1, K)`.
fn mean_of_dropped(
    draft: &Decoder,
    kept: &Kept,
    counts: &BTreeMap<u32, u64>,
) -> Result<Tensor, BuildError> {
    let of = |id: &u32| counts.get(id).copied().unwrap_or(0) as f32;
    let rows = draft.config.vocab_size as u32;
    let dropped: Vec<u32> = (0..rows).filter(|id| kept.renumber(*id).is_none()).collect();
    let seen: f32 = dropped.iter().map(of).sum();
    // Where none of them was seen, they count alike.
    let weights: Vec<f32> = dropped
        .iter()
        .map(|id| if seen > 0.0 { of(id) / seen } else { 1.0 / dropped.len().max(1) as f32 })
        .collect();
    let device = draft.embed_tokens.device();
    if dropped.is_empty() {
        return Ok(Tensor::zeros(
            (1, draft.config.hidden_size),
            draft.embed_tokens.dtype(),
            device,
        )?);
    }
    let table = draft.embed_tokens.index_select(&Tensor::new(dropped.as_slice(), device)?, 0)?;
    let weights = Tensor::from_vec(weights, (1, dropped.len()), device)?;
    Ok(weights.matmul(&table)?)
}

impl Trimmed {
    /// The same draft with the target's rows, for comparing it: what was dropped is read as the
    /// token for all others. What it writes for these rows must not be looked at.
    ///
    /// # Errors
    /// When a tensor computation fails.
    pub fn over_the_whole_vocabulary(&self, draft: &Decoder) -> Result<Decoder, BuildError> {
        let rows = draft.config.vocab_size;
        let map = TokenMap::with_unknown(self.ids.clone(), rows, self.unknown);
        over_target(&self.draft, &map, rows)
    }

    /// Replaces the ids in a `config.json` that the target's carried over.
    pub fn renumber(&self, config: &mut Map<String, Value>) {
        let place: BTreeMap<u64, usize> = self
            .ids
            .iter()
            .enumerate()
            .filter_map(|(new, old)| Some((u64::from((*old)?), new)))
            .collect();
        tokenizer::renumber_keys(config, &|id| place.get(&id).map(|new| *new as u64));
    }
}

/// A trimmed draft with `rows` rows of vocabulary, those of its target: what it lacks is read as
/// the token for the rest. What it writes for these rows must not be looked at.
///
/// # Errors
/// When a tensor computation fails.
pub fn over_target(draft: &Decoder, map: &TokenMap, rows: usize) -> Result<Decoder, BuildError> {
    let places: Vec<u32> = (0..rows as u32).map(|id| map.to_draft(id)).collect();
    let places = Tensor::from_vec(places, rows, draft.embed_tokens.device())?;
    let embed_tokens = draft.embed_tokens.index_select(&places, 0)?;
    let lm_head = match draft.config.tie_word_embeddings {
        true => embed_tokens.clone(),
        false => draft.lm_head.index_select(&places, 0)?,
    };
    let mut config = draft.config.clone();
    config.vocab_size = rows;
    Ok(Decoder {
        config,
        embed_tokens,
        layers: draft.layers.clone(),
        norm: draft.norm.clone(),
        lm_head,
    })
}

/// Share of a text's tokens, as the target reads it, that a trimmed vocabulary has.
///
/// # Errors
/// When the tokenizer refuses the text.
pub fn coverage(tokenizer: &Tokenizer, ids: &[Option<u32>], text: &str) -> Result<f64, BuildError> {
    let kept: std::collections::BTreeSet<u32> = ids.iter().flatten().copied().collect();
    let tokens = tokenizer.encode(text, false)?;
    let known = tokens.iter().filter(|id| kept.contains(id)).count();
    Ok(known as f64 / tokens.len().max(1) as f64)
}

/// A sentence or two in a language or of a kind, to see what a trimmed vocabulary loses.
pub const SAMPLES: [(&str, &str); 12] = [
    (
        "English",
        "The train was late again, so we walked along the river and talked about the trip.",
    ),
    ("German", "Der Zug kam wieder zu spät, also gingen wir am Fluss entlang und redeten."),
    ("French", "Le train avait encore du retard, alors nous avons marché le long de la rivière."),
    (
        "Spanish",
        "El tren llegó tarde otra vez, así que caminamos junto al río y hablamos del viaje.",
    ),
    ("Portuguese", "O trem atrasou de novo, então caminhamos ao longo do rio e conversamos."),
    ("Polish", "Pociąg znowu się spóźnił, więc poszliśmy wzdłuż rzeki i rozmawialiśmy."),
    ("Russian", "Поезд снова опоздал, поэтому мы пошли вдоль реки и говорили о поездке."),
    ("Arabic", "تأخر القطار مرة أخرى، فمشينا على طول النهر وتحدثنا عن الرحلة."),
    ("Hindi", "ट्रेन फिर से देर से आई, इसलिए हम नदी के किनारे चले और बातें कीं।"),
    ("Chinese", "火车又晚点了，所以我们沿着河边走，聊起了这次旅行。"),
    ("Japanese", "電車がまた遅れたので、川沿いを歩きながら旅行の話をしました。"),
    ("code", "def mean(values):\n    return sum(values) / len(values) if values else 0.0\n"),
];
