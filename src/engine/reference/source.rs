//! The adapter's calls on a request that runs here.

use super::entry::Entry;
use super::event::CloseReason;
use super::kvlog::GROUP;
use super::shared::{Inner, Pin, Shared, Slot};
use crate::control_state::{ControlDigest, Refusal};
use crate::digest::SetDigest;
use crate::engine::adapter::{
    AdapterError, Boundary, Checkpoint, ControlExport, PinId, Pinned, Released, Result, Sealed,
};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use parking_lot::MutexGuard;
use std::time::Instant;

impl Shared {
    pub(crate) fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned> {
        let inner = &mut *self.inner.lock();
        inner.check_floor(request, epoch)?;
        let known = inner
            .pins
            .iter()
            .find(|(_, p)| p.request == request && p.epoch == epoch)
            .map(|(id, p)| (*id, p.slot));
        let (id, slot) = match known {
            Some(known) => known,
            None => {
                let (slot, entry) = inner.request(request)?;
                entry.pins += 1;
                inner.raise_floor(request, epoch)?;
                let id = PinId(inner.fresh());
                let pin = Pin {
                    request,
                    slot,
                    epoch,
                    watermark: 0,
                    dirty: false,
                    tail: None,
                };
                inner.pins.insert(id, pin);
                (id, slot)
            }
        };
        let entry = inner
            .entries
            .get(&slot)
            .ok_or_else(|| AdapterError::Bug("a pin without its entry".into()))?;
        Ok(Pinned {
            pin: id,
            generation: entry.generation,
            prompt_tokens: entry.prompt_len as u64,
            max_tokens: entry.max_tokens,
            first_live: vec![(GROUP, 0)],
        })
    }

    pub(crate) fn unpin(&self, id: PinId) -> Result<Released> {
        let inner = &mut *self.inner.lock();
        let Some(pin) = inner.pins.remove(&id) else {
            return Ok(Released::default());
        };
        if let Some(entry) = inner.entries.get_mut(&pin.slot) {
            entry.pins -= 1;
        }
        let blocks = inner.collect(pin.slot);
        self.work.notify_one();
        Ok(Released { blocks })
    }

    pub(crate) fn seal_through(&self, id: PinId) -> Result<Sealed> {
        let inner = &mut *self.inner.lock();
        let (pin, entry) = inner.pinned(id)?;
        let mut sealed = sealed(entry);
        sealed.dirty = pin.dirty;
        let slot = pin.slot;
        if let Some(pin) = inner.pins.get_mut(&id) {
            pin.watermark = pin.watermark.max(sealed.stable_len);
        }
        // A fence may follow, and the live state is away in a step for most of the time.
        if let Some(entry) = inner.entries.get_mut(&slot) {
            entry.preview_wanted = true;
        }
        Ok(sealed)
    }

    pub(crate) fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary> {
        let mut inner = self.inner.lock();
        inner.check_floor(request, epoch)?;
        let (slot, entry) = inner.request(request)?;
        if entry.hold.is_none() {
            if !entry.in_flight && entry.seal() == 0 {
                return Err(Refusal::NoOutputYet.into());
            }
            if !self.drain(&mut inner, slot, deadline) {
                return Err(AdapterError::DrainDeadline);
            }
            // The lock was waited for: everything may have changed.
            inner.check_floor(request, epoch)?;
        }
        let (_, entry) = inner.request(request)?;
        if entry.seal() == 0 {
            return Err(Refusal::NoOutputYet.into());
        }
        entry.hold = Some(epoch);
        let boundary = Boundary {
            seal: entry.seal(),
            kv_len: entry.log.len() as u64 - 1,
            pending_token: entry.log.last().copied().unwrap_or(0),
            sealed: sealed(entry),
            last_step_done_ns: entry.last_step_done_ns,
        };
        inner.raise_floor(request, epoch)?;
        Ok(boundary)
    }

