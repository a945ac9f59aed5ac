//! What an owner has registered, and who is at work under which epoch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, RwLock};

use crate::mem::{BlockId, BlockPool, MemError, RegionKey, RemoteRegion, Why};
use crate::transport::{Access, Refusal, Revoked, Scope, Span, TransportError};

/// All registrations of a transport.
#[derive(Debug, Default)]
pub(super) struct Registry {
    all: RwLock<Vec<Arc<Registration>>>,
}

/// One registration: a key, an epoch that only grows, and the work admitted under it.
#[derive(Debug)]
pub(super) struct Registration {
    pub(super) key: RegionKey,
    pub(super) pool: Arc<BlockPool>,
    pub(super) access: Access,
    /// Blocks covered, as a bitmap; `None` for the whole pool.
    scope: Option<RwLock<Vec<u64>>>,
    /// The live epoch, also kept under the lock below, where it is decided.
    epoch: AtomicU64,
    work: Mutex<Work>,
    drained: Condvar,
}

#[derive(Debug, Default)]
struct Work {
    epoch: u64,
    revoked: bool,
    /// Guards of the live epoch, and of all older ones.
    now: usize,
    older: usize,
}

/// The right to touch a registration's memory for one piece of work; revoking waits for it.
#[derive(Debug)]
pub(super) struct Guard {
    registration: Arc<Registration>,
    epoch: u64,
}

/// Registrations one transport keeps at most.
const REGISTRATIONS_MAX: usize = 4096;

impl Registry {
    pub(super) fn register(
        &self,
        pool: &Arc<BlockPool>,
        access: Access,
        scope: Scope<'_>,
    ) -> Result<(RemoteRegion, Arc<Registration>), TransportError> {
        let scope = match scope {
            Scope::Pool => None,
            Scope::Blocks(blocks) => {
                let mut bits = vec![0u64; (pool.blocks() as usize).div_ceil(64)];
                mark(pool, blocks, &mut bits)?;
                Some(RwLock::new(bits))
            }
        };
        let registration = Arc::new(Registration {
            key: RegionKey::random()?,
            pool: pool.clone(),
            access,
            scope,
            epoch: AtomicU64::new(1),
            work: Mutex::new(Work {
                epoch: 1,
                ..Work::default()
            }),
            drained: Condvar::new(),
        });
        let mut all = self.all.write();
        if all.len() >= REGISTRATIONS_MAX {
            return Err(TransportError::Unsupported {
                what: "more than 4096 registrations; revoke some",
            });
        }
        all.push(registration.clone());
        Ok((registration.remote(1), registration))
    }

    /// The registration under a key. Looks at every key, so that the time taken says nothing about
    /// where, or whether, one matched.
    pub(super) fn find(&self, key: RegionKey) -> Option<Arc<Registration>> {
        let mut found = None;
        for r in self.all.read().iter() {
            if r.key == key {
                found = Some(r.clone());
            }
        }
        found
    }

    pub(super) fn remove(&self, key: RegionKey) {
        self.all.write().retain(|r| r.key != key);
    }

    /// Admits one piece of work, or says why not.
    pub(super) fn enter(
        &self,
        key: RegionKey,
        epoch: u64,
        access: Access,
    ) -> Result<Guard, Refusal> {
        let registration = self.find(key).ok_or(Refusal::UnknownKey)?;
        if registration.access != access {
            return Err(Refusal::Access);
        }
        registration.enter(epoch)
    }
}

fn mark(pool: &BlockPool, blocks: &[BlockId], bits: &mut [u64]) -> Result<(), TransportError> {
    let total = pool.blocks();
    for &block in blocks {
        if block >= total {
            return Err(MemError::NoSuchBlock {
                block,
                blocks: total,
            }
            .into());
        }
        bits[block as usize / 64] |= 1 << (block % 64);
    }
    Ok(())
}

impl Registration {
    fn remote(&self, epoch: u64) -> RemoteRegion {
        RemoteRegion {
            key: self.key,
            base: 0,
            len: self.pool.region_len(),
            epoch,
        }
    }

