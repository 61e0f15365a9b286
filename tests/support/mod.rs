//! What the black-box tests share.
#![allow(dead_code, clippy::unwrap_used)]

pub mod fake_trainer;
pub mod fake_vllm;
pub mod front;
pub mod looping;
pub mod raw;
