//! A body that passes frames on unchanged and may keep a copy of them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::oneshot;

use super::InFlight;
use crate::sidecar::capture::{CaptureSender, DropReason};
use crate::sidecar::exchange::{Api, Body as Collected, Budget, Exchange, Reservation};

/// Forwards `inner`, and tells `ending` what it saw.
pub(super) struct TeeBody<B> {
    inner: B,
    ending: Ending,
    /// Whether the length may be told to the server. False where the upstream told none, so that
    /// no `content-length` is made up for it.
    has_length: bool,
}

/// Copies bytes up to a cap, within the memory budget that all of them share.
pub(super) struct Collector {
    bytes: BytesMut,
    reservation: Reservation,
    cap: usize,
    /// Why collecting stopped. Forwarding goes on.
    stopped: Option<DropReason>,
}

/// An exchange whose answer is still to come.
pub(super) struct Pending {
    pub api: Api,
    pub domain: String,
    pub started_unix_ms: u64,
    pub draft_version: Option<String>,
    pub request: oneshot::Receiver<Result<Collected, DropReason>>,
    pub sender: CaptureSender,
    pub max_response_bytes: usize,
}

/// What happens when a body ends.
pub(super) struct Ending(Option<Kind>);

enum Kind {
    Request {
        collector: Collector,
        content: Content,
        done: oneshot::Sender<Result<Collected, DropReason>>,
    },
    Response {
        in_flight: InFlight,
        capture: Option<Box<Capture>>,
    },
}

/// An exchange whose answer is going by.
struct Capture {
    pending: Pending,
    collector: Collector,
    content: Content,
}

/// How to read a body: `content-type` and `content-encoding`, in lower case.
struct Content {
    kind: String,
    encoding: String,
}

impl Collector {
    pub fn new(budget: Arc<Budget>, cap: usize) -> Self {
        let reservation = Reservation::new(budget);
        Self { bytes: BytesMut::new(), reservation, cap, stopped: None }
    }

    fn add(&mut self, data: &Bytes) {
        if self.stopped.is_some() {
            return;
        }
        if self.bytes.len() + data.len() > self.cap {
            self.stop(DropReason::TooLarge);
        } else if !self.reservation.grow(data.len()) {
            self.stop(DropReason::Memory);
        } else {
            // A copy, not a reference: a slice would keep the connection's whole read buffer alive,
            // which the budget knows nothing of.
            self.bytes.extend_from_slice(data.chunk());
        }
    }

    fn stop(&mut self, reason: DropReason) {
        self.stopped = Some(reason);
        self.bytes = BytesMut::new();
    }

    fn finish(self, content: Content) -> Result<Collected, DropReason> {
        match self.stopped {
            Some(reason) => Err(reason),
            None => Ok(Collected {
                bytes: self.bytes.freeze(),
                content_type: content.kind,
                content_encoding: content.encoding,
                reserved: Some(self.reservation),
            }),
        }
    }
}

impl Ending {
    pub fn nothing() -> Self {
        Self(None)
    }

    /// Collects a request; the receiver gets it once all of it went by.
    pub fn request(
        collector: Collector,
        parts: &http::request::Parts,
    ) -> (Self, oneshot::Receiver<Result<Collected, DropReason>>) {
        let (done, collected) = oneshot::channel();
        let content = Content::of(&parts.headers);
        (Self(Some(Kind::Request { collector, content, done })), collected)
    }

    /// Ends `in_flight` with the response, and sends the exchange off when it went well.
    pub fn response(
        in_flight: InFlight,
        pending: Option<Pending>,
        parts: &http::response::Parts,
    ) -> Self {
        let capture = pending.and_then(|pending| {
            if !parts.status.is_success() {
                pending.sender.dropped(DropReason::ErrorStatus);
                return None;
            }
            let collector = Collector::new(pending.sender.budget(), pending.max_response_bytes);
            let content = Content::of(&parts.headers);
            Some(Box::new(Capture { pending, collector, content }))
        });
        Self(Some(Kind::Response { in_flight, capture }))
    }

    fn data(&mut self, data: &Bytes) {
        match &mut self.0 {
            Some(Kind::Request { collector, .. }) => collector.add(data),
            Some(Kind::Response { capture: Some(capture), .. }) => capture.collector.add(data),
            _ => {}
        }
    }

    fn complete(&mut self) {
        match self.0.take() {
            Some(Kind::Request { collector, content, done }) => {
                // Nobody is there to take it when the client left meanwhile.
                let _ = done.send(collector.finish(content));
            }
            Some(Kind::Response { capture: Some(capture), .. }) => {
                let Capture { mut pending, collector, content } = *capture;
                let request = pending.request.try_recv().unwrap_or(Err(DropReason::Aborted));
                match request.and_then(|request| Ok((request, collector.finish(content)?))) {
                    Ok((request, response)) => pending.sender.send(Exchange {
                        api: pending.api,
                        request,
                        response,
                        domain: pending.domain,
                        started_unix_ms: pending.started_unix_ms,
                        draft_version: pending.draft_version,
                    }),
                    Err(reason) => pending.sender.dropped(reason),
                }
            }
            Some(Kind::Response { capture: None, .. }) | None => {}
        }
    }

    fn broke_off(&mut self) {
        if let Some(Kind::Response { in_flight, .. }) = &self.0 {
            in_flight.observer.upstream_error();
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(Kind::Response { capture: Some(capture), .. }) = &self.0 {
            capture.pending.sender.dropped(DropReason::Aborted);
        }
    }
}

impl<B> TeeBody<B> {
    pub fn new(inner: B, ending: Ending, has_length: bool) -> Self {
        Self { inner, ending, has_length }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for TeeBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        match &frame {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.ending.data(data);
                }
                // A body of known length is not polled again after its last byte.
                if self.inner.is_end_stream() {
                    self.ending.complete();
                }
            }
            Some(Err(_)) => self.ending.broke_off(),
            None => self.ending.complete(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.has_length { self.inner.size_hint() } else { SizeHint::default() }
    }
}

impl Content {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name| {
            let value = headers.get(name).and_then(|value: &http::HeaderValue| value.to_str().ok());
            value.unwrap_or_default().to_ascii_lowercase()
        };
        Self { kind: text(header::CONTENT_TYPE), encoding: text(header::CONTENT_ENCODING) }
    }
}
