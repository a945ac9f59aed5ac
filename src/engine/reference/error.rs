//! Errors of the reference engine's serving side.

use crate::id::{ErrorKind, RequestId};

/// Why the engine refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The request can never be served by this engine as configured.
    #[error("{what}: {value} is outside {bounds}")]
    OutOfRange {
        /// Which argument.
        what: &'static str,
        /// What was given.
        value: String,
        /// What is accepted.
        bounds: String,
    },
    /// More KV than the whole pool holds.
    #[error(
        "needs {need} blocks of KV, the pool has {have}: shorten the prompt or max_output, or start the worker with more blocks"
    )]
    NeverFits {
        /// Blocks the request needs at its longest.
        need: u64,
        /// Blocks of the pool.
        have: u64,
    },
    /// The waiting queue is full; retry later or elsewhere.
    #[error("{waiting} requests wait already: retry later or on another worker")]
    QueueFull {
        /// Length of the queue.
        waiting: usize,
    },
    /// No block is free right now.
    #[error("{need} blocks needed, {free} free and unpromised: retry when requests have ended")]
    OutOfBlocks {
        /// Blocks asked for.
        need: u64,
        /// Blocks neither used nor promised.
        free: u64,
    },
    /// A request of that name is in the engine.
    #[error("request {0} is in the engine already: name each request once")]
    Duplicate(RequestId),
    /// No request of that name is in the engine.
    #[error("request {0} is not in this engine")]
    UnknownRequest(RequestId),
    /// A grammar that could not be compiled within its bounds.
    #[error("grammar refused: {0}")]
    Grammar(String),
    /// A file that is no usable model.
    #[error("model refused: {0}")]
    Model(String),
    /// A file could not be read.
    #[error("cannot read {path}: {error}")]
    Io {
        /// Which file.
        path: String,
        /// What the system said.
        error: String,
    },
    /// Memory for the pool could not be had, or a block was busy for too long.
    #[error("KV pool: {0}")]
    Pool(String),
    /// The configuration is wrong.
    #[error("configuration: {0}")]
    Config(String),
    /// The engine has been shut down.
    #[error("the engine has been shut down")]
    ShutDown,
    /// An invariant of ours is broken.
    #[error("bug: {0}")]
    Bug(String),
}

impl EngineError {
    /// What the caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OutOfRange { .. }
            | Self::NeverFits { .. }
            | Self::Duplicate(_)
            | Self::UnknownRequest(_)
            | Self::Grammar(_)
            | Self::Config(_)
            | Self::Io { .. } => ErrorKind::Caller,
            Self::Model(_) => ErrorKind::Unsupported,
            Self::QueueFull { .. } | Self::OutOfBlocks { .. } | Self::Pool(_) => {
                ErrorKind::Retryable
            }
            Self::ShutDown => ErrorKind::PeerLost,
            Self::Bug(_) => ErrorKind::Bug,
        }
    }
}
