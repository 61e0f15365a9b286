//! (see docs/ARCHITECTURE.md)

pub mod capture;
pub mod exchange;
pub mod proxy;
pub mod render;
pub mod sse;
pub mod store;
pub mod teacher;
