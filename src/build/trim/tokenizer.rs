//! A part of a `tokenizer.json`: which tokens stay, and everything that names ids renumbered.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::super::BuildError;
use super::merges::{Merges, parts};

/// The token for everything that was dropped, where the tokenizer has none of its own.
pub const UNKNOWN: &str = "<|unknown|>";

const SETTINGS: &str = "tokenizer_config.json";

/// The tokens that stay, in the order of their ids.
pub struct Kept {
    document: Value,
    /// Old ids by new ones; none for a token that was added.
    ids: Vec<Option<u32>>,
    places: HashMap<u32, u32>,
    unknown: String,
    unknown_id: u32,
    adds_unknown: bool,
}

impl Kept {
    /// All added and special tokens, all tokens for single bytes, the `most_used` most frequent of
    /// the others, and what merges need to reach those.
    ///
    /// # Errors
    /// When the tokenizer is not a BPE.
    pub fn choose(
        json: &[u8],
        counts: &BTreeMap<u32, u64>,
        most_used: usize,
    ) -> Result<Self, BuildError> {
        let document: Value = serde_json::from_slice(json)
            .map_err(|e| BuildError::Trim(format!("tokenizer.json cannot be read: {e}")))?;
        let kind = document.pointer("/model/type").and_then(Value::as_str).unwrap_or("none");
        let vocab = match document.pointer("/model/vocab") {
            Some(Value::Object(vocab)) if kind == "BPE" => vocab,
            _ => {
                return Err(BuildError::Trim(format!("the tokenizer is a {kind}, expected a BPE")));
            }
        };
        let pieces: HashMap<&str, u32> = vocab
            .iter()
            .filter_map(|(piece, id)| Some((piece.as_str(), u32::try_from(id.as_u64()?).ok()?)))
            .collect();
        let added: BTreeMap<&str, u32> = document
            .get("added_tokens")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|token| {
                let id = u32::try_from(token.get("id")?.as_u64()?).ok()?;
                Some((token.get("content")?.as_str()?, id))
            })
            .collect();

        let mut kept: BTreeSet<u32> = added.values().copied().collect();
        kept.extend(pieces.iter().filter(|(piece, _)| is_byte(piece)).map(|(_, id)| *id));
        let mut by_use: Vec<(&u32, &u64)> = counts.iter().collect();
        by_use.sort_by_key(|(id, count)| (std::cmp::Reverse(**count), **id));
        let others: BTreeSet<u32> =
            pieces.values().copied().filter(|id| !kept.contains(id)).collect();
        let seen = by_use.into_iter().map(|(id, _)| *id).filter(|id| others.contains(id));
        // A text holds a few thousand tokens. Behind them come the others in the order in which
        // the tokenizer learned them, which is that of their frequency in its own text.
        let unseen = others.iter().copied().filter(|id| !counts.contains_key(id));
        kept.extend(seen.chain(unseen).take(most_used));
        Merges::new(&document, &pieces).close(&pieces, &mut kept);

