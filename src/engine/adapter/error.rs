//! Why a call of the contract failed.

use super::{PinId, StageId};
use crate::control_state::{CodecError, Refusal};
use crate::digest::DigestError;
use crate::id::{ErrorKind, Incarnation, MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::MemError;
use crate::page::PageError;
use std::fmt;

/// The state of a stage, for messages; in the order a stage goes through them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// Whatever else an engine in another process reports.
    #[error("{text}")]
    Remote {
        /// What a caller can do about it.
        kind: ErrorKind,
        /// The engine's words.
        text: String,
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
            Self::Remote { kind, .. } => *kind,
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
