//! Segment header and record codec. Pure.
//!
//! ```text
//! segment header, sector 0              record, at a multiple of 32
//!   0  magic      "MLWAL001"              0  len      u32  payload bytes
//!   8  log        u32  whose log          4  back     u32  seq - highest seq known durable
//!  12  zero       u32                     8  seq      u64  contiguous within the log
//!  16  number     u64  of the segment    16  prev     u32  link of the record (or header) before
//!  24  nonce      u64  random            20  crc      u32  CRC-32C of the payload
//!  32  first_seq  u64                    24  link     u32  CRC-32C of nonce, bytes 0..24, 28..32
//!  40  capacity   u64                    28  kind     u8   the room's own
//!  48  zero                              29  zero     u16
//! 508  link       u32  CRC of 0..508     31  mark     u8 = 0xa5
//!                                        32  payload, then 1 to 32 bytes of 0xa5
//! ```
//!
//! A header lies within one 512-byte sector, which storage writes whole; its last byte and the
//! record's last byte are never zero. So a write cut short, or a sector that never arrived in the
//! zero-filled file, shows as zeros in known places, and anything else is damage.

/// Bytes of the segment header.
pub const SEGMENT_HEADER: usize = SECTOR;
/// Bytes of a record's header; records begin at multiples of it.
pub const RECORD_HEADER: usize = 32;
/// What storage writes whole.
pub const SECTOR: usize = 512;

const MAGIC: [u8; 8] = *b"MLWAL001";
const MARK: u8 = 0xa5;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// What stands in a segment's first sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Whose log: a room's own constant, so that one room's file is not read as another's.
    pub log: u32,
    /// The segment's number, rising.
    pub number: u64,
    /// Random; records of another segment cannot be taken for this one's.
    pub nonce: u64,
    /// Sequence number of the first record.
    pub first_seq: u64,
    /// The file's size: a shorter one has lost records, not merely room.
    pub capacity: u64,
}

/// Why a segment header is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderError {
    /// Not a file of ours, or of another release.
    Magic,
    /// Cut or changed.
    Checksum,
}

impl SegmentHeader {
    /// The first sector, and the link that the first record names.
    pub fn encode(&self) -> ([u8; SEGMENT_HEADER], u32) {
        let mut out = [0u8; SEGMENT_HEADER];
        out[0..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.log.to_le_bytes());
        out[16..24].copy_from_slice(&self.number.to_le_bytes());
        out[24..32].copy_from_slice(&self.nonce.to_le_bytes());
        out[32..40].copy_from_slice(&self.first_seq.to_le_bytes());
        out[40..48].copy_from_slice(&self.capacity.to_le_bytes());
        let link = crc_fast::crc32_iscsi(&out[..508]);
        out[508..].copy_from_slice(&link.to_le_bytes());
        (out, link)
    }

    /// Reads the first sector; also the link that the first record names.
    pub fn decode(bytes: &[u8]) -> Result<(Self, u32), HeaderError> {
        if bytes.len() < 8 || bytes[..8] != MAGIC {
            return Err(HeaderError::Magic);
        }
        if bytes.len() < SEGMENT_HEADER {
            return Err(HeaderError::Checksum);
        }
        let link = u32_at(bytes, 508);
        if link != crc_fast::crc32_iscsi(&bytes[..508]) {
            return Err(HeaderError::Checksum);
        }
        let header = Self {
            log: u32_at(bytes, 8),
            number: u64_at(bytes, 16),
            nonce: u64_at(bytes, 24),
            first_seq: u64_at(bytes, 32),
            capacity: u64_at(bytes, 40),
        };
        Ok((header, link))
    }
}

/// A record as read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// The room's own.
    pub kind: u8,
    /// Contiguous within the log.
    pub seq: u64,
    /// Every record up to here was durable before this one was written.
    pub synced: u64,
    /// As appended.
    pub payload: &'a [u8],
}

/// A record's header, checked in itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) len: usize,
    pub(super) seq: u64,
    pub(super) synced: u64,
    pub(super) prev: u32,
    pub(super) crc: u32,
    pub(super) link: u32,
    pub(super) kind: u8,
}

/// What stands where a header should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadAt {
    /// Nothing was written, or it did not arrive.
    Zero,
    /// Its end is missing.
    Cut,
    /// Whole, but not what was written.
    Bad,
    Sound(Head),
}