    pub(super) fn extend(&self, blocks: &[BlockId]) -> Result<(), TransportError> {
        match &self.scope {
            None => Ok(()),
            Some(bits) => mark(&self.pool, blocks, &mut bits.write()),
        }
    }

    pub(super) fn enter(self: &Arc<Self>, epoch: u64) -> Result<Guard, Refusal> {
        let mut work = self.work.lock();
        if work.revoked || work.epoch != epoch {
            return Err(Refusal::StaleEpoch);
        }
        work.now += 1;
        Ok(Guard {
            registration: self.clone(),
            epoch,
        })
    }

    /// True while grants of `epoch` are good.
    pub(super) fn alive(&self, epoch: u64) -> bool {
        self.epoch.load(Ordering::Acquire) == epoch
    }

    /// Ends the live epoch: nothing is admitted under it from here on. Gives the next one.
    pub(super) fn close_epoch(&self, for_ever: bool) -> RemoteRegion {
        let mut work = self.work.lock();
        work.epoch += 1;
        work.revoked |= for_ever;
        work.older += std::mem::take(&mut work.now);
        self.epoch
            .store(if work.revoked { 0 } else { work.epoch }, Ordering::Release);
        self.remote(work.epoch)
    }

    /// True once no work of a closed epoch is left.
    pub(super) fn wait_drained(&self, deadline: Instant) -> bool {
        let mut work = self.work.lock();
        while work.older > 0 {
            if self.drained.wait_until(&mut work, deadline).timed_out() {
                return work.older == 0;
            }
        }
        true
    }

    /// Takes everything in scope out of service, since somebody may still touch it.
    pub(super) fn quarantine(&self) -> Result<u64, TransportError> {
        let why = match self.access {
            Access::RemoteRead => Why::ReaderNotDrained,
            Access::RemoteWrite => Why::WriterNotDrained,
        };
        let blocks: Vec<BlockId> = match &self.scope {
            None => (0..self.pool.blocks())
                .filter(|&b| self.pool.refs(b).is_ok_and(|n| n > 0))
                .collect(),
            Some(bits) => {
                let bits = bits.read();
                (0..self.pool.blocks())
                    .filter(|b| bits[*b as usize / 64] >> (b % 64) & 1 == 1)
                    .collect()
            }
        };
        Ok(self.pool.quarantine(&blocks, why)?)
    }

    pub(super) fn covers(&self, blocks: &[BlockId]) -> bool {
        self.scope.as_ref().is_none_or(|bits| {
            let bits = bits.read();
            blocks
                .iter()
                .all(|b| bits[*b as usize / 64] >> (b % 64) & 1 == 1)
        })
    }

    /// The blocks under some spans, by their remote offsets, into `out` (replaced).
    pub(super) fn blocks_of(&self, spans: &[Span], out: &mut Vec<BlockId>) -> Result<(), Refusal> {
        out.clear();
        for s in spans {
            self.pool
                .blocks_of(s.remote_off, s.len, out)
                .map_err(|_| Refusal::OutOfRange)?;
        }
        if self.covers(out) {
            Ok(())
        } else {
            Err(Refusal::OutOfRange)
        }
    }
}

/// What a peer is told when its blocks cannot be leased.
pub(super) fn lease_refusal(e: MemError) -> Refusal {
    match e {
        MemError::Busy { .. } => Refusal::Busy,
        MemError::NotAllocated { .. } | MemError::Quarantined { .. } => Refusal::NotAllocated,
        _ => Refusal::OutOfRange,
    }
}

impl Guard {
    pub(super) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }

    /// False once the epoch was closed: finish at once and drop the guard.
    pub(super) fn alive(&self) -> bool {
        self.registration.alive(self.epoch)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut work = self.registration.work.lock();
        if work.epoch == self.epoch {
            work.now -= 1;
        } else {
            work.older -= 1;
            if work.older == 0 {
                self.registration.drained.notify_all();
            }
        }
    }
}

/// Closes an epoch and waits for its work, in-process part: what all paths do first.
pub(super) fn settle(
    drained: bool,
    registration: &Registration,
) -> Result<Revoked, TransportError> {
    if drained {
        Ok(Revoked::Done)
    } else {
        Ok(Revoked::Quarantined {
            bytes: registration.quarantine()?,
        })
    }
}
