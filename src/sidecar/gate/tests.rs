use super::*;

fn sample(domain: &str, positions: usize) -> Sample {
    Sample {
        prompt_ids: vec![1],
        output_ids: vec![1; positions],
        domain: domain.into(),
        held_out: true,
        ..Sample::default()
    }
}

/// Acceptance of a draft that reaches these rates on samples of 100 positions each.
fn reached(rates: &[f64]) -> Acceptance {
    Acceptance {
        positions: 100 * rates.len() as u64,
        acceptance_rate: rates.iter().sum::<f64>() / rates.len() as f64,
        alpha: 0.5,
        mean_accepted_length: 1.0,
        finite: true,
        per_sample: rates.to_vec(),
    }
}

fn samples(domains: &[&str]) -> Vec<Sample> {
    domains.iter().map(|domain| sample(domain, 100)).collect()
}

fn settings() -> GateSettings {
    GateSettings::default()
}

#[test]
fn a_better_candidate_is_published_with_its_numbers() {
    let (before, after) = (reached(&[0.2, 0.4]), reached(&[0.5, 0.5]));
    let (verdict, scores) = judge(&settings(), &samples(&["a", "b"]), &before, &after);
    assert_eq!(verdict, Verdict::Publish);
    assert!((scores.before - 0.3).abs() < 1e-12 && (scores.after - 0.5).abs() < 1e-12);
    assert_eq!((scores.positions, scores.samples), (200, 2));
    // Differences 0.3 and 0.1: mean 0.2, standard deviation 0.1414, over the square root of 2.
    assert!((scores.gain_stderr - 0.1).abs() < 1e-12, "{}", scores.gain_stderr);
    assert_eq!(scores.domains[1].domain, "b");
    assert!((scores.domains[1].before - 0.4).abs() < 1e-12);
}

#[test]
fn a_worse_candidate_is_refused_and_an_equal_one_is_not() {
    let (low, high) = (reached(&[0.3]), reached(&[0.31]));
    let held_out = samples(&["a"]);
    let (verdict, _) = judge(&settings(), &held_out, &high, &low);
    let Verdict::Refuse { reason } = verdict else { panic!("{verdict:?}") };
    assert!(reason.contains("0.3000 after, 0.3100 before"), "{reason}");
    assert_eq!(judge(&settings(), &held_out, &low, &low).0, Verdict::Publish);
    let strict = GateSettings { min_gain: 0.02, ..settings() };
    assert_eq!(judge(&strict, &held_out, &low, &high).0.word(), "refuse");
}

#[test]
fn too_little_data_holds() {
    let few = GateSettings { min_positions: 101, ..settings() };
    let (verdict, _) = judge(&few, &samples(&["a"]), &reached(&[0.1]), &reached(&[0.9]));
    assert_eq!(verdict.word(), "hold");
    assert!(verdict.reason().unwrap().contains("100 held-out positions, 101 are needed"));
}

#[test]
fn a_candidate_that_is_not_finite_is_never_published() {
    let held_out = samples(&["a"]);
    let broken = Acceptance { finite: false, ..reached(&[0.9]) };
    assert_eq!(judge(&settings(), &held_out, &reached(&[0.1]), &broken).0.word(), "refuse");
    let nan = Acceptance { acceptance_rate: f64::NAN, ..reached(&[0.9]) };
    assert_eq!(judge(&settings(), &held_out, &reached(&[0.1]), &nan).0.word(), "refuse");
    // Whatever runs when it is itself broken is replaced.
    assert_eq!(judge(&settings(), &held_out, &nan, &reached(&[0.1])).0, Verdict::Publish);
}

#[test]
fn one_domain_may_not_pay_for_another() {
    let held_out = samples(&["a", "b"]);
    let (before, after) = (reached(&[0.5, 0.5]), reached(&[0.9, 0.46]));
    let (verdict, _) = judge(&settings(), &held_out, &before, &after);
    assert!(verdict.reason().unwrap().contains("domain `b` falls from 0.5000 to 0.4600"));
    let within = reached(&[0.9, 0.48]);
    assert_eq!(judge(&settings(), &held_out, &before, &within).0, Verdict::Publish);
    // The same loss on a handful of positions is chance.
    let mut small = held_out.clone();
    small[1] = sample("b", 10);
    assert_eq!(judge(&settings(), &small, &before, &after).0, Verdict::Publish);
}
