use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use proptest::prelude::*;
use redb::StorageBackend;

use super::index::Index;
use super::*;

fn sample(captured_unix_ms: u64, output: usize, held_out: bool) -> Sample {
    Sample {
        id: 999,
        prompt_ids: vec![captured_unix_ms as u32, 7, 8],
        output_ids: vec![5; output],
        temperature: 0.7,
        domain: format!("domain-{}", captured_unix_ms % 2),
        captured_unix_ms,
        held_out,
        ids_estimated: true,
        draft_version: Some("v000001".into()),
        teacher: Vec::new(),
    }
}

fn rows(n: usize) -> Vec<TopK> {
    vec![TopK { ids: vec![5, 6], logprobs: vec![-0.25, -3.0e-20] }; n]
}

fn ids(samples: &[Sample]) -> Vec<u64> {
    samples.iter().map(|sample| sample.id).collect()
}

/// Both stores, the one on disk in a fresh folder.
fn stores(limits: StoreLimits) -> (tempfile::TempDir, Vec<Box<dyn SampleStore>>) {
    let folder = tempfile::tempdir().unwrap();
    let disk = RedbStore::open(&folder.path().join("store.redb"), limits).unwrap();
    (folder, vec![Box::new(MemoryStore::new(limits)), Box::new(disk)])
}

#[test]
fn a_sample_goes_from_unscored_to_learned() {
    let (_folder, stores) = stores(StoreLimits::default());
    for store in stores {
        for n in 1..=6 {
            assert_eq!(store.append(sample(n, 2, n % 3 == 0)).unwrap(), n);
        }
        assert_eq!(ids(&store.unscored(4).unwrap()), [1, 2, 3, 4]);
        assert!(store.unlearned(9).unwrap().is_empty());
        for n in 1..=5 {
            store.set_teacher(n, rows(2)).unwrap();
        }
        assert_eq!(ids(&store.unscored(9).unwrap()), [6]);
        assert_eq!(ids(&store.unlearned(3).unwrap()), [1, 2, 4]);
        // Id 6 is held out too, but not scored.
        assert_eq!(ids(&store.held_out(9).unwrap()), [3]);
        store.set_teacher(6, rows(2)).unwrap();
        assert_eq!(ids(&store.held_out(9).unwrap()), [6, 3]);
        assert_eq!(ids(&store.held_out(1).unwrap()), [6]);

        store.mark_learned(&[1, 4, 77]).unwrap();
        assert_eq!(ids(&store.unlearned(9).unwrap()), [2, 5]);
        assert_eq!(ids(&store.learned().unwrap()), [1, 4]);
        let index = [(1, "domain-1".to_owned()), (4, "domain-0".to_owned())];
        assert_eq!(store.learned_index().unwrap(), index);
        let stats = store.stats().unwrap();
        let counts = (stats.samples, stats.scored, stats.learned, stats.held_out, stats.evicted);
        assert_eq!(counts, (6, 6, 2, 2, 0));

        let expected = Sample { id: 4, teacher: rows(2), ..sample(4, 2, false) };
        assert_eq!(store.get(&[77, 4]).unwrap(), [expected]);
        store.remove(4).unwrap();
        store.remove(4).unwrap();
        assert_eq!(ids(&store.learned().unwrap()), [1]);
        assert_eq!(store.expire(3).unwrap(), 2);
        assert_eq!(store.stats().unwrap().samples, 3);
        assert_eq!(store.purge().unwrap(), 3);
        let stats = store.stats().unwrap();
        assert_eq!((stats.samples, stats.bytes), (0, 0));
        // Ids are never used twice, so that a late teacher cannot score another sample.
        assert_eq!(store.append(sample(9, 1, false)).unwrap(), 7);
    }
}

