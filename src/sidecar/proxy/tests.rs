use http::{HeaderMap, HeaderValue, Version};

use super::headers::*;

fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(*name, HeaderValue::from_static(value));
    }
    headers
}

#[test]
fn only_hop_by_hop_headers_are_dropped() {
    let mut headers = map(&[
        ("connection", "keep-alive, X-Mine , content-length"),
        ("keep-alive", "timeout=5"),
        ("x-mine", "1"),
        ("x-other", "2"),
        ("content-length", "3"),
        ("transfer-encoding", "chunked"),
        ("te", "trailers"),
        ("trailer", "x-sum"),
        ("upgrade", "h2c"),
        ("proxy-connection", "close"),
    ]);
    strip_hop_by_hop(&mut headers);
    let left: Vec<&str> = headers.keys().map(|name| name.as_str()).collect();
    assert_eq!(headers.len(), 3);
    for name in ["x-other", "content-length", "trailer"] {
        assert!(left.contains(&name), "{name} is missing in {left:?}");
    }
}

#[test]
fn opting_out_is_believed_unless_it_clearly_says_no() {
    for (value, expected) in [
        ("1", true),
        ("true", true),
        ("yes", true),
        ("please", true),
        ("0", false),
        (" False ", false),
        ("", false),
    ] {
        let mut headers = map(&[]);
        headers.insert(OPT_OUT_HEADER, HeaderValue::from_static(value));
        assert_eq!(take_opt_out(&mut headers), expected, "{value:?}");
        assert!(headers.is_empty());
    }
    assert!(!take_opt_out(&mut map(&[])));
    let mut twice = map(&[("x-draft-adapter-no-train", "0"), ("x-draft-adapter-no-train", "1")]);
    assert!(take_opt_out(&mut twice));
}

#[test]
fn domains_are_short_and_plain() {
    let domain = |value| {
        let mut headers = map(&[("x-draft-adapter-domain", value)]);
        let domain = take_domain(&mut headers);
        assert!(headers.is_empty());
        domain
    };
    assert_eq!(domain("sql-v1.2_x"), "sql-v1.2_x");
    assert_eq!(domain("a\"b"), "");
    assert_eq!(domain("two words"), "");
    assert_eq!(domain("12345678901234567890123456789012"), "12345678901234567890123456789012");
    assert_eq!(domain("123456789012345678901234567890123"), "");
}

#[test]
fn paths_are_compared_as_the_server_reads_them() {
    for path in ["/a/b", "//a//b/", "/%61/b", "/x/../a/./b", "/a/%2e/b", "/%2561/../a/b"] {
        assert_eq!(segments(path), ["a", "b"], "{path}");
    }
    assert_ne!(segments("/%2561/b"), ["a", "b"]);
    assert_eq!(segments("/a%2"), ["a%2"]);
    assert!(segments("/../..").is_empty());
}

#[test]
fn http2_requests_get_a_host_and_one_cookie_line() {
    let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2")]);
    let authority = "example.test:80".parse().unwrap();
    http2_to_http1(&mut headers, Version::HTTP_2, Some(&authority));
    assert_eq!(headers["host"], "example.test:80");
    let cookies: Vec<_> = headers.get_all("cookie").iter().collect();
    assert_eq!(cookies, ["a=1; b=2"]);
}
