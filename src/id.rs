//! Identity: the names and counters that every room may use. Pure data, no I/O, no clock.
//!
//! Three counters must never be mixed up, so each is a type of its own:
//! [`OwnerEpoch`] is the right to append tokens (+1 at each flip or recovery, even to the same
//! worker); [`RouteGeneration`] counts every write of the route record, an abort included, so a
//! compare-and-swap cannot suffer ABA; [`MigrationEpoch`] names one attempt to migrate.

use std::fmt;
use std::str::FromStr;

/// Names one request for its whole life, wherever it runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct RequestId(pub [u8; 16]);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for b in self.0 {
            write!(f, "{b:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

impl FromStr for RequestId {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let bytes = s.as_bytes();
        if bytes.len() != 32 {
            return Err(IdError::RequestId);
        }
        let mut id = [0u8; 16];
        for (out, pair) in id.iter_mut().zip(bytes.chunks_exact(2)) {
            let digit = |c: u8| (c as char).to_digit(16).ok_or(IdError::RequestId);
            *out = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(id))
    }
}

/// An identifier that could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// A request id is 32 hexadecimal digits.
    #[error("not a request id: expected 32 hexadecimal digits")]
    RequestId,
    /// A worker id is 1 to 64 bytes of `[A-Za-z0-9._-]`.
    #[error("not a worker id: expected 1 to 64 characters of A-Z a-z 0-9 . _ -")]
    WorkerId,
}

/// The operator's name of a worker: 1 to [`WorkerId::MAX_BYTES`] bytes of `[A-Za-z0-9._-]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(String);

impl WorkerId {
    /// Longest worker id, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Checks and wraps a name.
    pub fn new(name: impl Into<String>) -> Result<Self, IdError> {
        let name = name.into();
        let ok = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'.' | b'_' | b'-');
        if name.is_empty() || name.len() > Self::MAX_BYTES || !name.bytes().all(ok) {
            return Err(IdError::WorkerId);
        }
        Ok(Self(name))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for WorkerId {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        Self::new(s)
    }
}

/// A nonce drawn at each start of a worker: a restarted worker is another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Incarnation(pub u64);

/// One life of one worker. Rights are granted to this pair, never to a bare name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerRef {
    /// The operator's name.
    pub id: WorkerId,
    /// Which life of it.
    pub incarnation: Incarnation,
}

impl fmt::Display for WorkerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{:x}", self.id, self.incarnation.0)
    }
}

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub u64);

        impl $name {
            /// The next value; counters of this width do not wrap in practice, so this saturates.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0.saturating_add(1))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter! {
    /// The right to append tokens to a request; + 1 at each flip or recovery.
    OwnerEpoch
}
counter! {
    /// One attempt to migrate a request; receivers refuse lower ones than they have seen.
    MigrationEpoch
}
counter! {
    /// + 1 at every write of a route record, abort included.
    RouteGeneration
}

/// What a caller can do about an error, the same for every room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Nothing was lost; the same call may succeed later.
    Retryable,
    /// The other process is gone; retry elsewhere.
    PeerLost,
    /// The device is gone, with the driver's XID where it named one.
    DeviceLost {
        /// NVIDIA XID, if reported.
        xid: Option<u32>,
    },
    /// Bytes differ from what their digest promised.
    Integrity,
    /// This build, machine or request cannot do that; retrying does not help.
    Unsupported,
    /// The arguments are wrong.
    Caller,
    /// An invariant of ours is broken.
    Bug,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_survive_text_and_reject_everything_else() {
        let id = RequestId([0xa5; 16]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for bad in ["", "a5", "zz".repeat(16).as_str(), "é".repeat(16).as_str()] {
            assert_eq!(bad.parse::<RequestId>(), Err(IdError::RequestId));
        }
    }

    #[test]
    fn worker_ids_are_bounded_and_plain() {
        assert!(WorkerId::new("gpu-0.rack_1").is_ok());
        for bad in ["", "a b", "a/b", "é", "x".repeat(65).as_str()] {
            assert_eq!(WorkerId::new(bad), Err(IdError::WorkerId));
        }
    }
}
