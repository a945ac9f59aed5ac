//! What goes in and comes out of a metadata store.

use super::error::StoreError;
use crate::route::Revision;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest key, in bytes.
pub const MAX_KEY: usize = 256;
/// Longest value, in bytes. Records are small; bulk does not belong here.
pub const MAX_VALUE: usize = 64 << 10;

/// Names one attempt to change something, so that its retry is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub [u8; 16]);

impl OpId {
    /// A name that no other process and no other call has drawn.
    pub fn fresh() -> Self {
        static PROCESS: OnceLock<u64> = OnceLock::new();
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let process = *PROCESS.get_or_init(|| {
            let mut bytes = [0u8; 8];
            // Without randomness two processes could mistake each other's changes for retries.
            getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
            u64::from_le_bytes(bytes)
        });
        let mut id = [0u8; 16];
        id[..8].copy_from_slice(&process.to_le_bytes());
        id[8..].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Self(id)
    }
}

/// A record's value and when it was set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Versioned {
    /// The revision to expect in a compare-and-swap.
    pub revision: Revision,
    /// As it was put.
    pub value: Vec<u8>,
}

/// What a compare-and-swap makes of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// Sets the value.
    Put(&'a [u8]),
    /// Removes the record.
    Delete,
}

/// One compare-and-swap.
#[derive(Debug, Clone, Copy)]
pub struct Cas<'a> {
    /// 1 to [`MAX_KEY`] bytes of text.
    pub key: &'a str,
    /// The revision seen, or `None` if the record must be absent.
    pub expected: Option<Revision>,
    /// What to make of it.
    pub change: Change<'a>,
    /// The same for each retry of one attempt, fresh for each new one.
    pub op: OpId,
}

impl<'a> Cas<'a> {
    /// A new attempt to set a value.
    pub fn put(key: &'a str, expected: Option<Revision>, value: &'a [u8]) -> Self {
        Self {
            key,
            expected,
            change: Change::Put(value),
            op: OpId::fresh(),
        }
    }

    /// A new attempt to remove a record.
    pub fn delete(key: &'a str, expected: Revision) -> Self {
        Self {
            key,
            expected: Some(expected),
            change: Change::Delete,
            op: OpId::fresh(),
        }
    }
}

/// What became of a compare-and-swap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CasOutcome {
    /// Done, and durable.
    Applied {
        /// The change's revision.
        revision: Revision,
    },
    /// Not done: the record is not at the expected revision.
    Conflict {
        /// The record now; `None` if absent.
        current: Option<Versioned>,
    },
}

/// Records by prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// Every change up to here is reflected in the entries.
    pub revision: Revision,
    /// In key order.
    pub entries: Vec<(String, Versioned)>,
}

/// One change, as a watcher sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The record changed.
    pub key: String,
    /// The change's revision.
    pub revision: Revision,
    /// The new value; `None` for a removal.
    pub value: Option<Vec<u8>>,
}

/// What a watch returns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchBatch {
    /// Changes in order, possibly none.
    Events {
        /// In order of revision.
        events: Vec<Event>,
        /// Watch on from here: all changes up to it have been considered.
        upto: Revision,
    },
    /// The history no longer reaches back to where the watcher is: list, then watch from the
    /// listing's revision.
    Resync,
}

/// Orders the terms of one lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseTerm(pub u64);

/// What became of an attempt to take a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseOutcome {
    /// The caller holds it until `ttl` after its last renewal.
    Granted {
        /// To be named in renewals; higher than each earlier term's.
        term: LeaseTerm,
    },
    /// Another holds it.
    Held {
        /// Who.
        by: String,
        /// Time left unless renewed, by the store's clock.
        left: Duration,
    },
}

/// Refuses keys that a store will not take.
pub fn check_key(key: &str) -> Result<(), StoreError> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(StoreError::Key { len: key.len() });
    }
    Ok(())
}

/// Refuses prefixes longer than any key. The empty one is that of all records.
pub fn check_prefix(prefix: &str) -> Result<(), StoreError> {
    if prefix.len() > MAX_KEY {
        return Err(StoreError::Key { len: prefix.len() });
    }
    Ok(())
}

/// Refuses values that a store will not take.
pub fn check_value(value: &[u8]) -> Result<(), StoreError> {
    if value.len() > MAX_VALUE {
        return Err(StoreError::Value { len: value.len() });
    }
    Ok(())
}
