//! What two tokenizers have in common, by the content of their token tables.
//!
//! Sizes prove nothing: two vocabularies of one size may hold other tokens, and one vocabulary
//! may be padded to several sizes.

use std::collections::{BTreeSet, HashSet};

use crate::model::Tokenizer;

mod token_map;

pub use token_map::{TokenMap, TokenMapError, VOCAB_FILE};

/// How a draft's tokenizer relates to its target's.
#[derive(Debug, Clone, PartialEq)]
pub enum VocabMatch {
    /// Every id is the same token in both: ids can be passed on as they are.
    Identical,
    /// Only special tokens differ: those that one lacks, has under another id, does not treat as
    /// special, or puts at the beginning of a text where the other does not. Sorted.
    IdenticalUpToSpecial(Vec<String>),
    /// Ordinary tokens differ: only drafting across vocabularies is possible. `overlap` is the
    /// share of the smaller vocabulary's texts that the larger has too, between 0 and 1.
    Different { overlap: f64 },
}

/// Compares the token tables of two tokenizers.
pub fn compare(a: &Tokenizer, b: &Tokenizer) -> VocabMatch {
    let mut special = BTreeSet::new();
    let ids = a.vocab_size().max(b.vocab_size());
    for id in (0..ids).filter_map(|id| u32::try_from(id).ok()) {
        let (left, right) = (a.piece(id), b.piece(id));
        if left == right && a.is_special(id) == b.is_special(id) {
            continue;
        }
        // A token that is not there has no say in whether the difference is a special one.
        let is_special = |tokenizer: &Tokenizer, piece: &Option<String>| {
            piece.is_none() || tokenizer.is_special(id)
        };
        let only_special = left == right || (is_special(a, &left) && is_special(b, &right));
        if !only_special {
            return VocabMatch::Different { overlap: overlap(a, b) };
        }
        special.extend(left);
        special.extend(right);
    }
    special.extend(leading_difference(a, b));
    if special.is_empty() {
        VocabMatch::Identical
    } else {
        VocabMatch::IdenticalUpToSpecial(special.into_iter().collect())
    }
}

/// Special tokens that one of the two puts around a text and the other does not.
fn leading_difference(a: &Tokenizer, b: &Tokenizer) -> Vec<String> {
    let added = |tokenizer: &Tokenizer| -> HashSet<String> {
        let ids = tokenizer.encode("", true).unwrap_or_default();
        ids.into_iter().filter_map(|id| tokenizer.piece(id)).collect()
    };
    added(a).symmetric_difference(&added(b)).cloned().collect()
}

/// Shared texts of ordinary tokens, as a share of the smaller vocabulary.
fn overlap(a: &Tokenizer, b: &Tokenizer) -> f64 {
    let (a, b) = (texts(a), texts(b));
    let smaller = a.len().min(b.len());
    if smaller == 0 {
        return 0.0;
    }
    a.intersection(&b).count() as f64 / smaller as f64
}

/// What the ordinary tokens stand for, in a form that does not depend on how the vocabulary
/// spells spaces and bytes.
fn texts(tokenizer: &Tokenizer) -> HashSet<Vec<u8>> {
    (0..tokenizer.vocab_size())
        .filter_map(|id| u32::try_from(id).ok())
        .filter(|id| !tokenizer.is_special(*id))
        .filter_map(|id| {
            tokenizer.piece_bytes(id).or_else(|| Some(spelled_out(&tokenizer.piece(id)?)))
        })
        .collect()
}

fn spelled_out(piece: &str) -> Vec<u8> {
    let byte = piece.strip_prefix("<0x").and_then(|piece| piece.strip_suffix('>'));
    match byte.filter(|byte| byte.len() == 2).and_then(|byte| u8::from_str_radix(byte, 16).ok()) {
        Some(byte) => vec![byte],
        None => piece.replace('▁', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests;
