//! Owned memory regions, block pools and leases: who may touch which bytes, and when.
//!
//! # Why no data race is possible through this module's safe API
//!
//! A [`Region`] is one mapping, owned by value. While nobody else has it, its owner may look at all
//! of it ([`Region::as_slice`], [`Region::as_mut_slice`]: ordinary borrow rules). Moving it into a
//! [`BlockPool`] ends that: the pool never exposes the region as a slice again, and as a region is
//! moved, not shared, no second pool over the same bytes can exist.
//!
//! Inside a pool, bytes are reached only through leases:
//!
//! 1. Each block owns a list of byte *extents*. [`BlockPool::new`] refuses extents that overlap,
//!    between blocks or within one, or that leave the region. So a byte belongs to at most one block.
//! 2. The ledger grants, per block, either any number of [`ReadLease`]s or exactly one
//!    [`WriteLease`], never both. All grants of a batch are taken under one lock, all or none; they
//!    end when the lease is dropped, under the same lock, which also gives the happens-before edge
//!    between a writer's last byte and the next reader's first.
//! 3. `bytes(offset, len)` checks that the range lies inside extents of blocks *this* lease holds.
//!    A `&[u8]` borrows its lease and a `&mut [u8]` borrows its `WriteLease` mutably, so neither
//!    outlives the grant, and a `WriteLease` cannot give two mutable slices at once.
//! 4. A block with a live lease cannot be freed; a block that is free or quarantined cannot be
//!    leased. So a lease never sees a block change its owner.
//!
//! Hence, within a process, whoever holds `&[u8]` shares it with readers only, and whoever holds
//! `&mut [u8]` is alone. What would break it: a second mapping of the same pages with write access.
//! That is why a memfd region is sealed with `F_SEAL_FUTURE_WRITE` right after its owner mapped it:
//! the kernel refuses every later writable mapping and every `write(2)`, in this process and in any
//! other that gets the descriptor. `F_SEAL_SHRINK` keeps a truncation from turning reads into SIGBUS.
//! No other process ever writes our memory; peers read it ([`RegionView`]), and a peer that reads
//! while we write gets bytes that its digest check refuses, by raw copies that form no reference.
//!
//! The ledger's rules (exclusion, free, quarantine) are model-checked under every interleaving that
//! a bounded search reaches, see `mem/model.rs`.
//!
//! # Limits
//! Blocks per pool < 2^32, extents per pool < 2^32, region length < 2^63 bytes.

mod error;
mod extents;
mod key;
mod lease;
mod ledger;
#[cfg(test)]
mod model;
mod pool;
mod region;
#[cfg(test)]
mod tests;

pub use error::MemError;
pub use key::{RegionKey, RemoteRegion, RemoteRegionError};
pub use lease::{ReadLease, WriteLease};
pub use ledger::{PoolStats, Why};
pub use pool::{BlockId, BlockPool};
pub use region::{Region, RegionId, RegionView, SharedWords};
