//! What the engine keeps of a request, under its lock.

use super::blocks::{PrefixKey, next_key};
use super::kvlog::PageLog;
use super::live::Live;
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::BlockId;

/// Where a request stands with the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for blocks.
    Waiting,
    /// Computes whenever it is not held.
    Running,
    /// Made its last token, or was aborted or retired; only pins keep its KV.
    Ended,
}

/// One request.
pub(crate) struct Entry {
    pub request: RequestId,
    pub owner_epoch: OwnerEpoch,
    pub phase: Phase,
    /// `None` while a step works on it, and after the end.
    pub live: Option<Box<Live>>,
    /// A step works on it.
    pub in_flight: bool,
    /// Calls that wait for the next step boundary: no step starts meanwhile.
    pub boundary_wanted: u32,
    /// Prompt and output, as far as accepted.
    pub log: Vec<u32>,
    pub prompt_len: usize,
    /// Blocks in order of position.
    pub table: Vec<BlockId>,
    /// Blocks promised beyond the table.
    pub promised: u64,
    /// Tokens whose KV is in the pool for good.
    pub stable: usize,
    /// The most tokens it can ever hold.
    pub max_tokens: u64,
    /// The attempt that holds it.
    pub hold: Option<MigrationEpoch>,
    /// Changes when a slot is given to other tokens: never, in this engine.
    pub generation: u64,
    /// Pins on it.
    pub pins: u32,
    /// Digests of its pages.
    pub pages: PageLog,
    /// Encoded control state of some boundary passed, for practice ahead of a fence.
    pub preview: Option<Vec<u8>>,
    /// A newer one is wanted at the next boundary.
    pub preview_wanted: bool,
    pub last_step_done_ns: u64,
    /// Its client wants no more.
    pub abort: bool,
    pub priority: i32,
    /// Names of its full blocks as far as known; `None` if it shares nothing (imported, or filled with seeded bytes).
    pub keys: Option<Vec<PrefixKey>>,
    /// Of those, the ones offered to the prefix cache.
    pub published: usize,
    pub root_key: PrefixKey,
    /// Prompt positions below `.1` are filled from this seed.
    pub fill: Option<(u64, usize)>,
}

impl Entry {
    /// Output tokens numbered.
    pub(crate) fn seal(&self) -> u64 {
        (self.log.len() - self.prompt_len) as u64
    }

    /// Runs, and a step may start on it.
    pub(crate) fn may_step(&self) -> bool {
        self.phase == Phase::Running
            && self.live.is_some()
            && !self.in_flight
            && self.hold.is_none()
            && self.boundary_wanted == 0
            && !self.abort
    }

    /// The names of the full blocks of the first `tokens` tokens, extending what is known.
    pub(crate) fn keys_through(&mut self, tokens: usize, block_tokens: usize) -> &[PrefixKey] {
        let Some(keys) = &mut self.keys else {
            return &[];
        };
        while (keys.len() + 1) * block_tokens <= tokens {
            let at = keys.len() * block_tokens;
            let before = keys.last().unwrap_or(&self.root_key);
            let key = next_key(before, &self.log[at..at + block_tokens]);
            keys.push(key);
        }
        keys
    }
}