pub(super) fn head_at(bytes: &[u8], nonce: u64) -> HeadAt {
    debug_assert!(bytes.len() >= RECORD_HEADER);
    if bytes[31] != MARK {
        // The mark is written last within its sector: zero means cut, anything else is a change.
        return if bytes[..RECORD_HEADER].iter().all(|&b| b == 0) {
            HeadAt::Zero
        } else if bytes[31] == 0 {
            HeadAt::Cut
        } else {
            HeadAt::Bad
        };
    }
    let link = u32_at(bytes, 24);
    let back = u32_at(bytes, 4);
    let seq = u64_at(bytes, 8);
    if link != header_crc(bytes, nonce) || back == 0 || u64::from(back) > seq {
        return HeadAt::Bad;
    }
    HeadAt::Sound(Head {
        len: u32_at(bytes, 0) as usize,
        seq,
        synced: seq - u64::from(back),
        prev: u32_at(bytes, 16),
        crc: u32_at(bytes, 20),
        link,
        kind: bytes[28],
    })
}

/// Seeded with the segment's nonce: what a caller stores as a value cannot pass for a record.
fn header_crc(bytes: &[u8], nonce: u64) -> u32 {
    let mut covered = [0u8; 36];
    covered[..8].copy_from_slice(&nonce.to_le_bytes());
    covered[8..32].copy_from_slice(&bytes[..24]);
    covered[32..].copy_from_slice(&bytes[28..32]);
    crc_fast::crc32_iscsi(&covered)
}

/// Bytes that a record of `len` payload bytes takes.
pub fn record_bytes(len: usize) -> usize {
    (RECORD_HEADER + len + 1).next_multiple_of(RECORD_HEADER)
}

/// Appends one record; returns its link.
pub(super) fn encode(
    out: &mut Vec<u8>,
    nonce: u64,
    kind: u8,
    seq: u64,
    synced: u64,
    prev: u32,
    payload: &[&[u8]],
) -> u32 {
    debug_assert!(synced < seq && out.len().is_multiple_of(RECORD_HEADER));
    let at = out.len();
    out.extend_from_slice(&[0; RECORD_HEADER]);
    for part in payload {
        out.extend_from_slice(part);
    }
    let len = out.len() - at - RECORD_HEADER;
    let crc = crc_fast::crc32_iscsi(&out[at + RECORD_HEADER..]);
    out.resize(at + record_bytes(len), MARK);
    // Claiming less than is durable only weakens the evidence.
    let back = u32::try_from(seq - synced).unwrap_or(u32::MAX);
    let head = &mut out[at..at + RECORD_HEADER];
    head[0..4].copy_from_slice(&(len as u32).to_le_bytes());
    head[4..8].copy_from_slice(&back.to_le_bytes());
    head[8..16].copy_from_slice(&seq.to_le_bytes());
    head[16..20].copy_from_slice(&prev.to_le_bytes());
    head[20..24].copy_from_slice(&crc.to_le_bytes());
    head[28] = kind;
    head[31] = MARK;
    let link = header_crc(head, nonce);
    head[24..28].copy_from_slice(&link.to_le_bytes());
    link
}

/// What stands where a payload and its trailer should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyAt {
    Sound,
    /// Zeros stand where a lost sector or a cut write leaves them.
    Torn,
    Bad,
}

/// Judges the record of `head` at `at`, which lies within `bytes`.
pub(super) fn body_at(bytes: &[u8], at: usize, head: &Head) -> BodyAt {
    let end = at + record_bytes(head.len);
    let payload = &bytes[at + RECORD_HEADER..at + RECORD_HEADER + head.len];
    let trailer = &bytes[at + RECORD_HEADER + head.len..end];
    if trailer.iter().all(|&b| b == MARK) && crc_fast::crc32_iscsi(payload) == head.crc {
        return BodyAt::Sound;
    }
    let mut sector = (at / SECTOR + 1) * SECTOR;
    let lost_sector = loop {
        if sector >= end {
            break false;
        }
        if bytes[sector..end.min(sector + SECTOR)]
            .iter()
            .all(|&b| b == 0)
        {
            break true;
        }
        sector += SECTOR;
    };
    if lost_sector || bytes[end - 1] == 0 {
        BodyAt::Torn
    } else {
        BodyAt::Bad
    }
}
