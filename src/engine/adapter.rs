//! `EngineAdapter`: what a serving engine must offer so that a request it decodes can be moved,
//! and what it promises while that happens.
//!
//! # Parties and phases
//!
//! The *source executor* and the *destination executor* of a migration call the adapter of their
//! own engine; nobody calls an engine remotely except through them. One adapter stands for one
//! rank's pool. Phases, in order: PREPARE, RESERVE, STREAM, FENCE, COPY-TAIL, IMPORT-TAIL, VERIFY,
//! ARM, COMMIT, RESUME, GC.
//!
//! ```text
//! source:       pin  (seal_through  table  token_log  hash_pages  hash_tail)*
//!               hold  seal_through  hash_tail  export_control  --decision-->  retire | release_hold, unpin
//! destination:  prepare_import  (import_tokens  stage_write  hash_pages  hash_tail)*
//!               commit_import  hash_tail  import_control  export_control  arm
//!               --decision-->  activate | disarm            (abort_import any time before arm)
//! ```
//!
//! # Promises that hold across calls
//!
//! 1. **Epochs.** Each request has a *floor*: the highest [`MigrationEpoch`] any call has carried
//!    for it. `pin`, `hold`, `prepare_import` and `retire` carry an epoch; a [`PinId`] or
//!    [`StageId`] carries the epoch it was made with. Under the request's own lock, immediately
//!    before it mutates, each call compares its epoch with the floor: lower is
//!    [`AdapterError::StaleEpoch`] and changes nothing, higher raises the floor. A check made at
//!    admission only is worth nothing: the lock may have been waited for. Calls that only give
//!    back (`unpin`, `abort_import`, `disarm`) are taken at any epoch, since a dead attempt must
//!    be able to free what it holds, and touch nothing but their own pin or stage.
//! 2. **Incarnation.** Pin and stage ids belong to one life of the engine and are never reused in
//!    it. Where calls cross a process border they also carry [`Capabilities::incarnation`], checked
//!    under the same lock ([`AdapterError::WrongIncarnation`]).
//! 3. **A pin is a lease over (group, token range, generation).** From `pin` to `unpin` no block
//!    that holds a pinned token is freed, evicted, moved or swapped: not when the client aborts,
//!    not when the request finishes, not when a window slides. The range grows as the request
//!    decodes. The generation changes when, and only when, a slot is given to other tokens.
//! 4. **Seal watermark.** Slots below [`Sealed::stable_len`] are written by kernels that are done
//!    (*device-complete*), hold accepted tokens, and are not rewritten while pinned. A rewrite
//!    sets [`Sealed::dirty`] for good on that pin, and a fence must then not be completed.
//! 5. **A stage is exclusive and unreachable.** Its blocks are in no compute block table, no prefix
//!    cache and no other stage until [`EngineAdapter::activate`] returned. It bypasses the local
//!    prefix cache in both directions.
//! 6. **Digests read resident memory**, through the table that the engine itself will compute
//!    with, at the time of the call. Never a digest that came with the data, never a cached one
//!    (save [`EngineAdapter::hash_tail`]'s leaf states over slots that promises 4 and 7 hold still).
//! 7. **A hashed slot of a stage is frozen**: `stage_write` on it is refused from then on, so
//!    nobody writes between a page's verification and the decision.
//! 8. **Fencing never frees.** `hold` keeps KV, sampler and front-end state as they are; after
//!    `release_hold` the request goes on exactly as if it had never been held.
//! 9. **Giving back is idempotent, taking is keyed.** `unpin`, `abort_import`, `disarm`, `retire`,
//!    repeated or on something long gone, return `Ok` with [`Released`] 0. `pin` and
//!    `prepare_import` repeated with the same key return the same id; with the same key but other
//!    arguments, [`AdapterError::Conflict`]. Blocks whose lease is still out (a late write of a
//!    dead transfer) are freed only when that lease ends.
//! 10. **Unknown is typed**: a call on something that never existed or is gone returns
//!     [`AdapterError::Unknown`], except where promise 9 says otherwise.
//!
//! The conformance suite in [`super::conformance`] holds an engine to these, clause by clause.
//!
//! # Waiting
//!
//! `hold` waits up to its deadline. Calls that read KV may wait up to [`LEASE_WAIT`] for a block
//! that is being written at that moment, then fail as retryable. No other call waits.

