//! The journal's calls.

use super::error::{JournalError, Refusal};
use super::inner::{FLOOR_MAX, Inner};
use super::memory::{Entry, TokenRef, entries, unknown};
use super::record::{FORGET, LOG, TOKEN_HEAD, TOKENS, TOKENS_HEAD, encode_tokens};
use super::types::{Appended, JournalOptions, JournalStats, Status, Tail};
use super::upkeep::Upkeep;
use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::wal::{Dir, DiskDir, Series};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The journal of one gateway. See the [module](super)'s promises.
pub struct Journal {
    inner: Arc<Inner>,
    _upkeep: Upkeep,
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal")
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Opens, or makes, the journal in a directory; holds the directory's lock. What was journaled
    /// is there: see [`requests`](Self::requests).
    pub fn open(path: impl AsRef<Path>, options: JournalOptions) -> Result<Self, JournalError> {
        Self::open_dir(DiskDir::open(path)?, options)
    }

    /// Opens, or makes, the journal in any directory that keeps a log's promises.
    pub fn open_dir(dir: Arc<dyn Dir>, options: JournalOptions) -> Result<Self, JournalError> {
        let options = options.sound();
        let inner = Arc::new(Inner::open(Series::new(dir, "journal", LOG), options)?);
        let upkeep = Upkeep::start(&inner)?;
        Ok(Self {
            inner,
            _upkeep: upkeep,
        })
    }

    /// Begins a request, or moves its right to append to a higher epoch: nothing of a lower one is
    /// accepted from the moment this is decided, and that is durable (flushed) on return. Returns
    /// the undelivered tail in the same step. Repeating a floor is no error.
    pub fn raise_floor(
        &self,
        id: RequestId,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<Tail, JournalError> {
        let inner = &*self.inner;
        let mut core = inner.lock_with_room(FLOOR_MAX)?;
        let news = match core.requests.get(&id) {
            Some(held) => held.request.judge_floor(floor, owner)?,
            None => true,
        };
        if news {
            inner.set_floor(&mut core, id, floor, owner)?;
        }
        let held = core.requests.get(&id).ok_or_else(|| unknown(id))?;
        let (record, status) = (held.floor_record, Status::of(&held.request));
        let undelivered = entries(&held.request, status.delivered + 1, status.journaled);
        inner.flush(&mut core, record)?;
        Ok(Tail {
            status,
            undelivered,
        })
    }

    /// Appends tokens numbered from `first`, accepted under `epoch`. On return they survive a crash
    /// of the process. Equal tokens already there are passed over; see [`Refusal`] for the rest.
    pub fn append(
        &self,
        id: RequestId,
        epoch: OwnerEpoch,
        first: u64,
        tokens: &[TokenRef<'_>],
    ) -> Result<Appended, JournalError> {
        let inner = &*self.inner;
        let text: usize = tokens.iter().map(|t| t.text.len()).sum();
        let bytes = TOKENS_HEAD + tokens.len() * TOKEN_HEAD + text;
        let max = inner.options.max_append;
        if bytes > max {
            return Err(Refusal::TooLarge { bytes, max }.into());
        }
        let mut guard = inner.lock_with_room(bytes)?;
        let core = &mut *guard;
        let held = core.requests.get_mut(&id).ok_or_else(|| unknown(id))?;
        let fresh = &tokens[held.request.judge(epoch, first, tokens)?.skip..];
        let through = held.request.journaled() + fresh.len() as u64;
        if !fresh.is_empty() {
            if core.bytes + bytes as u64 > inner.options.max_bytes {
                let max = inner.options.max_bytes;
                let cause = format!("{} bytes of live requests, {max} allowed", core.bytes);
                return Err(JournalError::Unavailable { cause });
            }
            core.scratch.0.clear();
            encode_tokens(&mut core.scratch, id, &held.request, fresh);
            core.log.push(TOKENS, &[&core.scratch.0]);
            let before = held.request.bytes();
            fresh.iter().for_each(|&token| held.request.push(token));
            core.bytes += held.request.bytes() - before;
            inner.write(core)?;
        }
        Ok(Appended {
            through,
            fresh: fresh.len(),
        })
    }

    /// Notes that the client has tokens `1..=seq`. Less than what is known is no news.
    pub fn delivered(&self, id: RequestId, seq: u64) -> Result<(), JournalError> {
        let mut core = self.inner.lock()?;
        let held = core.requests.get_mut(&id).ok_or_else(|| unknown(id))?;
        Ok(held.request.deliver(seq)?)
    }

    /// Lets a request go: its stream has ended and nobody will ask for it again. A request that is
    /// not there is no error. Not flushed: after a power loss it may have to be forgotten again.
    pub fn forget(&self, id: RequestId) -> Result<(), JournalError> {
        let inner = &*self.inner;
        let mut guard = inner.lock_with_room(id.0.len())?;
        let core = &mut *guard;
        if !core.requests.contains_key(&id) {
            return Ok(());
        }
        let record = core.log.push(FORGET, &[&id.0]);
        if let Some(held) = core.requests.remove(&id) {
            core.bytes -= held.request.bytes();
            core.leave(held.home, record);
        }
        inner.write(core)
    }

    /// Where a request stands; `None` if it is not journaled.
    pub fn status(&self, id: RequestId) -> Result<Option<Status>, JournalError> {
        let core = self.inner.lock()?;
        Ok(core.requests.get(&id).map(|held| Status::of(&held.request)))
    }

    /// Tokens `from..=through`, as far as they are journaled.
    pub fn read(&self, id: RequestId, from: u64, through: u64) -> Result<Vec<Entry>, JournalError> {
        let core = self.inner.lock()?;
        let held = core.requests.get(&id).ok_or_else(|| unknown(id))?;
        Ok(entries(&held.request, from, through))
    }

    /// All requests journaled and not forgotten, in order of their ids: after a start, what is to be
    /// recovered.
    pub fn requests(&self) -> Result<Vec<(RequestId, Status)>, JournalError> {
        let core = self.inner.lock()?;
        let all = core
            .requests
            .iter()
            .map(|(&id, held)| (id, Status::of(&held.request)));
        let mut all: Vec<_> = all.collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        Ok(all)
    }

    /// Flushes everything appended so far.
    pub fn flush(&self) -> Result<(), JournalError> {
        let mut core = self.inner.lock()?;
        let written = core.written;
        self.inner.flush(&mut core, written)
    }

    /// What the journal's own thread does every window: flushes, prepares the next segment, lets old
    /// ones go.
    pub fn maintain(&self) -> Result<(), JournalError> {
        self.inner.maintain()
    }

    /// Counters.
    pub fn stats(&self) -> JournalStats {
        let core = self.inner.core.lock();
        JournalStats {
            requests: core.requests.len() as u64,
            bytes: core.bytes,
            segments: core.segments.len() as u64,
            ..core.stats
        }
    }
}
