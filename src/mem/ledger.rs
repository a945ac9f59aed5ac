//! Who owns, reads and writes each block. One lock per pool, taken once per batch.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::mem::MemError;

/// Why blocks were taken out of service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// A peer did not acknowledge in time that it stopped reading.
    ReaderNotDrained,
    /// A write may still arrive: its connection could not be shown to be destroyed.
    WriterNotDrained,
    /// The device or engine that used the blocks is gone or hung.
    DeviceLost,
    /// The memory itself gave wrong bytes.
    Faulty,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReaderNotDrained => "a reader was not drained in time",
            Self::WriterNotDrained => "a writer was not drained in time",
            Self::DeviceLost => "its device was lost",
            Self::Faulty => "its memory gave wrong bytes",
        })
    }
}

/// A count of everything in a pool, taken under its lock: `free + used + quarantined = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Blocks in the pool.
    pub total: usize,
    /// Blocks that can be allocated.
    pub free: usize,
    /// Blocks with an owner, not quarantined.
    pub used: usize,
    /// Blocks out of service for ever.
    pub quarantined: usize,
    /// Bytes of the quarantined blocks.
    pub quarantined_bytes: u64,
    /// Live read leases.
    pub read_leases: usize,
    /// Live write leases.
    pub write_leases: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    refs: u32,
    readers: u32,
    /// Writers that wait; new readers stand back for them, or a busy reader would starve decoding.
    writers_waiting: u32,
    writer: bool,
    /// In the free list.
    free: bool,
    quarantined: Option<Why>,
    generation: u64,
}

/// The blocks of one lease: a list for going through them, a bitmap for asking. Recycled through
/// the ledger, so a steady state allocates nothing.
#[derive(Debug, Default)]
pub(super) struct BlockSet {
    list: Vec<u32>,
    bits: Vec<u64>,
}

impl BlockSet {
    fn fill(&mut self, blocks: &[u32], total: usize) {
        self.bits.resize(total.div_ceil(64), 0);
        for &b in blocks {
            let (word, bit) = (b as usize / 64, 1u64 << (b % 64));
            if self.bits[word] & bit == 0 {
                self.bits[word] |= bit;
                self.list.push(b);
            }
        }
    }

    fn clear(&mut self) {
        for b in self.list.drain(..) {
            self.bits[b as usize / 64] = 0;
        }
    }

    pub(super) fn holds(&self, block: u32) -> bool {
        self.bits
            .get(block as usize / 64)
            .is_some_and(|w| w >> (block % 64) & 1 == 1)
    }

    pub(super) fn list(&self) -> &[u32] {
        &self.list
    }
}

/// What the lock protects.
#[derive(Debug)]
pub(super) struct State {
    entries: Vec<Entry>,
    free: Vec<u32>,
    spare: Vec<BlockSet>,
    quarantined: usize,
    quarantined_bytes: u64,
    read_leases: usize,
    write_leases: usize,
}

const SPARE_MAX: usize = 64;

/// A lock with a condition: parking_lot in the product, shuttle in the model check.
pub(super) trait Monitor<T> {
    fn new(value: T) -> Self;
    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R;
    /// Runs `f` under the lock until it says something else than `None`, waiting for
    /// [`Monitor::wake`] in between; the last run is the one at or after `deadline`.
    fn until<R>(&self, deadline: Instant, f: impl FnMut(&mut T, bool) -> Option<R>) -> R;
    fn wake(&self);
}

/// The product's monitor.
pub(super) struct Parking<T> {
    value: parking_lot::Mutex<T>,
    changed: parking_lot::Condvar,
    /// Waiters, counted so that dropping a lease costs no system call when there are none.
    waiting: AtomicUsize,
}

impl<T> Monitor<T> for Parking<T> {
    fn new(value: T) -> Self {
        let value = parking_lot::Mutex::new(value);
        Self {
            value,
            changed: parking_lot::Condvar::new(),
            waiting: AtomicUsize::new(0),
        }
    }

    fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        f(&mut self.value.lock())
    }

    fn until<R>(&self, deadline: Instant, mut f: impl FnMut(&mut T, bool) -> Option<R>) -> R {
        let mut guard = self.value.lock();
        let mut last = false;
        loop {
            if let Some(r) = f(&mut guard, last) {
                return r;
            }
            assert!(!last, "a last run gives an answer");
            // Counted before the lock is released, so a waker that saw the lock sees the count.
            self.waiting.fetch_add(1, Ordering::Relaxed);
            last = self.changed.wait_until(&mut guard, deadline).timed_out();
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn wake(&self) {
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.changed.notify_all();
        }
    }
}

/// The ledger of one pool.
pub(super) struct Ledger<M> {
    monitor: M,
    total: usize,
}

