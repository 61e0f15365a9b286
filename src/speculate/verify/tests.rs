use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Golden {
    logits: Vec<f32>,
    draft_logits: Vec<f32>,
    temperature: f32,
    top_k: usize,
    top_p: f32,
    p: Vec<f64>,
    q: Vec<f64>,
    overlap: f64,
    residual: Vec<f64>,
    accept: Vec<f64>,
    one_hot_token: u32,
    one_hot_accept: f64,
    one_hot_residual: Vec<f64>,
}

/// Made by tests/golden/verify.py.
fn golden() -> Vec<Golden> {
    serde_json::from_str(include_str!("../../../tests/golden/verify.json")).unwrap()
}

fn distribution(logits: &[f32], sampling: &Sampling) -> Vec<f32> {
    let mut out = Vec::new();
    assert!(probabilities(logits, sampling, &mut Scratch::default(), &mut out));
    out
}

fn assert_close(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (&got, &want) in got.iter().zip(want) {
        assert!((f64::from(got) - want).abs() < 1e-5, "{got} instead of {want}");
    }
}

fn normalised(weights: &[f32]) -> Vec<f32> {
    let total: f32 = weights.iter().sum();
    weights.iter().map(|w| if total > 0.0 { w / total } else { 0.0 }).collect()
}

#[test]
fn golden_numbers() {
    let cases = golden();
    assert!(cases.len() >= 16);
    for case in cases {
        let sampling =
            Sampling { temperature: case.temperature, top_p: case.top_p, top_k: case.top_k };
        let p = distribution(&case.logits, &sampling);
        let q = distribution(&case.draft_logits, &Sampling { top_p: 1.0, top_k: 0, ..sampling });
        assert_close(&p, &case.p);
        assert_close(&q, &case.q);
        assert!((overlap(&p, &q) - case.overlap).abs() < 1e-5);

        let mut rest = p.clone();
        residual(&mut rest, &q);
        assert_close(&normalised(&rest), &case.residual);
        // Acceptance flips exactly at min(1, p/q).
        for (token, &accept) in case.accept.iter().enumerate() {
            let verdict = |uniform: f64| {
                probabilistic(&mut p.clone(), &q, token as u32, uniform, 0.5).accepted
            };
            assert!(accept < 1e-4 || verdict(accept - 1e-4), "refused below p/q");
            assert!(accept > 1.0 - 1e-4 || !verdict(accept + 1e-4), "accepted above p/q");
        }

        assert_eq!(argmax(&q), case.one_hot_token);
        assert!((f64::from(p[case.one_hot_token as usize]) - case.one_hot_accept).abs() < 1e-5);
        let mut one_hot = vec![0f32; p.len()];
        one_hot[case.one_hot_token as usize] = 1.0;
        let mut rest = p.clone();
        residual(&mut rest, &one_hot);
        assert_close(&normalised(&rest), &case.one_hot_residual);
    }
}

/// Draws from two positions of a chain in which the second distribution depends on the first
/// token: the tokens that plain sampling gives, or that speculation with two drafts gives.
struct Chain {
    sampling: Sampling,
    target: Vec<Vec<f32>>,
    draft: Vec<Vec<f32>>,
}

const VOCAB: usize = 6;

impl Chain {
    fn new(temperature: f32) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(9);
        let mut rows = |near: Option<&Vec<Vec<f32>>>| -> Vec<Vec<f32>> {
            (0..=VOCAB)
                .map(|row| {
                    (0..VOCAB)
                        .map(|id| match near {
                            None => rng.random_range(-1.5..1.5),
                            Some(rows) => rows[row][id] + rng.random_range(-1.0..1.0),
                        })
                        .collect()
                })
                .collect()
        };
        let target = rows(None);
        let draft = rows(Some(&target));
        Self { sampling: Sampling { temperature, top_p: 1.0, top_k: 0 }, target, draft }
    }

    /// Row 0 is the first position; row `1 + token` follows that token.
    fn speculate(&self, probabilistic: bool, rng: &mut ChaCha8Rng) -> [u32; 2] {
        let mut verifier = Verifier::default();
        let mut emitted = Vec::new();
        while emitted.len() < 2 {
            let mut row = emitted.last().map_or(0, |&token: &u32| token as usize + 1);
            // Draft what is still missing, then verify as far as it holds.
            let mut drafts: Vec<(u32, Vec<f32>)> = Vec::new();
            let mut at = row;
            for _ in emitted.len()..2 {
                let q = distribution(&self.draft[at], &self.sampling);
                let token = if probabilistic { sample(&q, rng.random()) } else { argmax(&q) };
                drafts.push((token, q));
                at = token as usize + 1;
            }
            for (token, q) in &drafts {
                let drafted =
                    Drafted { token: *token, probabilities: probabilistic.then_some(q.as_slice()) };
                let choice =
                    verifier.choose(&self.target[row], &self.sampling, Some(drafted), rng).unwrap();
                emitted.push(choice.token);
                row = choice.token as usize + 1;
                if !choice.accepted {
                    break;
                }
            }
        }
        [emitted[0], emitted[1]]
    }

    /// Probability of each pair under the target alone, by the definition.
    fn exact(&self) -> Vec<f64> {
        let first = distribution(&self.target[0], &self.sampling);
        (0..VOCAB * VOCAB)
            .map(|pair| {
                let second = distribution(&self.target[pair / VOCAB + 1], &self.sampling);
                f64::from(first[pair / VOCAB]) * f64::from(second[pair % VOCAB])
            })
            .collect()
    }
}

