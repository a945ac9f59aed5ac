use std::fmt;
use std::sync::Arc;

use crate::mem::ledger::BlockSet;
use crate::mem::{BlockId, BlockPool, MemError};

/// What both kinds of lease are: a set of blocks of a pool, given back on drop.
struct Grant {
    pool: Arc<BlockPool>,
    set: BlockSet,
    writer: bool,
}

impl Grant {
    #[inline]
    fn check(&self, offset: u64, len: u64) -> Result<*mut u8, MemError> {
        if self
            .pool
            .index()
            .covered(offset, len, |b| self.set.holds(b))
        {
            // In bounds: extents lie inside the region, whose length fits an isize.
            Ok(self.pool.base().wrapping_add(offset as usize))
        } else {
            Err(MemError::OutsideLease { offset, len })
        }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.pool
            .ledger()
            .end(std::mem::take(&mut self.set), self.writer);
    }
}

/// Shared access to a set of blocks: while it lives, nobody in this process writes them and none of
/// them can be freed.
pub struct ReadLease(Grant);

/// Exclusive access to a set of blocks: while it lives, nobody else in this process reads or writes
/// them and none of them can be freed.
pub struct WriteLease(Grant);

impl ReadLease {
    pub(super) fn new(pool: Arc<BlockPool>, set: BlockSet) -> Self {
        Self(Grant {
            pool,
            set,
            writer: false,
        })
    }

    /// The bytes at `offset` of the region; the whole range must lie in this lease's blocks.
    #[inline]
    pub fn try_bytes(&self, offset: u64, len: usize) -> Result<&[u8], MemError> {
        let ptr = self.0.check(offset, len as u64)?;
        // SAFETY: the range lies in extents of blocks this lease holds; the ledger grants no writer
        // while it lives, the blocks cannot be freed, and the pool keeps the mapping alive.
        Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
    }

    /// As [`ReadLease::try_bytes`], for ranges that the caller planned itself.
    ///
    /// # Panics
    /// Where the range leaves the lease, as indexing a slice out of range would.
    #[inline]
    #[track_caller]
    pub fn bytes(&self, offset: u64, len: usize) -> &[u8] {
        self.try_bytes(offset, len)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// The blocks, each once.
    pub fn blocks(&self) -> &[BlockId] {
        self.0.set.list()
    }

    /// The pool they belong to.
    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.0.pool
    }
}

impl WriteLease {
    pub(super) fn new(pool: Arc<BlockPool>, set: BlockSet) -> Self {
        Self(Grant {
            pool,
            set,
            writer: true,
        })
    }

    /// The bytes at `offset` of the region; the whole range must lie in this lease's blocks.
    #[inline]
    pub fn try_bytes(&self, offset: u64, len: usize) -> Result<&[u8], MemError> {
        let ptr = self.0.check(offset, len as u64)?;
        // SAFETY: as in `ReadLease`; this lease is the only way to the bytes, and `&self` keeps
        // `bytes_mut` away while the slice lives.
        Ok(unsafe { std::slice::from_raw_parts(ptr, len) })
    }

    /// As [`WriteLease::try_bytes`], mutably.
    #[inline]
    pub fn try_bytes_mut(&mut self, offset: u64, len: usize) -> Result<&mut [u8], MemError> {
        let ptr = self.0.check(offset, len as u64)?;
        // SAFETY: the range lies in extents of blocks this lease holds alone, and `&mut self` makes
        // this the only live slice from it.
        Ok(unsafe { std::slice::from_raw_parts_mut(ptr, len) })
    }

    /// As [`WriteLease::try_bytes`], for ranges that the caller planned itself.
    ///
    /// # Panics
    /// Where the range leaves the lease, as indexing a slice out of range would.
    #[inline]
    #[track_caller]
    pub fn bytes(&self, offset: u64, len: usize) -> &[u8] {
        self.try_bytes(offset, len)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// As [`WriteLease::try_bytes_mut`], for ranges that the caller planned itself.
    ///
    /// # Panics
    /// Where the range leaves the lease, as indexing a slice out of range would.
    #[inline]
    #[track_caller]
    pub fn bytes_mut(&mut self, offset: u64, len: usize) -> &mut [u8] {
        self.try_bytes_mut(offset, len)
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// The checked address of a range, for the kernel or a device to write to: no slice is formed,
    /// so several ranges may be collected into one scatter list. Valid while this lease lives and no
    /// slice from it does.
    #[inline]
    pub fn as_mut_ptr(&mut self, offset: u64, len: usize) -> Result<*mut u8, MemError> {
        self.0.check(offset, len as u64)
    }

    /// Ends writing and goes on reading, with no moment in between at which another writer could
    /// get in: what is verified through the result is what was written.
    pub fn downgrade(mut self) -> ReadLease {
        self.0.pool.ledger().downgrade(&self.0.set);
        // The grant is a reader's from here on; its drop must end that, once.
        self.0.writer = false;
        ReadLease(self.0)
    }

    /// The blocks, each once.
    pub fn blocks(&self) -> &[BlockId] {
        self.0.set.list()
    }

    /// The pool they belong to.
    pub fn pool(&self) -> &Arc<BlockPool> {
        &self.0.pool
    }
}

impl fmt::Debug for ReadLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadLease")
            .field("blocks", &self.blocks())
            .finish()
    }
}

impl fmt::Debug for WriteLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteLease")
            .field("blocks", &self.blocks())
            .finish()
    }
}
