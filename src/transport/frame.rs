//! The wire format of `tcp`, and of the control messages of `shm`: a 64-byte header, then a payload.
//! Pure functions on bytes, so that a fuzzer can call them.
//!
//! ```text
//!  0 u32  magic "MLX1"           32 u64  epoch
//!  4 u8   kind                   40 u64  offset   Data: of this piece in the request's bytes
//!  5 u8   code    Refused: why   48 u32  len      bytes of payload that follow
//!  6 u16  count   spans          52 u32  zero
//!  8 u64  op      of the request 56 u32  CRC-32C of the payload
//! 16 [16] key                    60 u32  CRC-32C of bytes 0..60
//! ```
//! All little-endian. A span is `u64 offset, u32 length`. Requests are answered in order: a Get by
//! Data pieces in order or by Refused (also after some pieces), a Put (its list, then Data pieces) by
//! Done or Refused. Data of a put that was refused is read and thrown away.

use crate::mem::RegionKey;
use crate::transport::{PIECE_MAX, Refusal, Span};

/// Bytes of a header.
pub const HEADER_LEN: usize = 64;
/// Bytes of a span in a list.
pub const SPAN_LEN: usize = 12;
/// Most spans in one request.
pub const SPANS_MAX: usize = 4096;
/// Most bytes that one request moves; larger transfers go as several.
pub const REQUEST_BYTES_MAX: u64 = 1 << 20;
/// The version both sides must speak.
pub const VERSION: u64 = 1;

const MAGIC: u32 = u32::from_le_bytes(*b"MLX1");
/// No payload is larger, whatever a header says; longer ones close the connection.
pub const PAYLOAD_MAX: u32 = PIECE_MAX as u32;

const _: () = assert!(SPANS_MAX * SPAN_LEN <= PIECE_MAX);
const _: () =
    assert!(REQUEST_BYTES_MAX as usize >= PIECE_MAX && REQUEST_BYTES_MAX <= u32::MAX as u64);

/// CRC-32C (Castagnoli), by the fastest instructions that this machine has.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Adds a piece, by its check, to what a Put's target has landed. Done carries the sum of all pieces:
/// who has not seen the bytes cannot acknowledge them.
pub fn receipt(so_far: u32, piece: u32) -> u32 {
    crc32c(&(u64::from(so_far) << 32 | u64::from(piece)).to_le_bytes())
}

/// CRC-32C over several runs.
#[derive(Clone)]
pub struct Crc(crc_fast::Digest);

impl Crc {
    /// Of no bytes yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds a run.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The check so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }

    /// Back to no bytes.
    pub fn reset(&mut self) {
        self.0.reset();
    }
}

impl Default for Crc {
    fn default() -> Self {
        Self::new()
    }
}

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Initiator's first frame; `offset` is its version.
    Hello = 1,
    /// Owner's answer; `offset` is its version.
    Welcome = 2,
    /// Wants the spans of the payload.
    Get = 3,
    /// Will send bytes for the spans of the payload.
    Put = 4,
    /// A piece of a Get's answer or of a Put's bytes.
    Data = 5,
    /// A Put is applied and visible; `offset` is its [`receipt`].
    Done = 6,
    /// A request is not served, or not to its end; `code` says why.
    Refused = 7,
    /// Initiator: no more Data for this Put.
    Abort = 8,
    /// `shm`: wants the mapping behind a key.
    Map = 9,
    /// `shm`: a [`Mapping`] as payload, with two descriptors.
    Mapped = 10,
    /// `shm`: owner takes a grant back; `epoch` is the last one that was good.
    Revoke = 11,
    /// `shm`: the peer no longer reads under that grant.
    Revoked = 12,
    /// `shm`: initiator offers memory of its own, with a descriptor, for the target to read from;
    /// `op` names it, `offset` is its length.
    Offer = 13,
    /// `shm`: the target should read offered memory (`offset` names it) into its own; the payload
    /// lists pairs of runs.
    Pull = 14,
    /// `shm`: initiator: I have unmapped everything and am about to close.
    Bye = 15,
}

