//! A decoder for tests whose logits are a known function of the tokens before them.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::decode::{Decoder, Rows};
use crate::model::runtime::{LogitsOf, RuntimeError};

/// Logits depend on the last three tokens. Two fakes with the same `seed` agree; a fake with
/// `disagree` of 10 changes its mind in about one context of ten.
pub(crate) struct FakeDecoder {
    pub vocab_size: usize,
    pub context: usize,
    pub seed: u64,
    pub disagree: u64,
    /// Forwards that were begun, the one that waits at the gate included.
    pub forwards: AtomicUsize,
    /// Held for writing, it stops every forward.
    pub gate: parking_lot::RwLock<()>,
    pub rows: AtomicUsize,
    /// Rows of the largest forward.
    pub widest: AtomicUsize,
    /// Ids from here on are never likely, except for `eos`.
    pub ordinary: usize,
    /// The token that ends a text, made likely in one context of 40.
    pub eos: Option<u32>,
}

impl FakeDecoder {
    pub fn new(vocab_size: usize, seed: u64) -> Self {
        Self {
            vocab_size,
            context: 4096,
            seed,
            disagree: 0,
            forwards: AtomicUsize::new(0),
            gate: parking_lot::RwLock::new(()),
            rows: AtomicUsize::new(0),
            widest: AtomicUsize::new(0),
            ordinary: vocab_size,
            eos: None,
        }
    }

    /// The same model with another opinion in `percent` of all contexts.
    pub fn draft_of(target: &Self, percent: u64) -> Self {
        let (ordinary, eos) = (target.ordinary, target.eos);
        let base = Self::new(target.vocab_size, target.seed);
        Self { disagree: percent, ordinary, eos, ..base }
    }

    /// Logits after `history`.
    pub fn logits(&self, history: &[u32]) -> Vec<f32> {
        let mut state = mix(self.seed);
        for &token in &history[history.len().saturating_sub(3)..] {
            state = mix(state ^ u64::from(token) << 7);
        }
        let ends = self.eos.filter(|_| mix(state ^ 0xe05).is_multiple_of(40));
        if mix(state ^ 0xd15) % 100 < self.disagree {
            state = mix(state ^ 0xbad);
        }
        let mut row: Vec<f32> = (0..self.vocab_size as u64)
            .map(|id| (mix(state ^ (id << 20)) % 4000) as f32 / 500.0)
            .collect();
        row[self.ordinary..].fill(-30.0);
        if let Some(eos) = ends {
            row[eos as usize] = 9.0;
        }
        row
    }

    /// What greedy decoding gives after `prompt`.
    pub fn greedy(&self, prompt: &[u32], tokens: usize) -> Vec<u32> {
        let mut all = prompt.to_vec();
        for _ in 0..tokens {
            all.push(super::logits::argmax(&self.logits(&all)));
        }
        all.split_off(prompt.len())
    }
}

impl Decoder for FakeDecoder {
    type Cache = Vec<u32>;

    fn new_cache(&self) -> Vec<u32> {
        Vec::new()
    }

    fn cached(cache: &Vec<u32>) -> usize {
        cache.len()
    }

    fn truncate(cache: &mut Vec<u32>, len: usize) {
        cache.truncate(len);
    }

    fn cache_bytes(cache: &Vec<u32>) -> usize {
        cache.len() * 4
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn context(&self) -> usize {
        self.context
    }

    fn forward(&self, rows: &mut [Rows<'_, Vec<u32>>]) -> Result<Vec<f32>, RuntimeError> {
        self.forwards.fetch_add(1, Ordering::SeqCst);
        let _open = self.gate.read();
        for row in rows.iter() {
            let len = row.cache.len() + row.tokens.len();
            if len > self.context {
                return Err(RuntimeError::TooLong { len, limit: self.context });
            }
            if let Some(&id) = row.tokens.iter().find(|&&id| id as usize >= self.vocab_size) {
                return Err(RuntimeError::TokenOutOfRange { id, vocab_size: self.vocab_size });
            }
        }
        let count: usize = rows.iter().map(|row| row.tokens.len()).sum();
        self.rows.fetch_add(count, Ordering::Relaxed);
        self.widest.fetch_max(count, Ordering::Relaxed);
        let mut out = Vec::new();
        for row in rows {
            for (index, &token) in row.tokens.iter().enumerate() {
                row.cache.push(token);
                let wanted = match row.logits {
                    LogitsOf::None => false,
                    LogitsOf::Last => index + 1 == row.tokens.len(),
                    LogitsOf::All => true,
                };
                if wanted {
                    out.extend(self.logits(row.cache));
                }
            }
        }
        Ok(out)
    }
}

fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
