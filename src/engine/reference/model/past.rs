//! KV that earlier steps left in the pool, read through a request's block table.

use crate::mem::ReadLease;
use crate::page::BlockLayout;

/// The past of one request: positions `0..len` of `table`, under a lease.
#[derive(Clone, Copy)]
pub(crate) struct PastKv<'a> {
    pub lease: &'a ReadLease,
    pub layout: &'a BlockLayout,
    pub table: &'a [u32],
    pub len: usize,
}

/// All rows of one (layer, component) in one block.
pub(crate) struct Window<'a> {
    bytes: &'a [u8],
    slot_stride: usize,
    head_stride: usize,
    row: usize,
}

impl<'a> Window<'a> {
    /// One row.
    #[inline(always)]
    pub(crate) fn row(&self, slot: usize, head: usize) -> &'a [u8] {
        let at = slot * self.slot_stride + head * self.head_stride;
        &self.bytes[at..at + self.row]
    }
}

impl<'a> PastKv<'a> {
    /// Tokens of a block.
    pub(crate) fn block_tokens(&self) -> usize {
        self.layout.block_tokens() as usize
    }

    /// The rows of `component` (0 = K, 1 = V) of a layer in the `index`-th block of the request.
    pub(crate) fn window(&self, layer: usize, component: usize, index: usize) -> Window<'a> {
        let plane = self.layout.plane(layer, component);
        let geometry = self.layout.geometry();
        let row = if component == 0 {
            geometry.k_bytes
        } else {
            geometry.v_bytes
        } as usize;
        let slot_stride = plane.slot_stride as usize;
        let head_stride = plane.head_stride as usize;
        let len = (self.block_tokens() - 1) * slot_stride
            + (geometry.kv_heads as usize - 1) * head_stride
            + row;
        let block = u64::from(self.table[index]);
        Window {
            bytes: self
                .lease
                .bytes(plane.base + block * plane.block_stride, len),
            slot_stride,
            head_stride,
            row,
        }
    }
}
