//! The digest that a destination's re-export must match.

use crate::id::OwnerEpoch;
use sha2::{Digest, Sha256};
use std::fmt;

/// `ControlDigestV1`: what a control state hashes to, at which token, under which ownership.
///
/// The three parts are compared as fields of their own (`==` does just that), so a state of the
/// right bytes at the wrong token, or of a past owner, is told apart by name and not only by hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ControlDigest {
    /// The first 16 bytes of SHA-256 over the encoding.
    pub hash: [u8; 16],
    /// The seal: output tokens numbered at FENCED, from 1.
    pub offset: u64,
    /// The ownership under which those tokens were numbered.
    pub owner_epoch: OwnerEpoch,
}

impl ControlDigest {
    /// Digests an encoding as it stands; it is not decoded here.
    pub fn of(encoding: &[u8], offset: u64, owner_epoch: OwnerEpoch) -> Self {
        let full: [u8; 32] = Sha256::digest(encoding).into();
        let mut hash = [0; 16];
        hash.copy_from_slice(&full[..16]);
        Self {
            hash,
            offset,
            owner_epoch,
        }
    }

    /// Which part differs first from `other`, for a message; `None` when equal.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.owner_epoch != other.owner_epoch {
            Some("owner epoch")
        } else if self.offset != other.offset {
            Some("offset")
        } else if self.hash != other.hash {
            Some("state hash")
        } else {
            None
        }
    }
}

impl fmt::Debug for ControlDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlDigest(")?;
        for b in self.hash {
            write!(f, "{b:02x}")?;
        }
        write!(f, " @{} epoch {})", self.offset, self.owner_epoch)
    }
}