#[test]
fn wrong_teacher_rows_are_refused() {
    let (_folder, stores) = stores(StoreLimits::default());
    for store in stores {
        let id = store.append(sample(1, 2, false)).unwrap();
        let wrong = store.set_teacher(id, rows(3));
        assert!(matches!(wrong, Err(StoreError::WrongRows { rows: 3, expected: 2, .. })));
        assert!(matches!(store.set_teacher(9, rows(3)), Err(StoreError::Unknown { id: 9 })));
        assert_eq!(store.stats().unwrap().scored, 0);
        // A sample that comes with its rows needs no second call.
        let id = store.append(Sample { teacher: rows(2), ..sample(2, 2, false) }).unwrap();
        assert_eq!(ids(&store.unlearned(9).unwrap()), [id]);
    }
}

#[test]
fn the_oldest_learned_samples_leave_first() {
    let limits = StoreLimits { max_samples: 10, max_bytes: 1 << 20 };
    let (_folder, stores) = stores(limits);
    for store in stores {
        for n in 1..=10 {
            let held_out = n == 1 || n == 2;
            store.append(Sample { teacher: rows(2), ..sample(n, 2, held_out) }).unwrap();
        }
        store.mark_learned(&[5, 6]).unwrap();
        for n in 11..=14 {
            store.append(sample(n, 2, false)).unwrap();
        }
        // 5 and 6 were learned, 3 and 4 are the oldest of the others; a fifth may be held out.
        assert_eq!(ids(&store.held_out(9).unwrap()), [2, 1]);
        assert_eq!(ids(&store.unlearned(9).unwrap()), [7, 8, 9, 10]);
        assert!(store.learned().unwrap().is_empty());
        let stats = store.stats().unwrap();
        assert_eq!((stats.samples, stats.evicted), (10, 4));
        // More held-out samples push out held-out ones, not what is to be trained on.
        for n in 15..=18 {
            store.append(sample(n, 2, true)).unwrap();
        }
        assert!(store.stats().unwrap().held_out <= 4);
        assert_eq!(store.stats().unwrap().samples, 10);
    }
}

#[test]
fn the_byte_limit_holds_for_samples_and_teacher_rows() {
    let limits = StoreLimits { max_samples: 1000, max_bytes: 20_000 };
    let (_folder, stores) = stores(limits);
    for store in stores {
        for n in 1..=100 {
            let id = store.append(sample(n, 100, false)).unwrap();
            store.set_teacher(id, rows(100)).unwrap();
            assert!(store.stats().unwrap().bytes <= limits.max_bytes);
        }
        let stats = store.stats().unwrap();
        assert!(stats.samples > 3 && stats.evicted > 50, "{stats:?}");
        let large = store.append(sample(1, 10_000, false));
        assert!(matches!(large, Err(StoreError::TooLarge { limit: 20_000, .. })));
        assert_eq!(store.stats().unwrap().samples, stats.samples);
    }
}

#[test]
fn what_is_on_disk_is_there_again_and_for_the_owner_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    let store = RedbStore::open(&path, StoreLimits::default()).unwrap();
    for n in 1..=4 {
        store.append(sample(n, 2, false)).unwrap();
    }
    store.set_teacher(1, rows(2)).unwrap();
    store.set_teacher(2, rows(2)).unwrap();
    store.mark_learned(&[2]).unwrap();
    store.remove(4).unwrap();
    let second = RedbStore::open(&path, StoreLimits::default());
    assert!(matches!(second, Err(StoreError::InUse { .. })));
    let stats = store.stats().unwrap();
    drop(store);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    let store = RedbStore::open(&path, StoreLimits::default()).unwrap();
    assert_eq!(store.stats().unwrap(), stats);
    assert_eq!(ids(&store.unscored(9).unwrap()), [3]);
    assert_eq!(store.unlearned(9).unwrap()[0].teacher, rows(2));
    assert_eq!(ids(&store.learned().unwrap()), [2]);
    assert_eq!(store.append(sample(5, 2, false)).unwrap(), 5);
}

