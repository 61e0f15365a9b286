//! What each key means, and the reference page made from it.

use toml::Value;

use super::SidecarSettings;

/// Every key with its meaning, in the order of the reference. A test compares it with the struct.
#[rustfmt::skip]
pub const KEYS: &[(&str, &str)] = &[
    ("work_dir", "Folder for draft versions (`drafts/`), training state (`trainer/`), the control socket and, when it is on disk, the sample store. Made when missing. Other users may pass through it to the drafts, which the server reads, but not list it; the sample store is readable by this user alone."),
    ("draft", "Draft folder made by `da-build` that the first run imports as `v000000`. Not needed once the work folder has versions."),
    ("grace_seconds", "After SIGTERM: how long requests in flight and the current training step may take."),
    ("log", "Log filter, for example `info` or `draft_adapter=debug`. Prompts are never logged."),
    ("log_format", "`text` or `json`."),
    ("upstream.url", "Where vLLM or `da-serve` listens."),
    ("upstream.api_key", "Sent as a bearer token with the sidecar's own calls (scores, counters, the draft route). Clients' own headers are forwarded unchanged. Never printed."),
    ("upstream.model", "Name of the target at the server. Empty: the first one that it lists."),
    ("upstream.swap_timeout_seconds", "Limit of one swap: reading the weights and putting them in place."),
    ("upstream.poll_seconds", "How often counters and the running draft are read."),
    ("proxy.listen", "Address that clients use in place of the server's."),
    ("proxy.deny", "Request paths, with everything below them, that are answered 403 instead of being forwarded: routes that change or stop the server. Clients reach the server through here, operators directly."),
    ("proxy.connect_timeout_seconds", "Limit of connecting to the server; then the client gets 502."),
    ("proxy.max_request_bytes", "Largest request that is copied for learning; larger ones are only forwarded."),
    ("proxy.max_response_bytes", "Largest answer that is copied for learning; larger ones are only forwarded."),
    ("admin.listen", "Address of `/metrics`, `/livez`, `/readyz` and `/status`. Not for clients."),
    ("control.listen", "Address of the control service. Empty: a Unix socket `control.sock` in the work folder, which only this user can reach. A TCP address has no authentication."),
    ("capture.enabled", "Whether traffic is learned from at all."),
    ("capture.sample_rate", "Share of the requests that is captured."),
    ("capture.held_out_every", "One in this many samples only ever judges drafts, chosen by a hash of the prompt; 0 holds out none, and then nothing can be published."),
    ("capture.queue", "Exchanges that may wait for capture; more are dropped and counted."),
    ("capture.budget_bytes", "Memory for exchanges that are being copied or wait; more are dropped and counted."),
    ("capture.max_prompt_tokens", "Longest prompt that becomes a sample."),
    ("capture.min_output_tokens", "Shortest answer that becomes a sample."),
    ("capture.max_output_tokens", "Longest answer that becomes a sample."),
    ("capture.default_temperature", "Temperature of requests that name none, as the server has it."),
    ("store.kind", "`memory`, or `disk` for a `store.redb` in the work folder that survives a restart."),
    ("store.max_samples", "Samples kept; the oldest go first."),
    ("store.max_bytes", "Bytes kept; the oldest samples go first."),
    ("store.ttl_seconds", "Age at which a sample is deleted; 0 keeps samples until the store is full."),
    ("teacher.kind", "`rescore` asks the server for `prompt_logprobs` of each sample; `live` uses the log-probabilities that clients asked for, and drops samples without."),
    ("teacher.top_k", "Log-probabilities per output position; vLLM refuses more than its `max_logprobs` (20 by default)."),
    ("teacher.window", "Longest sample, prompt and output together in tokens, that is sent for scoring; the prompt is cut from the left. A long one costs the server a long prefill."),
    ("teacher.backlog", "Samples that may wait to be scored; the oldest beyond are dropped, so that what is learned is recent when traffic outruns the teacher."),
    ("teacher.yield_to_traffic", "Whether scoring holds back while users' requests wait."),
    ("learn.enabled", "Whether rounds run; false only captures and scores."),
    ("learn.round_samples", "New scored samples that start a round."),
    ("learn.round_max_wait_seconds", "A round starts with fewer new samples when the first has waited this long."),
    ("learn.epochs", "How often a round goes over its new samples."),
    ("learn.rehearsal", "Recently learned samples rehearsed in a round, as a multiple of the new ones."),
    ("learn.window_samples", "How many of the most recently learned samples may be rehearsed; older ones are replayed."),
    ("learn.replay_fraction", "Share of a round's tokens taken from older samples, evenly over domains, so that they are not forgotten."),
    ("learn.seed", "Seed of the choice of samples; recorded in every version."),
    ("gate.samples", "Held-out samples, newest first, that the running draft and the candidate are compared on."),
    ("gate.min_positions", "Fewest held-out output positions for a decision; with fewer, training goes on and nothing is published."),
    ("gate.min_gain", "Acceptance that a candidate must gain over the running draft."),
    ("gate.max_domain_loss", "Acceptance that a candidate may lose in any one domain."),
    ("gate.refusals_before_restart", "Refusals in a row after which training starts again from the running version."),
    ("publish.sink", "`upstream` swaps through the server's draft route; `folder` only moves `drafts/current`."),
    ("publish.keep_versions", "Versions kept on disk beside the first, the running one, its parent and a pinned one."),
    ("publish.server_path", "The `drafts` folder as the server sees it, when that differs (another mount). Empty: the same path."),
    ("watch.rollback", "Whether a version that does worse is taken back; false only counts."),
    ("watch.settle_seconds", "Counters are not attributed to a version for this long after a swap, while requests begun before it finish."),
    ("watch.min_tokens", "Drafted tokens of either version for a decision."),
    ("watch.min_drop", "Smallest drop of the acceptance rate that counts as worse."),
    ("watch.z", "Standard errors by which the running version must be below the one before."),
    ("watch.strict_z", "The same when there are too few new samples to tell a bad draft from changed traffic."),
    ("watch.collapse_ratio", "Live acceptance below this share of what the draft reaches on the same traffic's samples is a failed swap; 0 turns this off."),
    ("watch.compare_samples", "Samples captured since the swap, newest first, that both versions are compared on before a roll-back."),
    ("watch.decide_within_seconds", "How long a roll-back waits for such samples to be scored."),
    ("trainer.nice", "Priority of the training process, 0 (normal) to 19 (lowest)."),
    ("trainer.memory_limit_bytes", "Memory of the training process; beyond it the process ends and is started again. 0: no limit."),
    ("trainer.threads", "Threads of the training process; 0: one per core."),
    ("trainer.start_timeout_seconds", "How long the training process may take to load the draft."),
    ("trainer.restart_max_seconds", "Longest wait before a training process that keeps dying is started again."),
    ("train.loss", "`forward_kl`, `reverse_kl`, `total_variation`, `log_alpha` or `jensen_shannon`."),
    ("train.learning_rate", "AdamW step size."),
    ("train.warmup_steps", "Optimizer steps over which the step size rises to its value."),
    ("train.weight_decay", "AdamW weight decay."),
    ("train.beta1", "AdamW first moment decay."),
    ("train.beta2", "AdamW second moment decay."),
    ("train.clip", "Largest gradient norm; 0: no clipping."),
    ("train.window", "Longest window in tokens, prompt and output together; the prompt is cut from the left."),
    ("train.batch", "Samples in one optimizer step."),
    ("train.seed", "Seed of training; recorded in every version."),
    ("train.lora_rank", "Rank of updates of the blocks' projections; 0 trains every parameter whole."),
    ("train.num_speculative_tokens", "Draft length that mean accepted lengths are reported for; set it to the server's."),
];

