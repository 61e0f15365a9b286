//! The byte-level alphabet: vocabulary strings in which each character stands for one byte.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::Value;

/// Printable characters stand for their own byte; the other 68 bytes have the characters from
/// U+0100 on, in order.
static BYTE_OF_CHAR: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let mut next = 0x100u32;
    (0u8..=255)
        .map(|byte| {
            if matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF) {
                return (char::from(byte), byte);
            }
            let stand_in = char::from_u32(next).expect("U+0100 to U+0143 are characters");
            next += 1;
            (stand_in, byte)
        })
        .collect()
});

/// The bytes of a vocabulary string; a string with a character outside the alphabet (an added
/// token with a space, say) stands for itself.
pub(super) fn of_piece(piece: &str) -> Vec<u8> {
    piece
        .chars()
        .map(|character| BYTE_OF_CHAR.get(&character).copied())
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| piece.as_bytes().to_vec())
}

/// Whether a decoder does nothing but join the bytes of its tokens.
pub(super) fn is_byte_level(decoder: &Value) -> bool {
    match decoder.get("type").and_then(Value::as_str) {
        Some("ByteLevel") => true,
        Some("Sequence") => match decoder.get("decoders").and_then(Value::as_array) {
            Some(decoders) => matches!(decoders.as_slice(), [one] if is_byte_level(one)),
            None => false,
        },
        _ => false,
    }
}
