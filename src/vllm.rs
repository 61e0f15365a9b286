//! Client for vLLM's HTTP API and its metrics text. The embedded engine speaks the same.

pub mod client;
pub mod metrics_text;

pub use client::{Client, ClientError, DraftInfo, Model, SwapReply, TokenLogprobs};
pub use metrics_text::{MetricsText, SpecDecode, SpecDecodeDelta};
