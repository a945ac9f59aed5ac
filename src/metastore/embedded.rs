//! The embedded store: one writer over one append log.
//!
//! # How a change commits
//! The calling thread checks the revision and stages a record under one mutex, then, if nobody is
//! committing, commits itself: mutex released, one `pwrite`, one `fdatasync`, mutex taken, change
//! published. Callers that arrive meanwhile stage theirs and wait; the first of them to wake
//! commits all of those as one batch. So a lone change costs no change of thread, and many share
//! a flush.
//!
//! Nothing is published before it is durable, and what is not published does not exist for reads,
//! conflicts, watchers: a change to a record with an unpublished change waits for that one's fate.

use super::Revision;
use super::error::StoreError;
use super::lease::Leases;
use super::logged::{LOG, Replay, change_bytes, push_change, push_snapshot, snapshot_bytes};
use super::options::{Durability, EmbeddedOptions, Step, StoreStats};
use super::state::{Applied, Memory, State};
use super::types::{Cas, CasOutcome, Change};
use crate::wal::{Dir, DiskDir, IoError, Segment, Series, WalError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

pub(super) struct Core {
    pub(super) state: State,
    /// `None`: [`Durability::Memory`].
    log: Option<Segment>,
    /// Staged changes, not yet taken by a committer.
    queue: Vec<Applied>,
    /// The unpublished change of a key.
    pending: HashMap<Arc<str>, u64>,
    /// Bytes that unpublished changes will add.
    pending_bytes: u64,
    next_revision: u64,
    committing: bool,
    pub(super) poisoned: Option<Poison>,
    waiting: usize,
    pub(super) watching: usize,
    leases: Leases,
    stats: StoreStats,
}

#[derive(Clone)]
pub(super) struct Poison {
    pub(super) cause: String,
    /// Changes up to here may be on the disk.
    in_doubt_upto: u64,
}

/// The store inside one process. See the [module](super)'s promises.
pub struct EmbeddedStore {
    core: Mutex<Core>,
    /// A batch was published, or the store was poisoned.
    committed: Condvar,
    /// As `committed`, for watchers.
    pub(super) changed: Condvar,
    /// Held by whoever keeps the device awake.
    pub(super) waking: Mutex<()>,
    series: Option<Series>,
    options: EmbeddedOptions,
}

impl Core {
    pub(super) fn is_committing(&self) -> bool {
        self.committing
    }
}

impl fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedStore")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl EmbeddedStore {
    /// Opens, or makes, the store in a directory; holds the directory's lock.
    pub fn open(path: impl AsRef<Path>, options: EmbeddedOptions) -> Result<Self, StoreError> {
        Self::open_dir(DiskDir::open_direct(path)?, options)
    }

    /// Opens, or makes, the store in any directory that keeps a log's promises.
    pub fn open_dir(dir: Arc<dyn Dir>, options: EmbeddedOptions) -> Result<Self, StoreError> {
        let series = Series::new(dir, "meta", LOG);
        let fresh = || State::new(memory(&options));
        let numbers = series.numbers().map_err(WalError::Io)?;
        let (state, log) = match numbers.last() {
            Some(&last) => {
                let mut replay = Replay::new(fresh());
                let (log, _) = series.recover(last, |record| replay.record(record))?;
                let state = replay.finish().map_err(|e| WalError::Damaged {
                    file: log.file().name(),
                    offset: crate::wal::record::SEGMENT_HEADER as u64,
                    what: e.to_string(),
                })?;
                for &old in &numbers[..numbers.len() - 1] {
                    series.remove(old).map_err(WalError::Io)?;
                }
                (state, log)
            }
            None => {
                let state = fresh();
                let log = begin_segment(&series, &state, 1, 1, &options).map_err(WalError::Io)?;
                series.publish(&log).map_err(WalError::Io)?;
                (state, log)
            }
        };
        Ok(Self::with(state, Some((series, log)), options))
    }

    /// A store that lives and dies with the process ([`Durability::Memory`]).
    pub fn in_memory(options: EmbeddedOptions) -> Self {
        Self::with(State::new(memory(&options)), None, options)
    }

    fn with(state: State, log: Option<(Series, Segment)>, options: EmbeddedOptions) -> Self {
        let (series, log) = log.unzip();
        let next_revision = state.revision + 1;
        Self {
            core: Mutex::new(Core {
                state,
                log,
                queue: Vec::new(),
                pending: HashMap::new(),
                pending_bytes: 0,
                next_revision,
                committing: false,
                poisoned: None,
                waiting: 0,
                watching: 0,
                leases: Leases::new(),
                stats: StoreStats::default(),
            }),
            committed: Condvar::new(),
            changed: Condvar::new(),
            waking: Mutex::new(()),
            series,
            options,
        }
    }

    /// What an acknowledgement of this store promises.
    pub fn durability(&self) -> Durability {
        if self.series.is_some() {
            Durability::Disk
        } else {
            Durability::Memory
        }
    }

    /// Counters.
    pub fn stats(&self) -> StoreStats {
        let core = self.core.lock();
        StoreStats {
            revision: core.state.revision,
            records: core.state.records.len() as u64,
            bytes: core.state.bytes,
            log_bytes: core.log.as_ref().map_or(0, Segment::end),
            ..core.stats
        }
    }

    /// Where the log lies; `None` without one.
    pub(super) fn dir(&self) -> Option<&dyn Dir> {
        self.series.as_ref().map(|s| &**s.dir())
    }

    fn hook(&self, step: Step) {
        if let Some(hook) = &self.options.hook {
            hook(step);
        }
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Core>, StoreError> {
        let core = self.core.lock();
        match &core.poisoned {
            Some(poison) => Err(StoreError::Poisoned {
                cause: poison.cause.clone(),
            }),
            None => Ok(core),
        }
    }

    /// Waits until the change of `revision` is published, committing where nobody else does.
    fn settle(
        &self,
        core: &mut MutexGuard<'_, Core>,
        revision: u64,
        deadline: Instant,
    ) -> Result<(), Unsettled> {
        loop {
            if core.state.revision >= revision {
                return Ok(());
            }
            if let Some(poison) = &core.poisoned {
                return Err(Unsettled::Poisoned(poison.clone()));
            }
            if !core.committing {
                self.commit(core);
                continue;
            }
            core.waiting += 1;
            let late = self.committed.wait_until(core, deadline).timed_out();
            core.waiting -= 1;
            if late && core.state.revision < revision && core.committing && core.poisoned.is_none()
            {
                return Err(Unsettled::Late);
            }
        }
    }

    /// Writes, flushes and publishes what is staged. The mutex is free meanwhile.
    fn commit(&self, core: &mut MutexGuard<'_, Core>) {
        let Some(log) = core.log.as_mut() else { return };
        let (file, batch) = (log.file(), log.take());
        let changes = std::mem::take(&mut core.queue);
        core.committing = true;
        let result = MutexGuard::unlocked(core, || {
            self.hook(Step::Taken);
            batch.write(&*file)?;
            self.hook(Step::Written);
            file.sync()?;
            self.hook(Step::Flushed);
            Ok::<(), IoError>(())
        });
        core.committing = false;
        match result {
            Ok(()) => {
                if let Some(log) = core.log.as_mut() {
                    log.mark_synced(batch.last_seq());
                    log.give_back(batch);
                }
                core.stats.flushes += 1;
                core.stats.changes += changes.len() as u64;
                for change in changes {
                    if core.pending.get(&change.key) == Some(&change.revision) {
                        core.pending.remove(&change.key);
                    }
                    core.pending_bytes -= grows(&change.key, change.value.as_deref());
                    core.state.apply(change);
                }
            }
            Err(e) => {
                let in_doubt_upto = changes.last().map_or(0, |c| c.revision);
                core.poisoned = Some(Poison {
                    cause: e.to_string(),
                    in_doubt_upto,
                });
            }
        }
        if core.waiting > 0 {
            self.committed.notify_all();
        }
        if core.watching > 0 {
            self.changed.notify_all();
        }
        if self.options.hook.is_some() {
            MutexGuard::unlocked(core, || self.hook(Step::Published));
        }
    }

    /// Takes a snapshot into a new segment. Nothing may be staged or under way.
    fn rotate(&self, core: &mut Core) -> Result<(), StoreError> {
        let (Some(series), Some(log)) = (&self.series, core.log.as_mut()) else {
            return Ok(());
        };
        let (old, number) = (log.number(), log.number() + 1);
        let new = begin_segment(series, &core.state, number, log.next_seq(), &self.options)
            .map_err(|e| StoreError::Unavailable {
                cause: e.to_string(),
            })?;
        self.hook(Step::SnapshotPrepared);
        if let Err(e) = series.publish(&new) {
            // Which of the two a restart finds is open, so neither may be written to.
            let cause = e.to_string();
            core.poisoned = Some(Poison {
                cause: cause.clone(),
                in_doubt_upto: 0,
            });
            return Err(StoreError::Poisoned { cause });
        }
        self.hook(Step::SnapshotPublished);
        *log = new;
        core.stats.snapshots += 1;
        // A segment left over is removed at the next start.
        let _ = series.remove(old);
        Ok(())
    }

    /// Makes room in the log for one more change.
    fn make_room(
        &self,
        core: &mut MutexGuard<'_, Core>,
        payload: usize,
        deadline: Instant,
    ) -> Result<Room, StoreError> {
        match &core.log {
            None => return Ok(Room::Ready),
            Some(log) if log.fits(payload) => return Ok(Room::Ready),
            Some(_) => {}
        }
        let last = core.next_revision - 1;
        if core.state.revision < last {
            return match self.settle(core, last, deadline) {
                Ok(()) => Ok(Room::LookAgain),
                Err(e) => Err(e.before()),
            };
        }
        self.rotate(core)?;
        Ok(Room::LookAgain)
    }

    pub(super) fn try_cas(
        &self,
        cas: &Cas<'_>,
        deadline: Instant,
    ) -> Result<CasOutcome, StoreError> {
        let value = match cas.change {
            Change::Put(value) => Some(value),
            Change::Delete => None,
        };
        let mut core = self.lock()?;
        loop {
            if let Some(&unpublished) = core.pending.get(cas.key) {
                self.settle(&mut core, unpublished, deadline)
                    .map_err(Unsettled::before)?;
                continue;
            }
            if let Some(revision) = core.state.outcome_of(cas.op) {
                return Ok(CasOutcome::Applied {
                    revision: Revision(revision),
                });
            }
            let current = core
                .state
                .get(cas.key)
                .map(|entry| Revision(entry.revision));
            if current != cas.expected {
                return Ok(CasOutcome::Conflict {
                    current: core.state.versioned(cas.key),
                });
            }
            if current.is_none() && value.is_none() {
                // Removing what is absent changes nothing and needs no revision.
                return Ok(CasOutcome::Conflict { current: None });
            }
            let bytes = core.state.bytes + core.pending_bytes;
            if bytes + grows(cas.key, value) > self.options.max_bytes && value.is_some() {
                return Err(StoreError::Full {
                    bytes,
                    max: self.options.max_bytes,
                });
            }
            match self.make_room(&mut core, change_bytes(cas.key, value), deadline)? {
                Room::Ready => break,
                Room::LookAgain => {}
            }
        }
        let revision = core.next_revision;
        core.next_revision += 1;
        let key: Arc<str> = cas.key.into();
        let change = Applied {
            revision,
            op: cas.op,
            key,
            value: value.map(Arc::from),
        };
        match core.log.as_mut() {
            None => {
                core.stats.changes += 1;
                core.state.apply(change);
                if core.watching > 0 {
                    self.changed.notify_all();
                }
            }
            Some(log) => {
                push_change(log, &change);
                core.pending.insert(Arc::clone(&change.key), revision);
                core.pending_bytes += grows(&change.key, change.value.as_deref());
                core.queue.push(change);
                self.settle(&mut core, revision, deadline)
                    .map_err(|e| e.after(revision))?;
            }
        }
        Ok(CasOutcome::Applied {
            revision: Revision(revision),
        })
    }

    pub(super) fn with_leases<T>(
        &self,
        with: impl FnOnce(&mut Leases) -> T,
    ) -> Result<T, StoreError> {
        Ok(with(&mut self.lock()?.leases))
    }
}

enum Room {
    Ready,
    /// The mutex was free for a while: judge again.
    LookAgain,
}

enum Unsettled {
    Late,
    Poisoned(Poison),
}

impl Unsettled {
    /// Nothing had been staged for the caller.
    fn before(self) -> StoreError {
        match self {
            Self::Late => StoreError::Unavailable {
                cause: "deadline passed while an earlier change was being flushed".to_owned(),
            },
            Self::Poisoned(poison) => StoreError::Poisoned {
                cause: poison.cause,
            },
        }
    }

    /// The caller's change of `revision` had been staged.
    fn after(self, revision: u64) -> StoreError {
        match self {
            Self::Late => StoreError::InDoubt {
                cause: "deadline passed while the change was being flushed".to_owned(),
            },
            Self::Poisoned(poison) if revision <= poison.in_doubt_upto => StoreError::InDoubt {
                cause: poison.cause,
            },
            Self::Poisoned(poison) => StoreError::Poisoned {
                cause: poison.cause,
            },
        }
    }
}

fn grows(key: &str, value: Option<&[u8]>) -> u64 {
    value.map_or(0, |value| (key.len() + value.len()) as u64)
}

fn memory(options: &EmbeddedOptions) -> Memory {
    Memory {
        ops: options.remembered_ops,
        events: options.history,
        event_bytes: 8 << 20,
    }
}

fn begin_segment(
    series: &Series,
    state: &State,
    number: u64,
    first_seq: u64,
    options: &EmbeddedOptions,
) -> Result<Segment, IoError> {
    let header = crate::wal::record::SEGMENT_HEADER as u64;
    // Room for at least one change of the longest kind, or rotating would not help it.
    let least = crate::wal::record::record_bytes(change_bytes("", None) + 256 + (64 << 10)) as u64;
    let capacity = header + snapshot_bytes(state) + options.segment_bytes.max(least);
    let mut segment = series.create(number, first_seq, capacity.next_multiple_of(4096))?;
    push_snapshot(&mut segment, state);
    match series.prepare(&mut segment) {
        Ok(()) => Ok(segment),
        Err(e) => {
            series.abandon(segment);
            Err(e)
        }
    }
}