impl Kind {
    fn from_u8(v: u8) -> Option<Self> {
        use Kind::*;
        [
            Hello, Welcome, Get, Put, Data, Done, Refused, Abort, Map, Mapped, Revoke, Revoked,
            Offer, Pull, Bye,
        ]
        .into_iter()
        .find(|k| *k as u8 == v)
    }
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// A [`Refusal`]'s code in Refused, else 0.
    pub code: u8,
    /// Spans in the payload of Get, Put and Pull, else 0.
    pub count: u16,
    /// The request it belongs to.
    pub op: u64,
    /// The right to ask.
    pub key: RegionKey,
    /// The epoch of that right.
    pub epoch: u64,
    /// See [`Kind`].
    pub offset: u64,
    /// Payload bytes.
    pub len: u32,
    /// Check of the payload.
    pub payload_crc: u32,
}

/// Bytes that are no frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than a header.
    #[error("a header takes {HEADER_LEN} bytes")]
    Short,
    /// The header's own check failed: nothing in it can be believed, its length least of all.
    #[error("the header does not match its check")]
    HeaderCheck,
    /// Another protocol.
    #[error("not this protocol")]
    Magic,
    /// A kind this version does not know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Reserved bytes in use.
    #[error("reserved header bytes are not zero")]
    Reserved,
    /// A payload beyond [`PAYLOAD_MAX`].
    #[error("a payload of {0} bytes is over the limit of {PAYLOAD_MAX}")]
    TooLong(u32),
    /// A refusal without a reason we know.
    #[error("unknown refusal {0}")]
    Code(u8),
}

impl Header {
    /// A header with everything else zero.
    pub fn new(kind: Kind, op: u64) -> Self {
        let key = RegionKey::from_bytes([0; 16]);
        Self {
            kind,
            code: 0,
            count: 0,
            op,
            key,
            epoch: 0,
            offset: 0,
            len: 0,
            payload_crc: 0,
        }
    }

    /// A refusal of `op`.
    pub fn refused(op: u64, why: Refusal) -> Self {
        Self {
            code: why.code(),
            ..Self::new(Kind::Refused, op)
        }
    }

    /// The wire form.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut b = [0u8; HEADER_LEN];
        b[..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4] = self.kind as u8;
        b[5] = self.code;
        b[6..8].copy_from_slice(&self.count.to_le_bytes());
        b[8..16].copy_from_slice(&self.op.to_le_bytes());
        b[16..32].copy_from_slice(&self.key.to_bytes());
        b[32..40].copy_from_slice(&self.epoch.to_le_bytes());
        b[40..48].copy_from_slice(&self.offset.to_le_bytes());
        b[48..52].copy_from_slice(&self.len.to_le_bytes());
        b[56..60].copy_from_slice(&self.payload_crc.to_le_bytes());
        let check = crc32c(&b[..60]);
        b[60..].copy_from_slice(&check.to_le_bytes());
        b
    }

    /// Reads the first [`HEADER_LEN`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let b: &[u8; HEADER_LEN] = bytes.first_chunk().ok_or(FrameError::Short)?;
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        if crc32c(&b[..60]) != u32_at(60) {
            return Err(FrameError::HeaderCheck);
        }
        if u32_at(0) != MAGIC {
            return Err(FrameError::Magic);
        }
        let kind = Kind::from_u8(b[4]).ok_or(FrameError::Kind(b[4]))?;
        if u32_at(52) != 0 {
            return Err(FrameError::Reserved);
        }
        let len = u32_at(48);
        if len > PAYLOAD_MAX {
            return Err(FrameError::TooLong(len));
        }
        if kind == Kind::Refused && Refusal::from_code(b[5]).is_none() {
            return Err(FrameError::Code(b[5]));
        }
        let mut key = [0u8; 16];
        key.copy_from_slice(&b[16..32]);
        Ok(Self {
            kind,
            code: b[5],
            count: u16::from_le_bytes([b[6], b[7]]),
            op: u64_at(8),
            key: RegionKey::from_bytes(key),
            epoch: u64_at(32),
            offset: u64_at(40),
            len,
            payload_crc: u32_at(56),
        })
    }
}

