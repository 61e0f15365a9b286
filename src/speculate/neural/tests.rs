use std::path::PathBuf;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::speculate::fake::FakeDecoder;

fn shared(model: FakeDecoder) -> Arc<ArcSwap<Draft<FakeDecoder>>> {
    let draft = Draft { model, version: "startup".into(), checksum: None, path: PathBuf::new() };
    Arc::new(ArcSwap::from_pointee(draft))
}

fn proposer(
    model: FakeDecoder,
    method: DraftSampleMethod,
    catch_up: usize,
) -> NeuralProposer<FakeDecoder> {
    let vocab_size = model.vocab_size;
    NeuralProposer::new(shared(model), method, vocab_size, catch_up)
}

fn propose(
    proposer: &mut NeuralProposer<FakeDecoder>,
    sequences: &[(u64, &[u32], usize)],
) -> Vec<Proposal> {
    let mut rngs = vec![ChaCha8Rng::seed_from_u64(1); sequences.len()];
    let mut requests: Vec<DraftRequest<'_>> = sequences
        .iter()
        .zip(&mut rngs)
        .map(|(&(sequence, tokens, max_tokens), rng)| DraftRequest {
            sequence,
            tokens,
            max_tokens,
            temperature: 0.7,
            rng,
        })
        .collect();
    proposer.propose(&mut requests).unwrap()
}

#[test]
fn drafts_are_the_models_own_continuation() {
    let model = FakeDecoder::new(50, 1);
    let (first, second) = (model.greedy(&[1, 2, 3], 4), model.greedy(&[9], 2));
    let mut proposer = proposer(model, DraftSampleMethod::Greedy, 100);
    let got = propose(&mut proposer, &[(0, &[1, 2, 3], 4), (1, &[9], 2), (2, &[4, 4], 0)]);
    assert_eq!(got[0].tokens, first);
    assert_eq!(got[1].tokens, second);
    assert!(got[2].tokens.is_empty() && got[0].probabilities.is_empty());
    // One forward for the first position, one for each of the other three.
    assert_eq!(proposer.draft.model.forwards.load(std::sync::atomic::Ordering::Relaxed), 4);
}

#[test]
fn refused_tokens_are_rolled_back_and_accepted_ones_kept() {
    let model = FakeDecoder::new(50, 2);
    for accepted in 0..=4usize {
        let reference = FakeDecoder::new(50, 2);
        let mut proposer = proposer(FakeDecoder::new(50, 2), DraftSampleMethod::Greedy, 100);
        let mut tokens = vec![1, 2, 3];
        let drafted = propose(&mut proposer, &[(0, &tokens, 4)]).remove(0).tokens;
        tokens.extend(&drafted[..accepted]);
        // The target's own token, which the draft did not expect.
        tokens.push((model.greedy(&tokens, 1)[0] + 1) % 50);
        let before = proposer.draft.model.rows.load(std::sync::atomic::Ordering::Relaxed);
        let next = propose(&mut proposer, &[(0, &tokens, 3)]).remove(0).tokens;
        assert_eq!(next, reference.greedy(&tokens, 3), "{accepted} accepted");
        let read = proposer.draft.model.rows.load(std::sync::atomic::Ordering::Relaxed) - before;
        // The last drafted token was never read, so full acceptance leaves two to catch up.
        assert_eq!(read, if accepted == 4 { 4 } else { 3 });
    }
}

#[test]
fn a_backlog_is_read_in_bounded_pieces() {
    let model = FakeDecoder::new(50, 3);
    let long: Vec<u32> = (0..25).collect();
    let want = model.greedy(&long, 2);
    let mut proposer = proposer(model, DraftSampleMethod::Greedy, 10);
    assert!(propose(&mut proposer, &[(0, &long, 2), (1, &long, 2)])[0].tokens.is_empty());
    assert!(propose(&mut proposer, &[(0, &long, 2), (1, &long, 2)])[0].tokens.is_empty());
    assert_eq!(propose(&mut proposer, &[(0, &long, 2)])[0].tokens, want);
    assert!(proposer.draft.model.widest.load(std::sync::atomic::Ordering::Relaxed) <= 10);
}

#[test]
fn a_swapped_draft_starts_from_an_empty_cache() {
    let old = FakeDecoder::new(50, 4);
    let new = FakeDecoder::new(50, 5);
    let want = new.greedy(&[1, 2, 3], 3);
    let handle = shared(old);
    let mut proposer = NeuralProposer::new(Arc::clone(&handle), DraftSampleMethod::Greedy, 50, 100);
    propose(&mut proposer, &[(0, &[1, 2], 3)]);
    assert!(!proposer.begin_step());
    let draft =
        Draft { model: new, version: "v000001".into(), checksum: None, path: PathBuf::new() };
    handle.store(Arc::new(draft));
    assert!(proposer.begin_step());
    assert_eq!(propose(&mut proposer, &[(0, &[1, 2, 3], 3)])[0].tokens, want);
    assert!(!proposer.begin_step());
}

#[test]
fn nothing_is_drafted_past_the_context() {
    let mut model = FakeDecoder::new(50, 6);
    model.context = 10;
    let mut proposer = proposer(model, DraftSampleMethod::Greedy, 100);
    let tokens: Vec<u32> = (0..12).collect();
    let lens: Vec<usize> = [8, 9, 10, 11, 12]
        .map(|len| propose(&mut proposer, &[(0, &tokens[..len], 5)])[0].tokens.len())
        .to_vec();
    assert_eq!(lens, [3, 2, 1, 0, 0]);
}

#[test]
fn padding_is_never_drafted_and_sampled_drafts_carry_their_distribution() {
    for method in [DraftSampleMethod::Greedy, DraftSampleMethod::Probabilistic] {
        let model = FakeDecoder::new(50, 7);
        let mut proposer = NeuralProposer::new(shared(model), method, 20, 100);
        for start in 0..40 {
            let proposal = propose(&mut proposer, &[(start, &[start as u32], 4)]).remove(0);
            assert_eq!(proposal.tokens.len(), 4);
            assert!(proposal.tokens.iter().all(|&id| id < 20));
            for (q, &token) in proposal.probabilities.iter().zip(&proposal.tokens) {
                assert_eq!(q.len(), 20);
                assert!(q[token as usize] > 0.0);
            }
            let sampled = method == DraftSampleMethod::Probabilistic;
            assert_eq!(proposal.probabilities.len(), if sampled { 4 } else { 0 });
        }
    }
}
