use super::*;

const LOSSES: [Loss; 5] =
    [Loss::ForwardKl, Loss::ReverseKl, Loss::TotalVariation, Loss::LogAlpha, Loss::JensenShannon];

fn teacher() -> TopK {
    TopK { ids: vec![3, 0, 5], logprobs: vec![0.5f32.ln(), 0.2f32.ln(), 0.1f32.ln()] }
}

fn value(loss: Loss, teacher: &TopK, logits: &[f32]) -> f64 {
    loss.gradient_in_place(teacher, &mut logits.to_vec(), 1.0).into()
}

#[test]
fn gradients_match_finite_differences() {
    let logits = [0.3f32, -1.2, 0.7, 1.5, -0.4, 0.1, 0.9, -2.0];
    for loss in LOSSES {
        let mut gradient = logits.to_vec();
        loss.gradient_in_place(&teacher(), &mut gradient, 1.0);
        for index in 0..logits.len() {
            let step = 1e-2f32;
            let (mut up, mut down) = (logits, logits);
            up[index] += step;
            down[index] -= step;
            let numeric = (value(loss, &teacher(), &up) - value(loss, &teacher(), &down))
                / (2.0 * f64::from(step));
            let got = f64::from(gradient[index]);
            assert!((got - numeric).abs() < 2e-4, "{loss:?} logit {index}: {got} and {numeric}");
        }
        assert!(gradient.iter().sum::<f32>().abs() < 1e-5, "{loss:?} is invariant to a shift");
    }
}

#[test]
fn a_draft_equal_to_the_teacher_costs_nothing() {
    let masses = [0.5f32, 0.2, 0.1, 0.2];
    for loss in LOSSES {
        let mut derivative = [0.0; 4];
        assert!(loss.over_buckets(&masses, &masses, &mut derivative).abs() < 1e-6, "{loss:?}");
    }
}

#[test]
fn a_point_mass_turns_forward_kl_into_cross_entropy() {
    let sure = TopK { ids: vec![2], logprobs: vec![0.0] };
    let logits = [0.1f32, 0.2, 0.3, 0.4];
    let normaliser: f32 = logits.iter().map(|z| z.exp()).sum::<f32>().ln();
    let want = f64::from(normaliser - logits[2]);
    assert!((value(Loss::ForwardKl, &sure, &logits) - want).abs() < 1e-5);
    assert!((value(Loss::LogAlpha, &sure, &logits) - want).abs() < 1e-5);
}

#[test]
fn everything_stays_finite_without_overlap() {
    let sure = TopK { ids: vec![0], logprobs: vec![0.0] };
    for loss in LOSSES {
        let mut logits = vec![-80.0f32, 80.0, 0.0];
        let value = loss.gradient_in_place(&sure, &mut logits, 1.0);
        assert!(value.is_finite() && logits.iter().all(|g| g.is_finite()), "{loss:?}");
    }
}

/// Constants from numpy in float64: `tests/golden/losses.py`.
#[test]
fn values_match_numpy() {
    let logits = [0.3f32, -1.2, 0.7, 1.5, -0.4, 0.1, 0.9, -2.0];
    for (loss, want) in LOSSES.into_iter().zip(GOLDEN) {
        let got = value(loss, &teacher(), &logits);
        assert!((got - want).abs() < 1e-5, "{loss:?}: {got} instead of {want}");
    }
}

const GOLDEN: [f64; 5] =
    [0.142_629_280_769, 0.160_189_424_106, 0.245_812_828_324, 0.282_114_703_483, 0.037_074_946_235];

#[test]
fn names_are_parsed_and_others_refused() {
    assert_eq!("log_alpha".parse::<Loss>().unwrap(), Loss::LogAlpha);
    assert!("kl".parse::<Loss>().unwrap_err().to_string().contains("forward_kl"));
}
