//! The adapter's calls that read a request's KV and tokens, on either side of a migration.

use super::kvlog::GROUP;
use super::shared::{Inner, Shared};
use crate::digest::TailHasher;
use crate::engine::adapter::{
    AdapterError, PageDigests, PinId, Result, StageId, StageState, View, What,
};
use crate::mem::BlockId;
use std::ops::Range;

/// What a reading call works on, copied out from under the lock. The blocks stay: a pin or a stage
/// holds them, and where it is dropped meanwhile the call's lease keeps them from being freed.
struct Seen {
    table: Vec<BlockId>,
    /// Tokens that may be read.
    limit: u64,
}

fn group(group: u16) -> Result<()> {
    if group == GROUP {
        Ok(())
    } else {
        Err(AdapterError::Unknown(What::Group(group)))
    }
}

fn within(asked: u64, limit: u64) -> Result<()> {
    if asked <= limit {
        Ok(())
    } else {
        Err(AdapterError::OutOfRange { asked, limit })
    }
}

impl Inner {
    fn table_and_limit(&self, view: View) -> Result<(&[BlockId], u64)> {
        match view {
            View::Pin(id) => {
                let (_, entry) = self.pinned(id)?;
                Ok((&entry.table, entry.stable as u64))
            }
            View::Stage(id) => {
                let stage = self.stage(id)?;
                if stage.state == StageState::Active {
                    return Err(active());
                }
                Ok((&stage.table, stage.max_tokens))
            }
        }
    }
}

/// A stage that became a running request is no stage any more.
fn active() -> AdapterError {
    AdapterError::StageState {
        is: StageState::Active,
        needs: StageState::Armed,
    }
}

impl Shared {
    pub(crate) fn table_of(
        &self,
        view: View,
        group_id: u16,
        tokens: Range<u64>,
    ) -> Result<Vec<BlockId>> {
        group(group_id)?;
        let inner = self.inner.lock();
        let (table, limit) = inner.table_and_limit(view)?;
        within(tokens.end.max(tokens.start), limit)?;
        let per_block = u64::from(self.config.block_tokens);
        let from = (tokens.start / per_block) as usize;
        let to = tokens.end.div_ceil(per_block) as usize;
        Ok(table.get(from..to.max(from)).unwrap_or(&[]).to_vec())
    }

    pub(crate) fn token_log_of(&self, view: View, from: u64) -> Result<Vec<u32>> {
        let inner = self.inner.lock();
        let log = match view {
            View::Pin(id) => &inner.pinned(id)?.1.log,
            View::Stage(id) => &inner.stage(id)?.log,
        };
        within(from, log.len() as u64)?;
        Ok(log[from as usize..].to_vec())
    }

    pub(crate) fn hash_view(
        &self,
        view: View,
        group_id: u16,
        pages: Range<u32>,
        upto: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        group(group_id)?;
        let page_tokens = u64::from(self.parts.digester.header().page_tokens);
        let limit = upto.div_ceil(page_tokens);
        let tokens =
            u64::from(pages.start) * page_tokens..(u64::from(pages.end) * page_tokens).min(upto);
        let seen = self.begin(view, upto, &tokens, || within(pages.end.into(), limit))?;
        let mut fresh = PageDigests::new();
        let hashed = self.hash_pages_of(&seen.table, pages, upto, &mut fresh);
        self.finish(view, &tokens, hashed.is_ok(), &fresh, None)?;
        hashed?;
        for (row, leaves) in fresh.iter() {
            out.push(*row, leaves);
        }
        Ok(())
    }

    pub(crate) fn hash_view_tail(
        &self,
        view: View,
        upto: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        if upto == 0 {
            return Err(AdapterError::Caller("an empty sequence has no tail page"));
        }
        let page_tokens = u64::from(self.parts.digester.header().page_tokens);
        let tokens = (upto - 1) / page_tokens * page_tokens..upto;
        let seen = self.begin(view, upto, &tokens, || Ok(()))?;
        let mut tail = self.take_tail(view);
        let mut fresh = PageDigests::new();
        let hashed = self.hash_tail_of(&seen.table, upto, &mut tail, &mut fresh);
        self.finish(view, &tokens, hashed.is_ok(), &fresh, tail)?;
        hashed?;
        for (row, leaves) in fresh.iter() {
            out.push(*row, leaves);
        }
        Ok(())
    }

    /// Checks the range and marks it as being hashed, so that no write to it can begin.
    fn begin(
        &self,
        view: View,
        upto: u64,
        tokens: &Range<u64>,
        more: impl FnOnce() -> Result<()>,
    ) -> Result<Seen> {
        let inner = &mut *self.inner.lock();
        let (table, limit) = inner.table_and_limit(view)?;
        within(upto, limit)?;
        more()?;
        let seen = Seen {
            table: table.to_vec(),
            limit,
        };
        debug_assert!(tokens.end <= seen.limit);
        match view {
            View::Pin(id) => {
                if inner.pin(id)?.dirty {
                    return Err(AdapterError::SealedDirty);
                }
            }
            View::Stage(id) => inner.stage_mut(id)?.hashing.push(tokens.clone()),
        }
        Ok(seen)
    }

    fn take_tail(&self, view: View) -> Option<Box<TailHasher>> {
        let inner = &mut *self.inner.lock();
        match view {
            View::Pin(id) => inner.pins.get_mut(&id)?.tail.take(),
            View::Stage(id) => inner.stages.get_mut(&id)?.tail.take(),
        }
    }

    /// Freezes what was hashed and notes its digests. The view may be gone by now: an error.
    fn finish(
        &self,
        view: View,
        tokens: &Range<u64>,
        ok: bool,
        fresh: &PageDigests,
        tail: Option<Box<TailHasher>>,
    ) -> Result<()> {
        let inner = &mut *self.inner.lock();
        let page_tokens = u64::from(self.parts.digester.header().page_tokens);
        match view {
            View::Pin(id) => finish_pin(inner, id, tail)?,
            View::Stage(id) => finish_stage(inner, id, tokens, ok, tail)?,
        }
        let pages = match view {
            View::Pin(id) => {
                let slot = inner.pin(id)?.slot;
                inner.entries.get_mut(&slot).map(|e| &mut e.pages)
            }
            View::Stage(id) => inner.stages.get_mut(&id).map(|s| &mut s.pages),
        };
        if let Some(pages) = pages {
            for (row, _) in fresh.iter() {
                let end = u64::from(row.page) * page_tokens + u64::from(row.valid_tokens);
                pages.record(end, row.digest);
            }
        }
        Ok(())
    }
}

fn finish_pin(inner: &mut Inner, id: PinId, tail: Option<Box<TailHasher>>) -> Result<()> {
    inner.pin(id)?;
    if let (Some(pin), Some(tail)) = (inner.pins.get_mut(&id), tail) {
        pin.tail = Some(tail);
    }
    Ok(())
}

fn finish_stage(
    inner: &mut Inner,
    id: StageId,
    tokens: &Range<u64>,
    ok: bool,
    tail: Option<Box<TailHasher>>,
) -> Result<()> {
    if let Some(stage) = inner.stages.get_mut(&id) {
        if let Some(at) = stage.hashing.iter().position(|r| r == tokens) {
            stage.hashing.swap_remove(at);
        }
        if tail.is_some() {
            stage.tail = tail;
        }
        if ok {
            stage.frozen.insert(tokens.clone());
        }
    }
    inner.stage(id).map(|_| ())
}
