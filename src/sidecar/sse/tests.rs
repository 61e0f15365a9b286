use proptest::prelude::*;

use super::*;

/// Streams in every form that servers and proxies write them.
const STREAMS: &[&[u8]] = &[
    b"data: {\"choices\":[{\"delta\":{\"content\":\"\xf0\x9f\x98\x8a\"}}]}\n\ndata: [DONE]\n\n",
    b"data: a\r\n\r\ndata: b\r\n\r\n",
    b"data: a\r\rdata: b\r\r",
    b"data:no space\n\ndata:  two spaces\n\n",
    b": ping\n\ndata: x\n: in the middle\ndata: y\n\n",
    b"event: message\nid: 7\nretry: 10\ndata: first\ndata\ndata: third\n\n",
    b"data: never closed",
    b"data: closed line only\n",
    b"\xef\xbb\xbfdata: after a mark\n\n",
    b"\n\n\ndata: x\n\n\n\ndata: y\r\n\n",
    b"unknown: field\n\nevent: no data\n\ndata: \n\n",
    b"data: mixed\r\ndata: ends\rdata: here\n\r\ndata: z\r\n\r",
];

fn in_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<Event> {
    let mut parser = SseParser::new(1 << 20);
    let mut events = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut |event| events.push(event)).unwrap();
    }
    parser.finish(&mut |event| events.push(event));
    events
}

fn data(stream: &[u8]) -> Vec<String> {
    let events = parse_all(stream, 1 << 20).unwrap();
    events.into_iter().map(|e| String::from_utf8(e.data).unwrap()).collect()
}

#[test]
fn follows_the_format() {
    assert_eq!(
        data(STREAMS[0]),
        ["{\"choices\":[{\"delta\":{\"content\":\"\u{1f60a}\"}}]}", "[DONE]"]
    );
    assert_eq!(data(STREAMS[1]), ["a", "b"]);
    assert_eq!(data(STREAMS[2]), ["a", "b"]);
    assert_eq!(data(STREAMS[3]), ["no space", " two spaces"]);
    assert_eq!(data(STREAMS[4]), ["x\ny"]);
    assert_eq!(data(STREAMS[5]), ["first\n\nthird"]);
    assert_eq!(data(STREAMS[6]), ["never closed"]);
    assert_eq!(data(STREAMS[7]), ["closed line only"]);
    assert_eq!(data(STREAMS[8]), ["after a mark"]);
    assert_eq!(data(STREAMS[9]), ["x", "y"]);
    assert_eq!(data(STREAMS[10]), [""]);
    assert_eq!(data(STREAMS[11]), ["mixed\nends\nhere", "z"]);
    assert_eq!(parse_all(STREAMS[5], 100).unwrap()[0].name, b"message");
}

#[test]
fn every_split_in_two_and_three_gives_the_same_events() {
    for stream in STREAMS {
        let expected = parse_all(stream, 1 << 20).unwrap();
        for i in 0..=stream.len() {
            for j in i..=stream.len() {
                let pieces = [&stream[..i], &stream[i..j], &stream[j..]];
                assert_eq!(in_pieces(pieces), expected, "split at {i} and {j}");
            }
        }
        assert_eq!(in_pieces(stream.chunks(1)), expected);
    }
}

#[test]
fn an_event_over_the_limit_is_refused_and_many_small_ones_are_not() {
    let small = b"data: 0123456789\n\n".repeat(1000);
    assert_eq!(parse_all(&small, 32).unwrap().len(), 1000);
    let large = [b"data: ".as_slice(), &[b'x'; 100], b"\n\n"].concat();
    assert_eq!(parse_all(&large, 32), Err(EventTooLarge { limit: 32 }));
    // Also when it comes as many short lines, or as a line that never ends.
    let lines = b"data: 012345\n".repeat(10);
    assert_eq!(parse_all(&lines, 32), Err(EventTooLarge { limit: 32 }));
    let mut parser = SseParser::new(32);
    let endless = (0..100).try_for_each(|_| parser.push(b"abcdefgh", &mut |_| {}));
    assert_eq!(endless, Err(EventTooLarge { limit: 32 }));
}

proptest! {
    #[test]
    fn arbitrary_bytes_in_arbitrary_pieces_agree_with_the_whole(
        bytes in prop::collection::vec(
            prop_oneof![Just(b'\n'), Just(b'\r'), Just(b':'), Just(b' '), Just(b'd'), any::<u8>()],
            0..300,
        ),
        cuts in prop::collection::vec(0_usize..300, 0..8),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]);
        prop_assert_eq!(in_pieces(pieces), parse_all(&bytes, 1 << 20).unwrap());
    }

    #[test]
    fn what_is_written_is_read(
        events in prop::collection::vec("[a-z0-9 :{}\"]{0,20}(\n[a-z]{0,5}){0,2}", 1..6),
        end in prop_oneof![Just("\n"), Just("\r\n"), Just("\r")],
    ) {
        let mut stream = String::new();
        for event in &events {
            for line in event.split('\n') {
                stream += &format!("data: {line}{end}");
            }
            stream += end;
        }
        prop_assert_eq!(data(stream.as_bytes()), events);
    }
}
