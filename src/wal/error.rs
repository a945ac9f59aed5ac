//! What can go wrong below a log.

use crate::id::ErrorKind;

/// The file system refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op} {name}: {}", std::io::Error::from_raw_os_error(*errno))]
pub struct IoError {
    /// The call.
    pub op: &'static str,
    /// The file, or the directory.
    pub name: String,
    /// As the kernel gave it.
    pub errno: i32,
}

impl IoError {
    /// The disk, a quota or a file size limit is exhausted.
    pub fn no_space(&self) -> bool {
        use rustix::io::Errno;
        [Errno::NOSPC, Errno::DQUOT, Errno::FBIG]
            .iter()
            .any(|e| e.raw_os_error() == self.errno)
    }
}

/// An error of the wal room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WalError {
    /// The file system refused.
    #[error(transparent)]
    Io(#[from] IoError),
    /// Another process has the directory.
    #[error("{dir} is in use by another process: stop it, or name another directory")]
    Locked {
        /// The directory.
        dir: String,
    },
    /// A record that had been acknowledged is damaged.
    #[error(
        "{file} is damaged at byte {offset} ({what}): acknowledged records are lost. Restore the \
         directory from a copy; or, to start empty, move it away"
    )]
    Damaged {
        /// The file.
        file: String,
        /// Where the damaged record begins.
        offset: u64,
        /// What does not fit.
        what: String,
    },
    /// The file was written by another release or is none of ours.
    #[error(
        "{file} is no log of this release ({what}): name another directory, or use the release that wrote it"
    )]
    Foreign {
        /// The file.
        file: String,
        /// What does not fit.
        what: String,
    },
}

impl WalError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io(_) | Self::Locked { .. } => ErrorKind::Retryable,
            Self::Damaged { .. } => ErrorKind::Integrity,
            Self::Foreign { .. } => ErrorKind::Unsupported,
        }
    }
}
