use crate::mem::MemError;

/// A run of bytes of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) block: u32,
}

/// Finds the extent that holds an offset.
///
/// Pools have regular layouts, so nearly always every extent starts and ends at a multiple of some
/// power of two (the granule): then one table look-up finds it. Layouts without such a granule fall
/// back to a binary search.
#[derive(Debug)]
pub(super) struct ExtentIndex {
    /// Sorted by start, disjoint, neighbours of one block merged.
    extents: Vec<Extent>,
    /// log2 of the granule, and per granule the extent's index; empty where there is no granule.
    shift: u32,
    table: Vec<u32>,
    /// Bytes per block.
    block_bytes: Vec<u64>,
}

const NONE: u32 = u32::MAX;
/// At 4 B an entry the table costs at most 1/16 of the region.
const SHIFT_MIN: u32 = 6;

impl ExtentIndex {
    pub(super) fn new<I>(
        region_len: u64,
        blocks: u32,
        mut of: impl FnMut(u32) -> I,
    ) -> Result<Self, MemError>
    where
        I: IntoIterator<Item = (u64, u64)>,
    {
        let mut all = Vec::new();
        let mut block_bytes = Vec::with_capacity(blocks as usize);
        for block in 0..blocks {
            let mut bytes = 0u64;
            for (offset, len) in of(block) {
                let bad = |why| MemError::Extent {
                    block,
                    offset,
                    len,
                    why,
                };
                let end = offset.checked_add(len).ok_or(bad("overflows"))?;
                if len == 0 {
                    return Err(bad("is empty"));
                }
                if end > region_len {
                    return Err(bad("leaves its region"));
                }
                all.push(Extent {
                    start: offset,
                    end,
                    block,
                });
                bytes += len;
            }
            block_bytes.push(bytes);
        }
        all.sort_unstable_by_key(|e| e.start);
        let mut extents: Vec<Extent> = Vec::with_capacity(all.len());
        for e in all {
            match extents.last_mut() {
                Some(last) if last.end > e.start => {
                    let (block, offset, len) = (e.block, e.start, e.end - e.start);
                    return Err(MemError::Extent {
                        block,
                        offset,
                        len,
                        why: "overlaps another",
                    });
                }
                Some(last) if last.end == e.start && last.block == e.block => last.end = e.end,
                _ => extents.push(e),
            }
        }
        extents.shrink_to_fit();
        let low = extents.iter().fold(0u64, |bits, e| bits | e.start | e.end);
        let shift = if low == 0 { 0 } else { low.trailing_zeros() };
        let mut table = Vec::new();
        if shift >= SHIFT_MIN && extents.len() < NONE as usize {
            table = vec![NONE; (region_len >> shift) as usize + 1];
            for (i, e) in extents.iter().enumerate() {
                table[(e.start >> shift) as usize..(e.end >> shift) as usize].fill(i as u32);
            }
        }
        Ok(Self {
            extents,
            shift,
            table,
            block_bytes,
        })
    }

    pub(super) fn block_bytes(&self, block: u32) -> u64 {
        self.block_bytes[block as usize]
    }

    fn find(&self, offset: u64) -> Option<usize> {
        if self.table.is_empty() {
            let after = self.extents.partition_point(|e| e.start <= offset);
            return after
                .checked_sub(1)
                .filter(|&i| offset < self.extents[i].end);
        }
        let entry = *self
            .table
            .get(usize::try_from(offset >> self.shift).ok()?)?;
        (entry != NONE).then_some(entry as usize)
    }

    /// Calls `holds` with each block that `[offset, offset + len)` touches, in order; true if the
    /// range lies in extents throughout and every call said true. An empty range is not in any block.
    #[inline]
    pub(super) fn covered(
        &self,
        offset: u64,
        len: u64,
        mut holds: impl FnMut(u32) -> bool,
    ) -> bool {
        let Some(end) = offset.checked_add(len).filter(|_| len > 0) else {
            return false;
        };
        let Some(mut i) = self.find(offset) else {
            return false;
        };
        loop {
            let e = self.extents[i];
            if !holds(e.block) {
                return false;
            }
            if end <= e.end {
                return true;
            }
            i += 1;
            // The next extent must begin where this one ends.
            if self.extents.get(i).is_none_or(|next| next.start != e.end) {
                return false;
            }
        }
    }
}
