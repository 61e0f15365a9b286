//! Draft models for speculative decoding that keep themselves fitted to live traffic.
//!
//! The pipeline, in the order in which data meets it: [`hub`] finds a target, [`model`] runs it,
//! [`build`] turns it into a compact draft, [`speculate`] drafts and verifies with it, [`serve`]
//! offers that over HTTP, [`sidecar`] watches the traffic, [`distill`] fits the draft to it.
//! Dependencies point one way: `sidecar, serve → speculate, distill, build → vocab, model → hub`.

pub mod build;
pub mod config;
pub mod distill;
pub mod hub;
pub mod metrics;
pub mod model;
pub mod serve;
pub mod sidecar;
pub mod speculate;
pub mod vllm;
pub mod vocab;

/// Generated from `proto/`.
pub mod proto {
    #[allow(clippy::all, clippy::pedantic, missing_docs)]
    pub mod trainer {
        tonic::include_proto!("draft_adapter.trainer.v1");
    }
    #[allow(clippy::all, clippy::pedantic, missing_docs)]
    pub mod control {
        tonic::include_proto!("draft_adapter.control.v1");
    }
}
