//! The frame header: 32 bytes, little-endian, pure codec.
//!
//! ```text
//!  0  magic       "MLW1"
//!  4  version     u8 = 1
//!  5  reserved    u8 = 0
//!  6  kind        u16, the room's own
//!  8  flags       u32, the room's own
//! 12  len         u32, payload bytes
//! 16  id          u64, request id
//! 24  payload_crc u32, CRC-32C of the payload
//! 28  header_crc  u32, CRC-32C of bytes 0..28
//! ```

use super::error::Corrupt;
use std::io::IoSlice;

/// Bytes of a header on the wire.
pub const HEADER_BYTES: usize = 32;
/// First four bytes of each frame.
pub const MAGIC: [u8; 4] = *b"MLW1";
/// The only version there is.
pub const VERSION: u8 = 1;

/// What stands before each payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Message kind; its meaning belongs to the room that speaks.
    pub kind: u16,
    /// Message flags; their meaning belongs to the room that speaks.
    pub flags: u32,
    /// Payload bytes.
    pub len: u32,
    /// Request id, echoed by answers.
    pub id: u64,
    /// CRC-32C of the payload.
    pub payload_crc: u32,
}

impl FrameHeader {
    /// The header as it travels.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC);
        out[4] = VERSION;
        out[6..8].copy_from_slice(&self.kind.to_le_bytes());
        out[8..12].copy_from_slice(&self.flags.to_le_bytes());
        out[12..16].copy_from_slice(&self.len.to_le_bytes());
        out[16..24].copy_from_slice(&self.id.to_le_bytes());
        out[24..28].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c(&out[..28]);
        out[28..32].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads a header. The checksum is judged before any field is believed, but after the magic,
    /// so that a peer speaking another protocol is named as such.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Corrupt> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[0..4] != MAGIC {
            return Err(Corrupt::Magic {
                got: [bytes[0], bytes[1], bytes[2], bytes[3]],
            });
        }
        let want = crc32c(&bytes[..28]);
        if word(28) != want {
            return Err(Corrupt::HeaderCrc {
                got: word(28),
                want,
            });
        }
        if bytes[4] != VERSION {
            return Err(Corrupt::Version { got: bytes[4] });
        }
        if bytes[5] != 0 {
            return Err(Corrupt::Reserved { got: bytes[5] });
        }
        Ok(Self {
            kind: u16::from_le_bytes([bytes[6], bytes[7]]),
            flags: word(8),
            len: word(12),
            id: u64::from(word(16)) | u64::from(word(20)) << 32,
            payload_crc: word(24),
        })
    }
}

/// CRC-32C (Castagnoli) of one slice.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// CRC-32C of slices as if they were one.
pub fn crc32c_slices(parts: &[IoSlice<'_>]) -> u32 {
    match parts {
        [] => crc32c(&[]),
        [one] => crc32c(one),
        many => {
            let mut digest = RunningCrc::new();
            for part in many {
                digest.update(part);
            }
            digest.finish()
        }
    }
}

/// CRC-32C over bytes that arrive piece by piece.
#[derive(Debug)]
pub struct RunningCrc(crc_fast::Digest);

impl RunningCrc {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Takes the next bytes in.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    pub fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for RunningCrc {
    fn default() -> Self {
        Self::new()
    }
}