use crate::control_state::{Claim, CodecError, ControlDigest, Fingerprint, Refusal, RngKind};
use crate::digest::{DigestError, LeafDigest, PageDigest, SetDigest};
use crate::id::{ErrorKind, Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::{BlockPool, MemError, WriteLease};
use crate::page::{BlockLayout, ObjectSetHeader, PageError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a call that reads KV may wait for a block that is being written.
pub const LEASE_WAIT: Duration = Duration::from_millis(250);

/// A pin, unique in one life of an engine and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(pub u64);

/// A stage, unique in one life of an engine and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StageId(pub u64);

/// Whose KV and control state a reading call means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum View {
    /// A running or held request of this engine, through a pin on it.
    Pin(PinId),
    /// A request on its way in.
    Stage(StageId),
}

impl From<PinId> for View {
    fn from(pin: PinId) -> Self {
        Self::Pin(pin)
    }
}

impl From<StageId> for View {
    fn from(stage: StageId) -> Self {
        Self::Stage(stage)
    }
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pin(p) => write!(f, "pin {}", p.0),
            Self::Stage(s) => write!(f, "stage {}", s.0),
        }
    }
}

/// Whether the engine keeps per-request state that is not append-only KV (Mamba, linear attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MutableState {
    /// None: everything is append-only KV.
    None,
    /// One blob per such group, moved inside the fence through
    /// [`EngineAdapter::export_state`] and [`EngineAdapter::import_state`].
    MoveInFence {
        /// Largest blob, in bytes: it adds to the pause.
        max_bytes: u64,
    },
    /// It exists and cannot be moved; requests that have it are refused.
    Unsupported,
}

/// What may happen to the written part of the tail page while a request decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TailWrites {
    /// Slots are only ever appended, so the tail is copied and hashed before the fence.
    AppendOnly,
    /// The tail page is requantized as it grows, so it moves inside the fence as a whole.
    RewritesTail,
}

/// What an engine is and can do. Fixed for one life of the engine.
#[derive(Debug, Clone)]
pub struct Capabilities {
    /// Which life of the engine this is; pin and stage ids belong to it.
    pub incarnation: Incarnation,
    /// Which engine, as field 2 of the control state names it.
    pub engine_kind: u16,
    /// Build and numerics profile.
    pub fingerprint: Fingerprint,
    /// Hash of the model's architecture and configuration, as in the control state.
    pub model: [u8; 32],
    /// Version of the weights loaded.
    pub weights_version: u64,
    /// Hash of the tokenizer.
    pub tokenizer: [u8; 32],
    /// KV groups, canonical page size and digest scheme.
    pub header: ObjectSetHeader,
    /// Longest sequence, in tokens.
    pub max_context: u32,
    /// The random generators it can continue.
    pub rng_kinds: Vec<RngKind>,
    /// Tokens and KV bits of a request do not depend on what shares its batch or where it runs.
    pub batch_invariant: bool,
    /// Part of a sequence can be read while it decodes. Without it there is no STREAM phase:
    /// everything moves inside the fence.
    pub partial_sequence: bool,
    /// State besides KV.
    pub mutable_state: MutableState,
    /// What happens to the tail page.
    pub tail: TailWrites,
    /// The best [`RebuildClass`] that [`EngineAdapter::rebuild_from_journal`] can reach.
    pub rebuild: RebuildClass,
}

/// Where one group's KV lies in this process.
#[derive(Debug, Clone)]
pub struct PoolInfo {
    /// The blocks and their leases.
    pub pool: Arc<BlockPool>,
    /// Where each (layer, head, token) lies in a block, and which layers and heads live here: all
    /// of them unless TP or PP is on.
    pub layout: Arc<BlockLayout>,
}

/// A pin as it stands when it is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinned {
    /// Its id.
    pub pin: PinId,
    /// The generation of the pinned slots, see promise 3.
    pub generation: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// The most tokens this request can ever hold (prompt plus its output limit, at most the
    /// context); what the destination must have room for.
    pub max_tokens: u64,
    /// First token still held, by group in ascending order of group: 0, or where a sliding window
    /// stood. Pinned tokens are not evicted after this.
    pub first_live: Vec<(u16, u64)>,
}

