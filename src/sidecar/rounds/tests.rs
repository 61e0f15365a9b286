use super::*;

fn sample(id: u64, domain: &str, length: usize) -> Sample {
    Sample {
        id,
        prompt_ids: vec![1],
        output_ids: vec![id as u32; length],
        temperature: 0.0,
        domain: domain.into(),
        captured_unix_ms: id,
        held_out: false,
        ids_estimated: false,
        draft_version: None,
        teacher: Vec::new(),
    }
}

fn samples(ids: std::ops::Range<u64>, domain: &str) -> Vec<Sample> {
    ids.map(|id| sample(id, domain, 10)).collect()
}

fn settings() -> LearnSettings {
    LearnSettings { epochs: 1, rehearsal: 1.0, window_samples: 20, ..LearnSettings::default() }
}

fn count(round: &Round, ids: std::ops::Range<u64>) -> usize {
    round.samples.iter().filter(|sample| ids.contains(&sample.id)).count()
}

#[test]
fn the_first_round_has_only_new_samples_once_for_each_epoch() {
    let settings = LearnSettings { epochs: 3, ..settings() };
    let round = compose(&settings, 1, samples(0..8, "a"), Vec::new());
    assert_eq!(round.samples.len(), 24);
    assert_eq!(round.new_ids, (0..8).collect::<Vec<_>>());
}

#[test]
fn shares_of_rehearsal_and_replay_are_kept() {
    let learned = [samples(0..100, "old"), samples(100..120, "recent")].concat();
    let round = compose(&settings(), 4, samples(200..216, "new"), learned);
    assert_eq!(count(&round, 200..216), 16);
    assert_eq!(count(&round, 100..120), 16, "as many rehearsed as are new");
    // A fifth of all tokens: 8 samples beside 32 others.
    assert_eq!(count(&round, 0..100), 8);
    assert_eq!(round.new_ids.len(), 16);
}

#[test]
fn replay_is_even_over_domains_whatever_their_size() {
    let older = [samples(0..90, "large"), samples(90..100, "small")].concat();
    let window = samples(100..120, "recent");
    let round = compose(&settings(), 1, samples(200..216, "new"), [older, window].concat());
    assert_eq!((count(&round, 0..90), count(&round, 90..100)), (4, 4));
}

#[test]
fn a_round_is_reproducible_and_rounds_differ() {
    let learned = samples(0..100, "old");
    let make = |round| compose(&settings(), round, samples(200..216, "new"), learned.clone());
    assert_eq!(make(7), make(7));
    assert_ne!(make(7).samples, make(8).samples);
}

#[test]
fn replay_ends_when_there_is_nothing_left() {
    let learned = [samples(0..2, "old"), samples(100..120, "recent")].concat();
    let round = compose(&settings(), 1, samples(200..216, "new"), learned);
    assert_eq!(count(&round, 0..2), 2);
}

#[test]
fn the_data_hash_depends_on_history_and_content() {
    let first = data_hash("", &samples(0..2, "a"));
    assert_eq!(first, data_hash("", &samples(0..2, "a")));
    assert_ne!(first, data_hash("", &samples(0..3, "a")));
    assert_ne!(first, data_hash("other", &samples(0..2, "a")));
    assert_eq!(first.len(), 64);
}
