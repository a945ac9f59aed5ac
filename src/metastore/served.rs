//! The embedded store as a [`MetaStore`].

use super::embedded::EmbeddedStore;
use super::error::StoreError;
use super::lease::check_names;
use super::types::{
    Cas, CasOutcome, Change, LeaseOutcome, LeaseTerm, Listing, Versioned, WatchBatch, check_key,
    check_prefix, check_value,
};
use super::{MetaStore, Revision};
use std::time::{Duration, Instant};

/// Bytes and events of one watch batch.
const WATCH_EVENTS: usize = 256;
const WATCH_BYTES: usize = 1 << 20;

impl MetaStore for EmbeddedStore {
    fn get(&self, key: &str, _deadline: Instant) -> Result<Option<Versioned>, StoreError> {
        check_key(key)?;
        Ok(self.lock()?.state.versioned(key))
    }

    fn cas(&self, cas: &Cas<'_>, deadline: Instant) -> Result<CasOutcome, StoreError> {
        check_key(cas.key)?;
        if let Change::Put(value) = cas.change {
            check_value(value)?;
        }
        self.try_cas(cas, deadline)
    }

    fn keep_awake(&self, key: &str, deadline: Instant) -> Result<(), StoreError> {
        check_key(key)?;
        self.keep_device_awake(key, deadline)
    }

    fn list(&self, prefix: &str, _deadline: Instant) -> Result<Listing, StoreError> {
        check_prefix(prefix)?;
        let core = self.lock()?;
        let entries = core.state.under(prefix, None);
        let entries = entries
            .map(|(key, entry)| (key.to_string(), entry.versioned()))
            .collect();
        Ok(Listing {
            revision: Revision(core.state.revision),
            entries,
        })
    }

    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        deadline: Instant,
    ) -> Result<WatchBatch, StoreError> {
        check_prefix(prefix)?;
        let mut core = self.lock()?;
        let mut seen = after;
        loop {
            match core.state.events(prefix, seen, WATCH_EVENTS, WATCH_BYTES) {
                WatchBatch::Events { events, upto } if events.is_empty() => {
                    seen = upto;
                    if Instant::now() >= deadline {
                        return Ok(WatchBatch::Events { events, upto });
                    }
                }
                batch => return Ok(batch),
            }
            core.watching += 1;
            self.changed.wait_until(&mut core, deadline);
            core.watching -= 1;
            if let Some(poison) = &core.poisoned {
                return Err(StoreError::Poisoned {
                    cause: poison.cause.clone(),
                });
            }
        }
    }

    fn lease_acquire(
        &self,
        name: &str,
        holder: &str,
        ttl: Duration,
        deadline: Instant,
    ) -> Result<LeaseOutcome, StoreError> {
        super::lease::acquire(self, name, holder, ttl, deadline)
    }

    fn lease_renew(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        _deadline: Instant,
    ) -> Result<bool, StoreError> {
        check_names(name, holder)?;
        self.with_leases(|leases| leases.renew(name, holder, term, Instant::now()))
    }

    fn lease_release(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        _deadline: Instant,
    ) -> Result<(), StoreError> {
        check_names(name, holder)?;
        self.with_leases(|leases| leases.release(name, holder, term))
    }
}
