//! Fitting a draft to its target: teacher signals, losses, the optimizer and the trainer.

pub mod batch;
pub mod checkpoint;
pub mod evaluate;
pub mod head;
pub mod loss;
pub mod optimizer;
pub mod reference;
pub mod sample;
pub mod select;
pub mod teacher;
pub mod trainer;

pub use evaluate::Acceptance;
pub use loss::Loss;
pub use reference::{Comparison, Reference};
pub use sample::{Sample, TopK};
