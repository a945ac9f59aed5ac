//! One lock, one log, every request's state in memory.

use super::error::JournalError;
use super::memory::Request;
use super::record::{FLOOR, OPEN, Replay, encode_floor};
use super::types::{JournalOptions, JournalStats};
use crate::id::{OwnerEpoch, RequestId, WorkerId, WorkerRef};
use crate::route::Writer;
use crate::wal::record::SEGMENT_HEADER;
use crate::wal::{Blank, Segment, Series, WalError};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Longest record of a floor, in bytes: id, epoch, cursor, owner.
pub(super) const FLOOR_MAX: usize = 16 + 8 + 8 + 1 + WorkerId::MAX_BYTES + 8;

pub(super) struct Held {
    pub(super) request: Request,
    /// The record that set its floor.
    pub(super) floor_record: u64,
    /// The oldest segment it needs.
    pub(super) home: u64,
}

pub(super) struct Core {
    pub(super) requests: HashMap<RequestId, Held>,
    pub(super) log: Segment,
    /// Segments there are, oldest first; the last is the log's.
    pub(super) segments: VecDeque<u64>,
    /// Requests by home.
    pub(super) homes: BTreeMap<u64, usize>,
    /// Homes left by records not yet flushed: until then those segments must stay.
    pub(super) left: VecDeque<(u64, u64)>,
    pub(super) blank: Option<Blank>,
    pub(super) written: u64,
    pub(super) flushed: u64,
    pub(super) flushing: bool,
    waiting: usize,
    pub(super) bytes: u64,
    poisoned: Option<String>,
    pub(super) scratch: Writer,
    pub(super) stats: JournalStats,
}

pub(super) struct Inner {
    pub(super) core: Mutex<Core>,
    flushed: Condvar,
    pub(super) series: Series,
    pub(super) options: JournalOptions,
    /// Held through one pass of upkeep.
    pub(super) upkeep: Mutex<()>,
}

impl Core {
    /// A request no longer needs segments from `home` on, once `record` is flushed.
    pub(super) fn leave(&mut self, home: u64, record: u64) {
        self.left.push_back((record, home));
    }

    fn settle_homes(&mut self) {
        while let Some(&(record, home)) = self.left.front()
            && record <= self.flushed
        {
            self.left.pop_front();
            if let Some(n) = self.homes.get_mut(&home) {
                *n -= 1;
                if *n == 0 {
                    self.homes.remove(&home);
                }
            }
        }
    }
}

impl Inner {
    pub(super) fn open(series: Series, options: JournalOptions) -> Result<Self, JournalError> {
        let numbers = series.numbers().map_err(WalError::Io)?;
        let mut replay = Replay::default();
        let mut next_seq = None;
        let mut last = None;
        for (i, &number) in numbers.iter().enumerate() {
            let damaged = |what: &str| WalError::Damaged {
                file: format!("journal segment {number:x}"),
                offset: 0,
                what: what.to_owned(),
            };
            if i > 0 && numbers[i - 1] + 1 != number {
                return Err(damaged("the segment before it is missing").into());
            }
            let visit = |record: crate::wal::Record<'_>| replay.record(number, record);
            let found = if i + 1 < numbers.len() {
                series.read(number, visit)?
            } else {
                let (segment, found) = series.recover(number, visit)?;
                last = Some(segment);
                found
            };
            if next_seq.is_some_and(|next| next != found.header.first_seq) {
                return Err(damaged("the segment before it ends too early").into());
            }
            next_seq = Some(found.next_seq);
        }
        let log = match last {
            Some(log) => log,
            None => {
                let create = || {
                    let mut log = series.create(1, 1, options.segment_bytes)?;
                    series.prepare(&mut log)?;
                    series.publish(&log)?;
                    Ok(log)
                };
                create().map_err(WalError::Io)?
            }
        };
        let replayed = replay.finish().map_err(|e| WalError::Damaged {
            file: format!(
                "journal segment {:x}",
                numbers.first().copied().unwrap_or(1)
            ),
            offset: SEGMENT_HEADER as u64,
            what: e.to_string(),
        })?;
        let written = log.next_seq() - 1;
        let mut homes = BTreeMap::new();
        let mut bytes = 0;
        let mut requests = HashMap::with_capacity(replayed.len());
        for (id, (request, home)) in replayed {
            *homes.entry(home).or_insert(0) += 1;
            bytes += request.bytes();
            requests.insert(
                id,
                Held {
                    request,
                    floor_record: written,
                    home,
                },
            );
        }
        let mut segments: VecDeque<u64> = numbers.into();
        if segments.is_empty() {
            segments.push_back(log.number());
        }
        Ok(Self {
            core: Mutex::new(Core {
                requests,
                log,
                segments,
                homes,
                left: VecDeque::new(),
                blank: None,
                written,
                flushed: written,
                flushing: false,
                waiting: 0,
                bytes,
                poisoned: None,
                scratch: Writer::default(),
                stats: JournalStats::default(),
            }),
            flushed: Condvar::new(),
            series,
            options,
            upkeep: Mutex::new(()),
        })
    }

    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Core>, JournalError> {
        let core = self.core.lock();
        match &core.poisoned {
            Some(cause) => Err(JournalError::Poisoned {
                cause: cause.clone(),
            }),
            None => Ok(core),
        }
    }

