//! What all handles, the driver and the adapter's calls share; one lock for the ledger of requests.
//!
//! Invariant: arithmetic, hashing and copying happen outside the lock. A request's [`Live`] state
//! has one owner at a time: its [`Entry`], or the step that took it out (`in_flight`). Whoever
//! wants a step boundary raises `boundary_wanted`, so no new step starts, and waits for
//! `boundary`: so a hold takes effect at the end of the step in flight, or at once.

use super::blocks::Blocks;
use super::build::Parts;
use super::config::EngineConfig;
use super::entry::{Entry, Phase};
use super::event::{CloseReason, TokenSink};
use super::kvlog::PageLog;
use super::live::Live;
use super::stage::Stage;
use crate::digest::{DigestError, Scratch, TailHasher};
use crate::engine::adapter::{AdapterError, PinId, StageId, What};
use crate::id::{Incarnation, MigrationEpoch, RequestId};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// See the [module](self).
pub(crate) struct Shared {
    pub config: EngineConfig,
    pub parts: Parts,
    pub sink: Arc<dyn TokenSink>,
    pub incarnation: Incarnation,
    pub inner: Mutex<Inner>,
    /// Something became runnable, or the engine stops.
    pub work: Condvar,
    /// A step ended that somebody waits for.
    pub boundary: Condvar,
    /// Working memory of hashing calls.
    pub scratch: Mutex<Vec<Scratch>>,
}

/// A lease on a request's KV.
pub(crate) struct Pin {
    pub request: RequestId,
    /// The entry it holds; not always the request's current one (it may have left and come back).
    pub slot: Slot,
    pub epoch: MigrationEpoch,
    pub watermark: u64,
    pub dirty: bool,
    /// Leaf states of the growing page; out while a call extends them.
    pub tail: Option<Box<TailHasher>>,
}

/// Names one stay of one request in this engine; ascending by arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Slot(pub u64);

/// Everything under the lock.
pub(crate) struct Inner {
    pub entries: HashMap<Slot, Entry>,
    /// The stay of each request that has not ended.
    pub current: HashMap<RequestId, Slot>,
    /// Admitted and not ended, in order of admission.
    pub running: Vec<Slot>,
    /// Waiting for blocks: priority, then arrival.
    pub waiting: BTreeSet<(Reverse<i32>, Slot)>,
    pub pins: HashMap<PinId, Pin>,
    pub stages: HashMap<StageId, Stage>,
    pub blocks: Blocks,
    floors: HashMap<RequestId, MigrationEpoch>,
    /// Requests that ended here, newest last.
    ended: VecDeque<RequestId>,
    ended_set: HashSet<RequestId>,
    next_id: u64,
    /// Where in `running` the next batch begins.
    pub turn: usize,
    pub stop: bool,
    /// Steps taken, for status.
    pub steps: u64,
}

/// Ended requests that are remembered by name.
const MAX_ENDED: usize = 1 << 16;
/// Activated stages that are remembered by name.
const MAX_ACTIVE: usize = 1 << 14;
/// Floors kept for requests that are not here any more.
const MAX_FLOORS: usize = 1 << 18;

impl Inner {
    pub(crate) fn new(blocks: Blocks) -> Self {
        Self {
            entries: HashMap::new(),
            current: HashMap::new(),
            running: Vec::new(),
            waiting: BTreeSet::new(),
            pins: HashMap::new(),
            stages: HashMap::new(),
            blocks,
            floors: HashMap::new(),
            ended: VecDeque::new(),
            ended_set: HashSet::new(),
            next_id: 1,
            turn: 0,
            stop: false,
            steps: 0,
        }
    }

    /// A number never given before in this life.
    pub(crate) fn fresh(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }

