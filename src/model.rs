//! The decoder: configuration, weights, tokenizer, and two ways to run it.
//!
//! [`decoder`] is the differentiable form on candle tensors: calibration, healing and training.
//! [`runtime`] is the serving form: row-invariant integer kernels and a KV cache, where the
//! result for one token does not depend on what else is in the batch.

pub mod chat;
pub mod config;
pub mod decoder;
pub mod draft_folder;
pub mod kernels;
pub mod kv_cache;
pub mod manifest;
pub mod ops;
pub mod q8;
pub mod rope;
pub mod runtime;
pub mod tokenizer;

pub use config::{Activation, Anatomy, Family, ModelConfig, NormKind};
pub use manifest::DraftManifest;
pub use tokenizer::Tokenizer;
