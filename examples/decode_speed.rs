//! Times the runtime: one step with 1..=9 rows, and prompt processing.
#![allow(clippy::print_stdout, clippy::unwrap_used)]
use draft_adapter::hub::Target;
use draft_adapter::model::kv_cache::KvCache;
use draft_adapter::model::runtime::{LogitsOf, Runtime, Segment};
use std::time::Instant;

fn main() {
    let spec = std::env::args().nth(1).unwrap();
    let target = Target::open(&spec).unwrap();
    let runtime = Runtime::load(&target.config, &target.weights).unwrap();
    println!("{:.1} MB a step", runtime.bytes_per_step() as f64 / 1e6);
    let mut cache = KvCache::new(&target.config);
    let tokens: Vec<u32> = (0..128).map(|i| 1000 + i * 7).collect();
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        cache.truncate(0);
        let t = Instant::now();
        let prompt = Segment { tokens: &tokens, cache: &mut cache, logits: LogitsOf::Last };
        runtime.forward(&mut [prompt]).unwrap();
        best = best.min(t.elapsed().as_secs_f64());
    }
    println!("prompt of 128: {:.0} tokens/s", 128.0 / best);
    for rows in 1..=9 {
        let mut times: Vec<f64> = (0..25)
            .map(|_| {
                cache.truncate(128);
                let t = Instant::now();
                let mut segment =
                    [Segment { tokens: &tokens[..rows], cache: &mut cache, logits: LogitsOf::All }];
                runtime.forward(&mut segment).unwrap();
                t.elapsed().as_secs_f64() * 1e3
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!("{rows} rows: min {:.2} ms, median {:.2} ms", times[0], times[12]);
    }
}
