//! What can go wrong with a metadata store.

use super::types::{MAX_KEY, MAX_VALUE};
use crate::id::ErrorKind;

/// An error of the metastore room. Only [`InDoubt`](Self::InDoubt) leaves open whether a change
/// was made; all others say that this call changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The change may or may not have been made, and may still be made: read the record, or retry
    /// with the same operation id, before acting on either.
    #[error("outcome unknown ({cause}): read the record before acting")]
    InDoubt {
        /// How the answer was lost.
        cause: String,
    },
    /// The store could not be asked, or could not take the change. Nothing was changed.
    #[error("store unavailable ({cause}): nothing was changed; try again")]
    Unavailable {
        /// What stood in the way.
        cause: String,
    },
    /// A write or flush failed earlier: what is on disk is no longer known, so nothing is served
    /// until the store's process restarts and recovers from its log.
    #[error("store is poisoned ({cause}): restart its process, which recovers from the log")]
    Poisoned {
        /// The failure.
        cause: String,
    },
    /// The store is as large as it was allowed to become.
    #[error("store is full: {bytes} bytes of records, {max} allowed; delete records or allow more")]
    Full {
        /// Bytes that its records take.
        bytes: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// Keys have 1 to [`MAX_KEY`] bytes.
    #[error("key of {len} bytes: a key has 1 to {MAX_KEY}")]
    Key {
        /// As given.
        len: usize,
    },
    /// Values have up to [`MAX_VALUE`] bytes.
    #[error("value of {len} bytes: a value has up to {MAX_VALUE}")]
    Value {
        /// As given.
        len: usize,
    },
    /// The peer does not speak this protocol, or speaks it wrongly.
    #[error("the peer does not answer as a store of this release does: {what}")]
    Protocol {
        /// What was wrong.
        what: String,
    },
    /// The log or its directory cannot be used.
    #[error(transparent)]
    Log(#[from] crate::wal::WalError),
}

impl StoreError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::InDoubt { .. } | Self::Unavailable { .. } | Self::Full { .. } => {
                ErrorKind::Retryable
            }
            Self::Poisoned { .. } => ErrorKind::PeerLost,
            Self::Key { .. } | Self::Value { .. } => ErrorKind::Caller,
            Self::Protocol { .. } => ErrorKind::Unsupported,
            Self::Log(e) => e.kind(),
        }
    }

    /// True if the outcome of a change is unknown.
    pub fn in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt { .. })
    }
}
