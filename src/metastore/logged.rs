//! How changes and snapshots stand in the log. Pure codec.
//!
//! A segment begins with a snapshot (`ENTRY`s, `OPS`, one `SNAPSHOT_END`), which may be empty, and
//! goes on with changes (`PUT`, `DELETE`).

use super::state::{Applied, Entry, State};
use super::types::{MAX_KEY, MAX_VALUE, OpId};
use crate::route::{DecodeError, Reader};
use crate::wal::{Record, Segment};
use std::sync::Arc;

/// This room's logs.
pub(super) const LOG: u32 = 0x6d65_7461;

const PUT: u8 = 1;
const DELETE: u8 = 2;
const ENTRY: u8 = 3;
const OPS: u8 = 4;
const SNAPSHOT_END: u8 = 5;

/// Operation ids per `OPS` record.
const OPS_CHUNK: usize = 512;
const OP_BYTES: usize = 24;

/// Payload bytes of a change.
pub(super) fn change_bytes(key: &str, value: Option<&[u8]>) -> usize {
    8 + 16 + 2 + key.len() + value.map_or(0, <[u8]>::len)
}

pub(super) fn push_change(log: &mut Segment, change: &Applied) {
    let mut head = [0u8; 26];
    head[..8].copy_from_slice(&change.revision.to_le_bytes());
    head[8..24].copy_from_slice(&change.op.0);
    head[24..].copy_from_slice(&(change.key.len() as u16).to_le_bytes());
    let kind = if change.value.is_some() { PUT } else { DELETE };
    let value = change.value.as_deref().unwrap_or(&[]);
    log.push(kind, &[&head, change.key.as_bytes(), value]);
}

/// Bytes that a segment needs for a snapshot of `state`.
pub(super) fn snapshot_bytes(state: &State) -> u64 {
    use crate::wal::record::record_bytes;
    let entries: usize = state
        .records
        .iter()
        .map(|(key, entry)| record_bytes(10 + key.len() + entry.value.len()))
        .sum();
    let chunks = state.remembered().len().div_ceil(OPS_CHUNK);
    (entries + chunks * record_bytes(OPS_CHUNK * OP_BYTES) + record_bytes(16)) as u64
}

pub(super) fn push_snapshot(log: &mut Segment, state: &State) {
    for (key, entry) in &state.records {
        let mut head = [0u8; 10];
        head[..8].copy_from_slice(&entry.revision.to_le_bytes());
        head[8..].copy_from_slice(&(key.len() as u16).to_le_bytes());
        log.push(ENTRY, &[&head, key.as_bytes(), &entry.value]);
    }
    let mut chunk = Vec::with_capacity(OPS_CHUNK * OP_BYTES);
    let mut ops = state.remembered().peekable();
    while ops.peek().is_some() {
        chunk.clear();
        for (op, revision) in ops.by_ref().take(OPS_CHUNK) {
            chunk.extend_from_slice(&op.0);
            chunk.extend_from_slice(&revision.to_le_bytes());
        }
        log.push(OPS, &[&chunk]);
    }
    let mut end = [0u8; 16];
    end[..8].copy_from_slice(&state.revision.to_le_bytes());
    end[8..].copy_from_slice(&(state.records.len() as u64).to_le_bytes());
    log.push(SNAPSHOT_END, &[&end]);
}

/// Builds a state from records in order.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) state: State,
    complete: bool,
}

impl Replay {
    pub(super) fn new(state: State) -> Self {
        Self {
            state,
            complete: false,
        }
    }

    /// Takes one record; what it cannot mean is damage, since its checksum holds.
    pub(super) fn record(&mut self, record: Record<'_>) -> Result<(), String> {
        self.take(record.kind, record.payload)
            .map_err(|e| e.to_string())
    }

    /// The state, if the snapshot that must begin each segment was there.
    pub(super) fn finish(self) -> Result<State, ReplayError> {
        if self.complete {
            Ok(self.state)
        } else {
            Err(ReplayError::Incomplete)
        }
    }

