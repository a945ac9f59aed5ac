//! Where the bytes of one pool lie: strides per (layer, component), checked once at construction.

use std::sync::Arc;

use super::pieces::{Piece, block_pieces};
use super::{Component, GroupGeometry, MAX_PAGE_TOKENS, PageError, Shard};

/// Most blocks of a pool.
pub const MAX_BLOCKS: u32 = 1 << 28;

/// One component of one layer in a pool: the row of (block, slot, head) starts at
/// `base + block * block_stride + slot * slot_stride + head * head_stride`, `head` counted within
/// the shard. All in bytes from the start of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plane {
    /// Offset of block 0, slot 0, local head 0.
    pub base: u64,
    /// From one block to the next.
    pub block_stride: u64,
    /// From one token slot to the next.
    pub slot_stride: u64,
    /// From one local head to the next.
    pub head_stride: u64,
}

impl Plane {
    /// Whether `next` continues each of this plane's rows, `row` bytes long: then both are one
    /// plane of wider rows.
    pub(super) fn adjoins(&self, row: u64, next: &Self) -> bool {
        self.base.checked_add(row) == Some(next.base)
            && self.block_stride == next.block_stride
            && self.slot_stride == next.slot_stride
            && self.head_stride == next.head_stride
    }
}

/// Components that lie side by side in every row of every layer, as readers see them: one wider
/// row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Position of its first component in [`BlockLayout::components`].
    pub(crate) component: usize,
    /// Bytes of the joined row.
    pub(crate) row: u32,
}

/// Layout of one pool region for one group and shard. Immutable and checked: rows are disjoint,
/// inside the region, and all offsets fit in 64 bits.
#[derive(Debug, Clone)]
pub struct BlockLayout {
    geometry: Arc<GroupGeometry>,
    shard: Shard,
    blocks: u32,
    block_tokens: u32,
    region_len: u64,
    components: Vec<Component>,
    /// `[local layer][present component]`.
    planes: Vec<Plane>,
    pieces: Vec<Piece>,
    parts: Vec<Part>,
    /// `[local layer][part]`: all rows of one block lie in one piece, so that a reader may ask for
    /// a range of slots at once.
    whole: Vec<bool>,
    /// One part, whose slots follow one another: every leaf is contiguous within its block.
    contiguous_leaves: bool,
}

impl BlockLayout {
    /// Any strides at all. `planes` is `[layer of the shard][component present in the geometry]`,
    /// layer-major. For common engines use [`LayoutSpec`](super::LayoutSpec).
    ///
    /// Errors if a count is zero or too large, a plane is missing, rows overlap within or between
    /// blocks, or the layout reaches past `region_len`.
    pub fn from_planes(
        geometry: Arc<GroupGeometry>,
        shard: Shard,
        blocks: u32,
        block_tokens: u32,
        planes: Vec<Plane>,
        region_len: u64,
    ) -> Result<Self, PageError> {
        geometry.validate()?;
        shard.validate(&geometry)?;
        for (what, got, max) in [
            ("blocks", blocks, MAX_BLOCKS),
            ("block_tokens", block_tokens, MAX_PAGE_TOKENS),
        ] {
            if got == 0 {
                return Err(PageError::Zero { what });
            }
            if got > max {
                return Err(PageError::TooLarge {
                    what,
                    got: got.into(),
                    max: max.into(),
                });
            }
        }
        let components: Vec<_> = geometry.components().collect();
        let want = components.len() * shard.layers.len();
        if planes.len() != want {
            return Err(PageError::PlaneCount {
                got: planes.len(),
                want,
            });
        }
        let rows: Vec<u64> = components
            .iter()
            .map(|&c| geometry.row_bytes(c).into())
            .collect();
        let dims = (block_tokens, shard.heads.len() as u32);
        let pieces = block_pieces(&planes, &rows, dims, blocks, region_len)?;
        let parts = join_components(&planes, &rows);
        let mut whole = Vec::with_capacity(parts.len() * shard.layers.len());
        for layer in planes.chunks(rows.len()) {
            for part in &parts {
                whole.push(in_one_piece(
                    &layer[part.component],
                    part.row,
                    dims,
                    &pieces,
                ));
            }
        }
        let slots_adjacent = planes.chunks(rows.len()).all(|layer| {
            let adjacent = |p: &Part| layer[p.component].slot_stride == u64::from(p.row);
            parts.iter().all(adjacent)
        });
        let contiguous_leaves = slots_adjacent && parts.len() == 1 && whole.iter().all(|&w| w);
        Ok(Self {
            geometry,
            shard,
            blocks,
            block_tokens,
            region_len,
            components,
            planes,
            pieces,
            parts,
            whole,
            contiguous_leaves,
        })
    }

