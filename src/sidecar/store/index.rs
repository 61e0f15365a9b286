//! What both stores know about each sample without reading it.

use std::collections::{BTreeMap, BTreeSet};

use crate::distill::Sample;

use super::{StoreLimits, StoreStats};

/// At most one sample in this many is held out; above that the oldest held-out ones leave first.
const HELD_OUT_SHARE: u64 = 5;

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub captured_unix_ms: u64,
    pub domain: String,
    pub output_tokens: usize,
    pub sample_bytes: u64,
    pub teacher_bytes: u64,
    pub scored: bool,
    pub learned: bool,
    pub held_out: bool,
}

impl Entry {
    pub fn new(sample: &Sample, sample_bytes: u64, teacher_bytes: u64) -> Self {
        Self {
            captured_unix_ms: sample.captured_unix_ms,
            domain: sample.domain.clone(),
            output_tokens: sample.output_ids.len(),
            sample_bytes,
            teacher_bytes,
            scored: sample.is_scored(),
            learned: false,
            held_out: sample.held_out,
        }
    }

    fn bytes(&self) -> u64 {
        self.sample_bytes + self.teacher_bytes
    }

    fn class(&self) -> Class {
        match (self.held_out, self.scored, self.learned) {
            (true, false, _) => Class::HeldOutUnscored,
            (true, true, _) => Class::HeldOut,
            (false, false, _) => Class::Unscored,
            (false, true, false) => Class::Unlearned,
            (false, true, true) => Class::Learned,
        }
    }
}

/// Every sample is in exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Unscored,
    Unlearned,
    Learned,
    HeldOutUnscored,
    HeldOut,
}

const CLASSES: usize = 5;

/// All entries, by id and by class. Ids increase with time, so the first of a set is the oldest.
#[derive(Debug, Default)]
pub(super) struct Index {
    entries: BTreeMap<u64, Entry>,
    classes: [BTreeSet<u64>; CLASSES],
    bytes: u64,
    pub evicted: u64,
}

impl Index {
    pub fn insert(&mut self, id: u64, entry: Entry) {
        self.remove(id);
        self.bytes += entry.bytes();
        self.classes[entry.class() as usize].insert(id);
        self.entries.insert(id, entry);
    }

    pub fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.bytes -= entry.bytes();
        self.classes[entry.class() as usize].remove(&id);
        Some(entry)
    }

    pub fn get(&self, id: u64) -> Option<&Entry> {
        self.entries.get(&id)
    }

    pub fn class(&self, class: Class) -> impl DoubleEndedIterator<Item = u64> {
        self.classes[class as usize].iter().copied()
    }

    /// Unscored ids of both kinds, oldest first.
    pub fn unscored(&self, limit: usize) -> Vec<u64> {
        let mut ids: Vec<u64> = self
            .class(Class::Unscored)
            .take(limit)
            .chain(self.class(Class::HeldOutUnscored).take(limit))
            .collect();
        ids.sort_unstable();
        ids.truncate(limit);
        ids
    }

    pub fn learned(&self) -> Vec<(u64, String)> {
        self.class(Class::Learned).map(|id| (id, self.entries[&id].domain.clone())).collect()
    }

    pub fn older_than(&self, unix_ms: u64) -> Vec<u64> {
        let old = self.entries.iter().filter(|(_, e)| e.captured_unix_ms < unix_ms);
        old.map(|(id, _)| *id).collect()
    }

    pub fn last_id(&self) -> u64 {
        self.entries.last_key_value().map_or(0, |(id, _)| *id)
    }

    /// Who has to leave so that `samples` more with `bytes` more fit; never `keep`.
    pub fn victims(&self, limits: StoreLimits, samples: u64, bytes: u64, keep: u64) -> Vec<u64> {
        let mut over_samples =
            (self.entries.len() as u64 + samples).saturating_sub(limits.max_samples);
        let mut over_bytes = (self.bytes + bytes).saturating_sub(limits.max_bytes);
        if over_samples == 0 && over_bytes == 0 {
            return Vec::new();
        }
        let held_out = self.held_out_count();
        let surplus = held_out.saturating_sub(self.entries.len() as u64 / HELD_OUT_SHARE);
        let mut held_out_ids: Vec<u64> =
            self.class(Class::HeldOut).chain(self.class(Class::HeldOutUnscored)).collect();
        held_out_ids.sort_unstable();
        let (surplus_ids, last_ids) = held_out_ids.split_at(surplus as usize);
        let order = surplus_ids
            .iter()
            .copied()
            .chain(self.class(Class::Learned))
            .chain(self.class(Class::Unlearned))
            .chain(self.class(Class::Unscored))
            .chain(last_ids.iter().copied());
        let mut victims = Vec::new();
        for id in order.filter(|id| *id != keep) {
            if over_samples == 0 && over_bytes == 0 {
                break;
            }
            over_samples = over_samples.saturating_sub(1);
            over_bytes = over_bytes.saturating_sub(self.entries[&id].bytes());
            victims.push(id);
        }
        victims
    }

    fn held_out_count(&self) -> u64 {
        let [_, _, _, unscored, scored] = &self.classes;
        (unscored.len() + scored.len()) as u64
    }

    pub fn stats(&self) -> StoreStats {
        let [_, unlearned, learned, _, held_out_scored] = &self.classes;
        StoreStats {
            samples: self.entries.len() as u64,
            scored: (unlearned.len() + learned.len() + held_out_scored.len()) as u64,
            learned: learned.len() as u64,
            held_out: self.held_out_count(),
            bytes: self.bytes,
            evicted: self.evicted,
        }
    }
}