/// The part of a pinned request that will not change any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    /// The watermark: tokens `0..stable_len` are promised, see promise 4.
    pub stable_len: u64,
    /// Tokens accepted so far, prompt included. `stable_len <= accepted`.
    pub accepted: u64,
    /// Must be the [`Pinned::generation`]; if not, what was copied belongs to other tokens.
    pub generation: u64,
    /// A slot below an earlier watermark was rewritten: nothing copied so far may be trusted.
    pub dirty: bool,
}

/// Where a held request stands: the fence point, a step boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Boundary {
    /// Output tokens numbered so far, from 1. At least 1.
    pub seal: u64,
    /// Tokens with KV: prompt + seal - 1, for the last sampled token has none yet.
    pub kv_len: u64,
    /// That last token; the first step after resuming feeds it.
    pub pending_token: u32,
    /// Watermark and generation at the boundary; `sealed.stable_len == kv_len`.
    pub sealed: Sealed,
    /// When the last step that wrote this request's KV was done: nanoseconds of `CLOCK_MONOTONIC`,
    /// so that processes of one machine can compare. The fence pause counts from here.
    pub last_step_done_ns: u64,
}

/// The digests of some pages, in one allocation that is meant to be reused.
///
/// Each page has the leaves that live in this rank's shard, in canonical order. With a partial
/// shard the leader combines the ranks' leaves; then [`PageRow::digest`] covers only this rank's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageDigests {
    rows: Vec<(PageRow, Range<usize>)>,
    leaves: Vec<LeafDigest>,
}

/// One page's digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRow {
    /// KV group.
    pub group: u16,
    /// Page index in the request: tokens from `page * page_tokens`.
    pub page: u32,
    /// Tokens hashed, 1 ..= page_tokens. Slots past them are not part of the digest.
    pub valid_tokens: u16,
    /// Digest over `valid_tokens` and the leaves.
    pub digest: PageDigest,
}

impl PageDigests {
    /// Empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets the pages and keeps the memory.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.leaves.clear();
    }

    /// Adds a page.
    pub fn push(&mut self, row: PageRow, leaves: &[LeafDigest]) {
        let from = self.leaves.len();
        self.leaves.extend_from_slice(leaves);
        self.rows.push((row, from..self.leaves.len()));
    }

    /// Pages held.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// No pages.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The pages in the order they were pushed, each with its leaves.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&PageRow, &[LeafDigest])> {
        self.rows
            .iter()
            .map(|(row, range)| (row, &self.leaves[range.clone()]))
    }

    /// The last page pushed.
    pub fn last(&self) -> Option<(&PageRow, &[LeafDigest])> {
        self.rows
            .last()
            .map(|(row, range)| (row, &self.leaves[range.clone()]))
    }
}

/// An exported control state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlExport {
    /// The ControlStateV1 encoding.
    pub bytes: Vec<u8>,
    /// Its digest; `offset` is what *this* engine counts as numbered output tokens.
    pub digest: ControlDigest,
}

/// What a destination must make room for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportSpec {
    /// The request.
    pub request: RequestId,
    /// The attempt.
    pub epoch: MigrationEpoch,
    /// Geometry and scheme of the object set; must equal the engine's own.
    pub header: ObjectSetHeader,
    /// The source's fingerprint, judged by the engine's policy before anything is reserved.
    pub source: Fingerprint,
    /// Generator that must be continued.
    pub rng: RngKind,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// KV capacity to reserve, in tokens ([`Pinned::max_tokens`], or less if the engine can grow
    /// the request after it was activated).
    pub max_tokens: u64,
    /// [`Pinned::first_live`].
    pub first_live: Vec<(u16, u64)>,
}

/// What is attached to the request in the making.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Tokens with KV, for every group.
    pub kv_len: u64,
    /// First token held, by ascending group.
    pub first_live: Vec<(u16, u64)>,
}

/// A request that is complete, checked and one [`EngineAdapter::activate`] away from running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Armed {
    /// What is claimed about the continuation.
    pub claim: Claim,
    /// Output tokens replayed through grammar, penalties and detokenizer.
    pub replayed: u64,
    /// The last of them; the first step feeds it.
    pub pending_token: u32,
    /// The grammar mask's digest after the replay, equal to the one in the control state.
    pub mask_digest: Option<[u8; 32]>,
}

