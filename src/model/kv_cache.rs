//! Keys and values of one sequence, with exact roll-back.

use super::ModelConfig;

/// Keys and values of every layer for the tokens of one sequence.
///
/// Invariant: `len` rows are valid in every layer; rows beyond it are garbage that the next
/// forward overwrites, so [`KvCache::truncate`] is an exact undo.
pub struct KvCache {
    /// Per layer, keys after rotary embedding: `(len, num_key_value_heads * head_dim)`.
    pub(super) keys: Vec<Vec<f32>>,
    /// Per layer, values: `(len, num_key_value_heads * head_dim)`.
    pub(super) values: Vec<Vec<f32>>,
    pub(super) len: usize,
    row: usize,
}

impl KvCache {
    /// An empty cache; it grows as tokens arrive.
    pub fn new(config: &ModelConfig) -> Self {
        let layers = config.num_hidden_layers;
        Self {
            keys: vec![Vec::new(); layers],
            values: vec![Vec::new(); layers],
            len: 0,
            row: config.key_value_size(),
        }
    }

    /// Tokens whose keys and values are held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Forgets every token from position `len` on; does nothing when fewer are held.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes held, spare capacity included.
    pub fn bytes(&self) -> usize {
        let floats: usize = self.keys.iter().chain(&self.values).map(Vec::capacity).sum();
        floats * size_of::<f32>()
    }

    /// Makes room for `extra` tokens after the valid ones.
    pub(super) fn reserve(&mut self, extra: usize) {
        let wanted = (self.len + extra) * self.row;
        for rows in self.keys.iter_mut().chain(&mut self.values) {
            if rows.len() < wanted {
                rows.resize(wanted, 0.0);
            }
        }
    }
}
