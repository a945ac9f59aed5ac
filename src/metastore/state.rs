//! The records as of one revision, the outcomes still remembered, and the bounded history that
//! watchers read. Pure: changes go in one by one, in order of revision.

use super::types::{Event, OpId, Versioned, WatchBatch};
use crate::route::Revision;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

/// What a store keeps beside its records.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    /// Changes whose operation ids are remembered.
    pub(super) ops: usize,
    /// Changes that a watcher may lag behind.
    pub(super) events: usize,
    /// Bytes of keys and values that the history may hold.
    pub(super) event_bytes: usize,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) revision: u64,
    pub(super) value: Arc<[u8]>,
}

/// A change about to be made, or one read from the log.
#[derive(Debug, Clone)]
pub(super) struct Applied {
    pub(super) revision: u64,
    pub(super) op: OpId,
    pub(super) key: Arc<str>,
    /// `None` removes.
    pub(super) value: Option<Arc<[u8]>>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) records: BTreeMap<Arc<str>, Entry>,
    /// The last change's.
    pub(super) revision: u64,
    /// Keys and values held.
    pub(super) bytes: u64,
    ops: HashMap<OpId, u64>,
    ops_order: VecDeque<OpId>,
    /// Revisions `history_after + 1 ..= revision`, without gaps.
    history: VecDeque<Applied>,
    history_after: u64,
    history_bytes: usize,
    memory: Memory,
}

impl State {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            records: BTreeMap::new(),
            revision: 0,
            bytes: 0,
            ops: HashMap::new(),
            ops_order: VecDeque::new(),
            history: VecDeque::new(),
            history_after: 0,
            history_bytes: 0,
            memory,
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Entry> {
        self.records.get(key)
    }

    pub(super) fn versioned(&self, key: &str) -> Option<Versioned> {
        self.get(key).map(Entry::versioned)
    }

    /// The revision that an operation was applied at, if it was and is remembered.
    pub(super) fn outcome_of(&self, op: OpId) -> Option<u64> {
        self.ops.get(&op).copied()
    }

    /// Sets a record without it being a change: from a snapshot.
    pub(super) fn restore(&mut self, key: Arc<str>, entry: Entry) {
        self.bytes += (key.len() + entry.value.len()) as u64;
        self.records.insert(key, entry);
    }

    pub(super) fn remember(&mut self, op: OpId, revision: u64) {
        if self.ops.insert(op, revision).is_none() {
            self.ops_order.push_back(op);
        }
        while self.ops_order.len() > self.memory.ops {
            if let Some(old) = self.ops_order.pop_front() {
                self.ops.remove(&old);
            }
        }
    }

    /// Operations remembered, oldest first.
    pub(super) fn remembered(&self) -> impl ExactSizeIterator<Item = (OpId, u64)> + '_ {
        self.ops_order.iter().map(|op| (*op, self.ops[op]))
    }

    /// Ends a restore: the history begins here.
    pub(super) fn begin_at(&mut self, revision: u64) {
        self.revision = revision;
        self.history_after = revision;
        self.history.clear();
        self.history_bytes = 0;
    }

    /// Makes the change of the next revision.
    pub(super) fn apply(&mut self, change: Applied) {
        debug_assert_eq!(change.revision, self.revision + 1);
        let size = |value: &Arc<[u8]>| (change.key.len() + value.len()) as u64;
        let old = match &change.value {
            Some(value) => {
                self.bytes += size(value);
                let entry = Entry {
                    revision: change.revision,
                    value: Arc::clone(value),
                };
                self.records.insert(Arc::clone(&change.key), entry)
            }
            None => self.records.remove(&change.key),
        };
        if let Some(old) = old {
            self.bytes -= size(&old.value);
        }
        self.revision = change.revision;
        self.remember(change.op, change.revision);
        self.history_bytes += change.weight();
        self.history.push_back(change);
        while self.history.len() > self.memory.events
            || self.history_bytes > self.memory.event_bytes
        {
            let Some(gone) = self.history.pop_front() else {
                break;
            };
            self.history_bytes -= gone.weight();
            self.history_after = gone.revision;
        }
    }

    /// Records by prefix, in key order, from behind `after` on.
    pub(super) fn under<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a Arc<str>, &'a Entry)> {
        let from = match after {
            Some(key) if key >= prefix => Bound::Excluded(key),
            _ => Bound::Included(prefix),
        };
        self.records
            .range::<str, _>((from, Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
    }

    /// Changes under `prefix` behind `after`, as many as fit the bounds.
    pub(super) fn events(
        &self,
        prefix: &str,
        after: Revision,
        max_events: usize,
        max_bytes: usize,
    ) -> WatchBatch {
        if after.0 < self.history_after || after.0 > self.revision {
            return WatchBatch::Resync;
        }
        let mut events = Vec::new();
        let mut bytes = 0;
        let mut upto = after.0;
        let skip = (after.0 - self.history_after) as usize;
        for change in self.history.range(skip..) {
            if change.key.starts_with(prefix) {
                bytes += change.weight();
                if !events.is_empty() && (events.len() >= max_events || bytes > max_bytes) {
                    break;
                }
                events.push(Event {
                    key: change.key.to_string(),
                    revision: Revision(change.revision),
                    value: change.value.as_ref().map(|v| v.to_vec()),
                });
            }
            upto = change.revision;
        }
        WatchBatch::Events {
            events,
            upto: Revision(upto),
        }
    }
}

impl Entry {
    pub(super) fn versioned(&self) -> Versioned {
        Versioned {
            revision: Revision(self.revision),
            value: self.value.to_vec(),
        }
    }
}

impl Applied {
    fn weight(&self) -> usize {
        self.key.len() + self.value.as_ref().map_or(0, |v| v.len())
    }
}
