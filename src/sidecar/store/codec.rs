//! Samples as bytes. Little-endian, a version byte first, lengths checked against what is there.

use crate::distill::{Sample, TopK};

const VERSION: u8 = 1;
const HELD_OUT: u8 = 1;
const IDS_ESTIMATED: u8 = 2;
const HAS_DRAFT_VERSION: u8 = 4;

/// Everything but the id and the teacher rows.
pub(super) fn encode_sample(sample: &Sample) -> Vec<u8> {
    let ids = sample.prompt_ids.len() + sample.output_ids.len();
    let mut out = Vec::with_capacity(4 * ids + sample.domain.len() + 64);
    let mut flags = 0;
    for (set, flag) in [
        (sample.held_out, HELD_OUT),
        (sample.ids_estimated, IDS_ESTIMATED),
        (sample.draft_version.is_some(), HAS_DRAFT_VERSION),
    ] {
        flags |= if set { flag } else { 0 };
    }
    out.extend([VERSION, flags]);
    out.extend(sample.captured_unix_ms.to_le_bytes());
    out.extend(sample.temperature.to_le_bytes());
    for text in [&sample.domain, sample.draft_version.as_ref().unwrap_or(&String::new())] {
        put_len(&mut out, text.len());
        out.extend(text.as_bytes());
    }
    for ids in [&sample.prompt_ids, &sample.output_ids] {
        put_len(&mut out, ids.len());
        out.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    }
    out
}

/// Reads what [`encode_sample`] wrote; the teacher rows are left empty.
pub(super) fn decode_sample(id: u64, bytes: &[u8]) -> Result<Sample, String> {
    let mut input = Input(bytes);
    input.version()?;
    let flags = input.array::<1>()?[0];
    let captured_unix_ms = u64::from_le_bytes(input.array()?);
    let temperature = f32::from_le_bytes(input.array()?);
    let domain = input.text()?;
    let draft_version = input.text()?;
    let sample = Sample {
        id,
        prompt_ids: input.u32s()?,
        output_ids: input.u32s()?,
        temperature,
        domain,
        captured_unix_ms,
        held_out: flags & HELD_OUT != 0,
        ids_estimated: flags & IDS_ESTIMATED != 0,
        draft_version: (flags & HAS_DRAFT_VERSION != 0).then_some(draft_version),
        teacher: Vec::new(),
    };
    input.end()?;
    Ok(sample)
}

pub(super) fn encode_teacher(teacher: &[TopK]) -> Vec<u8> {
    let mut out = Vec::with_capacity(teacher_bytes(teacher) as usize);
    out.push(VERSION);
    put_len(&mut out, teacher.len());
    for row in teacher {
        put_len(&mut out, row.ids.len());
        out.extend(row.ids.iter().flat_map(|id| id.to_le_bytes()));
        put_len(&mut out, row.logprobs.len());
        out.extend(row.logprobs.iter().flat_map(|p| p.to_le_bytes()));
    }
    out
}

/// Length of what [`encode_teacher`] returns.
pub(super) fn teacher_bytes(teacher: &[TopK]) -> u64 {
    let rows = teacher.iter().map(|row| 8 + 4 * (row.ids.len() + row.logprobs.len()) as u64);
    5 + rows.sum::<u64>()
}

pub(super) fn decode_teacher(bytes: &[u8]) -> Result<Vec<TopK>, String> {
    let mut input = Input(bytes);
    input.version()?;
    let rows = input.len()?;
    let mut teacher = Vec::new();
    for _ in 0..rows {
        let ids = input.u32s()?;
        let logprobs = input.u32s()?.into_iter().map(f32::from_bits).collect();
        teacher.push(TopK { ids, logprobs });
    }
    input.end()?;
    Ok(teacher)
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    // Lengths are bounded by the capture limits, far below 4 billion.
    out.extend((len as u32).to_le_bytes());
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take(&mut self, n: usize) -> Result<&[u8], String> {
        let (head, tail) = self.0.split_at_checked(n).ok_or("it ends too early")?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn version(&mut self) -> Result<(), String> {
        match self.array()? {
            [VERSION] => Ok(()),
            [other] => Err(format!("format {other}, expected {VERSION}")),
        }
    }

    fn len(&mut self) -> Result<usize, String> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    fn text(&mut self) -> Result<String, String> {
        let len = self.len()?;
        String::from_utf8(self.take(len)?.to_vec()).map_err(|_| "text is not UTF-8".to_owned())
    }

    fn u32s(&mut self) -> Result<Vec<u32>, String> {
        let len = self.len()?;
        let bytes = self.take(len.checked_mul(4).ok_or("length overflows")?)?;
        let words = bytes.as_chunks::<4>().0;
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn end(self) -> Result<(), String> {
        if self.0.is_empty() { Ok(()) } else { Err("it is longer than it should be".into()) }
    }
}