/// How a request starts to run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activation {
    /// The new ownership, higher than the one in the imported control digest.
    pub owner_epoch: OwnerEpoch,
    /// The first output token number (from 1) to emit again before new ones; tokens below it are
    /// known to be accepted. `seal + 1` emits none again. Duplicates are dropped by the acceptor.
    pub reemit_from: u64,
}

/// Whether an activation was the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activated {
    /// The request became runnable by this call.
    Now,
    /// It already ran under this owner epoch; nothing changed and nothing is emitted again.
    Already,
}

/// What a call gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Released {
    /// Block references dropped by this very call; 0 when there was nothing left to drop.
    pub blocks: u64,
}

/// A request's control state at a step boundary, for recovery without its worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Output tokens numbered.
    pub seal: u64,
    /// Tokens with KV.
    pub kv_len: u64,
    /// The ControlStateV1 encoding there.
    pub control: Vec<u8>,
    /// Digest of the KV set up to `kv_len`, if the engine keeps the running hash.
    pub set_digest: Option<SetDigest>,
}

/// What a request is rebuilt from when its worker is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalImage {
    /// The request.
    pub request: RequestId,
    /// The attempt; shares the request's floor with migrations.
    pub epoch: MigrationEpoch,
    /// The ownership the checkpoint was taken under.
    pub owner_epoch: OwnerEpoch,
    /// The last checkpoint.
    pub checkpoint: Checkpoint,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// All journaled output tokens, number 1 through J. At least `checkpoint.seal` of them.
    pub output: Vec<u32>,
}

/// What a rebuilt request can be trusted for, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RebuildClass {
    /// The KV, hashed in resident memory, equals the digest in the checkpoint.
    BitExact,
    /// KV was computed again by kernels that promise the same tokens; not compared to a digest.
    TokenExactOnly,
    /// KV was computed again and later tokens may differ. Journaled tokens are kept as they are.
    Recomputed,
}

/// A rebuilt request, to be activated like an imported one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rebuilt {
    /// An armed stage.
    pub stage: StageId,
    /// What it can be trusted for; never better than what was checked.
    pub class: RebuildClass,
    /// Output tokens it holds: J.
    pub seal: u64,
}

/// The state of a stage, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StageState {
    /// Room is reserved; tokens and KV may be written.
    Open,
    /// The manifest is committed; KV can no longer be written.
    Committed,
    /// The control state is in.
    Loaded,
    /// Complete and checked.
    Armed,
    /// Running: no longer a stage.
    Active,
}

/// Something a call names that the engine does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum What {
    /// A request.
    Request(RequestId),
    /// A pin.
    Pin(PinId),
    /// A stage.
    Stage(StageId),
    /// A KV group.
    Group(u16),
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Request(r) => write!(f, "request {r}"),
            Self::Pin(p) => write!(f, "pin {}", p.0),
            Self::Stage(s) => write!(f, "stage {}", s.0),
            Self::Group(g) => write!(f, "KV group {g}"),
        }
    }
}

