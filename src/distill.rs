//! Fitting a draft to its target: teacher signals, losses, the optimizer and the trainer.

pub mod sample;
pub mod teacher;
pub mod trainer;

pub use sample::{Sample, TopK};
