//! Every metric name, once. Dashboards and alert rules are tested against this file.

// --- the sidecar's own, all with the prefix `da_` ---

/// Accepted share of drafted tokens, by draft version, from the upstream's counters.
pub const ACCEPTANCE_RATE: &str = "da_acceptance_rate";
/// Tokens a verification step yields on average, bonus token included, by draft version.
pub const MEAN_ACCEPTED_LENGTH: &str = "da_mean_accepted_length";
/// 1 when the upstream has drafted anything since the running version was swapped in.
pub const ACCEPTANCE_DATA: &str = "da_acceptance_data";
pub const DRAFTED_TOKENS: &str = "da_drafted_tokens_total";
pub const ACCEPTED_TOKENS: &str = "da_accepted_tokens_total";
pub const TRAINING_STEPS: &str = "da_training_steps_total";
pub const TRAINING_LOSS: &str = "da_training_loss";
pub const TRAINING_TOKENS: &str = "da_training_tokens_total";
pub const TRAINING_SECONDS: &str = "da_training_seconds_total";
/// Steps dropped because the loss or the gradient was not finite.
pub const TRAINING_SKIPPED_STEPS: &str = "da_training_skipped_steps_total";
/// Rounds that ended; label `outcome` is `done`, `interrupted` or `failed`.
pub const TRAINING_ROUNDS: &str = "da_training_rounds_total";
/// 1 while the trainer process answers.
pub const TRAINER_UP: &str = "da_trainer_up";
pub const TRAINER_RESTARTS: &str = "da_trainer_restarts_total";
/// Trainable tensors that the start-up gradient check found without a gradient; must be 0.
pub const PARAMS_WITHOUT_GRAD: &str = "da_distill_params_without_grad";
/// Gate score of the running draft and of the candidate; label `side` is `before` or `after`.
pub const GATE_SCORE: &str = "da_gate_score";
/// Gate decisions; label `verdict` is `publish`, `hold` or `refuse`.
pub const GATE_VERDICTS: &str = "da_gate_verdicts_total";
pub const SWAPS: &str = "da_swaps_total";
pub const SWAP_FAILURES: &str = "da_swap_failures_total";
pub const SWAP_STALL: &str = "da_swap_stall_seconds";
/// Versions taken back; label `cause` is `watch` or `operator`.
pub const ROLLBACKS: &str = "da_rollbacks_total";
/// Drops of live acceptance that changed traffic explains, so that nothing was rolled back.
pub const DRIFTS: &str = "da_drifts_total";
/// 1 while an operator has paused learning.
pub const PAUSED: &str = "da_paused";
pub const SAMPLES_CAPTURED: &str = "da_samples_captured_total";
/// Samples lost; label `reason` says why.
pub const SAMPLES_DROPPED: &str = "da_samples_dropped_total";
pub const SAMPLES_OPTED_OUT: &str = "da_samples_opted_out_total";
pub const SAMPLES_SCORED: &str = "da_samples_scored_total";
pub const STORE_SAMPLES: &str = "da_store_samples";
pub const STORE_BYTES: &str = "da_store_bytes";
/// Time from the request's arrival to the response's head, less the upstream's own share.
pub const PROXY_OVERHEAD: &str = "da_proxy_overhead_seconds";
/// Label `class` is the status class, `2xx` to `5xx`.
pub const PROXY_REQUESTS: &str = "da_proxy_requests_total";
pub const PROXY_IN_FLIGHT: &str = "da_proxy_requests_in_flight";
/// Requests that the upstream could not be reached for.
pub const PROXY_UPSTREAM_ERRORS: &str = "da_proxy_upstream_errors_total";
pub const BUILD_INFO: &str = "da_build_info";
/// 1 for the version that serves; label `version`.
pub const DRAFT_VERSION: &str = "da_draft_version";
pub const UPSTREAM_UP: &str = "da_upstream_up";

// --- vLLM's, which the sidecar reads and the embedded engine also exports ---

pub const VLLM_NUM_DRAFTS: &str = "vllm:spec_decode_num_drafts_total";
pub const VLLM_NUM_DRAFT_TOKENS: &str = "vllm:spec_decode_num_draft_tokens_total";
pub const VLLM_NUM_ACCEPTED_TOKENS: &str = "vllm:spec_decode_num_accepted_tokens_total";
/// Label `position` counts from 0.
pub const VLLM_ACCEPTED_PER_POS: &str = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
pub const VLLM_REQUESTS_RUNNING: &str = "vllm:num_requests_running";
pub const VLLM_REQUESTS_WAITING: &str = "vllm:num_requests_waiting";
pub const VLLM_KV_CACHE_USAGE: &str = "vllm:kv_cache_usage_perc";
pub const VLLM_PROMPT_TOKENS: &str = "vllm:prompt_tokens_total";
pub const VLLM_GENERATION_TOKENS: &str = "vllm:generation_tokens_total";
/// Label `finished_reason`.
pub const VLLM_REQUEST_SUCCESS: &str = "vllm:request_success_total";
pub const VLLM_TIME_TO_FIRST_TOKEN: &str = "vllm:time_to_first_token_seconds";
pub const VLLM_INTER_TOKEN_LATENCY: &str = "vllm:inter_token_latency_seconds";
pub const VLLM_E2E_LATENCY: &str = "vllm:e2e_request_latency_seconds";
pub const VLLM_REQUEST_QUEUE_TIME: &str = "vllm:request_queue_time_seconds";
/// Rows of each forward of the target.
pub const VLLM_ITERATION_TOKENS: &str = "vllm:iteration_tokens_total";
