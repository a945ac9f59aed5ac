//! Layouts by axis order: every permutation an engine uses, written as one array.

use std::sync::Arc;

use super::{BlockLayout, GroupGeometry, PageError, Plane, Shard};

/// An axis of a KV pool. `Kv` runs over the components (K, V, scales).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Layers of the shard.
    Layer,
    /// Components. Innermost: K and V of a row side by side. Outside `Block`: separate planes.
    Kv,
    /// Blocks of the pool.
    Block,
    /// KV heads of the shard.
    Head,
    /// Token slots of a block.
    Slot,
}

/// Head and slot order inside a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// Token slot outside head: all heads of a token side by side.
    Nhd,
    /// Head outside token slot: all tokens of a head side by side.
    Hnd,
}

/// Whether a block's layers lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Major {
    /// One array of blocks per layer.
    Layer,
    /// One array of blocks, each with all layers.
    Block,
}

/// Where V lies relative to K.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvSplit {
    /// K of all blocks, then V of all blocks.
    Planes,
    /// Within a block: its K part, then its V part.
    InBlock,
    /// Within a row: K and V of one token and head side by side.
    InRow,
}

/// Where side data (scales) lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// As further entries on the `Kv` axis.
    OnKvAxis,
    /// In an array of its own after the main one, in this axis order.
    Apart([Axis; 5]),
}

/// A pool described by its axis order, outermost first.
///
/// vLLM's six physical orders of `[L, B, H, N, C]` are permutations with `Kv` innermost; older
/// ones and SGLang's have it elsewhere. `base` skips bytes before the pool, `block_pad` adds
/// padding after each block (after each layer's part of it in layer-major pools).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayoutSpec {
    /// Axis order, outermost first.
    pub axes: [Axis; 5],
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Blocks of the pool.
    pub blocks: u32,
    /// Offset of the pool in its region.
    pub base: u64,
    /// Bytes of padding per step of the block axis.
    pub block_pad: u64,
    /// Where scales lie, if the geometry has any.
    pub scales: Scales,
}

impl LayoutSpec {
    /// The common orders; no base, no padding, scales on the `Kv` axis.
    pub fn new(major: Major, kv: KvSplit, order: Order, block_tokens: u32, blocks: u32) -> Self {
        use Axis::{Block, Head, Kv, Layer, Slot};
        let (a, b) = match order {
            Order::Nhd => (Slot, Head),
            Order::Hnd => (Head, Slot),
        };
        let axes = match (major, kv) {
            (Major::Layer, KvSplit::Planes) => [Layer, Kv, Block, a, b],
            (Major::Layer, KvSplit::InBlock) => [Layer, Block, Kv, a, b],
            (Major::Layer, KvSplit::InRow) => [Layer, Block, a, b, Kv],
            (Major::Block, KvSplit::Planes) => [Kv, Block, Layer, a, b],
            (Major::Block, KvSplit::InBlock) => [Block, Layer, Kv, a, b],
            (Major::Block, KvSplit::InRow) => [Block, Layer, a, b, Kv],
        };
        let scales = Scales::OnKvAxis;
        Self {
            axes,
            block_tokens,
            blocks,
            base: 0,
            block_pad: 0,
            scales,
        }
    }

    /// Lays the pool out and checks it. The region length is what the pool needs, see
    /// [`BlockLayout::region_len`].
    pub fn build(
        &self,
        geometry: &Arc<GroupGeometry>,
        shard: Shard,
    ) -> Result<BlockLayout, PageError> {
        geometry.validate()?;
        shard.validate(geometry)?;
        let rows: Vec<u64> = geometry
            .components()
            .map(|c| geometry.row_bytes(c).into())
            .collect();
        let apart = geometry.components().filter(|&c| c as u8 >= 2).count();
        let main = match self.scales {
            Scales::OnKvAxis => rows.len(),
            Scales::Apart(_) => rows.len() - apart,
        };
        let mut planes = vec![None; rows.len() * shard.layers.len()];
        let mut end = self.lay(&self.axes, &rows, 0..main, self.base, &shard, &mut planes)?;
        if let Scales::Apart(axes) = self.scales
            && apart > 0
        {
            end = self.lay(&axes, &rows, main..rows.len(), end, &shard, &mut planes)?;
        }
        let planes = planes.into_iter().flatten().collect();
        BlockLayout::from_planes(
            geometry.clone(),
            shard,
            self.blocks,
            self.block_tokens,
            planes,
            end,
        )
    }

    /// Lays out the components `which` from `base`; returns the end.
    fn lay(
        &self,
        axes: &[Axis; 5],
        rows: &[u64],
        which: std::ops::Range<usize>,
        base: u64,
        shard: &Shard,
        planes: &mut [Option<Plane>],
    ) -> Result<u64, PageError> {
        use Axis::{Block, Head, Kv, Layer, Slot};
        if [Layer, Kv, Block, Head, Slot]
            .iter()
            .any(|a| !axes.contains(a))
        {
            return Err(PageError::Axes);
        }
        // From the innermost axis out: `size[c]` is the extent of component c so far. Inside the
        // Kv axis components have sizes of their own; at it they are laid one after the other.
        let mut size: Vec<u64> = rows[which.clone()].to_vec();
        let mut offset = vec![0u64; size.len()];
        let mut stride = vec![[0u64; 4]; size.len()];
        for axis in axes.iter().rev() {
            let (n, slot) = match axis {
                Kv => {
                    let mut sum = 0u64;
                    for (o, s) in offset.iter_mut().zip(&size) {
                        *o = sum;
                        sum = sum.checked_add(*s).ok_or(PageError::Overflow)?;
                    }
                    size.fill(sum);
                    continue;
                }
                Layer => (shard.layers.len() as u64, 0),
                Block => (u64::from(self.blocks), 1),
                Slot => (u64::from(self.block_tokens), 2),
                Head => (shard.heads.len() as u64, 3),
            };
            for (s, st) in size.iter_mut().zip(&mut stride) {
                if *axis == Block {
                    *s = s.checked_add(self.block_pad).ok_or(PageError::Overflow)?;
                }
                st[slot] = *s;
                *s = s.checked_mul(n).ok_or(PageError::Overflow)?;
            }
        }
        for (i, c) in which.enumerate() {
            for l in 0..shard.layers.len() {
                let [layer_stride, block_stride, slot_stride, head_stride] = stride[i];
                let base = (l as u64)
                    .checked_mul(layer_stride)
                    .and_then(|o| o.checked_add(offset[i])?.checked_add(base))
                    .ok_or(PageError::Overflow)?;
                planes[l * rows.len() + c] = Some(Plane {
                    base,
                    block_stride,
                    slot_stride,
                    head_stride,
                });
            }
        }
        let total = size.first().copied().unwrap_or(0);
        base.checked_add(total).ok_or(PageError::Overflow)
    }
}