/// Appends one span of a list.
pub fn encode_span(offset: u64, len: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Reads a list of `count` spans, replacing what is in `out`, and gives its total bytes. What it
/// refuses is what a peer must be told: empty spans, a list of another length, or too much.
///
/// `local_off` of the result repeats `remote_off`: both name the reader's own memory.
pub fn decode_spans(list: &[u8], count: u16, out: &mut Vec<Span>) -> Result<u64, Refusal> {
    out.clear();
    if usize::from(count) > SPANS_MAX {
        return Err(Refusal::TooLarge);
    }
    if count == 0 || list.len() != usize::from(count) * SPAN_LEN {
        return Err(Refusal::BadRequest);
    }
    let mut total = 0u64;
    for s in list.chunks_exact(SPAN_LEN) {
        let (offset, len) = s.split_at(8);
        let offset = u64::from_le_bytes(offset.try_into().unwrap_or_default());
        let len = u64::from(u32::from_le_bytes(len.try_into().unwrap_or_default()));
        if len == 0 {
            return Err(Refusal::BadRequest);
        }
        if offset.checked_add(len).is_none() {
            return Err(Refusal::OutOfRange);
        }
        total += len;
        out.push(Span {
            remote_off: offset,
            local_off: offset,
            len,
        });
    }
    if total > REQUEST_BYTES_MAX {
        return Err(Refusal::TooLarge);
    }
    Ok(total)
}

/// Bytes of a pair of runs in a Pull's list.
pub const PAIR_LEN: usize = 20;

const _: () = assert!(SPANS_MAX * PAIR_LEN <= PIECE_MAX);

/// Appends one pair of runs: where in the target, where in the offered memory, how long.
pub fn encode_pair(s: &Span, out: &mut Vec<u8>) {
    out.extend_from_slice(&s.remote_off.to_le_bytes());
    out.extend_from_slice(&s.local_off.to_le_bytes());
    out.extend_from_slice(&(s.len as u32).to_le_bytes());
}

/// As [`decode_spans`], for the pairs of a Pull: `remote_off` is in the target's region, `local_off`
/// in the memory offered to it.
pub fn decode_pairs(list: &[u8], count: u16, out: &mut Vec<Span>) -> Result<u64, Refusal> {
    out.clear();
    if usize::from(count) > SPANS_MAX {
        return Err(Refusal::TooLarge);
    }
    if count == 0 || list.len() != usize::from(count) * PAIR_LEN {
        return Err(Refusal::BadRequest);
    }
    let mut total = 0u64;
    let word = |b: &[u8]| u64::from_le_bytes(b.try_into().unwrap_or_default());
    for p in list.chunks_exact(PAIR_LEN) {
        let (remote_off, local_off) = (word(&p[..8]), word(&p[8..16]));
        let len = u64::from(u32::from_le_bytes(p[16..].try_into().unwrap_or_default()));
        if len == 0 {
            return Err(Refusal::BadRequest);
        }
        if remote_off.checked_add(len).is_none() || local_off.checked_add(len).is_none() {
            return Err(Refusal::OutOfRange);
        }
        total += len;
        out.push(Span {
            remote_off,
            local_off,
            len,
        });
    }
    if total > REQUEST_BYTES_MAX {
        return Err(Refusal::TooLarge);
    }
    Ok(total)
}

/// What a Mapped frame's payload says of the two descriptors that come with it: the region's, and
/// the words' that tell which grants are alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// The region's name in the owner's process.
    pub region: u64,
    /// Its length, bytes.
    pub region_len: u64,
    /// Length of the words' memory, bytes.
    pub words_len: u64,
    /// Which word to watch, as an offset in bytes.
    pub word: u64,
    /// What it holds while the grant is alive.
    pub ticket: u64,
}