/// Why an adapter's call failed. No failed call has changed anything, unless its doc says so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    /// Never existed here, or is gone.
    #[error("{0} is not known to this engine; it ended, was never here, or the engine restarted")]
    Unknown(What),
    /// The call belongs to another life of the engine.
    #[error("the engine is incarnation {own:x}, not {asked:x}: it restarted and holds nothing of that life", own = .own.0, asked = .asked.0)]
    WrongIncarnation {
        /// The one the call names.
        asked: Incarnation,
        /// The engine's.
        own: Incarnation,
    },
    /// A newer attempt has been seen.
    #[error("migration epoch {asked} is over; epoch {floor} has been seen for this request")]
    StaleEpoch {
        /// The call's.
        asked: MigrationEpoch,
        /// The floor.
        floor: MigrationEpoch,
    },
    /// The owner epoch is not the one that the call needs.
    #[error("owner epoch {asked} does not fit: the request stands at {current} here")]
    OwnerEpoch {
        /// The call's.
        asked: OwnerEpoch,
        /// The request's.
        current: OwnerEpoch,
    },
    /// The request ended before it could be held.
    #[error("the request has finished; there is nothing left to move")]
    Finished,
    /// The call needs a held request.
    #[error("the request is not held by this attempt; hold it first")]
    NotHeld,
    /// In-flight work did not drain in time; the request runs on.
    #[error("in-flight work did not drain before the deadline; the request runs on, try again")]
    DrainDeadline,
    /// A slot below the watermark was rewritten.
    #[error("a sealed slot was rewritten; what was copied cannot be trusted, start a new attempt")]
    SealedDirty,
    /// Tokens past what may be read or hashed.
    #[error("tokens up to {asked} were asked for, only {limit} may be touched")]
    OutOfRange {
        /// End of the range asked for, in tokens (or pages, where the call counts pages).
        asked: u64,
        /// The largest end allowed.
        limit: u64,
    },
    /// No room.
    #[error("{needed} blocks are needed and {free} are free; free some or choose another worker")]
    OutOfBlocks {
        /// Needed.
        needed: u64,
        /// Free.
        free: u64,
    },
    /// A write to a slot whose digest was already given.
    #[error("group {group}: token {token} has been hashed and is frozen until the stage ends")]
    Frozen {
        /// Group.
        group: u16,
        /// First frozen token of the range.
        token: u64,
    },
    /// A slot below `kv_len` that was never hashed here.
    #[error(
        "group {group}: token {token} was never hashed in this stage; nothing unverified is armed"
    )]
    NotHashed {
        /// Group.
        group: u16,
        /// First such token.
        token: u64,
    },
    /// The call does not fit the stage's state.
    #[error("the stage is {is:?}; the call needs it {needs:?}")]
    StageState {
        /// What it is.
        is: StageState,
        /// What it would have to be.
        needs: StageState,
    },
    /// Same key, other arguments.
    #[error(
        "{0} differs from an earlier call with the same key; a retry must repeat its arguments"
    )]
    Conflict(&'static str),
    /// The request may not be moved, or not to this engine.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The object set's header, model, weights, tokenizer or capacity do not fit this engine.
    #[error("{0} differs from this engine's; choose a worker that serves the same model")]
    Incompatible(&'static str),
    /// The engine holds mutable state that it cannot move.
    #[error("KV group {group} is mutable state, which this engine cannot move")]
    MutableState {
        /// Group.
        group: u16,
    },
    /// The control state cannot be read.
    #[error("the control state cannot be read: {0}")]
    Control(#[from] CodecError),
    /// The control state contradicts what was imported, or the replay ended elsewhere.
    #[error(
        "{0} does not match the imported control state; the state that arrived is not the source's"
    )]
    ReplayMismatch(&'static str),
    /// A block is being written by somebody else.
    #[error("a KV block is being written at this moment; try again")]
    Busy,
    /// Memory could not be leased or allocated for another reason than `Busy` or `OutOfBlocks`.
    #[error(transparent)]
    Mem(MemError),
    /// A view or layout does not fit.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Hashing failed.
    #[error(transparent)]
    Digest(#[from] DigestError),
    /// The device failed.
    #[error("the device failed (XID {xid:?}); its KV is lost")]
    DeviceLost {
        /// NVIDIA XID, if reported.
        xid: Option<u32>,
    },
    /// The engine's process cannot be reached.
    #[error("the engine's process cannot be reached: {0}")]
    EngineLost(String),
    /// The arguments make no sense.
    #[error("{0}")]
    Caller(&'static str),
    /// An invariant of the engine's is broken.
    #[error("the engine broke an invariant: {0}")]
    Bug(String),
}

impl AdapterError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::DrainDeadline | Self::OutOfBlocks { .. } | Self::Busy => ErrorKind::Retryable,
            Self::EngineLost(_) | Self::WrongIncarnation { .. } => ErrorKind::PeerLost,
            Self::DeviceLost { xid } => ErrorKind::DeviceLost { xid: *xid },
            Self::SealedDirty | Self::ReplayMismatch(_) => ErrorKind::Integrity,
            Self::Control(e) => e.kind(),
            Self::Mem(e) => e.kind(),
            Self::Page(e) => e.kind(),
            Self::Digest(e) => e.kind(),
            Self::Refused(r) => r.kind(),
            Self::Incompatible(_) | Self::MutableState { .. } => ErrorKind::Unsupported,
            Self::Unknown(_)
            | Self::StaleEpoch { .. }
            | Self::OwnerEpoch { .. }
            | Self::Finished
            | Self::NotHeld
            | Self::OutOfRange { .. }
            | Self::Frozen { .. }
            | Self::NotHashed { .. }
            | Self::StageState { .. }
            | Self::Conflict(_)
            | Self::Caller(_) => ErrorKind::Caller,
            Self::Bug(_) => ErrorKind::Bug,
        }
    }
}