    /// The group whose KV this pool holds.
    pub fn geometry(&self) -> &Arc<GroupGeometry> {
        &self.geometry
    }

    /// Which layers and heads of it.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Blocks in the pool.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Length of the region this layout was checked against.
    pub fn region_len(&self) -> u64 {
        self.region_len
    }

    /// Bytes of one block that hold rows (padding not counted).
    pub fn block_bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.len).sum()
    }

    /// The byte ranges `(offset, len)` of one block: ascending pieces, disjoint from one another
    /// and from those of every other block.
    pub fn extents(
        &self,
        block: u32,
    ) -> Result<impl ExactSizeIterator<Item = (u64, u64)> + '_, PageError> {
        self.check_block(block)?;
        let at = u64::from(block);
        // Cannot overflow: construction checked the last block's end.
        Ok(self
            .pieces
            .iter()
            .map(move |p| (p.start + at * p.block_stride, p.len)))
    }

    /// Offset in the region of the row of a *global* layer and head. The row is contiguous and
    /// [`GroupGeometry::row_bytes`] long.
    pub fn locate(
        &self,
        layer: u32,
        head: u32,
        component: Component,
        block: u32,
        slot: u32,
    ) -> Result<u64, PageError> {
        let l = self.shard.layer_index(layer).ok_or(PageError::NotInShard {
            what: "layer",
            id: layer,
        })?;
        let h = self.shard.head_index(head).ok_or(PageError::NotInShard {
            what: "head",
            id: head,
        })?;
        let c = self
            .component_index(component)
            .ok_or(PageError::NotInShard {
                what: "component",
                id: component as u32,
            })?;
        self.check_block(block)?;
        if slot >= self.block_tokens {
            let block_tokens = self.block_tokens;
            return Err(PageError::SlotOutOfRange { slot, block_tokens });
        }
        let p = self.plane(l, c);
        Ok(p.base
            + u64::from(block) * p.block_stride
            + u64::from(slot) * p.slot_stride
            + h as u64 * p.head_stride)
    }

    /// Position of `component` among those present; `None` if the group has none.
    pub fn component_index(&self, component: Component) -> Option<usize> {
        self.components.iter().position(|&c| c == component)
    }

    /// The components present, in canonical order.
    pub fn components(&self) -> &[Component] {
        &self.components
    }

    /// The plane of a shard-local layer index and a position in [`components`](Self::components).
    /// Panics if out of range.
    pub fn plane(&self, local_layer: usize, component: usize) -> &Plane {
        &self.planes[local_layer * self.components.len() + component]
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether all rows of a part lie in one piece of a block.
    pub(crate) fn in_one_piece(&self, local_layer: usize, part: usize) -> bool {
        self.whole[local_layer * self.parts.len() + part]
    }

    pub(crate) fn contiguous_leaves(&self) -> bool {
        self.contiguous_leaves
    }

    pub(crate) fn check_block(&self, block: u32) -> Result<(), PageError> {
        if block < self.blocks {
            Ok(())
        } else {
            Err(PageError::BlockOutOfRange {
                block,
                blocks: self.blocks,
            })
        }
    }
}

fn join_components(planes: &[Plane], rows: &[u64]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (component, &row) in rows.iter().enumerate() {
        let joins = parts.last().is_some_and(|p: &Part| {
            planes
                .chunks(rows.len())
                .all(|layer| layer[p.component].adjoins(p.row.into(), &layer[component]))
        });
        match parts.last_mut() {
            // Row sizes are bounded, so their sum fits.
            Some(p) if joins => p.row += row as u32,
            _ => parts.push(Part {
                component,
                row: row as u32,
            }),
        }
    }
    parts
}

fn in_one_piece(plane: &Plane, row: u32, dims: (u32, u32), pieces: &[Piece]) -> bool {
    // Construction checked that these sums fit.
    let end = plane.base
        + u64::from(dims.0 - 1) * plane.slot_stride
        + u64::from(dims.1 - 1) * plane.head_stride
        + u64::from(row);
    let at = pieces.partition_point(|p| p.start <= plane.base);
    match at.checked_sub(1).map(|at| &pieces[at]) {
        Some(p) => p.block_stride == plane.block_stride && end <= p.start + p.len,
        None => false,
    }
}
