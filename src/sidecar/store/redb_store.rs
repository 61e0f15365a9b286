//! The store on disk: every call that changes something is one durable transaction.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use redb::{
    Database, DatabaseError, ReadableDatabase as _, ReadableTable as _, TableDefinition,
    WriteTransaction,
};
use tracing::warn;

use crate::distill::{Sample, TopK};

use super::index::{Class, Entry, Index};
use super::{SampleStore, StoreError, StoreLimits, StoreStats, codec};

const SAMPLES: TableDefinition<u64, &[u8]> = TableDefinition::new("samples");
const TEACHERS: TableDefinition<u64, &[u8]> = TableDefinition::new("teachers");
const LEARNED: TableDefinition<u64, ()> = TableDefinition::new("learned");
const META: TableDefinition<&str, u64> = TableDefinition::new("meta");
const LAST_ID: &str = "last_id";

/// Pages that redb may cache; samples are read once in a while, not again and again.
const CACHE_BYTES: usize = 16 << 20;
/// Deleted bytes that make it worth compacting the file.
const COMPACT_BYTES: u64 = 4 << 20;

/// Opens the database behind a path; replaced in tests by one whose disk fills up.
type Opener = Box<dyn Fn(&Path) -> Result<Database, DatabaseError> + Send + Sync>;

/// Samples in a redb file of mode 0600. What was committed survives a kill at any moment.
///
/// After a failed write the file is closed, and the next call opens it again: a disk that was full
/// for a while costs the samples of that while, nothing else.
pub struct RedbStore {
    path: PathBuf,
    limits: StoreLimits,
    opener: Opener,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// `None` after a failure, until the next call.
    db: Option<Database>,
    index: Index,
    last_id: u64,
    /// Bytes deleted since the last compaction.
    deleted_bytes: u64,
}

impl RedbStore {
    /// Opens the store at `path`, or makes an empty one.
    ///
    /// # Errors
    /// When another process has it open, the folder cannot be written, or the file is damaged.
    pub fn open(path: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        let opener = |path: &Path| {
            create_private(path).map_err(redb::StorageError::Io)?;
            Database::builder().set_cache_size(CACHE_BYTES).create(path)
        };
        Self::open_with(path, limits, Box::new(opener))
    }

    pub(super) fn open_with(
        path: &Path,
        limits: StoreLimits,
        opener: Opener,
    ) -> Result<Self, StoreError> {
        let store = Self { path: path.into(), limits, opener, state: Mutex::default() };
        store.reopen(&mut store.state.lock())?;
        Ok(store)
    }

    fn reopen(&self, state: &mut State) -> Result<(), StoreError> {
        let path = self.path.display().to_string();
        let db = (self.opener)(&self.path).map_err(|e| match e {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse { path: path.clone() },
            e => StoreError::Open { path: path.clone(), reason: e.to_string() },
        })?;
        let (mut index, last_id) =
            load(&db).map_err(|e| StoreError::Open { path, reason: e.to_string() })?;
        index.evicted = state.index.evicted;
        // Ids go on rising even when the last commit was lost.
        let last_id = last_id.max(state.last_id);
        *state = State { db: Some(db), index, last_id, deleted_bytes: 0 };
        Ok(())
    }

    fn database<'a>(&self, state: &'a mut State) -> Result<&'a Database, StoreError> {
        if state.db.is_none() {
            self.reopen(state)?;
        }
        state.db.as_ref().ok_or_else(|| self.failed("open", &"it is closed"))
    }

    fn failed(&self, action: &'static str, reason: &dyn std::fmt::Display) -> StoreError {
        StoreError::Failed {
            path: self.path.display().to_string(),
            action,
            reason: reason.to_string(),
        }
    }

    /// Runs `change` in a transaction that is on disk when this returns.
    fn write(
        &self,
        state: &mut State,
        action: &'static str,
        change: impl FnOnce(&WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), StoreError> {
        let db = self.database(state)?;
        let outcome = db.begin_write().map_err(redb::Error::from).and_then(|transaction| {
            change(&transaction)?;
            transaction.commit().map_err(redb::Error::from)
        });
        outcome.map_err(|e| {
            state.db = None;
            self.failed(action, &e)
        })
    }

    /// Reads samples with their teacher rows; ids that are gone are left out.
    fn read(
        &self,
        state: &mut State,
        ids: impl IntoIterator<Item = u64>,
    ) -> Result<Vec<Sample>, StoreError> {
        let outcome = read_samples(self.database(state)?, ids);
        outcome.map_err(|e| {
            state.db = None;
            self.failed("read", &e)
        })
    }

    /// Removes `ids` within a transaction of the caller.
    fn delete(transaction: &WriteTransaction, ids: &[u64]) -> Result<(), redb::Error> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut samples = transaction.open_table(SAMPLES)?;
        let mut teachers = transaction.open_table(TEACHERS)?;
        let mut learned = transaction.open_table(LEARNED)?;
        for id in ids {
            samples.remove(id)?;
            teachers.remove(id)?;
            learned.remove(id)?;
        }
        Ok(())
    }

    fn forget(state: &mut State, ids: &[u64]) {
        for id in ids {
            if let Some(entry) = state.index.remove(*id) {
                state.deleted_bytes += entry.sample_bytes + entry.teacher_bytes;
            }
        }
    }

    /// Gives deleted space back once it is worth it, so that deleted prompts do not linger.
    fn compact(&self, state: &mut State) -> Result<(), StoreError> {
        if state.deleted_bytes < COMPACT_BYTES.max(state.index.stats().bytes / 4) {
            return Ok(());
        }
        state.deleted_bytes = 0;
        let Some(db) = state.db.as_mut() else { return Ok(()) };
        db.compact().map(|_| ()).map_err(|e| {
            state.db = None;
            self.failed("compact", &e)
        })
    }
}

