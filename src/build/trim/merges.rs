//! How merges put tokens together.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

/// The merges of a BPE by the ids of their two sides: place in the list, and product.
pub struct Merges {
    by_sides: HashMap<(u32, u32), (usize, u32)>,
}

impl Merges {
    /// Reads the merges of a `tokenizer.json` whose vocabulary is `pieces`.
    pub fn new(document: &Value, pieces: &HashMap<&str, u32>) -> Self {
        let merges = document.pointer("/model/merges").and_then(Value::as_array);
        let by_sides = merges
            .into_iter()
            .flatten()
            .enumerate()
            .filter_map(|(rank, merge)| {
                let (left, right) = parts(merge)?;
                let product = pieces.get(format!("{left}{right}").as_str())?;
                Some(((*pieces.get(left)?, *pieces.get(right)?), (rank, *product)))
            })
            .collect();
        Self { by_sides }
    }

    /// Adds to `kept` all that its tokens pass through when their own text is read. With these,
    /// and the merges between them in their order, that text is read the same way: no other merge
    /// of the part could come first that did not come first in the whole.
    ///
    /// Vocabularies that were converted list every split of a token as a merge, and the first one
    /// listed need not be the one that is taken.
    pub fn close(&self, pieces: &HashMap<&str, u32>, kept: &mut BTreeSet<u32>) {
        let tokens = pieces.iter().filter(|(_, id)| kept.contains(id));
        let parts: Vec<u32> =
            tokens.flat_map(|(piece, id)| self.parts_of(piece, *id, pieces)).collect();
        kept.extend(parts);
    }

    /// Every token on the way from a piece's characters to the piece; none when merges do not
    /// lead there.
    fn parts_of(&self, piece: &str, id: u32, pieces: &HashMap<&str, u32>) -> Vec<u32> {
        let characters = piece.char_indices().map(|(at, c)| {
            let character = &piece[at..at + c.len_utf8()];
            pieces.get(character).copied()
        });
        let Some(mut symbols) = characters.collect::<Option<Vec<u32>>>() else {
            return Vec::new();
        };
        let mut parts = symbols.clone();
        let next = |symbols: &[u32]| {
            let merge = |(at, pair): (usize, &[u32])| {
                let (rank, product) = self.by_sides.get(&(pair[0], pair[1]))?;
                Some((*rank, at, *product))
            };
            symbols.windows(2).enumerate().filter_map(merge).min()
        };
        while let Some((_, at, product)) = next(&symbols) {
            symbols[at] = product;
            symbols.remove(at + 1);
            parts.push(product);
        }
        if symbols == [id] { parts } else { Vec::new() }
    }
}

/// The two sides of a merge, which is a list of two or a text with a space between.
pub fn parts(merge: &Value) -> Option<(&str, &str)> {
    match merge {
        Value::String(merge) => merge.split_once(' '),
        Value::Array(pair) => Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    }
}
