use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::mem::extents::ExtentIndex;
use crate::mem::ledger::{Ledger, Parking, State};
use crate::mem::{MemError, PoolStats, ReadLease, Region, RegionId, Why, WriteLease};

/// The number of a block in its pool, from 0.
pub type BlockId = u32;

/// One region cut into blocks, with a ledger of who owns, reads and writes each of them.
///
/// Blocks are ref-counted by their owners (block tables, prefix caches, pins); leases are separate
/// and short: one per batch of work. See the [module](crate::mem) for why this is sound.
pub struct BlockPool {
    region: Region,
    index: ExtentIndex,
    ledger: Ledger<Parking<State>>,
}

impl BlockPool {
    /// Cuts `region` into `blocks` blocks; `extents(b)` lists the `(offset, length)` runs of block
    /// `b`, bytes, in any order. Refuses runs that are empty, overlap or leave the region. Bytes in
    /// no extent stay out of everybody's reach.
    pub fn new<I>(
        region: Region,
        blocks: u32,
        extents: impl FnMut(BlockId) -> I,
    ) -> Result<Arc<Self>, MemError>
    where
        I: IntoIterator<Item = (u64, u64)>,
    {
        let index = ExtentIndex::new(region.len(), blocks, extents)?;
        Ok(Arc::new(Self {
            region,
            index,
            ledger: Ledger::new(blocks),
        }))
    }

    /// Cuts `region` into equal contiguous blocks of `block_bytes`; a rest is left out.
    pub fn contiguous(region: Region, block_bytes: u64) -> Result<Arc<Self>, MemError> {
        let bad = MemError::RegionLength { len: region.len() };
        let n = region
            .len()
            .checked_div(block_bytes)
            .filter(|&n| n > 0)
            .ok_or(bad)?;
        let n = u32::try_from(n).map_err(|_| bad)?;
        Self::new(region, n, |b| [(b as u64 * block_bytes, block_bytes)])
    }

    /// Allocates `n` blocks, all or none, each with one owner. Their contents are what the last
    /// owner left.
    pub fn alloc(&self, n: usize) -> Result<Vec<BlockId>, MemError> {
        let mut out = Vec::with_capacity(n);
        self.ledger.alloc(n, &mut out)?;
        Ok(out)
    }

    /// As [`BlockPool::alloc`], appending to the caller's list.
    pub fn alloc_into(&self, n: usize, out: &mut Vec<BlockId>) -> Result<(), MemError> {
        self.ledger.alloc(n, out)
    }

    /// Adds an owner to each block, all or none.
    pub fn retain(&self, blocks: &[BlockId]) -> Result<(), MemError> {
        self.ledger.retain(blocks)
    }

    /// Takes an owner from each block, all or none, and gives how many became free. A block whose
    /// last owner goes while a lease on it lives is refused as [`MemError::Busy`]; a quarantined one
    /// loses its owner and stays out of service.
    pub fn release(&self, blocks: &[BlockId]) -> Result<usize, MemError> {
        self.ledger.release(blocks)
    }

    /// Owners of a block.
    pub fn refs(&self, block: BlockId) -> Result<u32, MemError> {
        self.ledger.refs(block)
    }

    /// How often the block was allocated: a reference taken under another number is stale.
    pub fn generation(&self, block: BlockId) -> Result<u64, MemError> {
        self.ledger.generation(block)
    }

    /// Takes blocks out of service for ever, free or owned or leased; gives the bytes newly taken.
    /// They are counted in [`BlockPool::stats`], never allocated and never leased again.
    pub fn quarantine(&self, blocks: &[BlockId], why: Why) -> Result<u64, MemError> {
        self.ledger
            .quarantine(blocks, why, |b| self.index.block_bytes(b))
    }

    /// Counts, taken at one moment.
    pub fn stats(&self) -> PoolStats {
        self.ledger.stats()
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> u32 {
        self.ledger.total()
    }

    /// Bytes of one block, all extents together; 0 for a block that does not exist.
    pub fn block_bytes(&self, block: BlockId) -> u64 {
        if block < self.blocks() {
            self.index.block_bytes(block)
        } else {
            0
        }
    }

    /// Length of the region behind the pool, bytes; offsets in leases count from its start.
    pub fn region_len(&self) -> u64 {
        self.region.len()
    }

    /// The region's name in this process.
    pub fn region_id(&self) -> RegionId {
        self.region.id()
    }

    /// The descriptor that peers may map read-only; `None` for private memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.region.fd()
    }

    /// A shared lease on a set of blocks, now or not at all. A block named twice counts once.
    pub fn read(self: &Arc<Self>, blocks: &[BlockId]) -> Result<ReadLease, MemError> {
        Ok(ReadLease::new(self.clone(), self.ledger.read(blocks)?))
    }

    /// An exclusive lease on a set of blocks, now or not at all. Exclusive among leases: how many
    /// owners a block has ([`BlockPool::refs`]) and whether that forbids writing it is the engine's
    /// to know (a pin is an owner too).
    pub fn write(self: &Arc<Self>, blocks: &[BlockId]) -> Result<WriteLease, MemError> {
        Ok(WriteLease::new(self.clone(), self.ledger.write(blocks)?))
    }

    /// As [`BlockPool::read`], waiting until `deadline` for writers to leave.
    pub fn read_until(
        self: &Arc<Self>,
        blocks: &[BlockId],
        deadline: Instant,
    ) -> Result<ReadLease, MemError> {
        Ok(ReadLease::new(
            self.clone(),
            self.ledger.read_until(blocks, deadline)?,
        ))
    }

    /// As [`BlockPool::write`], waiting until `deadline` for readers and writers to leave. New
    /// readers stand back while a writer waits.
    pub fn write_until(
        self: &Arc<Self>,
        blocks: &[BlockId],
        deadline: Instant,
    ) -> Result<WriteLease, MemError> {
        Ok(WriteLease::new(
            self.clone(),
            self.ledger.write_until(blocks, deadline)?,
        ))
    }

    /// Appends the blocks that `[offset, offset + len)` touches, in order of their bytes, without a
    /// repeat of the one before. Fails if a byte of the range is in no block.
    pub fn blocks_of(&self, offset: u64, len: u64, out: &mut Vec<BlockId>) -> Result<(), MemError> {
        let covered = self.index.covered(offset, len, |b| {
            if out.last() != Some(&b) {
                out.push(b);
            }
            true
        });
        if covered {
            Ok(())
        } else {
            Err(MemError::OutsideLease { offset, len })
        }
    }

    pub(super) fn index(&self) -> &ExtentIndex {
        &self.index
    }

    pub(super) fn ledger(&self) -> &Ledger<Parking<State>> {
        &self.ledger
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.region.ptr()
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool")
            .field("region", &self.region)
            .field("stats", &self.stats())
            .finish()
    }
}