impl From<MemError> for AdapterError {
    fn from(e: MemError) -> Self {
        match e {
            MemError::Busy { .. } => Self::Busy,
            MemError::Exhausted { wanted, free } => Self::OutOfBlocks {
                needed: wanted as u64,
                free: free as u64,
            },
            other => Self::Mem(other),
        }
    }
}

/// Shorthand.
pub type Result<T, E = AdapterError> = std::result::Result<T, E>;

/// The contract between MoonLiveKV and a serving engine. Read the [module's promises](self) first;
/// the methods only say what each adds to them.
///
/// All calls may come from any thread, also at the same time. Calls on one request are ordered by
/// its lock; calls on different requests do not wait for each other, nor for a decode step, except
/// where a doc says so.
pub trait EngineAdapter: Send + Sync {
    /// What this engine is. Called by both executors before PREPARE, and by `status`.
    /// Takes no lock and cannot fail; equal in every call of one life.
    fn capabilities(&self) -> Capabilities;

    /// Where a group's KV lies, for transports to register and planners to read.
    ///
    /// Called once at start by the worker. The answer does not change in one life of the engine.
    /// Errors: `Unknown(Group)`.
    fn pool(&self, group: u16) -> Result<PoolInfo>;

    // ---- source ----

    /// Takes a lease on all KV of a request, now and as it grows (promise 3).
    ///
    /// Source executor, PREPARE. Raises the floor. Decode goes on undisturbed. Idempotent by
    /// (request, epoch): a repeat returns the same pin. A pin of a lower epoch stays and holds its
    /// memory until it is unpinned, but every other call on it is `StaleEpoch`.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch`; `Refused` for a request that cannot be moved, told
    /// here and not in the fence; `MutableState`; `Finished`.
    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned>;

    /// Ends the lease. Source executor, GC, after the decision; or after a failed attempt.
    ///
    /// Idempotent, at any epoch. Ends neither a hold nor the request; if the request ended in the
    /// meantime, its blocks are freed now. A lease that a reader still has on a block outlives this.
    ///
    /// Errors: none for an unknown pin (`Released` 0).
    fn unpin(&self, pin: PinId) -> Result<Released>;

    /// Moves the watermark as far as it goes and reports it (promise 4).
    ///
    /// Source executor, in each round of STREAM and at the fence. Never waits for a step: it reports
    /// what is device-complete now. The watermark of a pin never falls. With
    /// [`TailWrites::RewritesTail`] it stands at a page boundary until the request is held.
    ///
    /// Errors: `Unknown(Pin)`; `StaleEpoch`. Dirt is reported in the value, not as an error.
    fn seal_through(&self, pin: PinId) -> Result<Sealed>;

    /// The block ids that hold `tokens` of a group: entry i is the i-th *engine* block of the range
    /// that starts at `tokens.start` rounded down to a block. For this process only: ids never
    /// travel, except to the peer's planner as offsets.
    ///
    /// Both executors, STREAM to IMPORT-TAIL. On a pin, up to the watermark; the ids stay valid as
    /// long as the pin. On a stage, up to its capacity; the table is the one that will compute
    /// after activate, the same before and after `commit_import`. Slots before the first live token
    /// have no block: the range must not reach there.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange`.
    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>>;

    /// Prompt and output tokens from number `from` (0 = first prompt token) to the last accepted
    /// one, so that they stream early and the fence carries only the last few.
    ///
    /// Source executor in STREAM and at the fence; on a stage, what was imported so far.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange` if `from` is past the end.
    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>>;

    /// Hashes whole pages of a group from resident memory, now, with nothing cached (promise 6),
    /// and appends them to `out` in ascending order. `upto_tokens` is the sequence's length as the
    /// caller counts it; the page that holds its end counts as valid only up to there.
    ///
    /// Source executor: expected digests, up to the watermark. Destination executor: actual ones,
    /// STREAM and VERIFY; freezes what it hashed (promise 7). `--verify full` calls it again over
    /// everything inside the fence. Idempotent. On an error `out` is as before.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `OutOfRange` past the watermark or the stage's capacity, or
    /// before the first live page; `SealedDirty`; `Busy`; `DeviceLost`.
    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()>;

