//! What can go wrong while hashing.

use super::Scheme;
use crate::id::ErrorKind;
use crate::page::PageError;

/// Errors of this room.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// The view, layout or header does not fit.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The scheme needs every layer and head in one place; a shard does not have them.
    #[error(
        "{0} hashes the whole page at once and cannot be combined from shards: use blake3-leaves"
    )]
    NeedsWholePage(Scheme),
    /// The scheme has no incremental form.
    #[error(
        "{0} has no per-leaf state, so a growing tail cannot be hashed with it: use blake3-leaves"
    )]
    NotIncremental(Scheme),
    /// Two ranks that hold the same head disagree about its bytes.
    #[error("replicas of layer {layer} head {head} differ")]
    ReplicaMismatch {
        /// Global layer id.
        layer: u32,
        /// Global KV head id.
        head: u32,
    },
    /// Pages or slots must be pushed in order, without gaps.
    #[error("{what} {got} pushed, {want} is next")]
    OutOfOrder {
        /// `page` or `slot`.
        what: &'static str,
        /// Pushed.
        got: u64,
        /// Expected.
        want: u64,
    },
    /// A tail was given that the token count leaves no room for, or twice.
    #[error("group {group} has no tail page at this length, or its tail was given twice")]
    UnexpectedTail {
        /// Group number.
        group: u16,
    },
    /// Sealed pages and tail do not add up to the token count claimed.
    #[error("group {group} has {have} tokens hashed, {want} claimed")]
    TokenCount {
        /// Group number.
        group: u16,
        /// Tokens covered by the pages pushed and the tail.
        have: u64,
        /// Tokens claimed.
        want: u64,
    },
}

impl DigestError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Page(e) => e.kind(),
            Self::NeedsWholePage(_) | Self::NotIncremental(_) => ErrorKind::Unsupported,
            Self::ReplicaMismatch { .. } => ErrorKind::Integrity,
            Self::OutOfOrder { .. } | Self::UnexpectedTail { .. } | Self::TokenCount { .. } => {
                ErrorKind::Caller
            }
        }
    }
}