    pub(super) fn set_floor(
        &self,
        core: &mut Core,
        id: RequestId,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<(), JournalError> {
        let number = core.log.number();
        let (kind, held) = match core.requests.entry(id) {
            std::collections::hash_map::Entry::Occupied(there) => {
                let held = there.into_mut();
                held.request.floor = floor;
                held.request.owner = owner.clone();
                (FLOOR, held)
            }
            std::collections::hash_map::Entry::Vacant(free) => {
                *core.homes.entry(number).or_insert(0) += 1;
                let request = Request::new(floor, owner.clone());
                (
                    OPEN,
                    free.insert(Held {
                        request,
                        floor_record: 0,
                        home: number,
                    }),
                )
            }
        };
        core.scratch.0.clear();
        encode_floor(&mut core.scratch, id, &held.request);
        held.floor_record = core.log.push(kind, &[&core.scratch.0]);
        self.write(core)
    }

    fn poison<T>(&self, core: &mut Core, cause: String) -> Result<T, JournalError> {
        core.poisoned = Some(cause.clone());
        if core.waiting > 0 {
            self.flushed.notify_all();
        }
        Err(JournalError::Poisoned { cause })
    }

    /// Hands what is staged to the operating system.
    pub(super) fn write(&self, core: &mut Core) -> Result<(), JournalError> {
        let batch = core.log.take();
        if let Err(e) = batch.write(&*core.log.file()) {
            return self.poison(core, e.to_string());
        }
        core.stats.records += batch.last_seq() - core.written;
        core.written = batch.last_seq();
        core.log.give_back(batch);
        Ok(())
    }

    /// Returns once every record up to `upto` is on the disk. The lock is free meanwhile.
    pub(super) fn flush(
        &self,
        core: &mut MutexGuard<'_, Core>,
        upto: u64,
    ) -> Result<(), JournalError> {
        while core.flushed < upto {
            if let Some(cause) = &core.poisoned {
                return Err(JournalError::Poisoned {
                    cause: cause.clone(),
                });
            }
            if core.flushing {
                core.waiting += 1;
                self.flushed.wait(core);
                core.waiting -= 1;
                continue;
            }
            let (file, written) = (core.log.file(), core.written);
            core.flushing = true;
            let result = MutexGuard::unlocked(core, || file.sync());
            core.flushing = false;
            match result {
                Ok(()) => self.note_flushed(core, written),
                Err(e) => return self.poison(core, e.to_string()),
            }
            if core.waiting > 0 {
                self.flushed.notify_all();
            }
        }
        Ok(())
    }

    fn note_flushed(&self, core: &mut Core, upto: u64) {
        core.stats.flushes += 1;
        core.flushed = core.flushed.max(upto);
        core.log.mark_synced(core.flushed);
        core.settle_homes();
    }

    /// The lock, with room in the log for a record of that many bytes.
    pub(super) fn lock_with_room(
        &self,
        payload: usize,
    ) -> Result<MutexGuard<'_, Core>, JournalError> {
        let mut core = self.lock()?;
        while !core.log.fits(payload) {
            if core.flushing {
                // A failure of the flush under way is told once: to its caller, not to a second
                // flush beside it.
                let written = core.written;
                self.flush(&mut core, written)?;
            } else {
                self.next_segment(&mut core)?;
            }
        }
        Ok(core)
    }

    /// Goes on in a new segment. No flush may be under way.
    fn next_segment(&self, core: &mut Core) -> Result<(), JournalError> {
        // Everything before a segment is on the disk before that segment exists: so only the last
        // one can have lost anything.
        if let Err(e) = core.log.file().sync() {
            return self.poison(core, e.to_string());
        }
        let written = core.written;
        self.note_flushed(core, written);
        let (number, first) = (core.log.number() + 1, core.log.next_seq());
        let blank = match core.blank.take() {
            Some(blank) => Ok(blank),
            None => self.series.allocate(self.options.segment_bytes),
        };
        let begun = blank.and_then(|blank| self.series.begin(blank, number, first));
        let mut next = begun.map_err(|e| JournalError::Unavailable {
            cause: e.to_string(),
        })?;
        if let Err(e) = self.series.prepare(&mut next) {
            self.series.abandon(next);
            return Err(JournalError::Unavailable {
                cause: e.to_string(),
            });
        }
        if let Err(e) = self.series.publish(&next) {
            return self.poison(core, e.to_string());
        }
        core.log = next;
        core.segments.push_back(number);
        Ok(())
    }
}
