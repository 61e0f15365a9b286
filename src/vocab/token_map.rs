//! The table between a draft of fewer tokens and its target, `da_vocab.json` in a draft folder.
//!
//! Every token of such a draft is one of the target's, under another id, so ids are looked up and
//! no text is read again. One token of the draft stands for all that the target has besides.

use std::collections::HashSet;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::path::Path;

use crate::model::Tokenizer;

/// Name of the table in a draft folder: a list that holds, for each of the draft's ids, the
/// target's id of the same token, or null where the target has none.
pub const VOCAB_FILE: &str = "da_vocab.json";

/// Why a table cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenMapError {
    #[error("{VOCAB_FILE} cannot be read: {0}")]
    Read(std::io::Error),
    #[error("{VOCAB_FILE} is not a list of ids: {0}\nhint: build the draft again")]
    Syntax(serde_json::Error),
    #[error(
        "{VOCAB_FILE} has {got} ids, expected {expected}, those of the draft's tokenizer\nhint: the files are of different drafts"
    )]
    Length { expected: usize, got: usize },
    #[error(
        "{VOCAB_FILE} calls the draft's token {id} ({draft:?}) the target's {target_id} ({target:?})\nhint: the draft was made for another target"
    )]
    Piece { id: u32, draft: Option<String>, target_id: u32, target: Option<String> },
    #[error("{VOCAB_FILE} gives the target's token {target_id} twice\nhint: build the draft again")]
    Twice { target_id: u32 },
    #[error(
        "the draft has no token for what it dropped: expected a null in {VOCAB_FILE} or an unk_token in tokenizer.json\nhint: build the draft again"
    )]
    NoUnknown,
}

/// Ids of a draft and of its target, both ways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMap {
    /// By the draft's ids.
    to_target: Vec<Option<u32>>,
    /// By the target's ids.
    to_draft: Vec<u32>,
    unknown: u32,
}

impl TokenMap {
    /// Reads the table of a draft folder; none where there is no such file.
    ///
    /// # Errors
    /// See [`TokenMapError`].
    pub fn of_folder(
        folder: &Path,
        draft: &Tokenizer,
        target: &Tokenizer,
    ) -> Result<Option<Self>, TokenMapError> {
        match std::fs::read(folder.join(VOCAB_FILE)) {
            Ok(json) => Self::new(&json, draft, target).map(Some),
            // A model in one file is no folder.
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => Ok(None),
            Err(error) => Err(TokenMapError::Read(error)),
        }
    }

    /// Reads a table and holds it against both tokenizers: each pair is the same token.
    ///
    /// # Errors
    /// See [`TokenMapError`].
    pub fn new(json: &[u8], draft: &Tokenizer, target: &Tokenizer) -> Result<Self, TokenMapError> {
        let to_target: Vec<Option<u32>> =
            serde_json::from_slice(json).map_err(TokenMapError::Syntax)?;
        let (expected, got) = (draft.vocab_size(), to_target.len());
        if expected != got {
            return Err(TokenMapError::Length { expected, got });
        }
        let mut seen = HashSet::new();
        for (id, target_id) in (0..).zip(&to_target) {
            let Some(target_id) = *target_id else { continue };
            let (own, other) = (draft.piece(id), target.piece(target_id));
            if own.is_none() || own != other {
                return Err(TokenMapError::Piece { id, draft: own, target_id, target: other });
            }
            if !seen.insert(target_id) {
                return Err(TokenMapError::Twice { target_id });
            }
        }
        let unmapped = (0..).zip(&to_target).find(|(_, target_id)| target_id.is_none());
        let unknown = unmapped.map(|(id, _)| id).or_else(|| draft.unknown_id());
        let unknown = unknown.ok_or(TokenMapError::NoUnknown)?;
        Ok(Self::with_unknown(to_target, target.vocab_size(), unknown))
    }

    /// A table that is known to be right; `target_ids` is the number of the target's ids.
    pub(crate) fn with_unknown(
        to_target: Vec<Option<u32>>,
        target_ids: usize,
        unknown: u32,
    ) -> Self {
        let mut to_draft = vec![unknown; target_ids];
        for (id, target_id) in (0..).zip(&to_target) {
            if let Some(place) =
                target_id.and_then(|target_id| to_draft.get_mut(target_id as usize))
            {
                *place = id;
            }
        }
        Self { to_target, to_draft, unknown }
    }

    /// The target's ids of the tokens that the draft has, in the draft's order.
    pub fn shared(&self) -> impl Iterator<Item = u32> {
        self.to_target.iter().flatten().copied()
    }

    /// Number of the target's ids.
    pub fn target_ids(&self) -> usize {
        self.to_draft.len()
    }

    /// The draft's id of a token of the target; of what the draft lacks, the one for all the rest.
    pub fn to_draft(&self, target_id: u32) -> u32 {
        self.to_draft.get(target_id as usize).copied().unwrap_or(self.unknown)
    }

    /// Rows of logits over the draft's ids, `columns` each, as rows over the target's. What the
    /// draft lacks gets negative infinity, and what the target lacks is left out.
    pub fn spread(&self, logits: &[f32], columns: usize) -> Vec<f32> {
        let width = self.target_ids();
        let rows = logits.len() / columns.max(1);
        let mut spread = vec![f32::NEG_INFINITY; rows * width];
        let pairs = spread.chunks_exact_mut(width.max(1)).zip(logits.chunks_exact(columns.max(1)));
        for (spread, row) in pairs {
            for (logit, target_id) in row.iter().zip(&self.to_target) {
                if let Some(place) =
                    target_id.and_then(|target_id| spread.get_mut(target_id as usize))
                {
                    *place = *logit;
                }
            }
        }
        spread
    }
}

#[cfg(test)]
mod tests;
