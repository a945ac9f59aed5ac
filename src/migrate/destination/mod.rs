//! The destination: pulls, verifies in its own memory, arms, commits by itself, launches.
//!
//! It alone knows that it verified, so it alone commits; what it staged is freed only when the
//! record says that it did not become the owner.

mod fence;
mod machine;
mod stream;

pub use machine::Destination;

use super::io::{self, Op, Payload};
use super::msg::{Emission, PageClaim};
use crate::id::{MigrationEpoch, OwnerEpoch};
use crate::route::{Cause, ControlSeal};

/// What the destination is told.
pub type Event = io::Event<Done>;
/// What the destination wants done.
pub type Action = io::Action<Do>;

/// Work for the destination's executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Do {
    /// Reserve exclusive blocks that no block table, prefix cache or reader reaches. Answer:
    /// `Staged`.
    Stage {
        /// Idempotency key.
        op: Op,
        /// The attempt the stage belongs to.
        epoch: MigrationEpoch,
        /// The import specification.
        spec: Payload,
    },
    /// Read source slots `from..to` of every replica's share into the stage, and take over the
    /// token ids in `log`. Answer: `Pulled`.
    Pull {
        /// Idempotency key.
        op: Op,
        /// First token.
        from: u64,
        /// One past the last.
        to: u64,
        /// The offer's payload; [`Payload::NONE`] for a second try.
        log: Payload,
        /// Give up at this time.
        deadline_ns: u64,
    },
    /// End a pull early. Its `Pulled` still comes.
    CancelPull {
        /// The pull.
        op: Op,
    },
    /// Hash the stage's resident pages that overlap tokens `from..to`, from each page's first token,
    /// as `replica` holds them. Answer: `Hashed`.
    Hash {
        /// Idempotency key.
        op: Op,
        /// Which replica.
        replica: u16,
        /// First token.
        from: u64,
        /// One past the last.
        to: u64,
    },
    /// Put the push's slots `from..to` (all replicas) and its token ids into the stage. The
    /// payload's slots begin at `payload_from`. Answer: `Landed`.
    Land {
        /// Idempotency key.
        op: Op,
        /// The push's payload.
        payload: Payload,
        /// Token of the payload's first slot.
        payload_from: u64,
        /// First slot to write: those below are verified already and are not touched.
        from: u64,
        /// One past the last.
        to: u64,
    },
    /// Finish the replica's set digest over `0..kv_len` from resident memory. Tokens below `from`
    /// were hashed and found equal by an earlier `Hash`: their digests and leaf states may be used;
    /// any state past `from` must be dropped (a pull or `Land` has written there since). With `from`
    /// 0 everything is hashed again. Answer: `SetHashed`.
    HashSet {
        /// Idempotency key.
        op: Op,
        /// Which replica.
        replica: u16,
        /// First token not hashed yet.
        from: u64,
        /// One past the last token.
        kv_len: u64,
    },
    /// Attach the staged pages to the request's block table, in ascending order. Answer:
    /// `Attached`.
    Attach {
        /// Idempotency key.
        op: Op,
        /// Tokens with KV.
        kv_len: u64,
    },
    /// Give the engine the control state of the push. Answer: `ControlImported`.
    ImportControl {
        /// Idempotency key.
        op: Op,
        /// The push's payload.
        payload: Payload,
    },
    /// Export the control state again from the destination *engine* and digest it. Answer:
    /// `ReExported`.
    ReExport {
        /// Idempotency key.
        op: Op,
        /// The source's epoch, which the control state still names.
        owner_epoch: OwnerEpoch,
    },
    /// Make the request ready to run, not running: everything that can fail fails here. Answer:
    /// `Armed`.
    Arm {
        /// Idempotency key.
        op: Op,
    },
    /// Emit again, under the new epoch, the tokens not known to be journaled. Comes right before
    /// `Activate`; no answer.
    Emit {
        /// The new epoch.
        owner_epoch: OwnerEpoch,
        /// May be empty.
        tokens: Vec<Emission>,
    },
    /// Run. The next new token is `seal + 1`. Cannot fail; no answer. The executor makes a
    /// [`super::source::Source`] for the request, which this worker owns now.
    Activate {
        /// The new epoch.
        owner_epoch: OwnerEpoch,
        /// Last numbered token.
        seal: u64,
    },
    /// Undo `Arm` and free the stage. Cannot fail; idempotent; no answer.
    Disarm {
        /// The attempt whose stage it is.
        epoch: MigrationEpoch,
        /// Bytes a writer may still touch: those blocks are never reused.
        quarantined: u64,
    },
    /// Free the stage of an attempt that was not armed. Cannot fail; idempotent; no answer.
    AbortImport {
        /// The attempt whose stage it is.
        epoch: MigrationEpoch,
        /// Bytes a writer may still touch: those blocks are never reused.
        quarantined: u64,
    },
}

/// What the destination's executor answers, and what it must tell unasked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Done {
    /// Answer to `Stage`; on an error nothing is held.
    Staged {
        /// Of which action.
        op: Op,
        /// What was staged.
        result: Result<Staged, Cause>,
    },
    /// Answer to `Pull`. After it nobody writes on behalf of this pull, `Stuck` excepted.
    Pulled {
        /// Of which action.
        op: Op,
        /// How it ended.
        outcome: Pulled,
    },
    /// Answer to `Hash`: for the asked replica, by page.
    Hashed {
        /// Of which action.
        op: Op,
        /// What resident memory hashes to.
        result: Result<Vec<PageClaim>, Cause>,
    },
    /// Answer to `Land`.
    Landed {
        /// Of which action.
        op: Op,
        /// Whether the slots are resident.
        result: Result<(), Cause>,
    },
    /// Answer to `HashSet`.
    SetHashed {
        /// Of which action.
        op: Op,
        /// The set digest of the replica's resident share.
        result: Result<[u8; 32], Cause>,
    },
    /// Answer to `Attach`.
    Attached {
        /// Of which action.
        op: Op,
        /// Whether the pages are attached.
        result: Result<(), Cause>,
    },
    /// Answer to `ImportControl`.
    ControlImported {
        /// Of which action.
        op: Op,
        /// Whether the engine took it.
        result: Result<(), Cause>,
    },
    /// Answer to `ReExport`.
    ReExported {
        /// Of which action.
        op: Op,
        /// Digest of what the engine holds.
        result: Result<ControlSeal, Cause>,
    },
    /// Answer to `Arm`.
    Armed {
        /// Of which action.
        op: Op,
        /// Whether it is armed; on an error it is not.
        result: Result<(), Cause>,
    },
    /// Unasked: from now on STREAM may use this many bytes per second (0: unbounded).
    Shape {
        /// The rate.
        bytes_per_s: u64,
    },
    /// Unasked: the operator or a drain wants the attempt given up.
    Cancel {
        /// Why.
        cause: Cause,
    },
}

/// A reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Staged {
    /// Replicas that must verify.
    pub replicas: u16,
    /// Tokens of a canonical page.
    pub page_tokens: u16,
    /// Bytes that one token's KV takes, for the copy shaper.
    pub bytes_per_token: u64,
    /// See [`super::msg::Body::Ready`].
    pub align_tokens: u32,
}

/// How a pull ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pulled {
    /// All bytes are resident and visible to the agent that hashes.
    Landed,
    /// Not all; another try may succeed.
    Failed,
    /// The source or the path is gone for good.
    Lost,
    /// Not all, and local memory may still be written: it can be neither verified nor reused.
    Stuck {
        /// How much.
        quarantined: u64,
    },
}
