//! The ledger: which versions exist, what was measured of each, and which one should run.
//!
//! It is one small document, `state.json`, replaced atomically. Architecture invariant: what the
//! ledger says runs is the truth; the `current` link and the server are brought in line with it.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::publish::{FolderError, write_atomically};

/// Name of the ledger inside the work folder.
pub const LEDGER_FILE: &str = "state.json";
/// The version that was imported.
pub const FIRST_VERSION: &str = "v000000";
const SCHEMA: u32 = 1;
const SWAPS_KEPT: usize = 200;

/// Where a version is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VersionState {
    /// Passed the gate; its folder is being put in place.
    Publishing,
    Published,
    /// Taken back because it did worse; never published again.
    RolledBack,
    /// The server would not run it.
    Rejected,
}

impl VersionState {
    /// The word used in `/status` and in the control service.
    pub fn word(self) -> &'static str {
        match self {
            Self::Publishing => "publishing",
            Self::Published => "published",
            Self::RolledBack => "rolled_back",
            Self::Rejected => "refused",
        }
    }
}

/// What the gate measured, on the same held-out samples for both drafts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GateScores {
    /// Acceptance of the draft that ran, and of the candidate.
    pub before: f64,
    pub after: f64,
    pub mean_length_before: f64,
    pub mean_length_after: f64,
    pub positions: u64,
    pub samples: usize,
    /// Standard error of the paired difference over samples.
    pub gain_stderr: f64,
    pub domains: Vec<DomainScores>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DomainScores {
    pub domain: String,
    pub before: f64,
    pub after: f64,
    pub positions: u64,
}

/// The server's counters while one version ran.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveCounters {
    /// Verification steps.
    pub drafts: u64,
    pub drafted: u64,
    pub accepted: u64,
    /// Steps in which position 0, 1, … was accepted; empty when the server does not say.
    pub accepted_per_position: Vec<u64>,
}

impl LiveCounters {
    pub fn add(&mut self, other: &Self) {
        self.drafts += other.drafts;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        let positions = self.accepted_per_position.len().max(other.accepted_per_position.len());
        self.accepted_per_position.resize(positions, 0);
        for (sum, more) in self.accepted_per_position.iter_mut().zip(&other.accepted_per_position) {
            *sum += more;
        }
    }

    /// Accepted share of the drafted tokens; none before anything was drafted.
    pub fn acceptance_rate(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }

    /// Tokens that a verification step yields, bonus token included.
    pub fn mean_accepted_length(&self) -> Option<f64> {
        (self.drafts > 0).then(|| 1.0 + self.accepted as f64 / self.drafts as f64)
    }
}

/// Everything known of one version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VersionRecord {
    pub version: String,
    pub parent: Option<String>,
    pub state: VersionState,
    pub checksum: String,
    pub created_unix: u64,
    /// None for the imported version.
    pub gate: Option<GateScores>,
    pub live: LiveCounters,
    pub stage_ms: Option<f64>,
    pub swap_stall_ms: Option<f64>,
    /// Why it is rolled back or refused.
    pub reason: Option<String>,
    /// False once retention has deleted the folder.
    pub on_disk: bool,
}

/// One change of what the server runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SwapRecord {
    pub version: String,
    pub from: Option<String>,
    pub unix_ms: u64,
    pub stage_ms: f64,
    pub stall_ms: f64,
    pub gate_before: Option<f64>,
    pub gate_after: Option<f64>,
    /// `publish`, `rollback`, `pin` or `sync` (the server had restarted).
    pub cause: String,
}

/// What training cost, over all restarts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainingTotals {
    pub rounds: u64,
    pub steps: u64,
    pub skipped_steps: u64,
    /// Output tokens learned from, each pass counted.
    pub tokens: u64,
    pub seconds: f64,
}

/// The whole document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    pub schema: u32,
    /// Number of the next version.
    pub next: u64,
    /// The version that should run.
    pub running: String,
    pub pinned: Option<String>,
    pub paused: bool,
    /// Set by a roll-back: the trainer must start again from this version before it goes on.
    pub restart_from: Option<String>,
    /// Gate refusals in a row.
    pub refusals: u32,
    pub training: TrainingTotals,
    /// Hash over everything that the weights being trained have learned from.
    pub data_hash: String,
    pub versions: Vec<VersionRecord>,
    pub swaps: Vec<SwapRecord>,
}

impl Ledger {
    /// The ledger of a work folder that has only the imported version.
    pub fn first(checksum: String, created_unix: u64, data_hash: String) -> Self {
        let record = VersionRecord {
            version: FIRST_VERSION.into(),
            parent: None,
            state: VersionState::Published,
            checksum,
            created_unix,
            gate: None,
            live: LiveCounters::default(),
            stage_ms: None,
            swap_stall_ms: None,
            reason: None,
            on_disk: true,
        };
        Self {
            schema: SCHEMA,
            next: 1,
            running: FIRST_VERSION.into(),
            pinned: None,
            paused: false,
            restart_from: None,
            refusals: 0,
            training: TrainingTotals::default(),
            data_hash,
            versions: vec![record],
            swaps: Vec::new(),
        }
    }

    /// Reads the ledger of a work folder; none when there is no such file.
    ///
    /// # Errors
    /// When it cannot be read, or was not written by a build like this one.
    pub fn load(work_dir: &Path) -> Result<Option<Self>, FolderError> {
        let path = work_dir.join(LEDGER_FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(FolderError::io("read", &path, error)),
        };
        let damaged =
            |reason: String| FolderError::Ledger { path: path.display().to_string(), reason };
        let ledger: Self =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        if ledger.schema != SCHEMA {
            return Err(damaged(format!("expected schema {SCHEMA}, got {}", ledger.schema)));
        }
        Ok(Some(ledger))
    }

    /// Replaces the ledger on disk.
    ///
    /// # Errors
    /// When it cannot be written; the old one is then untouched.
    pub fn save(&self, work_dir: &Path) -> Result<(), FolderError> {
        let text = serde_json::to_vec_pretty(self).map_err(|error| FolderError::Ledger {
            path: LEDGER_FILE.into(),
            reason: error.to_string(),
        })?;
        write_atomically(&work_dir.join(LEDGER_FILE), &text)
    }

    pub fn next_version(&self) -> String {
        format!("v{:06}", self.next)
    }

    pub fn find(&self, version: &str) -> Option<&VersionRecord> {
        self.versions.iter().find(|record| record.version == version)
    }

    pub fn find_mut(&mut self, version: &str) -> Option<&mut VersionRecord> {
        self.versions.iter_mut().find(|record| record.version == version)
    }

    /// The version that the running one replaced, when it can still run.
    pub fn parent_of_running(&self) -> Option<&VersionRecord> {
        let parent = self.find(&self.running)?.parent.as_deref()?;
        self.find(parent).filter(|record| self.can_run(record))
    }

    /// Whether a version may be put (back) in service.
    pub fn can_run(&self, record: &VersionRecord) -> bool {
        record.on_disk && record.state == VersionState::Published
    }

    /// Adds to the history of swaps, which is bounded.
    pub fn push_swap(&mut self, swap: SwapRecord) {
        self.swaps.push(swap);
        let surplus = self.swaps.len().saturating_sub(SWAPS_KEPT);
        self.swaps.drain(..surplus);
    }
}
