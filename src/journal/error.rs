//! What the journal refuses, and what can go wrong with it.

use crate::id::{ErrorKind, OwnerEpoch, RequestId};
use crate::wal::WalError;

/// Why a call was not carried out. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The epoch's right to append has passed to a higher one.
    #[error("epoch {epoch} may no longer append: the floor is {floor}")]
    Fenced {
        /// The epoch that tried.
        epoch: OwnerEpoch,
        /// The lowest one accepted.
        floor: OwnerEpoch,
    },
    /// The epoch is not known here yet: read the route record, then raise the floor.
    #[error(
        "epoch {epoch} is above the floor {floor}: read the route record and raise the floor first"
    )]
    AboveFloor {
        /// The epoch that tried.
        epoch: OwnerEpoch,
        /// The floor as it is.
        floor: OwnerEpoch,
    },
    /// Two owners claim one epoch.
    #[error("epoch {floor} already belongs to {owner}")]
    FloorTaken {
        /// The floor.
        floor: OwnerEpoch,
        /// Whose it is.
        owner: String,
    },
    /// Tokens are missing before these.
    #[error("token {got} does not follow: the next is {next}")]
    Gap {
        /// The number expected.
        next: u64,
        /// The number given.
        got: u64,
    },
    /// A number is taken by a different token: the request's history has forked.
    #[error("token {seq} differs from the one journaled under that number")]
    Conflict {
        /// The number.
        seq: u64,
    },
    /// The stream has ended.
    #[error("token {seq} was the stream's last")]
    Finished {
        /// The last number.
        seq: u64,
    },
    /// More was delivered than was journaled.
    #[error("token {seq} cannot have been delivered: the log ends at {journaled}")]
    BeyondLog {
        /// The number claimed.
        seq: u64,
        /// J.
        journaled: u64,
    },
    /// No such request, or it was forgotten.
    #[error("request {0} is not journaled: raise its floor first")]
    Unknown(RequestId),
    /// One call brings too much.
    #[error("{bytes} bytes in one append, {max} allowed: split it")]
    TooLarge {
        /// Bytes given.
        bytes: usize,
        /// Bytes allowed.
        max: usize,
    },
}

/// An error of the journal room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// See [`Refusal`].
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// There is no room now, on the disk or in the journal. Nothing was accepted.
    #[error("journal cannot take more now ({cause}): nothing was accepted; try again")]
    Unavailable {
        /// What stood in the way.
        cause: String,
    },
    /// A write or flush failed earlier: what is on disk is no longer known.
    #[error("journal is poisoned ({cause}): restart its process, which recovers from the log")]
    Poisoned {
        /// The failure.
        cause: String,
    },
    /// The log or its directory cannot be used.
    #[error(transparent)]
    Log(#[from] WalError),
}

impl JournalError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(Refusal::Conflict { .. } | Refusal::FloorTaken { .. }) => {
                ErrorKind::Integrity
            }
            Self::Refused(_) => ErrorKind::Caller,
            Self::Unavailable { .. } => ErrorKind::Retryable,
            Self::Poisoned { .. } => ErrorKind::PeerLost,
            Self::Log(e) => e.kind(),
        }
    }
}
