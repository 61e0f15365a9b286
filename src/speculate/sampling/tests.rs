use super::*;

fn distribution(logits: &[f32], temperature: f32, top_p: f32, top_k: usize) -> Vec<f32> {
    let mut out = Vec::new();
    let sampling = Sampling { temperature, top_p, top_k };
    assert!(probabilities(logits, &sampling, &mut Scratch::default(), &mut out));
    out
}

#[test]
fn top_k_then_top_p_keep_what_vllm_keeps() {
    // Probabilities 0.5, 0.25, 0.125, 0.125.
    let logits = [4f32.ln(), 2f32.ln(), 0.0, 0.0];
    let close = |got: Vec<f32>, want: [f32; 4]| {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} instead of {want}");
        }
    };
    close(distribution(&logits, 1.0, 1.0, 0), [0.5, 0.25, 0.125, 0.125]);
    close(distribution(&logits, 1.0, 1.0, 2), [2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
    // Both tied tokens are at the edge of top_k, so both stay.
    close(distribution(&logits, 1.0, 1.0, 3), [0.5, 0.25, 0.125, 0.125]);
    // The two tied tokens together hold more than 1 - top_p: only the higher id goes.
    close(distribution(&logits, 1.0, 0.8, 0), [4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 0.0]);
    // After top_k the mass is renormalised before top_p looks at it: 1/3 <= 1 - 0.6.
    close(distribution(&logits, 1.0, 0.6, 2), [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn the_most_likely_token_always_stays() {
    let p = distribution(&[0.0, 1.0, 0.5], 1.0, 1e-6, 0);
    assert_eq!(p, [0.0, 1.0, 0.0]);
}

#[test]
fn a_wide_nucleus_matches_the_definition() {
    let logits: Vec<f32> = (0..5000).map(|i| ((i * 7919) % 5000) as f32 / 900.0).collect();
    for top_p in [0.1, 0.5, 0.9, 0.99, 0.9999] {
        let got = distribution(&logits, 0.8, top_p, 0);
        let full = distribution(&logits, 0.8, 1.0, 0);
        let mut order: Vec<usize> = (0..full.len()).collect();
        order.sort_by(|&a, &b| full[b].total_cmp(&full[a]));
        let (mut mass, mut kept) = (0f64, 0);
        while mass < f64::from(top_p) {
            mass += f64::from(full[order[kept]]);
            kept += 1;
        }
        let nonzero = got.iter().filter(|&&p| p > 0.0).count();
        assert!(nonzero.abs_diff(kept) <= 1, "top_p {top_p}: {nonzero} kept, not {kept}");
        assert!((sum(&got) - 1.0).abs() < 1e-5);
    }
}

#[test]
fn sampling_follows_the_running_sum() {
    let mut weights = vec![0f32; 3000];
    weights[5] = 1.0;
    weights[2000] = 2.0;
    weights[2999] = 1.0;
    assert_eq!(sample(&weights, 0.0), 5);
    assert_eq!(sample(&weights, 0.249), 5);
    assert_eq!(sample(&weights, 0.251), 2000);
    assert_eq!(sample(&weights, 0.749), 2000);
    assert_eq!(sample(&weights, 0.751), 2999);
    assert_eq!(sample(&weights, 1.0 - 1e-16), 2999);
}

#[test]
fn a_row_without_a_finite_logit_is_refused() {
    let sampling = Sampling { temperature: 1.0, top_p: 1.0, top_k: 0 };
    let mut out = Vec::new();
    for row in [[f32::NEG_INFINITY; 4], [f32::NAN; 4], [f32::INFINITY; 4]] {
        assert!(!probabilities(&row, &sampling, &mut Scratch::default(), &mut out));
    }
}

#[test]
fn masked_tokens_have_no_probability() {
    let p = distribution(&[0.0, f32::NEG_INFINITY, 0.0], 1.0, 1.0, 0);
    assert_eq!(p[1], 0.0);
}