        let own = document.pointer("/model/unk_token").and_then(Value::as_str);
        let unknown = own.filter(|piece| pieces.contains_key(piece) || added.contains_key(piece));
        let own = unknown.and_then(|piece| pieces.get(piece).or(added.get(piece))).copied();
        kept.extend(own);
        let adds_unknown = own.is_none();
        let unknown = unknown.unwrap_or(UNKNOWN).to_string();
        let places: HashMap<u32, u32> =
            kept.iter().enumerate().map(|(new, old)| (*old, new as u32)).collect();
        let unknown_id = own.and_then(|id| places.get(&id)).copied();
        let unknown_id = unknown_id.unwrap_or(kept.len() as u32);
        let mut ids: Vec<Option<u32>> = kept.into_iter().map(Some).collect();
        if adds_unknown {
            ids.push(None);
        }
        Ok(Self { document, ids, places, unknown, unknown_id, adds_unknown })
    }

    /// Old ids by new ones; none for a token that was added.
    pub fn ids(&self) -> &[Option<u32>] {
        &self.ids
    }

    /// The new id of the token for the rest.
    pub fn unknown_id(&self) -> u32 {
        self.unknown_id
    }

    /// Whether the token for the rest is a new one.
    pub fn adds_unknown(&self) -> bool {
        self.adds_unknown
    }

    /// The new id of a token, if it stays.
    pub fn renumber(&self, id: u32) -> Option<u32> {
        self.places.get(&id).copied()
    }

    /// New ids of those that stay.
    pub fn renumber_all(&self, ids: &[u32]) -> Vec<u32> {
        ids.iter().filter_map(|id| self.renumber(*id)).collect()
    }

    /// The target's tokenizer files that name ids, with what was dropped left out and every id
    /// renumbered. Servers learn from `tokenizer_config.json` which token stands for the rest, so
    /// there is one in any case; `eos` is what it names as the end where the target has none.
    ///
    /// # Errors
    /// When a file is not JSON.
    pub fn companions(
        &self,
        files: &[(String, Vec<u8>)],
        eos: Option<String>,
    ) -> Result<Vec<(String, Vec<u8>)>, BuildError> {
        let mut companions = Vec::new();
        if !files.iter().any(|(name, _)| name == SETTINGS) {
            let settings = json!({
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": self.unknown,
                "eos_token": eos,
            });
            let bytes = serde_json::to_vec_pretty(&settings).unwrap_or_default();
            companions.push((SETTINGS.to_string(), bytes));
        }
        for (name, bytes) in files {
            let document = match name.as_str() {
                "tokenizer.json" => self.tokenizer(),
                SETTINGS | "special_tokens_map.json" | "generation_config.json" => {
                    let mut document: Value = serde_json::from_slice(bytes)
                        .map_err(|e| BuildError::Trim(format!("{name} cannot be read: {e}")))?;
                    self.settings(name, &mut document);
                    document
                }
                _ => continue,
            };
            let bytes = serde_json::to_vec_pretty(&document).unwrap_or_default();
            companions.push((name.clone(), bytes));
        }
        Ok(companions)
    }

    fn tokenizer(&self) -> Value {
        let mut document = self.document.clone();
        let place = |id: &Value| {
            let id = u32::try_from(id.as_u64()?).ok()?;
            self.renumber(id)
        };
        let mut staying = BTreeSet::new();
        if let Some(Value::Object(vocab)) = document.pointer_mut("/model/vocab") {
            let mut kept: Vec<(u32, String)> =
                vocab.iter().filter_map(|(piece, id)| Some((place(id)?, piece.clone()))).collect();
            kept.sort();
            staying.extend(kept.iter().map(|(_, piece)| piece.clone()));
            *vocab = kept.into_iter().map(|(id, piece)| (piece, json!(id))).collect();
        }
        if let Some(Value::Array(merges)) = document.pointer_mut("/model/merges") {
            merges.retain(|merge| {
                parts(merge).is_some_and(|(left, right)| {
                    [left, right, &format!("{left}{right}")]
                        .iter()
                        .all(|piece| staying.contains(*piece))
                })
            });
        }
        if let Some(Value::Array(added)) = document.get_mut("added_tokens") {
            added.retain_mut(|token| match token.get("id").and_then(place) {
                Some(id) => {
                    token["id"] = json!(id);
                    true
                }
                None => false,
            });
            if self.adds_unknown {
                added.push(json!({
                    "id": self.ids.len() - 1,
                    "content": UNKNOWN,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": true,
                }));
            }
        }
        if let Some(processor) = document.get_mut("post_processor") {
            self.renumber_processor(processor);
        }
        for part in ["truncation", "padding"] {
            if let Some(value) = document.get_mut(part) {
                *value = Value::Null;
            }
        }
        document
    }

    /// Ids stand in lists named `ids`, or behind the text of a token.
    fn renumber_processor(&self, value: &mut Value) {
        let new = |id: &Value| {
            let id = u32::try_from(id.as_u64()?).ok()?;
            self.renumber(id)
        };
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    match (key.as_str(), &mut *value) {
                        ("ids", Value::Array(ids)) => {
                            *ids = ids.iter().filter_map(new).map(|id| json!(id)).collect();
                        }
                        ("sep" | "cls", Value::Array(pair)) => {
                            if let Some(id) = pair.get(1).and_then(new) {
                                pair[1] = json!(id);
                            }
                        }
                        _ => self.renumber_processor(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|v| self.renumber_processor(v)),
            _ => {}
        }
    }

    fn settings(&self, name: &str, document: &mut Value) {
        let Value::Object(map) = document else { return };
        if name == "generation_config.json" {
            renumber_keys(map, &|id| {
                let id = u32::try_from(id).ok()?;
                self.renumber(id).map(u64::from)
            });
            return;
        }
        map.insert("unk_token".into(), json!(self.unknown));
        if let Some(Value::Object(decoder)) = map.get_mut("added_tokens_decoder") {
            let mut kept: Map<String, Value> = std::mem::take(decoder)
                .into_iter()
                .filter_map(|(id, token)| {
                    Some((self.renumber(id.parse().ok()?)?.to_string(), token))
                })
                .collect();
            if self.adds_unknown {
                let token = json!({"content": UNKNOWN, "special": true});
                kept.insert((self.ids.len() - 1).to_string(), token);
            }
            *decoder = kept;
        }
    }
}

/// Renumbers what a configuration says of special tokens; an id that was dropped goes.
pub fn renumber_keys(config: &mut Map<String, Value>, new: &dyn Fn(u64) -> Option<u64>) {
    let keys: Vec<String> =
        config.keys().filter(|key| key.ends_with("_token_id")).cloned().collect();
    for key in keys {
        let renumbered = match config.get(&key) {
            Some(Value::Array(ids)) => {
                Some(json!(ids.iter().filter_map(|id| new(id.as_u64()?)).collect::<Vec<_>>()))
            }
            Some(id) => id.as_u64().and_then(new).map(|id| json!(id)),
            None => None,
        };
        match renumbered {
            Some(value) => config.insert(key, value),
            None => config.remove(&key),
        };
    }
}

/// Whether a token stands for one byte: a single character of the byte-level alphabet, which goes
/// up to U+0143, or `<0x..>`.
fn is_byte(piece: &str) -> bool {
    let mut characters = piece.chars();
    let single =
        matches!((characters.next(), characters.next()), (Some(c), None) if c <= '\u{143}');
    let spelled = piece.len() == 6 && piece.starts_with("<0x") && piece.ends_with('>');
    single || spelled
}