impl<M: Monitor<State>> Ledger<M> {
    pub(super) fn new(total: u32) -> Self {
        let state = State {
            entries: vec![
                Entry {
                    free: true,
                    ..Entry::default()
                };
                total as usize
            ],
            free: (0..total).rev().collect(),
            spare: Vec::with_capacity(SPARE_MAX),
            quarantined: 0,
            quarantined_bytes: 0,
            read_leases: 0,
            write_leases: 0,
        };
        Self {
            monitor: M::new(state),
            total: total as usize,
        }
    }

    pub(super) fn total(&self) -> u32 {
        self.total as u32
    }

    fn exists(&self, blocks: &[u32]) -> Result<(), MemError> {
        let total = self.total as u32;
        match blocks.iter().find(|&&b| b >= total) {
            Some(&block) => Err(MemError::NoSuchBlock {
                block,
                blocks: total,
            }),
            None => Ok(()),
        }
    }

    pub(super) fn alloc(&self, n: usize, out: &mut Vec<u32>) -> Result<(), MemError> {
        self.monitor.with(|s| {
            let free = s.free.len();
            if n > free {
                return Err(MemError::Exhausted { wanted: n, free });
            }
            for _ in 0..n {
                let b = s.free.pop().expect("counted above");
                let e = &mut s.entries[b as usize];
                e.refs = 1;
                e.free = false;
                e.generation += 1;
                out.push(b);
            }
            Ok(())
        })
    }

    pub(super) fn retain(&self, blocks: &[u32]) -> Result<(), MemError> {
        self.exists(blocks)?;
        self.monitor.with(|s| {
            for &block in blocks {
                s.owned(block)?;
            }
            for &b in blocks {
                s.entries[b as usize].refs += 1;
            }
            Ok(())
        })
    }

    pub(super) fn release(&self, blocks: &[u32]) -> Result<usize, MemError> {
        self.exists(blocks)?;
        self.monitor.with(|s| {
            // Nothing changes unless all of it can. Released one by one, then put back on refusal,
            // so that a list naming a block twice is judged by its sum.
            let mut done = 0;
            let refusal = blocks.iter().find_map(|&block| {
                let e = &mut s.entries[block as usize];
                let refused = if e.refs == 0 {
                    Some(MemError::NotAllocated { block })
                } else if e.refs == 1 && e.quarantined.is_none() && e.writer {
                    Some(MemError::Busy {
                        block,
                        by: "writer",
                    })
                } else if e.refs == 1 && e.quarantined.is_none() && e.readers > 0 {
                    Some(MemError::Busy {
                        block,
                        by: "reader",
                    })
                } else {
                    None
                };
                if refused.is_none() {
                    e.refs -= 1;
                    done += 1;
                }
                refused
            });
            if let Some(refusal) = refusal {
                for &b in &blocks[..done] {
                    s.entries[b as usize].refs += 1;
                }
                return Err(refusal);
            }
            let before = s.free.len();
            for &b in blocks {
                let e = &mut s.entries[b as usize];
                // A block that the list names twice is put back once.
                if e.refs == 0 && e.quarantined.is_none() && !e.free {
                    e.free = true;
                    s.free.push(b);
                }
            }
            Ok(s.free.len() - before)
        })
    }

    pub(super) fn quarantine(
        &self,
        blocks: &[u32],
        why: Why,
        bytes: impl Fn(u32) -> u64,
    ) -> Result<u64, MemError> {
        self.exists(blocks)?;
        let taken = self.monitor.with(|s| {
            let mut taken = 0;
            for &b in blocks {
                let e = &mut s.entries[b as usize];
                if e.quarantined.is_none() {
                    e.quarantined = Some(why);
                    taken += bytes(b);
                    s.quarantined += 1;
                    if std::mem::take(&mut e.free) {
                        s.free.retain(|&f| f != b);
                    }
                }
            }
            s.quarantined_bytes += taken;
            taken
        });
        self.monitor.wake();
        Ok(taken)
    }

    pub(super) fn generation(&self, block: u32) -> Result<u64, MemError> {
        self.exists(&[block])?;
        Ok(self.monitor.with(|s| s.entries[block as usize].generation))
    }

    pub(super) fn refs(&self, block: u32) -> Result<u32, MemError> {
        self.exists(&[block])?;
        Ok(self.monitor.with(|s| s.entries[block as usize].refs))
    }

    /// Block sets ready for reuse.
    #[cfg(test)]
    pub(super) fn spare_sets(&self) -> usize {
        self.monitor.with(|s| s.spare.len())
    }

