//! The default store: nothing outlives the process.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::distill::{Sample, TopK};

use super::index::{Class, Entry, Index};
use super::{SampleStore, StoreError, StoreLimits, StoreStats, codec};

/// Samples in memory, bounded by [`StoreLimits`].
pub struct MemoryStore {
    limits: StoreLimits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    index: Index,
    samples: HashMap<u64, Sample>,
    last_id: u64,
}

impl MemoryStore {
    pub fn new(limits: StoreLimits) -> Self {
        Self { limits, state: Mutex::default() }
    }
}

impl State {
    fn evict(&mut self, limits: StoreLimits, samples: u64, bytes: u64, keep: u64) {
        for id in self.index.victims(limits, samples, bytes, keep) {
            self.remove(id);
            self.index.evicted += 1;
        }
    }

    fn remove(&mut self, id: u64) {
        self.index.remove(id);
        self.samples.remove(&id);
    }

    fn get(&self, ids: impl IntoIterator<Item = u64>) -> Vec<Sample> {
        ids.into_iter().filter_map(|id| self.samples.get(&id).cloned()).collect()
    }
}

/// Bytes that a sample counts for, without its teacher rows.
fn sample_bytes(sample: &Sample) -> u64 {
    let ids = sample.prompt_ids.len() + sample.output_ids.len();
    (size_of::<Sample>() + 4 * ids + sample.domain.len()) as u64
}

impl SampleStore for MemoryStore {
    fn append(&self, mut sample: Sample) -> Result<u64, StoreError> {
        let teacher_bytes = codec::teacher_bytes(&sample.teacher);
        let sample_bytes = sample_bytes(&sample);
        let bytes = sample_bytes + teacher_bytes;
        if bytes > self.limits.max_bytes {
            return Err(StoreError::TooLarge { bytes, limit: self.limits.max_bytes });
        }
        let mut state = self.state.lock();
        state.evict(self.limits, 1, bytes, 0);
        state.last_id += 1;
        sample.id = state.last_id;
        state.index.insert(sample.id, Entry::new(&sample, sample_bytes, teacher_bytes));
        let id = sample.id;
        state.samples.insert(id, sample);
        Ok(id)
    }

    fn set_teacher(&self, id: u64, teacher: Vec<TopK>) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let Some(entry) = state.index.get(id).cloned() else {
            return Err(StoreError::Unknown { id });
        };
        if teacher.len() != entry.output_tokens {
            let (rows, expected) = (teacher.len(), entry.output_tokens);
            return Err(StoreError::WrongRows { id, rows, expected });
        }
        let teacher_bytes = codec::teacher_bytes(&teacher);
        let more = teacher_bytes.saturating_sub(entry.teacher_bytes);
        state.evict(self.limits, 0, more, id);
        state.index.insert(id, Entry { teacher_bytes, scored: true, ..entry });
        if let Some(sample) = state.samples.get_mut(&id) {
            sample.teacher = teacher;
        }
        Ok(())
    }

    fn unscored(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let state = self.state.lock();
        Ok(state.get(state.index.unscored(limit)))
    }

    fn mark_learned(&self, ids: &[u64]) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        for id in ids {
            if let Some(entry) = state.index.get(*id).cloned() {
                state.index.insert(*id, Entry { learned: true, ..entry });
            }
        }
        Ok(())
    }

    fn unlearned(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let state = self.state.lock();
        Ok(state.get(state.index.class(Class::Unlearned).take(limit)))
    }

    fn learned_index(&self) -> Result<Vec<(u64, String)>, StoreError> {
        Ok(self.state.lock().index.learned())
    }

    fn get(&self, ids: &[u64]) -> Result<Vec<Sample>, StoreError> {
        Ok(self.state.lock().get(ids.iter().copied()))
    }

    fn held_out(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let state = self.state.lock();
        Ok(state.get(state.index.class(Class::HeldOut).rev().take(limit)))
    }

    fn remove(&self, id: u64) -> Result<(), StoreError> {
        self.state.lock().remove(id);
        Ok(())
    }

    fn expire(&self, older_than_unix_ms: u64) -> Result<usize, StoreError> {
        let mut state = self.state.lock();
        let old = state.index.older_than(older_than_unix_ms);
        for id in &old {
            state.remove(*id);
        }
        Ok(old.len())
    }

    fn purge(&self) -> Result<usize, StoreError> {
        let mut state = self.state.lock();
        let evicted = state.index.evicted;
        let count = state.samples.len();
        let last_id = state.last_id;
        *state = State { last_id, ..State::default() };
        state.index.evicted = evicted;
        Ok(count)
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        Ok(self.state.lock().index.stats())
    }
}