    /// Refuses a lower epoch than any seen for this request, and raises the floor to a higher one.
    /// Only calls that are sure to succeed otherwise may raise it: check first.
    pub(crate) fn raise_floor(
        &mut self,
        request: RequestId,
        asked: MigrationEpoch,
    ) -> Result<(), AdapterError> {
        self.check_floor(request, asked)?;
        if self.floors.len() >= MAX_FLOORS && !self.floors.contains_key(&request) {
            let (current, pins, stages) = (&self.current, &self.pins, &self.stages);
            self.floors.retain(|r, _| {
                current.contains_key(r)
                    || pins.values().any(|p| p.request == *r)
                    || stages.values().any(|s| s.request == *r)
            });
        }
        self.floors.insert(request, asked);
        Ok(())
    }

    /// Refuses a lower epoch than any seen for this request.
    pub(crate) fn check_floor(
        &self,
        request: RequestId,
        asked: MigrationEpoch,
    ) -> Result<(), AdapterError> {
        match self.floors.get(&request) {
            Some(floor) if asked < *floor => Err(AdapterError::StaleEpoch {
                asked,
                floor: *floor,
            }),
            _ => Ok(()),
        }
    }

    /// A live pin of the newest attempt.
    pub(crate) fn pin(&self, id: PinId) -> Result<&Pin, AdapterError> {
        let pin = self
            .pins
            .get(&id)
            .ok_or(AdapterError::Unknown(What::Pin(id)))?;
        self.check_floor(pin.request, pin.epoch)?;
        Ok(pin)
    }

    /// A pin and the entry it holds.
    pub(crate) fn pinned(&self, id: PinId) -> Result<(&Pin, &Entry), AdapterError> {
        let pin = self.pin(id)?;
        let entry = self
            .entries
            .get(&pin.slot)
            .ok_or_else(|| AdapterError::Bug(format!("pin {} holds nothing", id.0)))?;
        Ok((pin, entry))
    }

    /// A live stage of the newest attempt.
    pub(crate) fn stage(&self, id: StageId) -> Result<&Stage, AdapterError> {
        let stage = self
            .stages
            .get(&id)
            .ok_or(AdapterError::Unknown(What::Stage(id)))?;
        self.check_floor(stage.request, stage.epoch)?;
        Ok(stage)
    }

    /// As [`Self::stage`], to change it.
    pub(crate) fn stage_mut(&mut self, id: StageId) -> Result<&mut Stage, AdapterError> {
        self.stage(id)?;
        self.stages
            .get_mut(&id)
            .ok_or(AdapterError::Unknown(What::Stage(id)))
    }

    /// A request that has not ended.
    pub(crate) fn request(&mut self, id: RequestId) -> Result<(Slot, &mut Entry), AdapterError> {
        let ended = self.ended_set.contains(&id);
        let slot = self.current.get(&id).copied();
        match slot.and_then(|s| self.entries.get_mut(&s).map(|e| (s, e))) {
            Some(found) => Ok(found),
            None if ended => Err(AdapterError::Finished),
            None => Err(AdapterError::Unknown(What::Request(id))),
        }
    }

    /// Ends a stay: its promise goes back, and its blocks too unless pins hold them. Returns the
    /// block references dropped. `remember`: later calls are told that the request finished.
    pub(crate) fn end(&mut self, slot: Slot, remember: bool) -> u64 {
        let Some(entry) = self.entries.get_mut(&slot) else {
            return 0;
        };
        let id = entry.request;
        self.waiting.remove(&(Reverse(entry.priority), slot));
        self.running.retain(|s| *s != slot);
        self.current.remove(&id);
        entry.phase = Phase::Ended;
        entry.live = None;
        entry.hold = None;
        self.blocks.unpromise(std::mem::take(&mut entry.promised));
        if remember && self.ended_set.insert(id) {
            self.ended.push_back(id);
            if self.ended.len() > MAX_ENDED
                && let Some(old) = self.ended.pop_front()
            {
                self.ended_set.remove(&old);
            }
        }
        self.collect(slot)
    }

