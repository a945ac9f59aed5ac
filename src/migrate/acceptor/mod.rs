//! The token acceptor, inside the gateway: who may append, in which order, and what was journaled.
//!
//! Per request it keeps, durably, `(floor epoch, its owner)` and the log J. It accepts only
//! `seq = J + 1` from the owner of the floor epoch; a higher epoch makes it read the record first.

mod machine;
mod recover;

pub use machine::{Acceptor, Durable};

use super::io::{self, Op, Payload};
use super::msg::Emission;
use crate::id::{OwnerEpoch, WorkerRef};
use crate::route::RoutePhase;

/// What the acceptor is told.
pub type Event = io::Event<Done>;
/// What the acceptor wants done.
pub type Action = io::Action<Do>;

/// Work for the gateway's executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Do {
    /// Append to the journal, after what is there. Answer: `Appended`, once it survives a crash of
    /// the process.
    Append {
        /// Idempotency key.
        op: Op,
        /// The epoch they were accepted under.
        owner_epoch: OwnerEpoch,
        /// Contiguous, from J + 1.
        tokens: Vec<Emission>,
    },
    /// Journal the floor. Answer: `FloorRaised`, once it survives a crash of the process. No token
    /// of a lower epoch is appended after this action.
    RaiseFloor {
        /// Idempotency key.
        op: Op,
        /// The lowest epoch accepted from now on.
        floor: OwnerEpoch,
        /// Its owner.
        owner: WorkerRef,
    },
    /// Journaled through here: the client may have them (D follows J).
    Deliver {
        /// Token number.
        through: u64,
    },
    /// Build the journal's image of the request for its rebuild; it then goes out as the payload of
    /// the `Rebuild` message. Answer: `ImageBuilt`.
    BuildImage {
        /// Idempotency key.
        op: Op,
        /// Tokens `1..=through`.
        through: u64,
    },
    /// Two different tokens claim one number: stop this stream and raise the alarm. Integrity.
    Alarm {
        /// The number.
        seq: u64,
        /// Who sent the second one.
        from: WorkerRef,
    },
    /// The stream has ended and the record says so: the request may be forgotten.
    Closed,
    /// A recovery ended.
    Recovered {
        /// Whether the target owns the request and runs it.
        running: bool,
        /// Phase the record is in.
        phase: RoutePhase,
    },
}

/// What the gateway's executor answers and tells.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Done {
    /// Answer to `Append`: J.
    Appended {
        /// Of which action.
        op: Op,
        /// Tokens `1..=through` are journaled.
        through: u64,
    },
    /// Answer to `RaiseFloor`.
    FloorRaised {
        /// Of which action.
        op: Op,
    },
    /// Answer to `BuildImage`.
    ImageBuilt {
        /// Of which action.
        op: Op,
        /// The image.
        payload: Payload,
    },
    /// The client has received through here (D).
    Delivered {
        /// Token number.
        through: u64,
    },
    /// Unasked: move the request to `target`, its owner is believed dead (a belief is enough:
    /// safety does not rest on it).
    Recover {
        /// Who shall rebuild it. May be the same worker name in a new life.
        target: WorkerRef,
    },
    /// Unasked: the client is gone, end the stream.
    Hangup,
}
