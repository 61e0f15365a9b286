//! An upstream and a client at the level of bytes on the wire.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A message as it went over the wire, split where HTTP/1.1 says so.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wire {
    /// Request or status line.
    pub start: String,
    /// As written, in order.
    pub headers: Vec<(String, String)>,
    /// Without the framing of chunks.
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// The body ended where its framing says, not where the connection did.
    pub complete: bool,
}

impl Wire {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// Headers bar those of a single hop, sorted by name; values of one name keep their order.
    pub fn end_to_end(&self) -> Vec<(String, String)> {
        let hop = ["connection", "keep-alive", "transfer-encoding", "te", "upgrade"];
        let mut headers = self.headers.clone();
        headers.retain(|(name, _)| !hop.contains(&name.to_ascii_lowercase().as_str()));
        headers.sort_by(|a, b| a.0.cmp(&b.0));
        headers
    }
}

/// Reads one message; `bodiless` for answers to HEAD.
pub async fn read_message(stream: &mut TcpStream, bodiless: bool) -> Option<Wire> {
    let mut reader = Reader { stream, buffer: Vec::new() };
    let start = reader.line().await?;
    let headers = reader.header_lines().await?;
    let mut wire = Wire { start, headers, complete: true, ..Wire::default() };
    let status: Option<u16> = wire
        .start
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3))
        .and_then(|code| code.parse().ok());
    if bodiless || matches!(status, Some(204 | 304)) {
        return Some(wire);
    }
    if wire.header("transfer-encoding").is_some_and(|v| v.contains("chunked")) {
        wire.complete = reader.chunks(&mut wire.body, &mut wire.trailers).await.is_some();
    } else if let Some(length) = wire.header("content-length") {
        let length: usize = length.parse().unwrap();
        wire.complete = reader.exactly(length, &mut wire.body).await.is_some();
    } else if status.is_some() {
        // Delimited by the end of the connection.
        while reader.fill().await {}
        wire.body = reader.buffer;
    }
    Some(wire)
}

struct Reader<'a> {
    stream: &'a mut TcpStream,
    buffer: Vec<u8>,
}

impl Reader<'_> {
    async fn fill(&mut self) -> bool {
        let mut piece = [0; 64 * 1024];
        match self.stream.read(&mut piece).await {
            Ok(n) if n > 0 => {
                self.buffer.extend(&piece[..n]);
                true
            }
            _ => false,
        }
    }

    async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line = self.buffer.drain(..end + 2).take(end).collect();
                return Some(String::from_utf8(line).unwrap());
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    async fn header_lines(&mut self) -> Option<Vec<(String, String)>> {
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Some(headers);
            }
            let (name, value) = line.split_once(':')?;
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    async fn exactly(&mut self, length: usize, body: &mut Vec<u8>) -> Option<()> {
        while self.buffer.len() < length {
            if !self.fill().await {
                body.append(&mut self.buffer);
                return None;
            }
        }
        body.extend(self.buffer.drain(..length));
        Some(())
    }

    async fn chunks(
        &mut self,
        body: &mut Vec<u8>,
        trailers: &mut Vec<(String, String)>,
    ) -> Option<()> {
        loop {
            let size = self.line().await?;
            let size = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
            if size == 0 {
                *trailers = self.header_lines().await?;
                return Some(());
            }
            self.exactly(size, body).await?;
            self.line().await?;
        }
    }
}

/// What the upstream writes for one request.
#[derive(Debug, Clone)]
pub struct Script {
    /// Written one after the other, flushed each.
    pub pieces: Vec<Vec<u8>>,
    pub pause: Duration,
    /// Whether the request was HEAD (for reading the answer).
    pub close: bool,
}

impl Script {
    pub fn new(response: impl Into<Vec<u8>>) -> Self {
        Self { pieces: vec![response.into()], pause: Duration::ZERO, close: false }
    }
}

/// Answers requests with scripts, in order, and keeps what it was sent.
pub struct RawUpstream {
    pub addr: SocketAddr,
    pub seen: Arc<Mutex<Vec<Wire>>>,
    scripts: Arc<Mutex<VecDeque<Script>>>,
    server: JoinHandle<()>,
}

impl RawUpstream {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let scripts: Arc<Mutex<VecDeque<Script>>> = Arc::default();
        let (seen_by, scripts_of) = (seen.clone(), scripts.clone());
        let server = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let (seen, scripts) = (seen_by.clone(), scripts_of.clone());
                tokio::spawn(async move {
                    while let Some(request) = read_message(&mut stream, false).await {
                        seen.lock().push(request);
                        let script = scripts.lock().pop_front().expect("a script for each request");
                        for piece in &script.pieces {
                            if stream.write_all(piece).await.is_err() {
                                return;
                            }
                            tokio::time::sleep(script.pause).await;
                        }
                        if script.close {
                            return;
                        }
                    }
                });
            }
        });
        Self { addr, seen, scripts, server }
    }

    pub fn script(&self, script: Script) {
        self.scripts.lock().push_back(script);
    }
}

impl Drop for RawUpstream {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// Sends bytes on a fresh connection and reads one answer.
pub async fn exchange(addr: SocketAddr, request: &[u8]) -> Wire {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(request).await.unwrap();
    let bodiless = request.starts_with(b"HEAD");
    read_message(&mut stream, bodiless).await.expect("an answer")
}
