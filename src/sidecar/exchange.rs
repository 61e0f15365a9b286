//! One proxied request with its whole answer: what the proxy hands to the capture task.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Which API the exchange belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// A complete, successful exchange, as the bytes that went over the wire.
pub struct Exchange {
    pub api: Api,
    pub request: Body,
    pub response: Body,
    /// Label from the request's domain header; empty without one.
    pub domain: String,
    /// When the request arrived, in milliseconds since the epoch.
    pub started_unix_ms: u64,
    /// Draft version that was serving then, where known.
    pub draft_version: Option<String>,
}

impl std::fmt::Debug for Exchange {
    // Bodies are personal data: no formatting may ever show them.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange")
            .field("api", &self.api)
            .field("request_bytes", &self.request.bytes.len())
            .field("response_bytes", &self.response.bytes.len())
            .finish_non_exhaustive()
    }
}

/// A collected body with the headers that say how to read it.
#[derive(Default)]
pub struct Body {
    pub bytes: Bytes,
    pub content_type: String,
    pub content_encoding: String,
    /// Gives the memory back to the budget when the exchange is dropped.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) reserved: Option<Reservation>,
}

impl Body {
    /// A body that was collected elsewhere and is not on the proxy's memory budget.
    pub fn new(bytes: impl Into<Bytes>, content_type: &str) -> Self {
        Self { bytes: bytes.into(), content_type: content_type.into(), ..Self::default() }
    }
}

/// Bytes that all collected bodies together may take.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
}

impl Budget {
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(bytes) })
    }

    /// Bytes that are free now.
    pub fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }
}

/// A share of a [`Budget`]; returned when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Reservation {
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    /// Takes `bytes` more, or leaves everything as it is and says no.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let taken = self
            .budget
            .left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes));
        if taken.is_ok() {
            self.bytes += bytes;
        }
        taken.is_ok()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.left.fetch_add(self.bytes, Ordering::Relaxed);
    }
}
