//! Server-sent events, parsed from bytes that arrive in any pieces.
//!
//! Follows the event-stream format of the HTML standard: lines end in LF, CR or CRLF, comments
//! start with a colon, one space after the colon of a field is dropped, several `data` lines join
//! with LF, a byte-order mark at the start is skipped. One leniency: an event that the stream ends
//! in without its blank line still counts, since servers leave that line out.

#[cfg(test)]
mod tests;

/// One dispatched event; only the parts that inference servers use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The `event` field; empty when there was none.
    pub name: Vec<u8>,
    /// The `data` lines, joined with LF.
    pub data: Vec<u8>,
}

/// A single event grew over the limit; the stream cannot be followed any further.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a server-sent event is larger than {limit} bytes")]
pub struct EventTooLarge {
    pub limit: usize,
}

/// Parser with at most one event in memory.
#[derive(Debug)]
pub struct SseParser {
    limit: usize,
    line: Vec<u8>,
    name: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    /// The last byte was a CR: a LF that follows belongs to the same line end.
    after_cr: bool,
    /// No line has ended yet, so a byte-order mark may stand in front.
    first_line: bool,
}

impl SseParser {
    /// `limit` is the largest event in bytes, field names included.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            name: Vec::new(),
            data: Vec::new(),
            has_data: false,
            after_cr: false,
            first_line: true,
        }
    }

    /// Takes the next bytes and calls `on_event` for every event that they complete.
    ///
    /// # Errors
    /// When an event is over the limit. The parser must not be used after that.
    pub fn push(
        &mut self,
        mut bytes: &[u8],
        on_event: &mut impl FnMut(Event),
    ) -> Result<(), EventTooLarge> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let (text, rest) = bytes.split_at(end.unwrap_or(bytes.len()));
            if self.line.len() + self.name.len() + self.data.len() + text.len() > self.limit {
                return Err(EventTooLarge { limit: self.limit });
            }
            self.line.extend_from_slice(text);
            bytes = rest;
            if let Some((end_byte, after)) = rest.split_first() {
                self.after_cr = *end_byte == b'\r';
                bytes = after;
                self.end_line(on_event);
            }
        }
        Ok(())
    }

    /// Ends the stream: a last line or event that was not closed is dispatched.
    pub fn finish(mut self, on_event: &mut impl FnMut(Event)) {
        if !self.line.is_empty() {
            self.end_line(on_event);
        }
        self.dispatch(on_event);
    }

    fn end_line(&mut self, on_event: &mut impl FnMut(Event)) {
        let line = std::mem::take(&mut self.line);
        let mut text = line.as_slice();
        if std::mem::take(&mut self.first_line) {
            text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        }
        if text.is_empty() {
            self.dispatch(on_event);
        } else {
            let (field, value) = match text.iter().position(|b| *b == b':') {
                Some(colon) => (&text[..colon], &text[colon + 1..]),
                None => (text, &b""[..]),
            };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            match field {
                b"data" => {
                    if self.has_data {
                        self.data.push(b'\n');
                    }
                    self.data.extend_from_slice(value);
                    self.has_data = true;
                }
                b"event" => self.name = value.to_vec(),
                // Comments (an empty field name), ids, retry times and unknown fields.
                _ => {}
            }
        }
        // The buffer is reused, so that a long stream allocates once.
        self.line = line;
        self.line.clear();
    }

    fn dispatch(&mut self, on_event: &mut impl FnMut(Event)) {
        let name = std::mem::take(&mut self.name);
        let data = std::mem::take(&mut self.data);
        if std::mem::take(&mut self.has_data) {
            on_event(Event { name, data });
        }
    }
}

/// All events of a complete body.
///
/// # Errors
/// When an event is over `limit` bytes.
pub fn parse_all(body: &[u8], limit: usize) -> Result<Vec<Event>, EventTooLarge> {
    let mut parser = SseParser::new(limit);
    let mut events = Vec::new();
    parser.push(body, &mut |event| events.push(event))?;
    parser.finish(&mut |event| events.push(event));
    Ok(events)
}
