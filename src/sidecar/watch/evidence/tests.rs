use super::*;

fn settings() -> WatchSettings {
    WatchSettings::default()
}

/// `drafts` steps of four tokens, of which this many accept 0, 1, 2, … tokens in equal shares.
fn counters(accepted_in_each: &[u64], repeat: u64) -> LiveCounters {
    let positions = |i: u64| accepted_in_each.iter().filter(|a| **a > i).count() as u64 * repeat;
    let drafts = accepted_in_each.len() as u64 * repeat;
    LiveCounters {
        drafts,
        drafted: 4 * drafts,
        accepted: accepted_in_each.iter().sum::<u64>() * repeat,
        accepted_per_position: (0..4).map(positions).collect(),
    }
}

#[test]
fn the_variance_is_that_of_whole_steps() {
    // Accepted 0 or 4 with equal chance: variance 4, so of the rate 4 / (16 n).
    let two_sided = counters(&[0, 4], 50);
    assert!((rate_variance(&two_sided) - 4.0 / (16.0 * 100.0)).abs() < 1e-12);
    // Always 2: no variance at all.
    assert!(rate_variance(&counters(&[2], 100)).abs() < 1e-12);
    // Without positions the worst case is assumed, which is the first of the two.
    let silent = LiveCounters { accepted_per_position: Vec::new(), ..two_sided.clone() };
    assert!((rate_variance(&silent) - rate_variance(&two_sided)).abs() < 1e-12);
}

#[test]
fn only_a_significant_and_large_drop_on_enough_tokens_is_suspect() {
    let good = counters(&[0, 2, 3, 4], 200);
    let bad = counters(&[0, 0, 1, 2], 200);
    let suspicion = suspect(&settings(), &bad, Some(&good), None);
    assert!(suspicion.worse_z.is_some_and(|z| z > 6.0), "{suspicion:?}");
    assert_eq!(suspect(&settings(), &good, Some(&bad), None), Suspicion::default());
    // The same rates on few tokens, or a small drop on many.
    let few = counters(&[0, 0, 1, 2], 10);
    assert_eq!(suspect(&settings(), &few, Some(&good), None), Suspicion::default());
    let slightly = counters(&[0, 2, 3, 4, 0, 2, 3, 3], 100_000);
    assert_eq!(suspect(&settings(), &slightly, Some(&good), None), Suspicion::default());
    assert_eq!(suspect(&settings(), &bad, None, None), Suspicion::default());
}

#[test]
fn first_tokens_far_below_the_prediction_are_a_collapse() {
    // Half of the steps accept their first token.
    let live = counters(&[0, 0, 1, 4], 200);
    assert!(!suspect(&settings(), &live, None, Some(0.9)).collapsed);
    assert!(suspect(&settings(), &live, None, Some(1.1)).collapsed);
    // Without positions, 0.6 a token over 4 tokens is expected to give a share of 0.326.
    let silent = |accepted| LiveCounters {
        drafts: 1000,
        drafted: 4000,
        accepted,
        accepted_per_position: Vec::new(),
    };
    assert!(!suspect(&settings(), &silent(700), None, Some(0.6)).collapsed);
    assert!(suspect(&settings(), &silent(600), None, Some(0.6)).collapsed);
}

#[test]
fn a_drop_that_the_drafts_do_not_show_is_the_traffics() {
    let live = counters(&[0, 0, 1, 2], 200);
    let suspicion = Suspicion { worse_z: Some(9.0), collapsed: false };
    let decide = |newer, older| {
        decide(&settings(), &live, &suspicion, &Comparison { newer, older: Some(older) })
    };
    assert!(matches!(decide(0.3, 0.5), Decision::RollBack { .. }));
    assert!(matches!(decide(0.5, 0.5), Decision::Drift { predicted, .. } if predicted == 0.5));
    assert!(matches!(decide(0.499, 0.5), Decision::Drift { .. }), "a hair is chance");
}

#[test]
fn a_collapse_counts_only_against_the_same_traffic() {
    let live = counters(&[0, 0, 1, 4], 200);
    let suspicion = Suspicion { worse_z: None, collapsed: true };
    let decide = |newer| decide(&settings(), &live, &suspicion, &Comparison { newer, older: None });
    assert!(matches!(decide(1.0 + 0.1), Decision::RollBack { .. }));
    assert!(matches!(decide(0.4), Decision::Drift { .. }));
}

#[test]
fn without_samples_only_an_extreme_drop_decides() {
    let blind = |z| decide_blind(&settings(), &Suspicion { worse_z: z, collapsed: true });
    assert!(matches!(blind(Some(6.5)), Decision::RollBack { .. }));
    assert_eq!(blind(Some(4.0)), Decision::Wait);
    assert_eq!(blind(None), Decision::Wait);
}

#[test]
fn old_windows_give_way_to_new_ones() {
    let mut evidence = Evidence::default();
    for _ in 0..10 {
        evidence.add(counters(&[4], 25), 300);
    }
    for _ in 0..10 {
        evidence.add(counters(&[0], 25), 300);
    }
    evidence.add(LiveCounters::default(), 300);
    let total = evidence.total();
    assert_eq!((total.drafted, total.accepted), (300, 0));
}