    fn take(&mut self, kind: u8, payload: &[u8]) -> Result<(), ReplayError> {
        let mut r = Reader::new(payload);
        match kind {
            ENTRY if !self.complete => {
                let revision = r.u64("entry.revision")?;
                let key = read_key(&mut r)?;
                let value = read_value(&mut r)?;
                let last = self.state.records.last_key_value();
                if last.is_some_and(|(last, _)| **last >= *key) {
                    return Err(ReplayError::Order("snapshot keys do not rise"));
                }
                self.state.restore(key, Entry { revision, value });
            }
            OPS if !self.complete => {
                while r.left() > 0 {
                    let op = OpId(r.array("ops.op")?);
                    self.state.remember(op, r.u64("ops.revision")?);
                }
            }
            SNAPSHOT_END if !self.complete => {
                let revision = r.u64("snapshot.revision")?;
                let entries = r.u64("snapshot.entries")?;
                r.end()?;
                if entries != self.state.records.len() as u64 {
                    return Err(ReplayError::Order(
                        "snapshot has not as many entries as it says",
                    ));
                }
                if self.state.records.values().any(|e| e.revision > revision) {
                    return Err(ReplayError::Order(
                        "snapshot holds an entry newer than itself",
                    ));
                }
                self.state.begin_at(revision);
                self.complete = true;
            }
            PUT | DELETE if self.complete => {
                let revision = r.u64("change.revision")?;
                if Some(revision) != self.state.revision.checked_add(1) {
                    return Err(ReplayError::Order(
                        "revision does not follow the one before it",
                    ));
                }
                let op = OpId(r.array("change.op")?);
                let key = read_key(&mut r)?;
                let value = if kind == PUT {
                    Some(read_value(&mut r)?)
                } else {
                    r.end()?;
                    None
                };
                self.state.apply(Applied {
                    revision,
                    op,
                    key,
                    value,
                });
            }
            PUT | DELETE => return Err(ReplayError::Order("a change stands before the snapshot")),
            ENTRY | OPS | SNAPSHOT_END => {
                return Err(ReplayError::Order(
                    "a snapshot stands behind the segment's first",
                ));
            }
            _ => return Err(ReplayError::Order("unknown kind of record")),
        }
        Ok(())
    }
}

/// Why sound records make no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplayError {
    /// A record's payload cannot be read.
    #[error(transparent)]
    Malformed(#[from] DecodeError),
    /// A record does not fit those before it.
    #[error("{0}")]
    Order(&'static str),
    /// The end of the snapshot that begins each segment is missing.
    #[error("the snapshot that begins it is not complete")]
    Incomplete,
}

fn read_key(r: &mut Reader<'_>) -> Result<Arc<str>, DecodeError> {
    let len = r.u16("key")? as usize;
    if len == 0 || len > MAX_KEY {
        return Err(DecodeError::Range("key"));
    }
    let key = std::str::from_utf8(r.raw(len, "key")?).map_err(|_| DecodeError::Range("key"))?;
    Ok(key.into())
}

fn read_value(r: &mut Reader<'_>) -> Result<Arc<[u8]>, DecodeError> {
    if r.left() > MAX_VALUE {
        return Err(DecodeError::Range("value"));
    }
    Ok(r.raw(r.left(), "value")?.into())
}

/// What records, by kind and payload, mean in their order: the body of a fuzz target. Returns how
/// many store records stand in the end.
pub fn replay_records<'a>(
    records: impl IntoIterator<Item = (u8, &'a [u8])>,
) -> Result<usize, ReplayError> {
    let memory = super::state::Memory {
        ops: 64,
        events: 64,
        event_bytes: 1 << 20,
    };
    let mut replay = Replay::new(State::new(memory));
    for (kind, payload) in records {
        replay.take(kind, payload)?;
    }
    Ok(replay.finish()?.records.len())
}
