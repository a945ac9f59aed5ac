//! KV pages: what a group keeps per token, where a pool's bytes lie, and how to get from one pool
//! to another. Pure: no I/O, no clock, no memory but the caller's.
//!
//! The *canonical* form of a page is a list of leaves, one per (global layer, KV head), layers
//! ascending, then heads; a leaf is, token after token, the token's K row, V row, K scales, V
//! scales, valid tokens only. It does not depend on block size, strides or a tensor- or
//! pipeline-parallel split, so two pools of the same model can be compared whatever their engines.
//!
//! ```
//! use std::sync::Arc;
//! use moonlivekv::page::*;
//!
//! let group = Arc::new(GroupGeometry::attention(0, 0..2, 4, 8, Dtype::Bf16)?);
//! let src = LayoutSpec::new(Major::Layer, KvSplit::Planes, Order::Nhd, 16, 8)
//!     .build(&group, group.whole())?;
//! // Rank 1 of 2, head-major, blocks of 64 tokens.
//! let dst = LayoutSpec::new(Major::Block, KvSplit::InRow, Order::Hnd, 64, 2)
//!     .build(&group, Shard::tensor_parallel(&group, 1, 2)?)?;
//! let from = TokenView::new(&src, &[5, 2, 7], 0..40)?;
//! let to = TokenView::new(&dst, &[1], 0..40)?;
//! assert_eq!(from.place(17)?, (2, 1));
//! let mut runs = Vec::new();
//! plan_copy(&from, &to, 0..40, &mut runs)?;
//! // 40 tokens, 2 layers, 2 of 4 heads, K and V: rows of 16 bytes.
//! assert_eq!(runs.iter().map(|r| r.len).sum::<u64>(), 40 * 2 * 2 * 2 * 16);
//! # Ok::<(), PageError>(())
//! ```

#![deny(unsafe_code)]

mod canon;
mod codec;
mod error;
mod geometry;
mod header;
mod layout;
mod pieces;
mod plan;
mod refs;
mod spec;
mod view;

pub use canon::{
    PageSpan, ResidentMut, copy_runs, export_page, import_page, packed_layout, unused_slots,
};
pub use error::{PageError, Unsupported};
pub use geometry::{
    Component, Dtype, GroupGeometry, KvKind, MAX_HEADS, MAX_LAYERS, MAX_ROW_BYTES, MAX_SCALE_BYTES,
    Shard,
};
pub(crate) use header::encode_geometry;
pub use header::{MAX_GROUPS, MAX_PAGE_TOKENS, ObjectSetHeader, Scheme};
pub use layout::{BlockLayout, MAX_BLOCKS, Plane};
pub use pieces::MAX_PIECES;
pub use plan::{CopyRun, assign_sources, plan_copy, plan_copy_of};
pub use refs::{KvObjectSet, MAX_PAGES, MAX_STORE_KEY, MAX_TP, PageRef, Part};
pub use spec::{Axis, KvSplit, LayoutSpec, Major, Order, Scales};
pub use view::TokenView;

/// Read access to parts of a pool's region.
///
/// Whoever gives access (a lease over blocks) also promises that nobody writes the bytes while the
/// slice lives.
pub trait Resident {
    /// The bytes `offset .. offset + len` of the region, or `None` if this access does not cover
    /// all of them. Callers ask for ranges inside one extent of one block.
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]>;
}

/// A whole region held as plain memory.
impl Resident for [u8] {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let from = usize::try_from(offset).ok()?;
        self.get(from..from.checked_add(len)?)
    }
}

impl Resident for Vec<u8> {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        self.as_slice().bytes(offset, len)
    }
}

impl<R: Resident + ?Sized> Resident for &R {
    fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        (**self).bytes(offset, len)
    }
}

#[cfg(test)]
mod refs_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
