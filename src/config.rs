//! One settings tree for each program: flags over environment over file over defaults.

pub mod build;
pub mod serve;
