//! The source: the worker that owns the request.
//!
//! It serves all through STREAM. After the fence it may go on only when the record says that the
//! attempt was aborted, and frees only when the record says who owns the request.

mod attempt;
mod machine;

pub use machine::Source;

use super::io::{self, Op, Payload};
use super::msg::{Emission, PageClaim};
use crate::id::{MigrationEpoch, OwnerEpoch};
use crate::route::{Cause, ControlSeal};

/// What the source is told.
pub type Event = io::Event<Done>;
/// What the source wants done.
pub type Action = io::Action<Do>;

/// Work for the source's executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Do {
    /// Pin the request's blocks, open them for reading by the destination, and describe them.
    /// Answer: `Pinned`.
    Pin {
        /// Idempotency key.
        op: Op,
        /// The attempt the pin and the grant belong to.
        epoch: MigrationEpoch,
    },
    /// Promise that written slots stay. Answer: `Sealed`.
    Seal {
        /// Idempotency key.
        op: Op,
    },
    /// Hash source-resident pages that overlap tokens `from..to`. Answer: `Hashed`, whose payload
    /// carries the token ids of that range.
    Hash {
        /// Idempotency key.
        op: Op,
        /// First token.
        from: u64,
        /// One past the last.
        to: u64,
        /// Shares to hash, as the destination's ranks hold them.
        replicas: u16,
    },
    /// Stop the request at a step boundary. Answer: `Held`.
    Hold {
        /// Idempotency key.
        op: Op,
        /// Give up (not held) at this time.
        deadline_ns: u64,
    },
    /// After the fence: finish the set digest over source-resident bytes, export the control state,
    /// gather the slots `from..kv_len` and the tokens numbered from `tokens_from`. Answer:
    /// `Exported`.
    Export {
        /// Idempotency key.
        op: Op,
        /// First slot to gather.
        from: u64,
        /// One past the last slot.
        kv_len: u64,
        /// Goes into the control digest.
        owner_epoch: OwnerEpoch,
        /// First token number to hand over.
        tokens_from: u64,
        /// Shares to digest.
        replicas: u16,
    },
    /// Let the request run again. Cannot fail; idempotent; no answer.
    ReleaseHold,
    /// End the destination's read access: no agent reads on its behalf afterwards. Answer:
    /// `Revoked`.
    Revoke {
        /// Idempotency key.
        op: Op,
        /// The attempt whose grant ends.
        epoch: MigrationEpoch,
    },
    /// Drop the pin; the request goes on. Cannot fail; idempotent; no answer.
    Unpin {
        /// The attempt whose pin it is.
        epoch: MigrationEpoch,
        /// What could not be revoked: those blocks are never reused.
        quarantined: u64,
    },
    /// The request is another worker's now, or ended: drop it, its pin and its blocks. Cannot fail;
    /// idempotent; no answer.
    Retire {
        /// What could not be revoked: those blocks are never reused.
        quarantined: u64,
    },
}

/// What the source's executor answers, and what it must tell unasked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Done {
    /// Answer to `Pin`.
    Pinned {
        /// Of which action.
        op: Op,
        /// The import specification to send along.
        result: Result<Payload, Cause>,
    },
    /// Answer to `Seal`.
    Sealed {
        /// Of which action.
        op: Op,
        /// The watermark.
        result: Result<Sealed, Cause>,
    },
    /// Answer to `Hash`.
    Hashed {
        /// Of which action.
        op: Op,
        /// Claims in the order of [`super::msg::Offer::claims`], and the token ids.
        result: Result<(Vec<PageClaim>, Payload), Cause>,
    },
    /// Answer to `Hold`.
    Held {
        /// Of which action.
        op: Op,
        /// Where it stopped; on an error it is *not* held.
        result: Result<Boundary, Cause>,
    },
    /// Answer to `Export`.
    Exported {
        /// Of which action.
        op: Op,
        /// What goes into the push.
        result: Result<Exported, Cause>,
    },
    /// Answer to `Revoke`.
    Revoked {
        /// Of which action.
        op: Op,
        /// Bytes that a reader may still touch; quarantined for ever.
        quarantined: u64,
    },
    /// Unasked: the gateway has journaled through here.
    Acked {
        /// Token number.
        through: u64,
    },
    /// Unasked: the stream ended here by itself.
    Ended,
    /// Unasked: the operator or a drain wants the attempt given up.
    Cancel {
        /// Why.
        cause: Cause,
    },
}

/// The engine's promise about written slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sealed {
    /// Slots below are written, accepted and stay.
    pub stable_len: u64,
    /// A slot below an earlier watermark was rewritten.
    pub dirty: bool,
}

/// Where a held request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Boundary {
    /// Output tokens numbered so far.
    pub seal: u64,
    /// Tokens with KV.
    pub kv_len: u64,
    /// A slot below an earlier watermark was rewritten.
    pub dirty: bool,
    /// The stream ended at this boundary: nothing is left to migrate.
    pub ended: bool,
}

/// What the fence found.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Exported {
    /// Over all pages, tail included.
    pub set_digest: [u8; 32],
    /// The same for each replica's share.
    pub replicas: Vec<[u8; 32]>,
    /// Digest of the exported control state.
    pub control: ControlSeal,
    /// Length of the control state in `payload`.
    pub control_bytes: u32,
    /// Length of the slots in `payload`.
    pub tail_bytes: u64,
    /// Tokens `tokens_from..=seal`.
    pub tokens: Vec<Emission>,
    /// Control state, then slots.
    pub payload: Payload,
}
