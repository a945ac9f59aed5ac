//! Who gets which blocks: promises, the prefix cache, and blocks that are still leased.
//!
//! Invariant: `promised <= free + evictable`. A request is admitted only with a promise for the
//! most it can ever need, so no running request is ever stopped for want of a block.

use super::EngineError;
use super::rng::mix64;
use crate::mem::{BlockId, BlockPool, MemError};
use std::collections::HashMap;
use std::sync::Arc;

/// Name of a full block by everything its KV depends on.
pub(crate) type PrefixKey = [u8; 32];

/// See the [module](self). All under the engine's lock.
pub(crate) struct Blocks {
    pool: Arc<BlockPool>,
    block_tokens: usize,
    promised: u64,
    /// Blocks without an owner whose lease is still out.
    deferred: Vec<BlockId>,
    cache: HashMap<PrefixKey, Cached>,
    tick: u64,
}

struct Cached {
    block: BlockId,
    used: u64,
}

/// Name of the first block's predecessor.
pub(crate) fn root_key(model: &[u8; 32], numerics: &[u8; 32], salt: &[u8]) -> PrefixKey {
    let mut h = blake3::Hasher::new_derive_key("MoonLiveKV reference engine prefix v1");
    h.update(model).update(numerics).update(salt);
    h.finalize().into()
}

/// Name of the block that holds `tokens` after `before`.
pub(crate) fn next_key(before: &PrefixKey, tokens: &[u32]) -> PrefixKey {
    let mut h = blake3::Hasher::new_keyed(before);
    tokens.iter().for_each(|t| {
        h.update(&t.to_le_bytes());
    });
    h.finalize().into()
}

impl Blocks {
    /// Over a fresh pool. With a `shuffle` seed other than 0 blocks are handed out in another
    /// order than the pool's.
    pub(crate) fn new(
        pool: Arc<BlockPool>,
        block_tokens: usize,
        shuffle: u64,
    ) -> Result<Self, MemError> {
        if shuffle != 0 {
            let mut all = pool.alloc(pool.blocks() as usize)?;
            for i in (1..all.len()).rev() {
                let j = mix64(shuffle ^ mix64(i as u64)) as usize % (i + 1);
                all.swap(i, j);
            }
            pool.release(&all)?;
        }
        Ok(Self {
            pool,
            block_tokens,
            promised: 0,
            deferred: Vec::new(),
            cache: HashMap::new(),
            tick: 0,
        })
    }

    /// Blocks that `tokens` tokens take.
    pub(crate) fn for_tokens(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.block_tokens as u64)
    }

    /// Blocks of the pool that can serve at all.
    pub(crate) fn usable(&self) -> u64 {
        let s = self.pool.stats();
        (s.free + s.used) as u64
    }

    /// Blocks promised and not yet taken.
    pub(crate) fn promised(&self) -> u64 {
        self.promised
    }

    /// Blocks whose owner is gone and whose lease is still out.
    pub(crate) fn deferred(&self) -> usize {
        self.deferred.len()
    }

    /// Blocks that the prefix cache alone keeps: those that a request uses too are not to be had.
    pub(crate) fn cached(&self) -> usize {
        let idle = |c: &&Cached| self.pool.refs(c.block).is_ok_and(|r| r == 1);
        self.cache.values().filter(idle).count()
    }

    /// Free blocks that nobody was promised, evicting cached ones as needed to reach `want`.
    pub(crate) fn available(&mut self, want: u64) -> u64 {
        self.reap();
        let free = |s: &Self| s.pool.stats().free as u64;
        let short = (want + self.promised).saturating_sub(free(self));
        if short > 0 {
            self.evict(short as usize);
        }
        free(self).saturating_sub(self.promised)
    }

    /// Promises `n` blocks, or says how many are available.
    pub(crate) fn promise(&mut self, n: u64) -> Result<(), u64> {
        let available = self.available(n);
        if available < n {
            return Err(available);
        }
        self.promised += n;
        Ok(())
    }

    /// Takes back a promise.
    pub(crate) fn unpromise(&mut self, n: u64) {
        self.promised = self.promised.saturating_sub(n);
    }

    /// Takes promised blocks.
    pub(crate) fn take_promised(
        &mut self,
        n: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<(), EngineError> {
        if n == 0 {
            return Ok(());
        }
        // The promise itself is what these blocks are taken from.
        self.unpromise(n as u64);
        let available = self.available(n as u64);
        if available < n as u64 {
            self.promised += n as u64;
            let (need, free) = (n as u64, available);
            return Err(EngineError::OutOfBlocks { need, free });
        }
        self.pool
            .alloc_into(n, out)
            .map_err(|e| EngineError::Pool(e.to_string()))
    }

    /// Takes blocks that were not promised; says how many are available if they are too few.
    pub(crate) fn take(&mut self, n: u64) -> Result<Vec<BlockId>, u64> {
        let available = self.available(n);
        if available < n {
            return Err(available);
        }
        self.pool.alloc(n as usize).map_err(|_| available)
    }

    /// Drops one owner of each block. Those still leased follow when their leases end.
    pub(crate) fn give_back(&mut self, blocks: &[BlockId]) {
        if blocks.is_empty() || self.pool.release(blocks).is_ok() {
            return;
        }
        for b in blocks {
            match self.pool.release(&[*b]) {
                Ok(_) => {}
                Err(_) => self.deferred.push(*b),
            }
        }
    }

    /// Adds an owner.
    pub(crate) fn retain(&self, blocks: &[BlockId]) -> Result<(), MemError> {
        self.pool.retain(blocks)
    }

    /// Tries again to free what was leased.
    pub(crate) fn reap(&mut self) {
        let pool = &self.pool;
        self.deferred.retain(|b| pool.release(&[*b]).is_err());
    }

    /// The blocks of the longest cached prefix of `keys`, with an owner added to each.
    pub(crate) fn shared_prefix(&mut self, keys: &[PrefixKey]) -> Vec<BlockId> {
        self.tick += 1;
        let mut out = Vec::new();
        for key in keys {
            let Some(cached) = self.cache.get_mut(key) else {
                break;
            };
            cached.used = self.tick;
            out.push(cached.block);
        }
        if self.pool.retain(&out).is_err() {
            out.clear();
        }
        out
    }

    /// Offers a full block to others.
    pub(crate) fn publish(&mut self, key: PrefixKey, block: BlockId) {
        self.tick += 1;
        let used = self.tick;
        if let Some(cached) = self.cache.get_mut(&key) {
            cached.used = used;
        } else if self.pool.retain(&[block]).is_ok() {
            self.cache.insert(key, Cached { block, used });
        }
    }

    /// Drops up to `n` cached blocks that nobody else uses, least recently used first.
    pub(crate) fn evict(&mut self, n: usize) {
        let pool = &self.pool;
        let mut idle: Vec<(u64, PrefixKey)> = self
            .cache
            .iter()
            .filter(|(_, c)| pool.refs(c.block).is_ok_and(|r| r == 1))
            .map(|(k, c)| (c.used, *k))
            .collect();
        idle.sort_unstable();
        for (_, key) in idle.into_iter().take(n) {
            if let Some(c) = self.cache.remove(&key) {
                self.give_back(&[c.block]);
            }
        }
    }

    /// Forgets every cached block.
    pub(crate) fn clear_cache(&mut self) {
        let all: Vec<BlockId> = self.cache.drain().map(|(_, c)| c.block).collect();
        self.give_back(&all);
    }
}