    pub(crate) fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
        let inner = &mut *self.inner.lock();
        inner.check_floor(request, epoch)?;
        let (slot, entry) = inner.request(request)?;
        match entry.hold {
            Some(holder) if holder > epoch => {
                return Err(AdapterError::StaleEpoch {
                    asked: epoch,
                    floor: holder,
                });
            }
            Some(_) => entry.hold = None,
            None => return Ok(()),
        }
        if entry.abort {
            self.close(inner, slot, CloseReason::Aborted);
        }
        self.work.notify_one();
        Ok(())
    }

    pub(crate) fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released> {
        let inner = &mut *self.inner.lock();
        inner.check_floor(request, epoch)?;
        let (slot, hold) = match inner.request(request) {
            Ok((slot, entry)) => (slot, entry.hold),
            Err(_) => return Ok(Released::default()),
        };
        if hold != Some(epoch) {
            return Err(AdapterError::NotHeld);
        }
        inner.raise_floor(request, epoch)?;
        let blocks = self.close(inner, slot, CloseReason::Retired);
        self.work.notify_one();
        Ok(Released { blocks })
    }

    pub(crate) fn export_pinned(&self, id: PinId, owner: OwnerEpoch) -> Result<ControlExport> {
        let mut inner = self.inner.lock();
        let check = |inner: &Inner| -> Result<Slot> {
            let (pin, entry) = inner.pinned(id)?;
            if entry.hold != Some(pin.epoch) {
                return Err(AdapterError::NotHeld);
            }
            if entry.owner_epoch != owner {
                return Err(AdapterError::OwnerEpoch {
                    asked: owner,
                    current: entry.owner_epoch,
                });
            }
            if pin.dirty {
                return Err(AdapterError::SealedDirty);
            }
            Ok(pin.slot)
        };
        let slot = check(&inner)?;
        let kv_len = inner
            .entries
            .get(&slot)
            .map_or(0, |e| e.log.len() as u64 - 1);
        let set = self.set_digest_of(&mut inner, slot, kv_len)?;
        let slot = check(&inner)?;
        let live = inner.entries.get(&slot).and_then(|e| e.live.as_deref());
        let live = live.ok_or(AdapterError::NotHeld)?;
        let state = self.control_of(live, set)?;
        let bytes = state.encode()?;
        let digest = ControlDigest::of(&bytes, live.seal(), owner);
        Ok(ControlExport { bytes, digest })
    }

    /// The set digest of a stay's first `kv_len` tokens; hashes, without the lock, what no call
    /// has hashed yet. A retained copy of the table keeps the blocks meanwhile.
    fn set_digest_of(
        &self,
        inner: &mut MutexGuard<'_, Inner>,
        slot: Slot,
        kv_len: u64,
    ) -> Result<SetDigest> {
        loop {
            let entry = inner.entries.get_mut(&slot).ok_or(AdapterError::Finished)?;
            let missing = match entry.pages.set_digest(kv_len)? {
                Ok(set) => return Ok(set),
                Err(missing) => missing,
            };
            let blocks = inner.blocks.for_tokens(kv_len) as usize;
            let table = inner.entries.get(&slot).map(|e| e.table[..blocks].to_vec());
            let table = table.ok_or(AdapterError::Finished)?;
            inner.blocks.retain(&table)?;
            let hashed =
                MutexGuard::unlocked(inner, || self.hash_missing(&table, &missing, kv_len));
            inner.blocks.give_back(&table);
            let entry = inner.entries.get_mut(&slot).ok_or(AdapterError::Finished)?;
            for (upto, digest) in hashed? {
                entry.pages.record(upto, digest);
            }
        }
    }

    pub(crate) fn journal_checkpoint(
        &self,
        request: RequestId,
        deadline: Instant,
    ) -> Result<Checkpoint> {
        let mut inner = self.inner.lock();
        let (slot, entry) = inner.request(request)?;
        if !entry.in_flight && entry.seal() == 0 {
            return Err(Refusal::NoOutputYet.into());
        }
        if !self.drain(&mut inner, slot, deadline) {
            return Err(AdapterError::DrainDeadline);
        }
        let (slot, entry) = inner.request(request)?;
        // A copy of the state at this boundary; the request goes on while its pages are hashed.
        let live = entry.live.clone().ok_or(AdapterError::DrainDeadline)?;
        if live.seal() == 0 {
            return Err(Refusal::NoOutputYet.into());
        }
        let kv_len = live.tokens.len() as u64 - 1;
        let set = self.set_digest_of(&mut inner, slot, kv_len)?;
        drop(inner);
        Ok(Checkpoint {
            seal: live.seal(),
            kv_len,
            control: self.control_of(&live, set)?.encode()?,
            set_digest: Some(set),
        })
    }
}

fn sealed(entry: &Entry) -> Sealed {
    Sealed {
        stable_len: entry.stable as u64,
        accepted: entry.log.len() as u64,
        generation: entry.generation,
        dirty: false,
    }
}