#[test]
fn after_a_purge_no_prompt_is_left_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    let marker: Vec<u32> = b"a very private prompt!!!".iter().map(|b| u32::from(*b)).collect();
    let needle: Vec<u8> = marker.iter().flat_map(|id| id.to_le_bytes()).collect();
    let holds = || std::fs::read(&path).unwrap().windows(needle.len()).any(|w| w == needle);
    let store = RedbStore::open(&path, StoreLimits::default()).unwrap();
    store.append(Sample { prompt_ids: marker, ..sample(1, 2, false) }).unwrap();
    assert!(holds());
    assert_eq!(store.purge().unwrap(), 1);
    assert!(!holds());
    drop(store);
    assert!(!holds());
}

#[test]
fn a_file_that_is_no_store_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    std::fs::write(&path, b"this is not a database".repeat(1000)).unwrap();
    let error = RedbStore::open(&path, StoreLimits::default()).err().unwrap();
    assert!(matches!(error, StoreError::Open { .. }));
    assert!(error.to_string().contains("store.redb"), "{error}");
    let missing = RedbStore::open(&folder.path().join("no/such/folder"), StoreLimits::default());
    assert!(matches!(missing, Err(StoreError::Open { .. })));
}

/// A disk with little space left.
#[derive(Debug)]
struct SmallDisk {
    inner: redb::backends::FileBackend,
    left: Arc<AtomicI64>,
}

impl StorageBackend for SmallDisk {
    fn len(&self) -> Result<u64, std::io::Error> {
        StorageBackend::len(&self.inner)
    }
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), std::io::Error> {
        self.inner.read(offset, out)
    }
    fn set_len(&self, len: u64) -> Result<(), std::io::Error> {
        self.inner.set_len(len)
    }
    fn sync_data(&self) -> Result<(), std::io::Error> {
        self.inner.sync_data()
    }
    fn write(&self, offset: u64, data: &[u8]) -> Result<(), std::io::Error> {
        if self.left.fetch_sub(data.len() as i64, Ordering::SeqCst) < data.len() as i64 {
            return Err(std::io::Error::from(std::io::ErrorKind::StorageFull));
        }
        self.inner.write(offset, data)
    }
    fn close(&self) -> Result<(), std::io::Error> {
        self.inner.close()
    }
}

#[test]
fn a_full_disk_is_an_error_and_passes() {
    let folder = tempfile::tempdir().unwrap();
    let left = Arc::new(AtomicI64::new(i64::MAX / 2));
    let space = left.clone();
    let opener = move |path: &Path| {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(redb::StorageError::Io)?;
        let inner = redb::backends::FileBackend::new(file)?;
        redb::Database::builder().create_with_backend(SmallDisk { inner, left: space.clone() })
    };
    let path = folder.path().join("store.redb");
    let store = RedbStore::open_with(&path, StoreLimits::default(), Box::new(opener)).unwrap();
    for n in 1..=5 {
        store.append(sample(n, 2, false)).unwrap();
    }
    // It may fill up at any point of a transaction.
    for bytes in [0, 1, 100, 4096, 5000, 8192, 12_288, 20_000] {
        left.store(bytes, Ordering::SeqCst);
        let full = (0..100).find_map(|_| store.append(sample(6, 1000, false)).err());
        assert!(
            matches!(full, Some(StoreError::Failed { .. } | StoreError::Open { .. })),
            "{bytes} bytes: {full:?}"
        );
        assert!(store.set_teacher(1, rows(2)).is_err());
        left.store(i64::MAX / 2, Ordering::SeqCst);
        let kept = store.unscored(1000).unwrap();
        assert_eq!(ids(&kept)[..5], [1, 2, 3, 4, 5], "{bytes} bytes");
        store.append(sample(7, 2, false)).unwrap();
    }
}

/// The other half of the next test: a process that stores until it is killed.
#[test]
fn child_that_appends() {
    let Ok(path) = std::env::var("DA_TEST_STORE") else { return };
    let store = RedbStore::open(Path::new(&path), StoreLimits::default()).unwrap();
    for n in 1.. {
        let id = store.append(sample(n, 50, false)).unwrap();
        store.set_teacher(id, rows(50)).unwrap();
        println!("stored {id}");
    }
}

