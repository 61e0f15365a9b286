//! The embedded engine: an OpenAI-compatible speculative decoder in one process.
pub mod drafts;
pub mod engine;
pub mod http;
pub mod metrics;
mod output;
mod stage;
pub mod stop;
