//! Speculative decoding: who drafts, how drafts are verified, and how long they should be.
//!
//! **Architecture invariant**: an unverified token is never emitted. [`verify`] decides every
//! token, drafted or not, by one rule, so plain and speculative decoding are the same code.

pub(crate) mod decode;
#[cfg(test)]
pub(crate) mod fake;
pub mod logits;
pub(crate) mod neural;
pub mod policy;
pub mod proposer;
pub mod sampling;
pub(crate) mod translate;
pub mod verify;

pub use neural::DraftSampleMethod;
pub use policy::{CostCurve, DraftLength};
pub use proposer::{DraftRequest, Proposal, Proposer};
pub use sampling::Sampling;
pub use verify::{Choice, Verifier};
