//! The fake's tokenizer and its "model": bytes for tokens, an answer that is a hash of the prompt.

pub const EOS: u32 = 2;
pub const IM_START: u32 = 1;
/// Id of byte 0; byte `b` is `FIRST_BYTE + b`.
pub const FIRST_BYTE: u32 = 3;

const SPECIALS: [(&str, u32); 3] = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)];

/// Token ids of a text: special tokens where they are written, a token for every other byte.
pub fn encode(text: &str) -> Vec<u32> {
    let mut ids = Vec::with_capacity(text.len());
    let mut rest = text;
    'outer: while !rest.is_empty() {
        for (piece, id) in SPECIALS {
            if let Some(after) = rest.strip_prefix(piece) {
                ids.push(id);
                rest = after;
                continue 'outer;
            }
        }
        let c = rest.chars().next().unwrap();
        let (head, tail) = rest.split_at(c.len_utf8());
        ids.extend(head.bytes().map(|b| FIRST_BYTE + u32::from(b)));
        rest = tail;
    }
    ids
}

/// Bytes of ids, special tokens skipped.
pub fn bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().filter(|id| **id >= FIRST_BYTE).map(|id| (id - FIRST_BYTE) as u8).collect()
}

/// The prompt of a chat, as the ChatML template renders it.
pub fn render_chat(messages: &serde_json::Value) -> String {
    let mut text = String::new();
    for message in messages.as_array().into_iter().flatten() {
        let role = message["role"].as_str().unwrap_or_default();
        let content = message["content"].as_str().unwrap_or_default();
        text += &format!("<|im_start|>{role}\n{content}<|im_end|>\n");
    }
    text + "<|im_start|>assistant\n"
}

/// The whole answer to a prompt, ended by [`EOS`]. Contains multi-byte characters, so tokens
/// split them.
pub fn answer(prompt: &[u32]) -> Vec<u32> {
    const WORDS: [&str; 12] = [
        "seven", "apples", "plus", "é", "nine", "is", "😊", "select", "from", "naïve", "tables",
        "done",
    ];
    let mut state = prompt.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, id| {
        (hash ^ u64::from(*id)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mut draw = |n: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let words = 4 + draw(8);
    let text: Vec<&str> = (0..words).map(|_| WORDS[draw(12) as usize]).collect();
    let mut ids = encode(&text.join(" "));
    ids.push(EOS);
    ids
}

/// Log-probabilities at one position: the token itself at 0.75, then others that halve.
pub fn top_logprobs(id: u32, k: usize) -> Vec<(u32, f64)> {
    let others = (0..).map(|n| (id + 1 + n) % (FIRST_BYTE + 256));
    let mut top = vec![(id, 0.75_f64.ln())];
    top.extend(others.zip(1..k).map(|(other, n)| (other, 0.25_f64.ln() - n as f64 * 2_f64.ln())));
    top
}

/// How `token` fields spell an id.
pub fn spell(id: u32, as_token_ids: bool) -> String {
    if as_token_ids {
        return format!("token_id:{id}");
    }
    match SPECIALS.iter().find(|(_, special)| *special == id) {
        Some((piece, _)) => (*piece).to_owned(),
        None => String::from_utf8_lossy(&bytes(&[id])).into_owned(),
    }
}

/// A `tokenizer.json` with exactly these ids.
pub fn tokenizer_json() -> String {
    // The byte-level alphabet: printable bytes stand for themselves, the rest are moved up.
    let mut moved = 256;
    let vocab: serde_json::Map<String, serde_json::Value> = (0..256_u32)
        .map(|b| {
            let printable = matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            let c = if printable {
                b
            } else {
                moved += 1;
                moved - 1
            };
            (char::from_u32(c).unwrap().to_string(), (FIRST_BYTE + b).into())
        })
        .chain(SPECIALS.iter().map(|(piece, id)| ((*piece).to_owned(), (*id).into())))
        .collect();
    let added: Vec<serde_json::Value> = SPECIALS
        .iter()
        .map(|(piece, id)| {
            serde_json::json!({"id": id, "content": piece, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer":
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": null,
        "decoder":
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": []}
    })
    .to_string()
}

/// The chat template that [`render_chat`] follows.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + \
    message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Writes the tokenizer files that a draft folder has.
pub fn write_tokenizer(folder: &std::path::Path) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("tokenizer.json"), tokenizer_json()).unwrap();
    let config = serde_json::json!({
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE
    });
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}