#[test]
fn what_was_stored_survives_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    let mut reported = BTreeSet::new();
    for round in 1..=5 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "sidecar::store::tests::child_that_appends", "--nocapture"])
            .env("DA_TEST_STORE", &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ids = lines.map_while(Result::ok).filter_map(|line| {
            // The harness may have put the test's name in front of the first line.
            line.rsplit_once("stored ").and_then(|(_, id)| id.parse::<u64>().ok())
        });
        let before = reported.len();
        reported.extend(ids.take(round * 7));
        assert_eq!(reported.len(), before + round * 7, "ids are never used twice");
        // SIGKILL, in the middle of whatever it is doing.
        child.kill().unwrap();
        child.wait().unwrap();
        let store = RedbStore::open(&path, StoreLimits::default()).unwrap();
        let scored: BTreeSet<u64> = ids_of(&store.unlearned(usize::MAX).unwrap());
        let lost: Vec<&u64> = reported.difference(&scored).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?} were reported and are gone");
    }
}

fn ids_of(samples: &[Sample]) -> BTreeSet<u64> {
    samples.iter().map(|sample| sample.id).collect()
}

#[test]
fn counts_agree_with_a_recount() {
    let mut index = Index::default();
    for n in 1..=50_u64 {
        let mut entry = index::Entry::new(&sample(n, 1, n % 7 == 0), n, 2 * n);
        entry.scored = n % 2 == 0;
        entry.learned = n % 4 == 0;
        index.insert(n, entry);
    }
    for n in (1..=50).step_by(3) {
        index.remove(n);
    }
    let left = (1..=50_u64).filter(|n| n % 3 != 1);
    let stats = index.stats();
    assert_eq!(stats.samples, left.clone().count() as u64);
    assert_eq!(stats.bytes, left.clone().map(|n| 3 * n).sum::<u64>());
    assert_eq!(stats.scored, left.clone().filter(|n| n % 2 == 0).count() as u64);
    assert_eq!(stats.learned, left.clone().filter(|n| n % 4 == 0 && n % 7 != 0).count() as u64);
    assert_eq!(stats.held_out, left.filter(|n| n % 7 == 0).count() as u64);
}

proptest! {
    #[test]
    fn samples_survive_encoding(
        prompt_ids in prop::collection::vec(any::<u32>(), 0..50),
        output_ids in prop::collection::vec(any::<u32>(), 0..50),
        temperature in any::<f32>().prop_filter("comparable", |t| !t.is_nan()),
        domain in ".{0,20}",
        draft_version in prop::option::of(".{0,9}"),
        flags in any::<(bool, bool, u64)>(),
        teacher in prop::collection::vec(
            prop::collection::vec(any::<(u32, u32)>(), 0..5), 0..10),
    ) {
        let sample = Sample {
            id: 3, prompt_ids, output_ids, temperature, domain, captured_unix_ms: flags.2,
            held_out: flags.0, ids_estimated: flags.1, draft_version, teacher: Vec::new(),
        };
        let bytes = codec::encode_sample(&sample);
        prop_assert_eq!(codec::decode_sample(3, &bytes).unwrap(), sample);
        for cut in 0..bytes.len() {
            prop_assert!(codec::decode_sample(3, &bytes[..cut]).is_err());
        }
        let teacher: Vec<TopK> = teacher.into_iter().map(|row| TopK {
            ids: row.iter().map(|entry| entry.0).collect(),
            logprobs: row.iter().map(|entry| f32::from_bits(entry.1)).collect(),
        }).collect();
        let bytes = codec::encode_teacher(&teacher);
        prop_assert_eq!(bytes.len() as u64, codec::teacher_bytes(&teacher));
        let back = codec::decode_teacher(&bytes).unwrap();
        // Bit for bit, NaN included.
        prop_assert_eq!(codec::encode_teacher(&back), bytes);
    }

    #[test]
    fn damaged_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = bytes;
        if let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        let _ = codec::decode_sample(1, &bytes);
        let _ = codec::decode_teacher(&bytes);
    }
}