/// Makes the file readable for its owner alone, before anything is written to it.
fn create_private(path: &Path) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_permissions(fs::Permissions::from_mode(0o600))
}

fn load(db: &Database) -> Result<(Index, u64), redb::Error> {
    // A transaction that opens the tables makes them exist, so that readers find them.
    let transaction = db.begin_write()?;
    {
        transaction.open_table(SAMPLES)?;
        transaction.open_table(TEACHERS)?;
        transaction.open_table(LEARNED)?;
        transaction.open_table(META)?;
    }
    transaction.commit()?;

    let transaction = db.begin_read()?;
    let samples = transaction.open_table(SAMPLES)?;
    let teachers = transaction.open_table(TEACHERS)?;
    let learned = transaction.open_table(LEARNED)?;
    let mut index = Index::default();
    for item in samples.iter()? {
        let (id, bytes) = item?;
        let id = id.value();
        let sample = match codec::decode_sample(id, bytes.value()) {
            Ok(sample) => sample,
            Err(reason) => {
                warn!(id, reason, "skipping a damaged sample");
                continue;
            }
        };
        let teacher = teachers.get(id)?;
        let teacher_bytes = teacher.as_ref().map_or(0, |bytes| bytes.value().len() as u64);
        let mut entry = Entry::new(&sample, bytes.value().len() as u64, teacher_bytes);
        entry.scored = teacher.is_some();
        entry.learned = learned.get(id)?.is_some();
        index.insert(id, entry);
    }
    let stored = transaction.open_table(META)?.get(LAST_ID)?.map_or(0, |value| value.value());
    let last_id = stored.max(index.last_id());
    Ok((index, last_id))
}

fn read_samples(
    db: &Database,
    ids: impl IntoIterator<Item = u64>,
) -> Result<Vec<Sample>, redb::Error> {
    let transaction = db.begin_read()?;
    let samples = transaction.open_table(SAMPLES)?;
    let teachers = transaction.open_table(TEACHERS)?;
    let mut out = Vec::new();
    for id in ids {
        let Some(bytes) = samples.get(id)? else { continue };
        let teacher = teachers.get(id)?;
        let decoded = codec::decode_sample(id, bytes.value()).and_then(|mut sample| {
            if let Some(teacher) = &teacher {
                sample.teacher = codec::decode_teacher(teacher.value())?;
            }
            Ok(sample)
        });
        match decoded {
            Ok(sample) => out.push(sample),
            Err(reason) => warn!(id, reason, "skipping a damaged sample"),
        }
    }
    Ok(out)
}

impl SampleStore for RedbStore {
    fn append(&self, sample: Sample) -> Result<u64, StoreError> {
        let bytes = codec::encode_sample(&sample);
        let teacher = sample.is_scored().then(|| codec::encode_teacher(&sample.teacher));
        let teacher_bytes = teacher.as_ref().map_or(0, |teacher| teacher.len() as u64);
        let total = bytes.len() as u64 + teacher_bytes;
        if total > self.limits.max_bytes {
            return Err(StoreError::TooLarge { bytes: total, limit: self.limits.max_bytes });
        }
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let id = state.last_id + 1;
        let victims = state.index.victims(self.limits, 1, total, 0);
        self.write(&mut state, "append a sample", |transaction| {
            Self::delete(transaction, &victims)?;
            transaction.open_table(SAMPLES)?.insert(id, bytes.as_slice())?;
            if let Some(teacher) = &teacher {
                transaction.open_table(TEACHERS)?.insert(id, teacher.as_slice())?;
            }
            transaction.open_table(META)?.insert(LAST_ID, id)?;
            Ok(())
        })?;
        Self::forget(&mut state, &victims);
        state.index.evicted += victims.len() as u64;
        state.last_id = id;
        state.index.insert(id, Entry::new(&sample, bytes.len() as u64, teacher_bytes));
        self.compact(&mut state)?;
        Ok(id)
    }

