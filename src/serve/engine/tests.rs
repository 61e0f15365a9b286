use std::path::PathBuf;

use arc_swap::ArcSwap;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::speculate::Sampling;
use crate::speculate::decode::Draft;
use crate::speculate::fake::FakeDecoder;
use crate::speculate::logits::{argmax, log_sum_exp, top_k};
use crate::speculate::neural::{DraftSampleMethod, NeuralProposer};

const VOCAB: usize = 40;

struct Rig {
    target: Arc<FakeDecoder>,
    metrics: Arc<EngineMetrics>,
    shared: Option<Arc<ArcSwap<Draft<FakeDecoder>>>>,
    settings: EngineSettings,
    length: DraftLength,
    method: DraftSampleMethod,
}

impl Rig {
    fn plain() -> Self {
        Self {
            target: Arc::new(FakeDecoder::new(VOCAB, 1)),
            metrics: Arc::new(EngineMetrics::new("fake").unwrap()),
            shared: None,
            settings: EngineSettings::new(8, 512, VOCAB),
            length: DraftLength::fixed(0, None),
            method: DraftSampleMethod::Greedy,
        }
    }

    /// A draft of another opinion in `percent` of all contexts, `k` tokens at a time.
    fn drafted(percent: u64, k: usize) -> Self {
        let rig = Self::plain();
        let draft = draft(FakeDecoder::draft_of(&rig.target, percent), "startup");
        Self {
            shared: Some(Arc::new(ArcSwap::from_pointee(draft))),
            length: DraftLength::fixed(k, None),
            ..rig
        }
    }

    fn start(&self) -> EngineHandle {
        let proposer = self.shared.as_ref().map(|shared| -> Box<dyn Proposer> {
            Box::new(NeuralProposer::new(Arc::clone(shared), self.method, VOCAB, 64))
        });
        let (target, metrics) = (Arc::clone(&self.target), Arc::clone(&self.metrics));
        let (settings, length) = (self.settings.clone(), self.length.clone());
        Engine::start(pool(1).unwrap(), settings, target, proposer, length, metrics)
    }

    /// Waits until the engine is inside its forward number `count`; the gate must be held.
    fn wait_for_forward(&self, count: usize) {
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        while self.target.forwards.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < deadline, "the engine does not run");
            std::thread::yield_now();
        }
    }

    fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.metrics.encode().unwrap()).unwrap();
        text.lines()
            .find(|line| line.starts_with(&format!("{name}{{")))
            .and_then(|line| line.rsplit(' ').next())
            .and_then(|value| value.parse().ok())
            .unwrap()
    }
}

fn draft(model: FakeDecoder, version: &str) -> Draft<FakeDecoder> {
    Draft { model, version: version.into(), checksum: None, path: PathBuf::new() }
}

fn request(prompt: &[u32], max_tokens: usize) -> (GenerateRequest, UnboundedReceiver<Event>) {
    let (events, receiver) = unbounded_channel();
    let request = GenerateRequest {
        prompt: prompt.to_vec(),
        sampling: Sampling::GREEDY,
        max_tokens,
        min_tokens: 0,
        stop_ids: Vec::new(),
        seed: None,
        logprobs: None,
        prompt_logprobs: None,
        priority: 0,
        events,
    };
    (request, receiver)
}

#[derive(Default, Debug)]
struct Answer {
    ids: Vec<u32>,
    scores: Vec<TokenScore>,
    prompt_scores: Vec<TokenScore>,
    finish: Option<FinishReason>,
    accepted: u64,
    error: Option<EngineError>,
}

fn collect(mut receiver: UnboundedReceiver<Event>) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = receiver.blocking_recv() {
        match event {
            Event::PromptScores(scores) => answer.prompt_scores.extend(scores),
            Event::Tokens { ids, scores, verified } => {
                answer.accepted += verified.map_or(0, |verified| verified.accepted as u64);
                answer.ids.extend(ids);
                answer.scores.extend(scores);
            }
            Event::Finished(reason) => answer.finish = Some(reason),
            Event::Failed(error) => answer.error = Some(error),
        }
    }
    answer
}

