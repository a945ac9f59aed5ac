//! One request at one worker: its machines under one lock, and what their executors keep for them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, MutexGuard};

use super::early::{Ahead, Early};
use super::null::Claim;
use crate::drive::{Payloads, Phase};
use crate::engine::adapter::{Boundary, PinId, Pinned, StageId};
use crate::engine::reference::GenerateSpec;
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::destination::Destination;
use crate::migrate::io::Op;
use crate::migrate::recovery::Rebuilder;
use crate::migrate::source::Source;
use crate::node::bulk::Grant;
use crate::node::kv::SetRun;
use crate::node::options::Options;
use crate::node::spec::SourceSpec;
use crate::route::Cause;

/// Which machine of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Owns the request.
    Source,
    /// Receives it.
    Destination,
    /// Rebuilds it from the journal.
    Rebuilder,
}

/// A request at this worker.
pub struct Slot {
    /// Its name.
    pub request: RequestId,
    state: Mutex<State>,
}

/// What the lock protects. Every machine's check happens under it, so a check *is* the check at the
/// mutation.
#[derive(Default)]
pub struct State {
    /// Set while this worker owns the request, and afterwards until it is forgotten.
    pub source: Option<Source>,
    /// Set once the request was on its way here.
    pub destination: Option<Destination>,
    /// Set once a recovery chose this worker.
    pub rebuilder: Option<Rebuilder>,
    /// The stream ended here.
    pub ended: bool,
    /// Bytes that machines refer to by number.
    pub payloads: Payloads,
    /// The source executor's side of the present attempt.
    pub outgoing: Outgoing,
    /// The destination executor's side.
    pub incoming: Incoming,
    /// The rebuilder's executor.
    pub rebuild: Rebuilding,
}

/// A right to read that was given out.
pub struct Open {
    /// For which attempt.
    pub epoch: MigrationEpoch,
    /// To which group's pool.
    pub group: u16,
    /// The right.
    pub grant: Grant,
    /// Blocks opened so far, counted from the request's first.
    pub blocks: usize,
}

/// The source executor's side of an attempt.
#[derive(Default)]
pub struct Outgoing {
    /// The attempt.
    pub epoch: MigrationEpoch,
    /// What the operator chose for it.
    pub options: Options,
    /// Where it is to go.
    pub destination: Option<WorkerRef>,
    /// Every pin not given back, with the attempt it belongs to.
    pub pins: Vec<(MigrationEpoch, PinId)>,
    /// The present pin.
    pub pinned: Option<Pinned>,
    /// Rights to read given out.
    pub open: Vec<Open>,
    /// The running set digest over source-resident memory.
    pub set: Option<SetRun>,
    /// Where the request was held.
    pub boundary: Option<Boundary>,
    /// Tokens whose ids went out with offers: `0..told`.
    pub told: u64,
    /// Slots sent ahead of the push.
    pub ahead: Option<Ahead>,
    /// The phase it is in here.
    pub phase: Phase,
    /// Why this side gave it up, if it did.
    pub cause: Option<Cause>,
}

/// A block range of the source as its offer told it.
#[derive(Debug, Clone)]
pub struct RemoteTable {
    /// Tokens it covers.
    pub tokens: Range<u64>,
    /// By group: blocks from the one of `tokens.start`.
    pub tables: Vec<(u16, Vec<u32>)>,
}

/// The destination executor's side of an attempt.
#[derive(Default)]
pub struct Incoming {
    /// The attempt.
    pub epoch: MigrationEpoch,
    /// Where it comes from.
    pub source: Option<WorkerRef>,
    /// What the source told.
    pub spec: Option<Arc<SourceSpec>>,
    /// Every stage not given back, with the attempt it belongs to.
    pub stages: Vec<(MigrationEpoch, StageId)>,
    /// The present stage.
    pub stage: Option<StageId>,
    /// The running set digest over destination-resident memory.
    pub set: Option<SetRun>,
    /// Source tables by first token, kept for second tries.
    pub tables: BTreeMap<u64, Arc<RemoteTable>>,
    /// Pulls under way, and how to end them early.
    pub pulls: Vec<(Op, Arc<AtomicBool>)>,
    /// Set by `Activate`: the caller makes a source machine.
    pub activated: Option<OwnerEpoch>,
    /// Slots that came ahead of the push, in place and hashed there.
    pub early: Option<Early>,
    /// The push is here and the request does not run yet.
    pub fenced: bool,
    /// Hash of the control state, as the push claimed it.
    pub control: Option<[u8; 16]>,
    /// In a null handoff: what the push claimed.
    pub null: Option<Claim>,
    /// The phase it is in here.
    pub phase: Phase,
    /// Why this side gave it up, if it did.
    pub cause: Option<Cause>,
}

/// The rebuilder's executor.
#[derive(Default)]
pub struct Rebuilding {
    /// An armed stage made from a checkpoint.
    pub stage: Option<StageId>,
    /// The submit that starts the request from its prompt, where there was no checkpoint.
    pub submit: Option<Box<GenerateSpec>>,
    /// Set by `Activate`: the caller makes a source machine.
    pub activated: Option<OwnerEpoch>,
}

impl Slot {
    /// A request not known before.
    pub fn new(request: RequestId) -> Self {
        Self {
            request,
            state: Mutex::default(),
        }
    }

    /// The per-request lock, if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        self.state.try_lock()
    }

    /// The per-request lock.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