impl Mapping {
    /// Bytes of the wire form: five little-endian words.
    pub const WIRE_LEN: usize = 40;

    /// The wire form.
    pub fn encode(&self) -> [u8; Self::WIRE_LEN] {
        let words = [
            self.region,
            self.region_len,
            self.words_len,
            self.word,
            self.ticket,
        ];
        let mut out = [0; Self::WIRE_LEN];
        out.chunks_exact_mut(8)
            .zip(words)
            .for_each(|(b, w)| b.copy_from_slice(&w.to_le_bytes()));
        out
    }

    /// Reads it; refuses lengths and places that make no sense.
    pub fn decode(bytes: &[u8]) -> Result<Self, Refusal> {
        let b: &[u8; Self::WIRE_LEN] = bytes.try_into().map_err(|_| Refusal::BadRequest)?;
        let mut words = b
            .chunks_exact(8)
            .map(|w| u64::from_le_bytes(w.try_into().unwrap_or_default()));
        let mut next = || words.next().unwrap_or_default();
        let m = Self {
            region: next(),
            region_len: next(),
            words_len: next(),
            word: next(),
            ticket: next(),
        };
        let inside = m.word.checked_add(8).is_some_and(|end| end <= m.words_len);
        if m.region_len == 0 || !m.word.is_multiple_of(8) || !inside || m.ticket == 0 {
            return Err(Refusal::BadRequest);
        }
        Ok(m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn crc_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let mut c = Crc::new();
        c.update(b"1234");
        c.update(b"56789");
        assert_eq!(c.value(), 0xe306_9283);
        c.reset();
        c.update(&[0u8; 32]);
        assert_eq!(c.value(), 0x8a91_36aa, "RFC 3720 B.4");
    }

    /// A header with one field changed *and* its check made right again.
    fn forged(at: usize, to: &[u8]) -> Result<Header, FrameError> {
        let mut b = Header::refused(1, Refusal::Busy).encode();
        b[at..at + to.len()].copy_from_slice(to);
        let check = crc32c(&b[..60]);
        b[60..].copy_from_slice(&check.to_le_bytes());
        Header::decode(&b)
    }

    #[test]
    fn each_thing_that_can_be_wrong_with_a_header_has_its_error() {
        let good = Header::refused(7, Refusal::Busy).encode();
        assert_eq!(Header::decode(&good[..63]), Err(FrameError::Short));
        for bit in 0..512 {
            let mut b = good;
            b[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Header::decode(&b),
                Err(FrameError::HeaderCheck),
                "bit {bit}"
            );
        }
        assert_eq!(forged(0, b"HTTP"), Err(FrameError::Magic));
        assert_eq!(forged(4, &[0]), Err(FrameError::Kind(0)));
        assert_eq!(forged(4, &[16]), Err(FrameError::Kind(16)));
        assert_eq!(forged(5, &[99]), Err(FrameError::Code(99)));
        assert_eq!(forged(52, &[1]), Err(FrameError::Reserved));
        assert_eq!(
            forged(48, &u32::MAX.to_le_bytes()),
            Err(FrameError::TooLong(u32::MAX))
        );
    }

    #[test]
    fn span_lists_are_bounded() {
        let mut out = Vec::new();
        let list = |spans: &[(u64, u32)]| {
            let mut b = Vec::new();
            spans.iter().for_each(|&(o, l)| encode_span(o, l, &mut b));
            b
        };
        let two = list(&[(5, 6), (1 << 40, 9)]);
        assert_eq!(decode_spans(&two, 2, &mut out), Ok(15));
        assert_eq!(
            out[1],
            Span {
                remote_off: 1 << 40,
                local_off: 1 << 40,
                len: 9
            }
        );
        assert_eq!(decode_spans(&two, 1, &mut out), Err(Refusal::BadRequest));
        assert_eq!(decode_spans(&[], 0, &mut out), Err(Refusal::BadRequest));
        assert_eq!(
            decode_spans(&list(&[(5, 0)]), 1, &mut out),
            Err(Refusal::BadRequest)
        );
        assert_eq!(
            decode_spans(&list(&[(u64::MAX, 1)]), 1, &mut out),
            Err(Refusal::OutOfRange)
        );
        assert_eq!(
            decode_spans(&list(&[(0, 1 << 20), (0, 1)]), 2, &mut out),
            Err(Refusal::TooLarge)
        );
        assert_eq!(
            decode_spans(&[], u16::MAX, &mut out),
            Err(Refusal::TooLarge)
        );
        assert_eq!(Refusal::from_code(0), None);
        assert_eq!(Refusal::from_code(12), None);
    }

    #[test]
    fn pairs_and_mappings_are_bounded() {
        let mut out = Vec::new();
        let list = |pairs: &[(u64, u64, u64)]| {
            let mut b = Vec::new();
            for &(remote_off, local_off, len) in pairs {
                encode_pair(
                    &Span {
                        remote_off,
                        local_off,
                        len,
                    },
                    &mut b,
                );
            }
            b
        };
        let two = list(&[(5, 6, 7), (8, 9, 10)]);
        assert_eq!(decode_pairs(&two, 2, &mut out), Ok(17));
        assert_eq!(
            out[1],
            Span {
                remote_off: 8,
                local_off: 9,
                len: 10
            }
        );
        assert_eq!(decode_pairs(&two, 1, &mut out), Err(Refusal::BadRequest));
        assert_eq!(
            decode_pairs(&list(&[(1, 1, 0)]), 1, &mut out),
            Err(Refusal::BadRequest)
        );
        assert_eq!(
            decode_pairs(&list(&[(1, u64::MAX, 1)]), 1, &mut out),
            Err(Refusal::OutOfRange)
        );
        assert_eq!(
            decode_pairs(&list(&[(0, 0, 1 << 21)]), 1, &mut out),
            Err(Refusal::TooLarge)
        );
        assert_eq!(
            decode_pairs(&[], u16::MAX, &mut out),
            Err(Refusal::TooLarge)
        );
        let m = Mapping {
            region: 1,
            region_len: 2,
            words_len: 16,
            word: 8,
            ticket: 3,
        };
        assert_eq!(Mapping::decode(&m.encode()), Ok(m));
        for bad in [
            Mapping { region_len: 0, ..m },
            Mapping { word: 16, ..m },
            Mapping { word: 4, ..m },
            Mapping {
                word: u64::MAX - 7,
                ..m
            },
            Mapping { ticket: 0, ..m },
        ] {
            assert_eq!(Mapping::decode(&bad.encode()), Err(Refusal::BadRequest));
        }
        assert_eq!(Mapping::decode(&m.encode()[1..]), Err(Refusal::BadRequest));
    }

    proptest! {
        #[test]
        fn headers_survive_the_wire(
            kind in 1u8..=15, count: u16, op: u64, key: [u8; 16], epoch: u64, offset: u64,
            len in 0u32..=PAYLOAD_MAX, payload_crc: u32, code in 1u8..=11,
        ) {
            let kind = Kind::from_u8(kind).unwrap();
            let key = RegionKey::from_bytes(key);
            let h = Header { kind, code, count, op, key, epoch, offset, len, payload_crc };
            prop_assert_eq!(Header::decode(&h.encode()), Ok(h));
        }

        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), count: u16) {
            let _ = Header::decode(&bytes);
            let _ = decode_spans(&bytes, count, &mut Vec::new());
            let _ = decode_pairs(&bytes, count, &mut Vec::new());
            let _ = Mapping::decode(&bytes);
            let _ = crate::mem::RemoteRegion::decode(&bytes);
        }
    }
}