fn generate(engine: &EngineHandle, prompt: &[u32], max_tokens: usize) -> Answer {
    let (request, events) = request(prompt, max_tokens);
    engine.generate(request).unwrap();
    collect(events)
}

#[test]
fn greedy_output_is_the_same_with_any_draft_and_any_batch() {
    let prompts: Vec<Vec<u32>> =
        (0..8).map(|i| (0..5 + 20 * i).map(|j| (i * 7 + j * 3) % VOCAB as u32).collect()).collect();
    let reference = FakeDecoder::new(VOCAB, 1);
    for rig in [Rig::plain(), Rig::drafted(0, 4), Rig::drafted(30, 4), Rig::drafted(100, 7)] {
        let engine = rig.start();
        let events: Vec<_> = prompts
            .iter()
            .enumerate()
            .map(|(i, prompt)| {
                let (request, events) = request(prompt, 30 + i);
                engine.generate(request).unwrap();
                events
            })
            .collect();
        for (i, (prompt, events)) in prompts.iter().zip(events).enumerate() {
            let answer = collect(events);
            assert_eq!(answer.ids, reference.greedy(prompt, 30 + i));
            assert_eq!(answer.finish, Some(FinishReason::Length));
        }
    }
}

#[test]
fn a_draft_equal_to_the_target_is_accepted_at_one() {
    let rig = Rig::drafted(0, 4);
    let engine = rig.start();
    let answer = generate(&engine, &[1, 2, 3], 101);
    assert_eq!(answer.ids.len(), 101);
    let drafted = rig.metric(crate::metrics::VLLM_NUM_DRAFT_TOKENS);
    let accepted = rig.metric(crate::metrics::VLLM_NUM_ACCEPTED_TOKENS);
    assert!(drafted > 0.0);
    assert_eq!(drafted, accepted);
    assert_eq!(answer.accepted as f64, accepted);
    // One token from the prompt, then 20 verifications of 4 drafted tokens and one more.
    assert_eq!(rig.metric(crate::metrics::VLLM_NUM_DRAFTS), 20.0);
    assert_eq!(rig.metric(crate::metrics::VLLM_GENERATION_TOKENS), 101.0);
}

#[test]
fn a_seed_gives_the_same_sample_with_and_without_a_draft() {
    let sampled = |rig: &Rig| {
        let (mut request, events) = request(&[5, 6], 60);
        request.sampling = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20 };
        request.seed = Some(7);
        rig.start().generate(request).unwrap();
        collect(events).ids
    };
    let plain = sampled(&Rig::plain());
    assert_eq!(plain.len(), 60);
    assert_eq!(sampled(&Rig::drafted(20, 4)), plain);
    assert_eq!(sampled(&Rig::drafted(90, 2)), plain);
}

#[test]
fn probabilistic_drafts_equal_to_the_target_are_always_accepted() {
    let mut rig = Rig::drafted(0, 4);
    rig.method = DraftSampleMethod::Probabilistic;
    let (mut request, events) = request(&[5, 6], 80);
    request.sampling.temperature = 0.8;
    rig.start().generate(request).unwrap();
    assert_eq!(collect(events).ids.len(), 80);
    assert_eq!(
        rig.metric(crate::metrics::VLLM_NUM_DRAFT_TOKENS),
        rig.metric(crate::metrics::VLLM_NUM_ACCEPTED_TOKENS)
    );
}

#[test]
fn a_swap_between_steps_leaves_the_text_alone() {
    let rig = Rig::drafted(100, 4);
    let engine = rig.start();
    let want = rig.target.greedy(&[1, 2, 3], 400);
    let (request, mut events) = request(&[1, 2, 3], 400);
    engine.generate(request).unwrap();
    assert!(matches!(events.blocking_recv(), Some(Event::Tokens { .. })));
    let shared = rig.shared.as_ref().unwrap();
    shared.store(Arc::new(draft(FakeDecoder::draft_of(&rig.target, 0), "v000001")));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(engine.await_draft()).unwrap();
    let answer = collect(events);
    assert_eq!(answer.ids, want[1..], "the first token was taken before");
    // Also when the swap came after the last step.
    assert_eq!(generate(&engine, &[9], 21).accepted, 16);
    assert_eq!(engine.status().swaps, 1);
}