    /// Hashes, for every group in ascending order, the page that holds token `upto_tokens - 1`, up
    /// to there: a partial page, or a full one where `upto_tokens` ends it.
    ///
    /// Incremental: the view keeps each leaf's state, so a call costs the slots since the last call
    /// on this view. A caller that crosses a page boundary asks for the boundary first and so gets
    /// the full page cheaply too. Callers, freezing and errors as [`hash_pages`](Self::hash_pages);
    /// also `Caller` for `upto_tokens` 0. Going back to fewer tokens of the same page is allowed
    /// and hashes them anew.
    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()>;

    /// Stops the request at a step boundary (promise 8).
    ///
    /// Source executor, FENCE. Raises the floor. Returns when no kernel that writes this request's
    /// KV is in flight, every sampled token is numbered and handed to emission, and no draft is
    /// left; other requests keep decoding. From then on the request is in no batch and emits
    /// nothing until `release_hold`. Idempotent: repeated by the holding epoch it returns the same
    /// boundary; a higher epoch takes the hold over, and the old one can no longer release it.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch`; `Finished` (also when the last step before the
    /// boundary ended it); `Refused(NoOutputYet)`; `DrainDeadline`, after which the request runs.
    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary>;

    /// Lets a held request go on as if nothing had happened.
    ///
    /// Source executor, only on evidence that the decision left ownership here (an abort in the
    /// route record), or before any intent existed. Idempotent for the epoch that held: `Ok` if the
    /// request is not held.
    ///
    /// Errors: `Unknown(Request)`; `StaleEpoch` (a newer attempt holds it).
    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()>;

    /// Encodes the control state at the boundary, engine part and front-end part together.
    ///
    /// Source executor at the fence, on a pin whose request is held by the pin's epoch.
    /// Destination executor in VERIFY, on a loaded or armed stage: encoded again from the state the
    /// engine *holds*, never from the bytes that were imported. The two must be equal byte for byte.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `NotHeld`; `StageState`; `OwnerEpoch` if the request stands
    /// at another one here; `Refused`.
    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport>;

    /// Reads one group's mutable blob at the boundary. Callers and errors as
    /// [`export_control`](Self::export_control); `MutableState` unless the capabilities say
    /// [`MutableState::MoveInFence`].
    fn export_state(&self, view: View, group: u16) -> Result<Vec<u8>> {
        let _ = view;
        Err(AdapterError::MutableState { group })
    }

    /// Drops a request that now runs elsewhere, its hold and its own references to KV. Pins on it
    /// still hold until they are unpinned.
    ///
    /// Source executor, GC, only on evidence that ownership went to the other side. It needs the
    /// request held, so that a running request cannot be dropped by a late message. Idempotent:
    /// `Released` 0 for an unknown request.
    ///
    /// Errors: `StaleEpoch`; `NotHeld`.
    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released>;

    // ---- destination ----

    /// Reserves room for a request on its way in (promise 5).
    ///
    /// Destination executor, RESERVE. Raises the floor. Idempotent by (request, epoch). A stage of a
    /// lower epoch keeps its memory until it is aborted or disarmed, but can do nothing else.
    ///
    /// Errors: `StaleEpoch`; `Conflict` (same key, other arguments, or the request runs here);
    /// `Incompatible`; `Refused(ProfileMismatch | OpaqueRng)`; `MutableState`; `OutOfBlocks`.
    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId>;

    /// Appends tokens number `from ..` (0 = first prompt token) to the stage's log.
    ///
    /// Destination executor, STREAM and at the fence. Idempotent: tokens already there must be
    /// equal and are skipped; a gap is refused.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState` once loaded; `OutOfRange` for a gap or past
    /// `max_tokens + 1`; `Conflict` for a token that differs.
    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()>;

    /// Exclusive access to the blocks that hold `tokens` of a group, to land bytes in.
    ///
    /// Destination executor, STREAM and COPY-TAIL. The lease is given under the request's lock and
    /// keeps its blocks from being freed or hashed; to overlap landing and hashing, take ranges
    /// that end at engine block boundaries. Slots outside `tokens` must not be written through it.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState` once committed; `OutOfRange`; `Frozen`; `Busy`.
    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease>;

