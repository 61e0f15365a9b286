use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::model::runtime::LogitsOf;
use crate::speculate::decode::Draft;
use crate::speculate::fake::FakeDecoder;
use crate::speculate::neural::{DraftSampleMethod, NeuralProposer};
use crate::speculate::sampling::{Sampling, Scratch, probabilities};
use crate::speculate::verify::Drafted;
use crate::speculate::{DraftRequest, Proposer, Verifier};

const TARGET: usize = 12;

/// The draft's ids 0, 1, 2 and 4 are the target's 7, 2, 9 and 4; its id 3 stands for the rest.
fn map() -> TokenMap {
    TokenMap::with_unknown(vec![Some(7), Some(2), Some(9), None, Some(4)], TARGET, 3)
}

fn translated() -> Translated<FakeDecoder> {
    Translated { model: FakeDecoder::new(5, 3), map: Some(map()) }
}

#[test]
fn a_translated_draft_reads_and_writes_the_targets_ids() {
    let draft = translated();
    assert_eq!(draft.vocab_size(), TARGET);
    let mut cache = draft.new_cache();
    let rows = Rows { tokens: &[9, 5, 2], cache: &mut cache, logits: LogitsOf::Last };
    let got = draft.forward(&mut [rows]).unwrap();
    assert_eq!(cache, [2, 3, 1], "token 5 is one of the rest");
    let own = draft.model.logits(&[2, 3, 1]);
    for (id, logit) in got.iter().enumerate() {
        let want = match id {
            7 => own[0],
            2 => own[1],
            9 => own[2],
            4 => own[4],
            _ => f32::NEG_INFINITY,
        };
        assert_eq!(*logit, want, "{id}");
    }
}

#[test]
fn without_a_table_nothing_is_translated() {
    let plain = Translated { model: FakeDecoder::new(5, 3), map: None };
    let mut cache = plain.new_cache();
    let rows = Rows { tokens: &[4, 0], cache: &mut cache, logits: LogitsOf::Last };
    assert_eq!(plain.forward(&mut [rows]).unwrap(), plain.model.logits(&[4, 0]));
    assert_eq!(plain.vocab_size(), 5);
}

/// Emitted tokens have the target's frequencies, with tokens among them that the draft lacks.
#[test]
fn sampled_output_is_distributed_as_the_targets() {
    const DRAWS: usize = 40_000;
    let target = FakeDecoder::new(TARGET, 11);
    let prompt = [5, 2, 7];
    // Warm enough for every token to be drawn.
    let sampling = Sampling { temperature: 4.0, top_p: 1.0, top_k: 0 };
    let (row, mut want) = (target.logits(&prompt), Vec::new());
    assert!(probabilities(&row, &sampling, &mut Scratch::default(), &mut want));
    let lacking: f32 = [0, 1, 3, 5, 6, 8, 10, 11].map(|id: usize| want[id]).iter().sum();
    assert!(lacking > 0.2, "the draft lacks {lacking} of the target's mass");

    for method in [DraftSampleMethod::Greedy, DraftSampleMethod::Probabilistic] {
        let draft = Draft {
            model: translated(),
            version: "startup".into(),
            checksum: None,
            path: PathBuf::new(),
        };
        let shared = Arc::new(ArcSwap::from_pointee(draft));
        let mut proposer = NeuralProposer::new(shared, method, TARGET, 64);
        let mut verifier = Verifier::default();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut counts, mut accepted) = ([0u32; TARGET], 0);
        for _ in 0..DRAWS {
            let request = DraftRequest {
                sequence: 0,
                tokens: &prompt,
                max_tokens: 1,
                temperature: sampling.temperature,
                rng: &mut rng,
            };
            let proposal = proposer.propose(&mut [request]).unwrap().remove(0);
            proposer.forget(0);
            let token = proposal.tokens[0];
            assert!([2, 4, 7, 9].contains(&token), "{token} is not one of the draft's");
            let q = proposal.probabilities.first().map(Vec::as_slice);
            let drafted = Some(Drafted { token, probabilities: q });
            let choice = verifier.choose(&row, &sampling, drafted, &mut rng).unwrap();
            counts[choice.token as usize] += 1;
            accepted += usize::from(choice.accepted);
        }
        assert!(accepted > DRAWS / 50, "{accepted} accepted");
        for (id, (count, p)) in counts.iter().zip(&want).enumerate() {
            let (n, p) = (DRAWS as f64, f64::from(*p));
            let bound = 5.0 * (n * p * (1.0 - p)).sqrt();
            assert!((f64::from(*count) - n * p).abs() < bound, "{method:?} {id}: {count}, {p}");
        }
    }
}
