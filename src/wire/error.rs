//! What can go wrong on a framed socket.

use super::endpoint::EndpointError;
use super::frame::FrameHeader;
use crate::id::ErrorKind;
use std::fmt;
use std::time::Duration;

/// A header that cannot be believed. The connection ends: frame borders are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Corrupt {
    /// Not our protocol.
    #[error("frame starts with {got:02x?}, not MLW1: the peer speaks another protocol")]
    Magic {
        /// The four bytes read.
        got: [u8; 4],
    },
    /// Header bytes changed on the way.
    #[error("header checksum {got:08x}, computed {want:08x}: bytes changed on the way")]
    HeaderCrc {
        /// As received.
        got: u32,
        /// As computed.
        want: u32,
    },
    /// A peer of another release.
    #[error("frame version {got}, this build speaks 1: upgrade the older side")]
    Version {
        /// As received.
        got: u8,
    },
    /// A byte that must be zero is not.
    #[error("reserved header byte is {got}, must be 0: the peer is newer or broken")]
    Reserved {
        /// As received.
        got: u8,
    },
}

/// What a call was doing when its deadline passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Connecting.
    Connect,
    /// Waiting for a peer to connect.
    Accept,
    /// Waiting for another thread's frame to leave the shared send half.
    Lock,
    /// Writing a frame.
    Send,
    /// Waiting for a frame.
    Recv,
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Doing::Connect => "connecting",
            Doing::Accept => "waiting for a peer to connect",
            Doing::Lock => "waiting for the shared send half",
            Doing::Send => "sending a frame",
            Doing::Recv => "waiting for a frame",
        })
    }
}

/// An error of the wire room.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The deadline passed. A receive may be called again and goes on where it was. A send had
    /// written nothing if `partial` is false; otherwise the half is broken.
    #[error("deadline passed while {doing}")]
    Timeout {
        /// Which wait.
        doing: Doing,
        /// A frame had begun to move.
        partial: bool,
    },
    /// The peer closed or died.
    #[error("peer closed the connection{}", if *mid_frame { " in the middle of a frame" } else { "" })]
    Closed {
        /// Bytes of an unfinished frame were lost.
        mid_frame: bool,
    },
    /// This side was closed through a [`Closer`](super::Closer).
    #[error("closed by this side")]
    ClosedHere,
    /// The header cannot be believed; the connection is unusable.
    #[error("corrupt frame header: {0}")]
    Corrupt(#[from] Corrupt),
    /// The payload is not what was sent; the next frame can still be received.
    #[error("payload of frame kind {} id {} fails its checksum: bytes changed on the way", header.kind, header.id)]
    Payload {
        /// Of the frame that failed.
        header: FrameHeader,
    },
    /// The peer announces more than this connection allows; the connection is unusable.
    #[error("peer announces a frame of {len} bytes, this connection allows {max}")]
    FrameTooLong {
        /// Announced payload bytes.
        len: u32,
        /// Allowed payload bytes.
        max: u32,
    },
    /// The caller's own frame exceeds the limit; nothing was sent.
    #[error("frame of {len} bytes is over the limit of {max}: split it")]
    PayloadTooLong {
        /// Payload bytes asked for.
        len: usize,
        /// Allowed payload bytes.
        max: u32,
    },
    /// A frame began and did not end in time (slowloris); the connection is unusable.
    #[error("a frame begun is not complete after {allowed:?}: peer too slow or stalled")]
    TooSlow {
        /// Time granted to one frame.
        allowed: Duration,
    },
    /// An earlier failure left this half unusable: connect again.
    #[error("connection is unusable after an earlier failure: connect again")]
    Broken,
    /// Listening where other machines can reach it must be asked for by name.
    #[error(
        "refusing to listen on {addr}: not a loopback address; allow it by name if that is meant"
    )]
    NotLoopback {
        /// As asked for.
        addr: String,
    },
    /// The address is taken by a living process.
    #[error("{endpoint} is in use by a living process: stop it or choose another endpoint")]
    InUse {
        /// As asked for.
        endpoint: String,
    },
    /// The endpoint text is wrong.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The operating system refused.
    #[error("{op}: {}", std::io::Error::from_raw_os_error(*errno))]
    Io {
        /// The call.
        op: &'static str,
        /// As the kernel gave it.
        errno: i32,
    },
}

impl WireError {
    pub(super) fn io(op: &'static str, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::PIPE | Errno::CONNRESET | Errno::CONNABORTED => {
                Self::Closed { mid_frame: false }
            }
            other => Self::Io {
                op,
                errno: other.raw_os_error(),
            },
        }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Timeout { .. } | Self::InUse { .. } | Self::TooSlow { .. } => {
                ErrorKind::Retryable
            }
            Self::Closed { .. } | Self::ClosedHere | Self::Broken => ErrorKind::PeerLost,
            Self::Corrupt(Corrupt::Version { .. }) => ErrorKind::Unsupported,
            Self::Corrupt(_) | Self::Payload { .. } => ErrorKind::Integrity,
            Self::FrameTooLong { .. } => ErrorKind::Unsupported,
            Self::PayloadTooLong { .. } | Self::NotLoopback { .. } | Self::Endpoint(_) => {
                ErrorKind::Caller
            }
            Self::Io { errno, .. } => match rustix::io::Errno::from_raw_os_error(*errno) {
                rustix::io::Errno::CONNREFUSED
                | rustix::io::Errno::NOENT
                | rustix::io::Errno::HOSTUNREACH
                | rustix::io::Errno::NETUNREACH
                | rustix::io::Errno::TIMEDOUT => ErrorKind::PeerLost,
                rustix::io::Errno::BADF | rustix::io::Errno::FAULT | rustix::io::Errno::NOTSOCK => {
                    ErrorKind::Bug
                }
                _ => ErrorKind::Retryable,
            },
        }
    }
}
