//! Leases: who may *try to drive*. A term is a record in the store, so terms rise across crashes;
//! its time is kept in memory by the store's monotonic clock. After a restart the holder on record
//! is granted one full `ttl` more, so that a restart elects nobody new.

use super::error::StoreError;
use super::types::{Cas, CasOutcome, LeaseOutcome, LeaseTerm, MAX_KEY, Versioned};
use super::{EmbeddedStore, MetaStore};
use crate::route::Reader;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Prefix of the records that hold terms.
pub(super) const PREFIX: &str = "lease/";

/// Shortest and longest time to live.
const TTL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(3600));

/// How long the terms on record still run.
#[derive(Debug)]
pub(super) struct Leases(HashMap<String, Running>);

#[derive(Debug, Clone)]
struct Running {
    term: u64,
    holder: String,
    ttl: Duration,
    until: Instant,
}

impl Leases {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    pub(super) fn renew(
        &mut self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        now: Instant,
    ) -> bool {
        match self.0.get_mut(name) {
            Some(run) if run.term == term.0 && run.holder == holder && now < run.until => {
                run.until = now + run.ttl;
                true
            }
            _ => false,
        }
    }

    pub(super) fn release(&mut self, name: &str, holder: &str, term: LeaseTerm) {
        if let Some(run) = self.0.get_mut(name)
            && run.term == term.0
            && run.holder == holder
        {
            run.until = Instant::now();
        }
    }

    /// Time left of the term on record, and its holder.
    fn left(&mut self, name: &str, on_record: &OnRecord, now: Instant) -> (String, Duration) {
        let run = self
            .0
            .entry(name.to_owned())
            .or_insert_with(|| on_record.start(now));
        if run.term < on_record.term {
            *run = on_record.start(now);
        }
        (run.holder.clone(), run.until.saturating_duration_since(now))
    }
}

struct OnRecord {
    term: u64,
    holder: String,
    ttl: Duration,
}

impl OnRecord {
    fn start(&self, now: Instant) -> Running {
        let (term, ttl) = (self.term, self.ttl);
        Running {
            term,
            holder: self.holder.clone(),
            ttl,
            until: now + ttl,
        }
    }

    fn encode(holder: &str, ttl: Duration) -> Vec<u8> {
        let mut value = (ttl.as_millis() as u64).to_le_bytes().to_vec();
        value.extend_from_slice(holder.as_bytes());
        value
    }

    fn decode(record: &Versioned) -> Option<Self> {
        let mut r = Reader::new(&record.value);
        let ttl = Duration::from_millis(r.u64("ttl").ok()?).clamp(TTL.0, TTL.1);
        let holder = std::str::from_utf8(r.raw(r.left(), "holder").ok()?)
            .ok()?
            .to_owned();
        Some(Self {
            term: record.revision.0,
            holder,
            ttl,
        })
    }
}

/// Takes a lease: by the record, its time by memory.
pub(super) fn acquire(
    store: &EmbeddedStore,
    name: &str,
    holder: &str,
    ttl: Duration,
    deadline: Instant,
) -> Result<LeaseOutcome, StoreError> {
    check_names(name, holder)?;
    let ttl = ttl.clamp(TTL.0, TTL.1);
    let key = format!("{PREFIX}{name}");
    let value = OnRecord::encode(holder, ttl);
    let mut current = store.get(&key, deadline)?;
    loop {
        if let Some(on_record) = current.as_ref().and_then(OnRecord::decode) {
            let now = Instant::now();
            let (by, left) = store.with_leases(|leases| leases.left(name, &on_record, now))?;
            if !left.is_zero() {
                let term = LeaseTerm(on_record.term);
                if by == holder && store.with_leases(|l| l.renew(name, holder, term, now))? {
                    return Ok(LeaseOutcome::Granted { term });
                }
                return Ok(LeaseOutcome::Held { by, left });
            }
        }
        let expected = current.as_ref().map(|record| record.revision);
        match store.cas(&Cas::put(&key, expected, &value), deadline)? {
            CasOutcome::Applied { revision } => {
                let term = revision.0;
                let granted = OnRecord {
                    term,
                    holder: holder.to_owned(),
                    ttl,
                };
                store.with_leases(|leases| leases.left(name, &granted, Instant::now()))?;
                return Ok(LeaseOutcome::Granted {
                    term: LeaseTerm(term),
                });
            }
            CasOutcome::Conflict { current: now } => current = now,
        }
    }
}

/// Refuses what no store will take as a lease's name and holder.
pub(super) fn check_names(name: &str, holder: &str) -> Result<(), StoreError> {
    if name.is_empty() || name.len() > MAX_KEY - PREFIX.len() {
        return Err(StoreError::Key { len: name.len() });
    }
    if holder.len() > MAX_KEY {
        return Err(StoreError::Value { len: holder.len() });
    }
    Ok(())
}