#[test]
fn emitted_tokens_are_distributed_as_the_target() {
    const DRAWS: usize = 60_000;
    // 0.999 quantile of chi-square with 35 degrees of freedom; the seed is fixed, so a test that
    // passes keeps passing.
    const LIMIT: f64 = 66.62;
    for temperature in [0.7, 1.0] {
        for probabilistic in [false, true] {
            let chain = Chain::new(temperature);
            let mut rng = ChaCha8Rng::seed_from_u64(1234);
            let mut counts = vec![0usize; VOCAB * VOCAB];
            for _ in 0..DRAWS {
                let [a, b] = chain.speculate(probabilistic, &mut rng);
                counts[a as usize * VOCAB + b as usize] += 1;
            }
            let exact = chain.exact();
            let chi_square: f64 = counts
                .iter()
                .zip(&exact)
                .map(|(&count, &p)| {
                    let expected = p * DRAWS as f64;
                    (count as f64 - expected).powi(2) / expected
                })
                .sum();
            assert!(
                chi_square < LIMIT,
                "temperature {temperature}, probabilistic {probabilistic}: chi-square {chi_square}"
            );
        }
    }
}

#[test]
fn the_chi_square_test_would_notice_a_wrong_rule() {
    // Taking every draft unverified is the classic mistake; its statistic must be far outside.
    let chain = Chain::new(1.0);
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut counts = [0f64; VOCAB];
    let q = distribution(&chain.draft[0], &chain.sampling);
    for _ in 0..10_000 {
        counts[sample(&q, rng.random()) as usize] += 1.0;
    }
    let p = distribution(&chain.target[0], &chain.sampling);
    let chi_square: f64 = counts
        .iter()
        .zip(&p)
        .map(|(count, &p)| {
            let expected = f64::from(p) * 10_000.0;
            (count - expected).powi(2) / expected
        })
        .sum();
    assert!(chi_square > 100.0, "chi-square {chi_square}");
}

#[test]
fn a_draft_equal_to_the_target_is_always_accepted() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut verifier = Verifier::default();
    for temperature in [0.0, 0.7, 1.0] {
        for _ in 0..500 {
            let row: Vec<f32> = (0..300).map(|_| rng.random_range(-4.0..4.0)).collect();
            let sampling = Sampling { temperature, top_p: 1.0, top_k: 0 };
            let (token, q) = if sampling.is_greedy() {
                (argmax(&row), None)
            } else {
                let q = distribution(&row, &sampling);
                (sample(&q, rng.random()), Some(q))
            };
            let drafted = Drafted { token, probabilities: q.as_deref() };
            let choice = verifier.choose(&row, &sampling, Some(drafted), &mut rng).unwrap();
            assert_eq!(choice, Choice { token, accepted: true });
        }
    }
}

#[test]
fn an_argmax_draft_never_changes_what_a_seed_gives() {
    let mut rows = ChaCha8Rng::seed_from_u64(4);
    let mut plain = ChaCha8Rng::seed_from_u64(5);
    let mut drafted = plain.clone();
    let mut verifier = Verifier::default();
    let sampling = Sampling { temperature: 0.9, top_p: 0.95, top_k: 40 };
    for step in 0..300u32 {
        let row: Vec<f32> = (0..200).map(|_| rows.random_range(-4.0..4.0)).collect();
        let draft = Drafted { token: step % 200, probabilities: None };
        let want = verifier.choose(&row, &sampling, None, &mut plain).unwrap();
        let got = verifier.choose(&row, &sampling, Some(draft), &mut drafted).unwrap();
        assert_eq!(got.token, want.token);
        assert_eq!(got.accepted, got.token == step % 200);
    }
}

#[test]
fn a_token_the_target_excludes_is_never_emitted() {
    let mut p = vec![0.5, 0.5, 0.0];
    let q = [0.0, 0.0, 1.0];
    for uniform in [0.0, 0.3, 0.99] {
        let choice = probabilistic(&mut p.clone(), &q, 2, uniform, uniform);
        assert!(!choice.accepted && choice.token < 2);
        assert!(one_hot(&p, 2, uniform).token < 2);
    }
    // Outside the vocabulary: a draft padded further than the target.
    assert!(probabilistic(&mut p, &q, 99, 0.0, 0.0).token < 2);
}
