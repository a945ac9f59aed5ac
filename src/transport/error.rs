use crate::id::ErrorKind;
use crate::mem::MemError;

/// Why a peer would not serve a request. Its other work goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
pub enum Refusal {
    /// It honours no such key.
    #[error("the peer knows no region under this key: ask it for a grant")]
    UnknownKey = 1,
    /// The grant's epoch is over.
    #[error("the grant's epoch is over: ask the owner for a new grant")]
    StaleEpoch = 2,
    /// A range leaves the region, or touches blocks outside the grant's scope.
    #[error("a range lies outside what the grant covers")]
    OutOfRange = 3,
    /// A get from staging, or a put into read-only memory.
    #[error("the region is not registered for this direction")]
    Access = 4,
    /// More bytes or spans than one request may name.
    #[error("the request is larger than the peer takes")]
    TooLarge = 5,
    /// Somebody else holds the blocks.
    #[error("the blocks are leased to somebody else; retry")]
    Busy = 6,
    /// The blocks are free or quarantined: nobody vouches for their contents.
    #[error("the blocks are free or out of service")]
    NotAllocated = 7,
    /// The payload did not match its check where it arrived.
    #[error("the payload did not match its check at the peer")]
    Integrity = 8,
    /// An empty span or a list that contradicts itself.
    #[error("the peer could not make sense of the request")]
    BadRequest = 9,
    /// We asked for it.
    #[error("the request was withdrawn")]
    Aborted = 10,
    /// This path cannot do that with this region.
    #[error("the peer's path cannot do that with this region")]
    Unsupported = 11,
}

impl Refusal {
    /// The wire form.
    pub fn code(self) -> u8 {
        self as u8
    }

    /// From the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        use Refusal::*;
        [
            UnknownKey,
            StaleEpoch,
            OutOfRange,
            Access,
            TooLarge,
            Busy,
            NotAllocated,
            Integrity,
            BadRequest,
            Aborted,
            Unsupported,
        ]
        .into_iter()
        .find(|r| r.code() == code)
    }
}

/// Why a transfer, or a call about one, failed. Small and `Copy`, so that reporting it allocates
/// nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// The peer refused the request.
    #[error("refused by the peer: {0}")]
    Refused(#[from] Refusal),
    /// The payload of this transfer did not match its check.
    #[error(
        "{} bytes at offset {offset} of the transfer did not match their check; transfer again",
        len
    )]
    Integrity {
        /// Offset of the piece in the transfer, bytes.
        offset: u64,
        /// Length of the piece, bytes.
        len: u32,
    },
    /// The connection broke its own rules and was closed: `what` did not hold. Unfinished transfers
    /// of it can be retried on a new one.
    #[error("connection closed: {what}; connect again")]
    Connection {
        /// The rule that was broken.
        what: &'static str,
    },
    /// The peer closed the connection, or its process is gone.
    #[error("the peer is gone (errno {errno})")]
    PeerLost {
        /// The system's number, 0 for an orderly close.
        errno: i32,
    },
    /// The deadline passed first.
    #[error("the deadline passed before the transfer was done")]
    DeadlineExceeded,
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// Too many transfers in flight on this link: take completions first.
    #[error("{limit} transfers are in flight on this link already; poll first")]
    TooManyInFlight {
        /// The limit.
        limit: usize,
    },
    /// A transfer that contradicts itself.
    #[error("bad transfer: {what}")]
    BadTransfer {
        /// What is wrong with it.
        what: &'static str,
    },
    /// An address of another path, or one that the listener may not take.
    #[error("bad endpoint: {what}")]
    BadEndpoint {
        /// What is wrong with it.
        what: &'static str,
    },
    /// No such registration here.
    #[error("no region is registered under this key")]
    UnknownKey,
    /// This path cannot do that.
    #[error("unsupported: {what}")]
    Unsupported {
        /// What, and what to do instead.
        what: &'static str,
    },
    /// The system refused a call.
    #[error("{call} failed with errno {errno}")]
    System {
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
    /// A block or lease is not what the call needs.
    #[error(transparent)]
    Mem(#[from] MemError),
}

impl TransportError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(r) => match r {
                Refusal::Busy | Refusal::Aborted => ErrorKind::Retryable,
                Refusal::Integrity => ErrorKind::Integrity,
                Refusal::Unsupported => ErrorKind::Unsupported,
                _ => ErrorKind::Caller,
            },
            Self::Integrity { .. } => ErrorKind::Integrity,
            Self::Connection { .. }
            | Self::DeadlineExceeded
            | Self::Cancelled
            | Self::TooManyInFlight { .. } => ErrorKind::Retryable,
            Self::PeerLost { .. } => ErrorKind::PeerLost,
            Self::BadTransfer { .. } | Self::BadEndpoint { .. } | Self::UnknownKey => {
                ErrorKind::Caller
            }
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::System { errno, .. } => match *errno {
                libc::ECONNREFUSED | libc::EAGAIN | libc::EMFILE | libc::ENFILE | libc::ENOMEM => {
                    ErrorKind::Retryable
                }
                libc::ECONNRESET | libc::EPIPE | libc::ETIMEDOUT | libc::ENOENT => {
                    ErrorKind::PeerLost
                }
                _ => ErrorKind::Unsupported,
            },
            Self::Mem(e) => e.kind(),
        }
    }

    pub(super) fn io(call: &'static str, e: &std::io::Error) -> Self {
        Self::System {
            call,
            errno: e.raw_os_error().unwrap_or(0),
        }
    }
}