/// The reference page `docs/configuration.md`.
pub fn reference() -> String {
    let defaults = crate::config::keys::<SidecarSettings>();
    let mut page = String::from(HEAD);
    let mut section = None;
    for (key, meaning) in KEYS {
        let (table, name) = key.rsplit_once('.').unwrap_or(("", key));
        if section != Some(table) {
            let title = if table.is_empty() { "Top level".into() } else { format!("`[{table}]`") };
            page.push_str(&format!("\n## {title}\n\n| key | default | meaning |\n|---|---|---|\n"));
            section = Some(table);
        }
        let default = defaults.get(*key).map(Value::to_string).unwrap_or_default();
        page.push_str(&format!("| `{name}` | `{default}` | {meaning} |\n"));
    }
    page
}

const HEAD: &str = "# Configuration of da-sidecar

One TOML file, given with `--config` or `DA_CONFIG`. Every key can also be set by a variable, `DA_` and the key in upper case with `_` for the dots (`learn.epochs` is `DA_LEARN_EPOCHS`), and by `--set KEY=VALUE`; the common ones have a flag of their own. A flag wins over a variable, a variable over the file, the file over the default. Unknown keys are refused. `da-sidecar config --show` prints the effective values and where each came from.

This page is printed by `da-sidecar config --reference`.
";
