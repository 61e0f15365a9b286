//! Where captured samples wait for the teacher, for training and for replay.
//!
//! Two homes behind one trait: [`MemoryStore`], the default, forgets everything with the process;
//! [`RedbStore`] keeps samples in a file that only its owner can read. Both hold at most
//! [`StoreLimits`]: the oldest learned samples leave first, and a fifth at most is held out.

mod codec;
mod index;
mod memory;
mod redb_store;
#[cfg(test)]
mod tests;

use crate::distill::{Sample, TopK};

pub use memory::MemoryStore;
pub use redb_store::RedbStore;

/// What can go wrong with a store. Nothing that was stored before is lost by any of these.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "sample store {path} is in use by another process\nhint: stop the other sidecar, or give each its own work directory"
    )]
    InUse { path: String },
    #[error(
        "cannot open sample store {path}: {reason}\nhint: check the folder's permissions; a damaged store can be deleted, and a new one is made"
    )]
    Open { path: String, reason: String },
    #[error(
        "sample store {path} failed to {action}: {reason}\nhint: free disk space; the store recovers by itself"
    )]
    Failed { path: String, action: &'static str, reason: String },
    #[error("no sample {id} in the store")]
    Unknown { id: u64 },
    #[error(
        "sample of {bytes} bytes does not fit into a store of {limit} bytes\nhint: raise the store's byte limit or lower the longest prompt that is captured"
    )]
    TooLarge { bytes: u64, limit: u64 },
    #[error("{rows} teacher rows for {expected} output tokens of sample {id}")]
    WrongRows { id: u64, rows: usize, expected: usize },
}

/// How much a store may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    pub max_samples: u64,
    /// Token ids and teacher rows as they are stored, without the store's own overhead.
    pub max_bytes: u64,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { max_samples: 20_000, max_bytes: 1 << 30 }
    }
}

/// What a store holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct StoreStats {
    pub samples: u64,
    pub scored: u64,
    pub learned: u64,
    pub held_out: u64,
    pub bytes: u64,
    /// Samples that had to leave for newer ones since the store was opened.
    pub evicted: u64,
}

/// Keeps samples. Calls block (on a mutex, and on the disk where there is one): from async code
/// they belong into `spawn_blocking`. The proxy never calls any of them.
pub trait SampleStore: Send + Sync {
    /// Stores a sample under a fresh id, which is returned; the id in `sample` is ignored.
    ///
    /// # Errors
    /// When the disk refuses, or the sample alone is over the limit.
    fn append(&self, sample: Sample) -> Result<u64, StoreError>;

    /// Adds the teacher's rows, one for each output token.
    ///
    /// # Errors
    /// When the id is unknown (it may have been evicted or purged), the number of rows is wrong,
    /// or the disk refuses.
    fn set_teacher(&self, id: u64, teacher: Vec<TopK>) -> Result<(), StoreError>;

    /// Samples without teacher rows, oldest first.
    ///
    /// # Errors
    /// When the disk refuses.
    fn unscored(&self, limit: usize) -> Result<Vec<Sample>, StoreError>;

    /// Marks samples as trained on; unknown ids are skipped.
    ///
    /// # Errors
    /// When the disk refuses.
    fn mark_learned(&self, ids: &[u64]) -> Result<(), StoreError>;

    /// Scored samples that were not trained on and are not held out, oldest first.
    ///
    /// # Errors
    /// When the disk refuses.
    fn unlearned(&self, limit: usize) -> Result<Vec<Sample>, StoreError>;

    /// Scored samples that were trained on: what replay chooses from. Copies all of them; see
    /// [`SampleStore::learned_index`] for choosing first.
    ///
    /// # Errors
    /// When the disk refuses.
    fn learned(&self) -> Result<Vec<Sample>, StoreError> {
        let ids: Vec<u64> = self.learned_index()?.into_iter().map(|(id, _)| id).collect();
        self.get(&ids)
    }

    /// Id and domain of every sample that [`SampleStore::learned`] would return, oldest first.
    ///
    /// # Errors
    /// When the disk refuses.
    fn learned_index(&self) -> Result<Vec<(u64, String)>, StoreError>;

    /// Samples by id, in the order asked for; ids that are gone are left out.
    ///
    /// # Errors
    /// When the disk refuses.
    fn get(&self, ids: &[u64]) -> Result<Vec<Sample>, StoreError>;

    /// Scored held-out samples, newest first.
    ///
    /// # Errors
    /// When the disk refuses.
    fn held_out(&self, limit: usize) -> Result<Vec<Sample>, StoreError>;

    /// Deletes one sample; an unknown id is not an error.
    ///
    /// # Errors
    /// When the disk refuses.
    fn remove(&self, id: u64) -> Result<(), StoreError>;

    /// Deletes what was captured before this time; returns how many samples.
    ///
    /// # Errors
    /// When the disk refuses.
    fn expire(&self, older_than_unix_ms: u64) -> Result<usize, StoreError>;

    /// Deletes everything, so that no trace of a prompt is left in the store; returns how many
    /// samples.
    ///
    /// # Errors
    /// When the disk refuses; then some samples may be left.
    fn purge(&self) -> Result<usize, StoreError>;

    /// # Errors
    /// When the disk refuses.
    fn stats(&self) -> Result<StoreStats, StoreError>;
}