#[test]
fn the_queue_is_served_by_priority_then_by_arrival() {
    let mut rig = Rig::plain();
    rig.settings.max_num_seqs = 1;
    let engine = rig.start();
    // Takes the only slot while the others queue up.
    let held = rig.target.gate.write();
    let (blocker, blocked) = request(&[0], 20);
    engine.generate(blocker).unwrap();
    rig.wait_for_forward(1);
    // All answers share one channel, so its order is the engine's; the length names the request.
    let (shared, mut events) = unbounded_channel();
    for (priority, tokens) in [(5, 2), (0, 3), (3, 4), (-1, 5), (0, 6)] {
        let (mut request, _) = request(&[30], tokens);
        request.priority = priority;
        request.events = shared.clone();
        engine.generate(request).unwrap();
    }
    drop(shared);
    drop(held);
    assert_eq!(collect(blocked).ids.len(), 20);
    let (mut order, mut length) = (Vec::new(), 0);
    while let Some(event) = events.blocking_recv() {
        match event {
            Event::Tokens { ids, .. } => length += ids.len(),
            Event::Finished(_) => order.push(std::mem::take(&mut length)),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(order, [5, 3, 6, 4, 2]);
    assert_eq!(engine.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn a_long_prompt_does_not_stall_a_running_stream() {
    let mut rig = Rig::plain();
    rig.settings.prefill_chunk_busy = 16;
    let engine = rig.start();
    let held = rig.target.gate.write();
    let (short, stream) = request(&[1], 400);
    engine.generate(short).unwrap();
    rig.wait_for_forward(1);
    let long: Vec<u32> = (0..480).map(|i| i % VOCAB as u32).collect();
    let (request, events) = request(&long, 3);
    engine.generate(request).unwrap();
    drop(held);
    assert_eq!(collect(events).ids, rig.target.greedy(&long, 3));
    assert_eq!(collect(stream).ids.len(), 400);
    // No forward held more than one piece of the prompt beside the stream.
    assert!(rig.target.widest.load(Ordering::Relaxed) <= 17);
}

#[test]
fn dropping_the_receiver_ends_the_sequence() {
    let rig = Rig::drafted(10, 4);
    let engine = rig.start();
    let held = rig.target.gate.write();
    let (request, events) = request(&[1], 500);
    engine.generate(request).unwrap();
    rig.wait_for_forward(1);
    drop(events);
    drop(held);
    assert_eq!(generate(&engine, &[2], 5).ids.len(), 5);
    // At most one verification's tokens came out of the forward that was under way.
    assert!(rig.metric(crate::metrics::VLLM_GENERATION_TOKENS) <= 10.0);
}

#[test]
fn prompt_scores_are_the_targets_own_in_any_chunking() {
    let prompt: Vec<u32> = (0..50).map(|i| i * 11 % VOCAB as u32).collect();
    for chunk in [1, 7, 128] {
        let mut rig = Rig::drafted(0, 4);
        rig.settings.scoring_chunk = chunk;
        let engine = rig.start();
        let (mut request, events) = request(&prompt, 1);
        request.prompt_logprobs = Some(5);
        engine.generate(request).unwrap();
        let answer = collect(events);
        assert_eq!(answer.prompt_scores.len(), prompt.len() - 1);
        for (index, score) in answer.prompt_scores.iter().enumerate() {
            let row = rig.target.logits(&prompt[..=index]);
            let normaliser = log_sum_exp(&row);
            assert_eq!(score.id, prompt[index + 1]);
            assert!((score.logprob - (row[score.id as usize] - normaliser)).abs() < 1e-5);
            let top: Vec<u32> = top_k(&row, 5).iter().map(|&(id, _)| id).collect();
            assert_eq!(score.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), top);
            assert_eq!(score.rank == 1, score.id == argmax(&row));
        }
        assert_eq!(answer.ids, rig.target.greedy(&prompt, 1));
        assert_eq!(rig.metric(crate::metrics::VLLM_NUM_DRAFTS), 0.0);
    }
}

#[test]
fn scoring_and_streams_share_the_engine() {
    let rig = Rig::drafted(20, 3);
    let engine = rig.start();
    let long: Vec<u32> = (0..300).map(|i| i % VOCAB as u32).collect();
    let scored: Vec<_> = (0..2)
        .map(|_| {
            let (mut request, events) = request(&long, 2);
            request.prompt_logprobs = Some(3);
            engine.generate(request).unwrap();
            events
        })
        .collect();
    let answer = generate(&engine, &[1, 2], 300);
    assert_eq!(answer.ids, rig.target.greedy(&[1, 2], 300));
    for events in scored {
        let answer = collect(events);
        assert_eq!(answer.prompt_scores.len(), 299);
        assert_eq!(answer.ids, rig.target.greedy(&long, 2));
    }
}

#[test]
fn stop_ids_end_and_min_tokens_bans_them() {
    let rig = Rig::drafted(0, 4);
    let engine = rig.start();
    let free = rig.target.greedy(&[1, 2], 40);
    let stop = free[17];
    let first = free.iter().position(|&id| id == stop).unwrap();
    let (mut stopped, events) = request(&[1, 2], 40);
    stopped.stop_ids = vec![stop];
    engine.generate(stopped).unwrap();
    let answer = collect(events);
    assert_eq!(answer.ids, free[..=first]);
    assert_eq!(answer.finish, Some(FinishReason::Stop(stop)));

    let (mut kept, events) = request(&[1, 2], 40);
    kept.stop_ids = vec![stop];
    kept.min_tokens = first + 5;
    engine.generate(kept).unwrap();
    let answer = collect(events);
    assert_eq!(answer.ids[..first], free[..first]);
    assert!(answer.ids.len() >= first + 5);
    assert!(!answer.ids[..first + 5].contains(&stop));
}

#[test]
fn output_scores_belong_to_the_emitted_tokens() {
    let rig = Rig::drafted(40, 4);
    let (mut request, events) = request(&[3, 4], 25);
    request.logprobs = Some(4);
    request.sampling.temperature = 1.0;
    rig.start().generate(request).unwrap();
    let answer = collect(events);
    assert_eq!(answer.scores.len(), 25);
    let mut tokens = vec![3, 4];
    for (&id, score) in answer.ids.iter().zip(&answer.scores) {
        let row = rig.target.logits(&tokens);
        assert_eq!(score.id, id);
        assert_eq!(score.top.len(), 4);
        assert!((score.logprob - (row[id as usize] - log_sum_exp(&row))).abs() < 1e-5);
        tokens.push(id);
    }
}

#[test]
fn padding_is_never_emitted() {
    let mut rig = Rig::drafted(0, 4);
    rig.settings.vocab_size = 10;
    for temperature in [0.0, 1.5] {
        let (mut request, events) = request(&[3], 100);
        request.sampling.temperature = temperature;
        rig.start().generate(request).unwrap();
        assert!(collect(events).ids.iter().all(|&id| id < 10));
    }
}

#[test]
fn a_failing_step_fails_its_requests_and_the_engine_goes_on() {
    let rig = Rig::plain();
    let engine = rig.start();
    let answer = generate(&engine, &[VOCAB as u32 + 1], 5);
    assert!(matches!(answer.error, Some(EngineError::Model(_))));
    assert_eq!(generate(&engine, &[1], 5).ids.len(), 5);
}

#[test]
fn a_full_queue_refuses() {
    let mut rig = Rig::plain();
    rig.settings.max_queued = 0;
    let (request, _events) = request(&[1], 5);
    assert!(matches!(rig.start().generate(request), Err(EngineError::Overloaded { .. })));
}
