//! Several log records in one input: kind, length (two bytes, little-endian), payload, and again. A
//! length past the end takes what is left, so that every input is some list of records.

/// Reads the list.
pub fn records(mut data: &[u8]) -> Vec<(u8, &[u8])> {
    let mut all = Vec::new();
    while let Some((&[kind, low, high], rest)) = data.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
        let (payload, next) = rest.split_at(len);
        all.push((kind, payload));
        data = next;
    }
    all
}

/// Writes one.
pub fn framed(all: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, payload) in all {
        out.push(*kind);
        out.extend((payload.len() as u16).to_le_bytes());
        out.extend(payload);
    }
    out
}
