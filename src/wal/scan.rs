//! Reading a segment back. Pure: bytes in, records and a verdict out.

use super::record::{
    BodyAt, HeadAt, HeaderError, RECORD_HEADER, Record, SEGMENT_HEADER, SegmentHeader, body_at,
    head_at, record_bytes,
};
use std::collections::VecDeque;

/// How far a segment is sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scan {
    /// Its first sector.
    pub header: SegmentHeader,
    /// Where the next record goes.
    pub end: u64,
    /// The next record's sequence number.
    pub next_seq: u64,
    /// The next record's `prev`.
    pub link: u32,
    /// From here on no record proves that those before it were durable.
    pub unproven_from: u64,
    /// Bytes other than zero stand behind the end: a write that nobody was told about was cut.
    pub torn: bool,
}

/// Why a segment is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScanError {
    /// Not a log of this kind and release.
    Foreign {
        /// What does not fit.
        what: String,
    },
    /// Something that had been written whole is not what was written.
    Damaged {
        /// Where the damage begins.
        offset: u64,
        /// What does not fit.
        what: String,
    },
}

/// Reads a segment, giving each sound record to `visit` in order. `visit` may refuse a record whose
/// payload it cannot mean: that is damage too.
///
/// Records end at the first that is not sound. That is a torn tail, and no error, only if nothing
/// found there or behind contradicts it: a record that says the missing one was durable, or bytes
/// that no cut write leaves.
pub fn scan(
    bytes: &[u8],
    log: u32,
    mut visit: impl FnMut(Record<'_>) -> Result<(), String>,
) -> Result<Scan, ScanError> {
    let (header, mut link) = match SegmentHeader::decode(bytes) {
        Ok(found) => found,
        Err(HeaderError::Magic) => {
            return Err(ScanError::Foreign {
                what: "its first bytes are not MLWAL001".to_owned(),
            });
        }
        Err(HeaderError::Checksum) => return damaged(0, "segment header fails its checksum"),
    };
    if header.log != log {
        let what = format!("it belongs to log {:#x}, not {log:#x}", header.log);
        return Err(ScanError::Foreign { what });
    }
    if (bytes.len() as u64) < header.capacity {
        return damaged(bytes.len(), "file is shorter than it was made");
    }
    let mut at = SEGMENT_HEADER;
    let mut next_seq = header.first_seq;
    // Offsets of the records not yet proven durable by a later one.
    let mut unproven: VecDeque<(u64, u64)> = VecDeque::new();
    while bytes.len() - at >= RECORD_HEADER {
        let head = match head_at(&bytes[at..], header.nonce) {
            HeadAt::Sound(head) => head,
            HeadAt::Zero | HeadAt::Cut => break,
            HeadAt::Bad => return damaged(at, "record header fails its checksum"),
        };
        if head.prev != link || head.seq != next_seq {
            return damaged(at, "record does not follow the one before it");
        }
        if head.len > bytes.len() - at || record_bytes(head.len) > bytes.len() - at {
            return damaged(at, "record reaches past the end of the segment");
        }
        match body_at(bytes, at, &head) {
            BodyAt::Sound => {}
            BodyAt::Torn => break,
            BodyAt::Bad => return damaged(at, "record payload fails its checksum"),
        }
        let payload = &bytes[at + RECORD_HEADER..at + RECORD_HEADER + head.len];
        let record = Record {
            kind: head.kind,
            seq: head.seq,
            synced: head.synced,
            payload,
        };
        if let Err(what) = visit(record) {
            return damaged(at, &what);
        }
        while unproven.front().is_some_and(|&(seq, _)| seq <= head.synced) {
            unproven.pop_front();
        }
        unproven.push_back((head.seq, at as u64));
        link = head.link;
        at += record_bytes(head.len);
        // A sequence number that cannot be followed was never given.
        next_seq = match head.seq.checked_add(1) {
            Some(next) => next,
            None => return damaged(at, "sequence numbers are exhausted"),
        };
    }
    let mut torn = false;
    for (offset, piece) in (at..)
        .step_by(RECORD_HEADER)
        .zip(bytes[at..].chunks(RECORD_HEADER))
    {
        if piece.iter().all(|&b| b == 0) {
            continue;
        }
        torn = true;
        if offset == at || piece.len() < RECORD_HEADER {
            continue;
        }
        if let HeadAt::Sound(later) = head_at(piece, header.nonce)
            && later.seq > next_seq
            && later.synced >= next_seq
        {
            let what = format!(
                "record {next_seq} was durable when record {} was written",
                later.seq
            );
            return damaged(at, &what);
        }
    }
    let unproven_from = unproven.front().map_or(at as u64, |&(_, offset)| offset);
    Ok(Scan {
        header,
        end: at as u64,
        next_seq,
        link,
        unproven_from,
        torn,
    })
}

fn damaged<T>(offset: usize, what: &str) -> Result<T, ScanError> {
    Err(ScanError::Damaged {
        offset: offset as u64,
        what: what.to_owned(),
    })
}
