//! Which headers stop at the proxy, and what paths mean.

use http::header::{CONNECTION, COOKIE, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::uri::Authority;
use http::{HeaderMap, HeaderName, HeaderValue, Version};

/// `1` or `true` keeps a request out of the training data. Not forwarded.
pub const OPT_OUT_HEADER: HeaderName = HeaderName::from_static("x-draft-adapter-no-train");
/// A label for the kind of traffic. Not forwarded.
pub const DOMAIN_HEADER: HeaderName = HeaderName::from_static("x-draft-adapter-domain");
/// Longer labels are ignored.
pub const MAX_DOMAIN_CHARS: usize = 32;

const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-authenticate"),
    HeaderName::from_static("proxy-authorization"),
    HeaderName::from_static("proxy-connection"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Removes what concerns one connection only: the fixed set and what `Connection` names.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    // A client must not be able to talk the proxy into dropping what the request depends on.
    let vital = [HOST, http::header::CONTENT_LENGTH, http::header::CONTENT_TYPE];
    for name in named.iter().filter(|name| !vital.contains(name)).chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Removes the opt-out header and says whether it was set. Anything but a clear no counts as yes:
/// a misspelt value must not lead to training on what someone wanted left out.
pub(super) fn take_opt_out(headers: &mut HeaderMap) -> bool {
    let values: Vec<HeaderValue> = headers.get_all(OPT_OUT_HEADER).iter().cloned().collect();
    headers.remove(OPT_OUT_HEADER);
    let is_no = |value: &HeaderValue| {
        let value = value.as_bytes().trim_ascii();
        [b"0".as_slice(), b"false", b"no", b""].iter().any(|no| value.eq_ignore_ascii_case(no))
    };
    values.iter().any(|value| !is_no(value))
}

/// Removes the domain header and returns its label. A label that is too long or has characters
/// other than letters, digits, `.`, `-` and `_` counts as none: it becomes a metric's label.
pub(super) fn take_domain(headers: &mut HeaderMap) -> String {
    let label = headers.remove(DOMAIN_HEADER);
    let label = label.as_ref().and_then(|value| value.to_str().ok()).unwrap_or_default().trim();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let valid = label.len() <= MAX_DOMAIN_CHARS && label.chars().all(allowed);
    if valid { label.to_owned() } else { String::new() }
}

pub(super) fn is_websocket(headers: &HeaderMap) -> bool {
    let upgrades = headers.get_all(UPGRADE).iter().filter_map(|value| value.to_str().ok());
    upgrades.flat_map(|value| value.split(',')).any(|v| v.trim().eq_ignore_ascii_case("websocket"))
}

/// HTTP/2 has the host in its own field and may split cookies; HTTP/1.1 wants one line of each.
pub(super) fn http2_to_http1(
    headers: &mut HeaderMap,
    version: Version,
    authority: Option<&Authority>,
) {
    if version != Version::HTTP_2 {
        return;
    }
    let host = authority.and_then(|authority| HeaderValue::from_str(authority.as_str()).ok());
    if let (false, Some(host)) = (headers.contains_key(HOST), host) {
        headers.insert(HOST, host);
    }
    let crumbs: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// Segments of a path as a server sees them: percent-decoded, without empty ones and dots.
pub(super) fn segments(path: &str) -> Vec<String> {
    let mut segments = Vec::new();
    let decoded = percent_decode(path);
    for segment in decoded.split('/') {
        match segment {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment.to_owned()),
        }
    }
    segments
}

fn percent_decode(path: &str) -> String {
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digit = |n: usize| after.get(n).and_then(|b| char::from(*b).to_digit(16));
        if let (b'%', Some(high), Some(low)) = (*first, digit(0), digit(1)) {
            decoded.push((high * 16 + low) as u8);
            rest = &after[2..];
        } else {
            decoded.push(*first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