    /// Attaches the pages to the request in the making, in ascending order of position, and closes
    /// the stage for writing. Slots past `kv_len` in the last block read as zero afterwards.
    ///
    /// Destination executor, IMPORT-TAIL. All groups get the same `kv_len`, so a group that came
    /// out shorter is refused here. Idempotent with an equal manifest.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `Conflict`; `StageState`; `OutOfRange` past the capacity;
    /// `Incompatible` for a first live token that is not the one reserved for; `Busy` while a
    /// write lease is out.
    fn commit_import(&self, stage: StageId, manifest: &Manifest) -> Result<()>;

    /// Loads the control state into the engine.
    ///
    /// Destination executor, after `commit_import`. Checks every count and hash in it against what
    /// was imported: token log, `kv_len`, model, weights, tokenizer, generator, profile. Idempotent
    /// with equal bytes and owner epoch.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `Conflict`; `Control`; `Refused`;
    /// `Incompatible`; `ReplayMismatch` naming the part that contradicts.
    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()>;

    /// Writes one group's mutable blob. Destination executor, before `arm`; errors as
    /// [`import_control`](Self::import_control), and `MutableState`.
    fn import_state(&self, stage: StageId, group: u16, bytes: &[u8]) -> Result<()> {
        let _ = (stage, bytes);
        Err(AdapterError::MutableState { group })
    }

    /// Makes the request ready to run, and does not run it.
    ///
    /// Destination executor, ARM, after it verified every page and the control digest. Replays the
    /// output tokens through grammar, penalties and detokenizer and compares the mask digest and
    /// the text offsets with the control state. Refuses while any slot below `kv_len` was never
    /// hashed in this stage. Idempotent.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `NotHashed`; `ReplayMismatch`; `Refused`.
    fn arm(&self, stage: StageId) -> Result<Armed>;

    /// Drops a stage, armed or not, and frees its blocks.
    ///
    /// Destination executor, only on evidence that ownership stayed with the source (an armed stage
    /// may have been committed by a compare-and-swap whose reply was lost). Idempotent, any epoch.
    ///
    /// Errors: `StageState { is: Active }` for a request that runs, which it leaves alone.
    fn disarm(&self, stage: StageId) -> Result<Released>;

    /// Drops a stage that is not armed, and frees its blocks. Destination executor, any time before
    /// ARM, without evidence. Idempotent, any epoch; at once, even while transfers are under way
    /// (their blocks follow when their leases end).
    ///
    /// Errors: `StageState` for an armed stage or a request that runs; both are left alone.
    fn abort_import(&self, stage: StageId) -> Result<Released>;

    /// Makes an armed request runnable: from here on it computes, emits and may be pinned.
    ///
    /// Destination executor, RESUME, only after the commit's compare-and-swap is known to have
    /// succeeded. First emits output tokens from `reemit_from` again, then decodes. Idempotent for
    /// the same owner epoch.
    ///
    /// Errors: `Unknown`; `StaleEpoch`; `StageState`; `OwnerEpoch` if not higher than the imported
    /// one, or if it runs under another; `OutOfRange` for `reemit_from` 0 or past `seal + 1`.
    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated>;

    // ---- recovery ----

    /// The control state at the next step boundary, without holding the request.
    ///
    /// Source worker, periodically, and after admission once there is an output token.
    ///
    /// Errors: `Unknown(Request)`; `Refused`; `Finished`; `DrainDeadline`.
    fn journal_checkpoint(&self, request: RequestId, deadline: Instant) -> Result<Checkpoint>;

    /// Rebuilds a lost request from journal and checkpoint into an armed stage.
    ///
    /// The worker chosen by recovery, after the acceptor's floor was raised. KV is computed again
    /// (or loaded and hashed), output tokens up to J are replayed and never sampled anew. The class
    /// says what was *checked*: recomputed KV is `BitExact` only if it was hashed in resident
    /// memory and equals [`Checkpoint::set_digest`]. Idempotent by (request, epoch). May take as
    /// long as a prefill; it does not hold the request's lock meanwhile, and re-checks the floor
    /// before it publishes the stage.
    ///
    /// Errors: as `prepare_import`, `import_control` and `arm`; `Conflict` if the journal
    /// contradicts the checkpoint.
    fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt>;
}
