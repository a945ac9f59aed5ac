//! The worker that rebuilds a request from the journal after its owner was lost.
//!
//! The acceptor begins the recovery (record, then floor, then J) and sends `Rebuild`; this machine
//! checks the record, rebuilds, completes the recovery by compare-and-swap, and runs.

mod machine;

pub use machine::Rebuilder;

use super::io::{self, Op, Payload};
use crate::id::OwnerEpoch;
use crate::route::Cause;

/// What the rebuilder is told.
pub type Event = io::Event<Done>;
/// What the rebuilder wants done.
pub type Action = io::Action<Do>;

/// Work for the rebuilder's executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Do {
    /// Rebuild KV and control state from the journal's image; the request stays stopped. Answer:
    /// `Rebuilt`.
    Rebuild {
        /// Idempotency key.
        op: Op,
        /// The image.
        image: Payload,
        /// The epoch it will run under.
        owner_epoch: OwnerEpoch,
        /// The log J.
        journaled: u64,
    },
    /// Run; the next new token is `journaled + 1`. Cannot fail; no answer. The executor makes a
    /// [`super::source::Source`] for the request.
    Activate {
        /// The new epoch.
        owner_epoch: OwnerEpoch,
        /// The log J.
        journaled: u64,
    },
    /// Somebody else was given the request: free what was rebuilt. Cannot fail; idempotent.
    Discard {
        /// The epoch it would have run under.
        owner_epoch: OwnerEpoch,
    },
}

/// What the rebuilder's executor answers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Done {
    /// Answer to `Rebuild`; on an error nothing is held.
    Rebuilt {
        /// Of which action.
        op: Op,
        /// Whether the request is ready to run.
        result: Result<(), Cause>,
    },
}