    pub(super) fn stats(&self) -> PoolStats {
        self.monitor.with(|s| PoolStats {
            total: self.total,
            free: s.free.len(),
            used: self.total - s.free.len() - s.quarantined,
            quarantined: s.quarantined,
            quarantined_bytes: s.quarantined_bytes,
            read_leases: s.read_leases,
            write_leases: s.write_leases,
        })
    }

    pub(super) fn read(&self, blocks: &[u32]) -> Result<BlockSet, MemError> {
        self.exists(blocks)?;
        self.monitor.with(|s| s.try_read(blocks))
    }

    pub(super) fn write(&self, blocks: &[u32]) -> Result<BlockSet, MemError> {
        self.exists(blocks)?;
        self.monitor.with(|s| s.try_write(blocks))
    }

    pub(super) fn read_until(
        &self,
        blocks: &[u32],
        deadline: Instant,
    ) -> Result<BlockSet, MemError> {
        self.exists(blocks)?;
        self.monitor
            .until(deadline, |s, last| match s.try_read(blocks) {
                Err(MemError::Busy { .. }) if !last => None,
                answer => Some(answer),
            })
    }

    pub(super) fn write_until(
        &self,
        blocks: &[u32],
        deadline: Instant,
    ) -> Result<BlockSet, MemError> {
        self.exists(blocks)?;
        let mut announced = false;
        let answer = self.monitor.until(deadline, |s, last| {
            let answer = s.try_write(blocks);
            if matches!(answer, Err(MemError::Busy { .. })) && !last {
                s.announce(blocks, &mut announced, true);
                return None;
            }
            s.announce(blocks, &mut announced, false);
            Some(answer)
        });
        if answer.is_err() {
            // Readers that stood back for us may go on.
            self.monitor.wake();
        }
        answer
    }

    /// A writer becomes a reader with nothing in between.
    pub(super) fn downgrade(&self, set: &BlockSet) {
        self.monitor.with(|s| {
            for &b in set.list() {
                let e = &mut s.entries[b as usize];
                e.writer = false;
                e.readers = 1;
            }
            s.write_leases -= 1;
            s.read_leases += 1;
        });
        self.monitor.wake();
    }

    pub(super) fn end(&self, mut set: BlockSet, writer: bool) {
        self.monitor.with(|s| {
            for &b in set.list() {
                let e = &mut s.entries[b as usize];
                if writer {
                    e.writer = false;
                } else {
                    e.readers -= 1;
                }
            }
            if writer {
                s.write_leases -= 1;
            } else {
                s.read_leases -= 1;
            }
            if s.spare.len() < SPARE_MAX {
                set.clear();
                s.spare.push(set);
            }
        });
        self.monitor.wake();
    }
}

impl State {
    fn owned(&self, block: u32) -> Result<&Entry, MemError> {
        let e = &self.entries[block as usize];
        match e.quarantined {
            Some(why) => Err(MemError::Quarantined { block, why }),
            None if e.refs == 0 => Err(MemError::NotAllocated { block }),
            None => Ok(e),
        }
    }

    fn set(&mut self, blocks: &[u32]) -> BlockSet {
        let mut set = self.spare.pop().unwrap_or_default();
        set.fill(blocks, self.entries.len());
        set
    }

    fn try_read(&mut self, blocks: &[u32]) -> Result<BlockSet, MemError> {
        for &block in blocks {
            let e = self.owned(block)?;
            if e.writer {
                return Err(MemError::Busy {
                    block,
                    by: "writer",
                });
            }
            if e.writers_waiting > 0 {
                return Err(MemError::Busy {
                    block,
                    by: "waiting writer",
                });
            }
        }
        let set = self.set(blocks);
        for &b in set.list() {
            self.entries[b as usize].readers += 1;
        }
        self.read_leases += 1;
        Ok(set)
    }

    /// Waiting writers do not stand in each other's way: whoever wakes first wins.
    fn try_write(&mut self, blocks: &[u32]) -> Result<BlockSet, MemError> {
        for &block in blocks {
            let e = self.owned(block)?;
            if e.writer {
                return Err(MemError::Busy {
                    block,
                    by: "writer",
                });
            }
            if e.readers > 0 {
                return Err(MemError::Busy {
                    block,
                    by: "reader",
                });
            }
        }
        let set = self.set(blocks);
        for &b in set.list() {
            self.entries[b as usize].writer = true;
        }
        self.write_leases += 1;
        Ok(set)
    }

    /// Enters the caller among the waiting writers of `blocks`, or takes it out.
    fn announce(&mut self, blocks: &[u32], is: &mut bool, to: bool) {
        if *is != to {
            for &b in blocks {
                let waiting = &mut self.entries[b as usize].writers_waiting;
                *waiting = if to { *waiting + 1 } else { *waiting - 1 };
            }
            *is = to;
        }
    }
}
