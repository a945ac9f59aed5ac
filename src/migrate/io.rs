//! What goes into the protocol's machines and what comes out of them.
//!
//! Every machine is driven alike: `handle(now_ns, event, &mut out)`. An executor performs the
//! actions *in order*; those that carry an [`Op`] report back with an event that carries the same
//! `Op`. An executor must complete every action it was given (with a failure, at the latest, at the
//! action's own deadline): a machine frees nothing while an operation of its own is outstanding.
//!
//! Calls for one request are serialized by the executor (the per-request lock), so the checks a
//! machine makes when an event arrives *are* the checks at the mutation.

use std::hash::{Hash, Hasher};

use super::msg::Msg;
use crate::id::{MigrationEpoch, WorkerRef};
use crate::route::{Cause, Revision, RouteRecord, Versioned, same_worker};

/// Idempotency key of one action: unique within a request and party, also across attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Op {
    /// The attempt it belongs to (0: none).
    pub epoch: MigrationEpoch,
    /// Number within the attempt, from 1.
    pub n: u32,
}

/// Numbers only tell answers apart: two states that differ in how many operations went before are
/// the same state, and a model check that remembers states by their hash shall see them as one.
impl Hash for Op {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.epoch.hash(state);
    }
}

/// Where a message goes or comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Peer {
    /// One life of a worker.
    Worker(WorkerRef),
    /// A coordinator, by its start-up nonce (the intent's `driver`).
    Coordinator(u64),
    /// The gateway that accepts the request's tokens.
    Gateway,
}

impl Peer {
    /// Whether this is that life of that worker.
    pub(crate) fn is_worker(&self, worker: &WorkerRef) -> bool {
        matches!(self, Peer::Worker(w) if same_worker(w, worker))
    }
}

/// Bytes that travel with a message and that no machine looks at: the executor keeps them under
/// this number. `Payload::NONE`: the message has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Payload(pub u64);

impl Payload {
    /// No bytes.
    pub const NONE: Payload = Payload(0);
}

/// A timer of a machine. Setting an armed one moves it; a timer that fires late is harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Timer {
    /// The attempt it belongs to.
    pub epoch: MigrationEpoch,
    /// What for.
    pub kind: TimerKind,
}

/// What a timer is for. A time-out entitles to *attempt an abort*, to ask again or to send again;
/// never to more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TimerKind {
    /// The present step took too long.
    Deadline,
    /// Ask the store again.
    Retry,
    /// Send the last message again.
    Resend,
    /// Seal and offer what was decoded since.
    Round,
    /// The shaper lets more bytes through.
    Pace,
}

/// What the store answered.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StoreReply {
    /// The value at the linearization point of the read.
    Value(Versioned),
    /// There is no such key.
    Absent,
    /// The compare-and-swap took place; the new value stands at this revision.
    Applied(Revision),
    /// The compare-and-swap did not take place; what stands there instead (`None`: no such key).
    Conflict(Option<Versioned>),
    /// No answer, or one that leaves open whether a compare-and-swap took place (or will).
    InDoubt,
}

/// What a machine is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event<D> {
    /// A message arrived. It may be late, repeated, or meant for an earlier life of this worker:
    /// the machine tells.
    Recv {
        /// Who sent it.
        from: Peer,
        /// The message.
        msg: Msg,
        /// Bytes that came with it.
        payload: Payload,
    },
    /// A store operation ended.
    Store {
        /// Which.
        op: Op,
        /// How.
        reply: StoreReply,
    },
    /// A timer fired.
    Timer(Timer),
    /// Something this kind of machine asked its executor for, or must know.
    Local(D),
}

/// What a machine wants done.
#[allow(
    clippy::large_enum_variant,
    reason = "messages are moved a few times a migration; a box would be an allocation in the fence"
)]
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action<A> {
    /// Read the request's route record, linearizably. Answer: `Store` with `Value`, `Absent` or
    /// `InDoubt`.
    StoreRead {
        /// Idempotency key.
        op: Op,
    },
    /// Replace the request's route record if its revision is still `expect`. Answer: `Store` with
    /// `Applied`, `Conflict` or `InDoubt`. A lost reply is `InDoubt`, never a failure.
    StoreCas {
        /// Idempotency key.
        op: Op,
        /// The revision to compare.
        expect: Revision,
        /// The whole new record.
        next: Box<RouteRecord>,
    },
    /// Send; may be lost. With a payload, its bytes follow the message.
    Send {
        /// To whom.
        to: Peer,
        /// What.
        msg: Msg,
        /// Bytes to send along.
        payload: Payload,
    },
    /// Arm (or move) a timer.
    SetTimer {
        /// Which.
        timer: Timer,
        /// When, on the clock of `now_ns`.
        at_ns: u64,
    },
    /// Disarm a timer.
    ClearTimer(Timer),
    /// Tell the operator; no answer.
    Report(Report),
    /// Something for the executor of this kind of machine.
    Do(A),
}

/// The steps of a migration, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// The intent is being written.
    Prepare,
    /// Source pages are pinned, destination pages reserved.
    Reserve,
    /// Pages are copied and verified while the source serves.
    Stream,
    /// The source stops at a step boundary.
    Fence,
    /// Certificate, remaining slots and control state travel.
    CopyTail,
    /// They are put into the staged import.
    ImportTail,
    /// The destination hashes its memory and compares.
    Verify,
    /// The destination engine is made ready, not emitting.
    Arm,
    /// The compare-and-swap by the destination.
    Commit,
    /// The destination emits; everybody is told.
    Resume,
    /// What the attempt held is freed.
    Gc,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Step; 11] = [
        Step::Prepare,
        Step::Reserve,
        Step::Stream,
        Step::Fence,
        Step::CopyTail,
        Step::ImportTail,
        Step::Verify,
        Step::Arm,
        Step::Commit,
        Step::Resume,
        Step::Gc,
    ];
}

/// What an operator wants to see; carries no authority.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Report {
    /// A step began at this party.
    Entered(Step),
    /// A round of streaming was verified.
    Streamed {
        /// Tokens verified so far, on every replica.
        verified: u64,
        /// Tokens the source last said it has.
        accepted: u64,
    },
    /// A page differed; it is fetched again or the attempt given up.
    Mismatch {
        /// Which replica.
        replica: u16,
        /// Which page (`u32::MAX`: the set digest).
        page: u32,
    },
    /// This party moves to abort.
    GivingUp(Cause),
    /// A message was refused, and why.
    Stale(&'static str),
    /// The decision is known here.
    Decided {
        /// Whether the destination owns the request now.
        committed: bool,
    },
    /// This party has freed all it held for the attempt.
    Released {
        /// Bytes that may never be reused in this process.
        quarantined: u64,
    },
}