    fn set_teacher(&self, id: u64, teacher: Vec<TopK>) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let Some(entry) = state.index.get(id).cloned() else {
            return Err(StoreError::Unknown { id });
        };
        if teacher.len() != entry.output_tokens {
            let (rows, expected) = (teacher.len(), entry.output_tokens);
            return Err(StoreError::WrongRows { id, rows, expected });
        }
        let bytes = codec::encode_teacher(&teacher);
        let teacher_bytes = bytes.len() as u64;
        let more = teacher_bytes.saturating_sub(entry.teacher_bytes);
        let victims = state.index.victims(self.limits, 0, more, id);
        self.write(&mut state, "store teacher rows", |transaction| {
            Self::delete(transaction, &victims)?;
            transaction.open_table(TEACHERS)?.insert(id, bytes.as_slice())?;
            Ok(())
        })?;
        Self::forget(&mut state, &victims);
        state.index.evicted += victims.len() as u64;
        state.index.insert(id, Entry { teacher_bytes, scored: true, ..entry });
        Ok(())
    }

    fn unscored(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let ids = state.index.unscored(limit);
        self.read(&mut state, ids)
    }

    fn mark_learned(&self, ids: &[u64]) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let known: Vec<u64> =
            ids.iter().copied().filter(|id| state.index.get(*id).is_some()).collect();
        if known.is_empty() {
            return Ok(());
        }
        self.write(&mut state, "mark samples", |transaction| {
            let mut learned = transaction.open_table(LEARNED)?;
            known.iter().try_for_each(|id| learned.insert(id, ()).map(|_| ()))?;
            Ok(())
        })?;
        for id in known {
            if let Some(entry) = state.index.get(id).cloned() {
                state.index.insert(id, Entry { learned: true, ..entry });
            }
        }
        Ok(())
    }

    fn unlearned(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let ids: Vec<u64> = state.index.class(Class::Unlearned).take(limit).collect();
        self.read(&mut state, ids)
    }

    fn learned_index(&self) -> Result<Vec<(u64, String)>, StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        Ok(state.index.learned())
    }

    fn get(&self, ids: &[u64]) -> Result<Vec<Sample>, StoreError> {
        self.read(&mut self.state.lock(), ids.iter().copied())
    }

    fn held_out(&self, limit: usize) -> Result<Vec<Sample>, StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let ids: Vec<u64> = state.index.class(Class::HeldOut).rev().take(limit).collect();
        self.read(&mut state, ids)
    }

    fn remove(&self, id: u64) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        self.write(&mut state, "remove a sample", |transaction| Self::delete(transaction, &[id]))?;
        Self::forget(&mut state, &[id]);
        self.compact(&mut state)
    }

    fn expire(&self, older_than_unix_ms: u64) -> Result<usize, StoreError> {
        let mut state = self.state.lock();
        self.database(&mut state)?;
        let old = state.index.older_than(older_than_unix_ms);
        if old.is_empty() {
            return Ok(0);
        }
        self.write(&mut state, "expire samples", |transaction| Self::delete(transaction, &old))?;
        Self::forget(&mut state, &old);
        self.compact(&mut state)?;
        Ok(old.len())
    }

    /// Deletes the file, whose free pages may still hold prompts, and makes an empty one.
    fn purge(&self) -> Result<usize, StoreError> {
        let mut state = self.state.lock();
        let count = state.index.stats().samples as usize;
        let (last_id, evicted) = (state.last_id, state.index.evicted);
        *state = State { last_id, ..State::default() };
        state.index.evicted = evicted;
        let removed = fs::remove_file(&self.path).and_then(|()| sync_folder(&self.path));
        removed.map_err(|e| self.failed("purge", &e))?;
        self.reopen(&mut state)?;
        self.write(&mut state, "purge", |transaction| {
            transaction.open_table(META)?.insert(LAST_ID, last_id)?;
            Ok(())
        })?;
        Ok(count)
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        Ok(self.state.lock().index.stats())
    }
}

fn sync_folder(path: &Path) -> std::io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}
