use super::*;
use crate::speculate::fake::FakeDecoder;

/// Verification of a row costs a tenth of a whole forward, a draft step a fifth.
fn curve() -> CostCurve {
    CostCurve {
        verify_ms: (0..9).map(|row| 10.0 + f64::from(row)).collect(),
        draft_ms: (0..9).map(|row| 2.0 + 0.2 * f64::from(row)).collect(),
    }
}

#[test]
fn expected_tokens_follow_the_geometric_sum() {
    let closed = |a: f64, k: i32| (1.0 - a.powi(k + 1)) / (1.0 - a);
    for (a, k) in [(0.0, 4), (0.5, 1), (0.67, 4), (0.9, 8)] {
        assert!((expected_tokens(a, k) - closed(a, k as i32)).abs() < 1e-12);
    }
    assert_eq!(expected_tokens(1.0, 4), 5.0);
}

#[test]
fn the_best_length_grows_with_acceptance_and_is_the_argmax() {
    let curve = curve();
    assert_eq!(curve.best_length(0.05, 1, MAX_AUTO), 0);
    let mut last = 0;
    for step in 0..=100 {
        let a = f64::from(step) / 100.0;
        let best = curve.best_length(a, 1, MAX_AUTO);
        assert!(best >= last, "shrinks at {a}");
        last = best;
        for k in 0..=MAX_AUTO {
            assert!(curve.tokens_per_second(a, k, 1) <= curve.tokens_per_second(a, best, 1) + 1e-9);
        }
    }
    assert_eq!(last, MAX_AUTO);
    // k = 1 pays as soon as (1 + a) / 13 > 1 / 10.
    assert_eq!(curve.break_even(), Some(0.31));
}

#[test]
fn a_curve_without_a_draft_never_drafts() {
    let curve = CostCurve { draft_ms: Vec::new(), ..curve() };
    assert_eq!(curve.best_length(1.0, 1, MAX_AUTO), 0);
    assert_eq!(curve.break_even(), None);
    let mut length = DraftLength::auto(curve);
    assert!((0..1000).all(|_| length.next_step(1) == 0));
}

#[test]
fn more_sequences_make_long_drafts_dearer() {
    let curve = curve();
    assert!(curve.best_length(0.6, 8, MAX_AUTO) <= curve.best_length(0.6, 1, MAX_AUTO));
    // Beyond the measured rows the slope goes on.
    assert!((interpolate(&curve.verify_ms, 20) - 29.0).abs() < 1e-9);
}

#[test]
fn the_estimate_follows_a_change() {
    let mut estimate = AcceptanceEstimate::new(0.6);
    for _ in 0..400 {
        estimate.observe(4, 0);
    }
    assert!(estimate.value() < 0.1);
    estimate.draft_changed();
    for _ in 0..10 {
        estimate.observe(4, 3);
    }
    // 3 of every 4 judged tokens are accepted.
    assert!((estimate.value() - 0.75).abs() < 0.15, "{}", estimate.value());
}

#[test]
fn a_bad_draft_is_switched_off_and_probed_until_it_recovers() {
    let mut length = DraftLength::auto(curve());
    let mut drafted_steps = 0;
    for _ in 0..2000 {
        let k = length.next_step(1);
        drafted_steps += usize::from(k > 0);
        length.observe(k, 0);
    }
    assert!(drafted_steps > 20, "it must go on probing");
    assert!(drafted_steps < 200, "{drafted_steps} steps were wasted");
    for _ in 0..1500 {
        let k = length.next_step(1);
        length.observe(k, k);
    }
    assert!(length.next_step(1) >= 4, "recovery went unnoticed");
}

#[test]
fn a_swap_starts_a_probe_at_once() {
    let mut length = DraftLength::auto(curve());
    for _ in 0..1000 {
        let k = length.next_step(1);
        length.observe(k, 0);
    }
    length.draft_changed();
    let mut steps = 0;
    loop {
        let k = length.next_step(1);
        length.observe(k, k);
        steps += 1;
        if k >= 4 {
            break;
        }
        assert!(steps < 40, "the new draft was not noticed");
    }
}

#[test]
fn fixed_stays_fixed() {
    let mut length = DraftLength::fixed(3, None);
    for _ in 0..100 {
        length.observe(3, 0);
        assert_eq!(length.next_step(8), 3);
    }
}

#[test]
fn measuring_covers_every_size() {
    let target = FakeDecoder::new(10, 1);
    let curve = CostCurve::measure(&target, Some(&FakeDecoder::new(10, 1)), 2).unwrap();
    assert_eq!((curve.verify_ms.len(), curve.draft_ms.len()), (9, 9));
    assert_eq!(target.widest.load(std::sync::atomic::Ordering::Relaxed), 64);
    assert!(CostCurve::measure(&target, None::<&FakeDecoder>, 1).unwrap().draft_ms.is_empty());
}

#[test]
fn a_measured_curve_is_made_to_rise() {
    assert!(rising(&[]).is_empty());
    assert_eq!(rising(&[1.0, 2.0, 4.0]), [1.0, 2.0, 4.0]);
    assert_eq!(rising(&[3.0, 1.0, 4.0, 6.0, 2.0]), [2.0, 2.0, 4.0, 4.0, 4.0]);
    assert_eq!(rising(&[9.0, 6.0, 3.0]), [6.0, 6.0, 6.0]);
}

#[test]
fn a_draft_that_looks_too_dear_is_tried_once_at_the_start() {
    let dear = CostCurve { draft_ms: vec![9.0; 9], ..curve() };
    let mut length = DraftLength::auto(dear);
    assert_eq!(length.preferred(1), 0);
    assert_eq!(length.next_step(1), 1);
}
