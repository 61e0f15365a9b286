//! The daemon beside the server: it proxies and captures traffic, has it scored, trains the draft
//! in a child process, gates and publishes versions, and takes back what does worse.

pub mod capture;
pub mod cli;
pub mod control;
pub mod draft_sink;
pub mod exchange;
pub mod gate;
pub mod learn;
pub mod metrics;
pub mod proxy;
pub mod publish;
pub mod release;
pub mod render;
pub mod rounds;
pub mod run;
pub mod scoring;
pub mod sse;
pub mod status;
pub mod store;
pub mod supervisor;
pub mod teacher;
pub mod trainer_process;
pub mod upstream;
pub mod versions;
pub mod watch;
