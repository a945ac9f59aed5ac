use std::fmt;

/// The right to ask for a region: 128 bits from the system's generator, so it cannot be guessed.
///
/// Equality takes the same time whatever the bytes are. `Debug` shows 16 of the 128 bits only, so
/// that logs do not hand out rights.
#[derive(Clone, Copy)]
pub struct RegionKey([u8; 16]);

impl RegionKey {
    /// Draws a new key. Fails only where the system has no entropy source.
    pub fn random() -> Result<Self, crate::mem::MemError> {
        let mut bytes = [0u8; 16];
        getrandom::fill(&mut bytes).map_err(|e| crate::mem::MemError::System {
            call: "getrandom",
            errno: e.raw_os_error().unwrap_or(0),
        })?;
        Ok(Self(bytes))
    }

    /// The key in wire form.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// A key from wire form; any 16 bytes are a key, few are one that somebody honours.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl PartialEq for RegionKey {
    fn eq(&self, other: &Self) -> bool {
        let difference = u128::from_ne_bytes(self.0) ^ u128::from_ne_bytes(other.0);
        // One comparison of the whole word: no early exit at the first differing byte.
        std::hint::black_box(difference) == 0
    }
}

impl Eq for RegionKey {}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RegionKey({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// What a peer must know to reach a registered region: handed out by the owner, sent over a control
/// channel, presented with each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteRegion {
    /// The right to ask.
    pub key: RegionKey,
    /// Address of the region's first byte in the path's own address space; 0 where the path
    /// addresses by offset (`local`, `shm`, `tcp`).
    pub base: u64,
    /// Length of the region, bytes.
    pub len: u64,
    /// The epoch this grant belongs to; it dies when the owner moves to the next one.
    pub epoch: u64,
}

/// A [`RemoteRegion`] that could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RemoteRegionError {
    /// The encoding has exactly [`RemoteRegion::WIRE_LEN`] bytes.
    #[error("a remote region takes {} bytes, got {got}", RemoteRegion::WIRE_LEN)]
    Length {
        /// Bytes given.
        got: usize,
    },
    /// Not this encoding, or a version we do not know.
    #[error("unknown remote region tag {0:#010x}")]
    Tag(u32),
    /// An empty region, or one whose end overflows 64 bits.
    #[error("a remote region at {base:#x} cannot have {len} bytes")]
    Range {
        /// First address.
        base: u64,
        /// Length, bytes.
        len: u64,
    },
}

impl RemoteRegion {
    /// Bytes of the wire form: tag 4, key 16, base 8, len 8, epoch 8; little-endian.
    pub const WIRE_LEN: usize = 44;
    const TAG: u32 = u32::from_le_bytes(*b"MLR1");

    /// The wire form.
    pub fn encode(&self) -> [u8; Self::WIRE_LEN] {
        let mut out = [0u8; Self::WIRE_LEN];
        out[..4].copy_from_slice(&Self::TAG.to_le_bytes());
        out[4..20].copy_from_slice(&self.key.0);
        out[20..28].copy_from_slice(&self.base.to_le_bytes());
        out[28..36].copy_from_slice(&self.len.to_le_bytes());
        out[36..44].copy_from_slice(&self.epoch.to_le_bytes());
        out
    }

    /// Reads the wire form; exactly [`Self::WIRE_LEN`] bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, RemoteRegionError> {
        let b: &[u8; Self::WIRE_LEN] = bytes
            .try_into()
            .map_err(|_| RemoteRegionError::Length { got: bytes.len() })?;
        let word = |at: usize| u64::from_le_bytes(b[at..at + 8].try_into().expect("8 bytes"));
        let tag = u32::from_le_bytes(b[..4].try_into().expect("4 bytes"));
        if tag != Self::TAG {
            return Err(RemoteRegionError::Tag(tag));
        }
        let (base, len, epoch) = (word(20), word(28), word(36));
        if len == 0 || base.checked_add(len).is_none() {
            return Err(RemoteRegionError::Range { base, len });
        }
        let key = RegionKey(b[4..20].try_into().expect("16 bytes"));
        Ok(Self {
            key,
            base,
            len,
            epoch,
        })
    }
}