    /// Frees the blocks of an ended stay that no pin holds.
    pub(crate) fn collect(&mut self, slot: Slot) -> u64 {
        match self.entries.get(&slot) {
            Some(e) if e.phase == Phase::Ended && e.pins == 0 => {}
            _ => return 0,
        }
        let Some(entry) = self.entries.remove(&slot) else {
            return 0;
        };
        self.blocks.give_back(&entry.table);
        entry.table.len() as u64
    }

    /// Forgets the names of the oldest activated stages, if there are too many.
    pub(crate) fn forget_stages(&mut self) {
        if self.stages.len() <= MAX_ACTIVE {
            return;
        }
        let mut active: Vec<StageId> = self
            .stages
            .iter()
            .filter(|(_, s)| !s.is_pending())
            .map(|(id, _)| *id)
            .collect();
        active.sort_unstable();
        for id in active
            .iter()
            .take(active.len().saturating_sub(MAX_ACTIVE / 2))
        {
            self.stages.remove(id);
        }
    }

    /// A request that ended here may come back.
    pub(crate) fn forget_end(&mut self, id: RequestId) {
        if self.ended_set.remove(&id) {
            self.ended.retain(|r| *r != id);
        }
    }
}

impl Shared {
    /// Waits under the lock until no step works on `slot`, or `deadline`; false if the deadline
    /// passed first. Other calls may have changed anything meanwhile.
    pub(crate) fn drain(
        &self,
        inner: &mut MutexGuard<'_, Inner>,
        slot: Slot,
        deadline: Instant,
    ) -> bool {
        let in_flight = |i: &Inner| i.entries.get(&slot).is_some_and(|e| e.in_flight);
        if !in_flight(inner) {
            return true;
        }
        if let Some(e) = inner.entries.get_mut(&slot) {
            e.boundary_wanted += 1;
        }
        while in_flight(inner) {
            if self.boundary.wait_until(inner, deadline).timed_out() {
                break;
            }
        }
        if let Some(e) = inner.entries.get_mut(&slot) {
            e.boundary_wanted -= 1;
        }
        self.work.notify_one();
        !in_flight(inner)
    }

    /// Ends a stay before its last token, and tells.
    pub(crate) fn close(&self, inner: &mut Inner, slot: Slot, reason: CloseReason) -> u64 {
        let Some(request) = inner.entries.get(&slot).map(|e| e.request) else {
            return 0;
        };
        let dropped = inner.end(slot, reason != CloseReason::Retired);
        self.sink.closed(request, reason);
        dropped
    }

    /// A new entry for `live`, without blocks.
    pub(crate) fn entry(&self, live: Live) -> Result<Entry, DigestError> {
        let log = live.tokens.clone();
        let pages = PageLog::new(&self.parts.digester)?;
        Ok(self.entry_of(live, log, pages))
    }

    /// As [`Self::entry`], with the parts that are dear to copy.
    pub(crate) fn entry_of(&self, live: Live, log: Vec<u32>, pages: PageLog) -> Entry {
        let salt = live.params.cache_salt.as_deref().unwrap_or_default();
        let root_key = super::blocks::root_key(
            &self.parts.info.model,
            &self.parts.fingerprint.numerics_profile,
            salt,
        );
        Entry {
            request: live.request,
            owner_epoch: live.owner_epoch,
            phase: Phase::Waiting,
            in_flight: false,
            boundary_wanted: 0,
            log,
            prompt_len: live.prompt_len,
            table: Vec::new(),
            promised: 0,
            stable: 0,
            max_tokens: live.params.max_tokens(live.prompt_len),
            hold: None,
            generation: 1,
            pins: 0,
            pages,
            preview: None,
            preview_wanted: false,
            last_step_done_ns: 0,
            abort: false,
            priority: live.params.priority,
            keys: None,
            published: 0,
            root_key,
            fill: None,
            live: Some(Box::new(live)),
        }
    }
}
