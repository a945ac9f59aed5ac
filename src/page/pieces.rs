//! The pieces one block occupies, and the proof that no two rows of a pool share a byte.

use super::{PageError, Plane, Unsupported};

/// Most separate byte ranges of one block.
pub const MAX_PIECES: usize = 1 << 20;

/// A maximal contiguous byte range of block 0; block `b` has it at `start + b * block_stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) block_stride: u64,
}

/// `planes` cycle through components with row sizes `rows`; `dims` = (slots, heads).
pub(super) fn block_pieces(
    planes: &[Plane],
    rows: &[u64],
    dims: (u32, u32),
    blocks: u32,
    region_len: u64,
) -> Result<Vec<Piece>, PageError> {
    let mut raw = Vec::new();
    for layer in planes.chunks(rows.len()) {
        // Components that lie side by side in every row (K and V interleaved) are one wider row;
        // this keeps the number of pieces small for layouts that interleave.
        let mut i = 0;
        while i < layer.len() {
            let first = layer[i];
            let mut row = rows[i];
            i += 1;
            while i < layer.len() && first.adjoins(row, &layer[i]) {
                row += rows[i];
                i += 1;
            }
            plane_pieces(&first, row, dims, &mut raw)?;
        }
    }
    raw.sort_unstable_by_key(|p| p.start);
    let mut pieces: Vec<Piece> = Vec::new();
    for p in raw {
        match pieces.last_mut() {
            Some(last) if p.start < last.start + last.len => {
                return Err(PageError::Overlap { offset: p.start });
            }
            Some(last)
                if p.start == last.start + last.len && p.block_stride == last.block_stride =>
            {
                last.len += p.len;
            }
            _ => pieces.push(p),
        }
    }
    pieces.shrink_to_fit();
    check_blocks(&pieces, blocks, region_len)?;
    Ok(pieces)
}

/// Appends the pieces of one plane in block 0.
fn plane_pieces(
    plane: &Plane,
    row: u64,
    (slots, heads): (u32, u32),
    out: &mut Vec<Piece>,
) -> Result<(), PageError> {
    // Inner dimension first: the one with the smaller stride. A dimension of one element has no
    // stride that matters.
    let mut inner = (u64::from(slots), plane.slot_stride);
    let mut outer = (u64::from(heads), plane.head_stride);
    if inner.0 == 1 || (outer.0 > 1 && outer.1 < inner.1) {
        std::mem::swap(&mut inner, &mut outer);
    }
    let overlap = Err(PageError::Overlap { offset: plane.base });
    let mut len = row;
    let mut n_inner = inner.0;
    if inner.0 > 1 {
        if inner.1 < len {
            return overlap;
        }
        if inner.1 == len {
            len = len.checked_mul(inner.0).ok_or(PageError::Overflow)?;
            n_inner = 1;
        }
    }
    let mut n_outer = outer.0;
    if outer.0 > 1 {
        if n_inner == 1 && outer.1 == len {
            len = len.checked_mul(outer.0).ok_or(PageError::Overflow)?;
            n_outer = 1;
        } else if n_inner == 1 && outer.1 < len {
            return overlap;
        }
        // With both dimensions scattered, overlap shows when all pieces are sorted.
    }
    let count = (n_inner * n_outer) as usize;
    if out.len() + count > MAX_PIECES {
        return Err(Unsupported::TooScattered.into());
    }
    for o in 0..n_outer {
        for i in 0..n_inner {
            let start = at(plane.base, &[(o, outer.1), (i, inner.1)])?;
            start.checked_add(len).ok_or(PageError::Overflow)?;
            out.push(Piece {
                start,
                len,
                block_stride: plane.block_stride,
            });
        }
    }
    Ok(())
}

fn at(base: u64, steps: &[(u64, u64)]) -> Result<u64, PageError> {
    steps.iter().try_fold(base, |sum, &(n, stride)| {
        n.checked_mul(stride)
            .and_then(|d| sum.checked_add(d))
            .ok_or(PageError::Overflow)
    })
}

/// Block `b`'s pieces must not meet those of any other block.
///
/// Over all blocks a piece sweeps the span `start .. start + (blocks-1)*stride + len`. Pieces whose
/// spans do not meet are disjoint in every block. Pieces whose spans do meet (K and V of one block
/// with padding between, layers interleaved within blocks) must share one stride and be disjoint
/// modulo it; then no two blocks can collide.
fn check_blocks(pieces: &[Piece], blocks: u32, region_len: u64) -> Result<(), PageError> {
    let last = u64::from(blocks) - 1;
    let end_of =
        |p: &Piece| -> Result<u64, PageError> { at(p.start + p.len, &[(last, p.block_stride)]) };
    let mut end = 0;
    for p in pieces {
        end = end.max(end_of(p)?);
    }
    if end > region_len {
        return Err(PageError::OutOfRegion {
            end,
            len: region_len,
        });
    }
    if last == 0 {
        return Ok(());
    }
    let mut from = 0;
    while from < pieces.len() {
        let mut reach = end_of(&pieces[from])?;
        let mut to = from + 1;
        while to < pieces.len() && pieces[to].start < reach {
            reach = reach.max(end_of(&pieces[to])?);
            to += 1;
        }
        check_cluster(&pieces[from..to])?;
        from = to;
    }
    Ok(())
}

fn check_cluster(cluster: &[Piece]) -> Result<(), PageError> {
    let stride = cluster[0].block_stride;
    let overlap = |p: &Piece| Err(PageError::Overlap { offset: p.start });
    if let Some(p) = cluster
        .iter()
        .find(|p| p.block_stride != stride || p.len > stride)
    {
        return overlap(p);
    }
    let mut residues: Vec<(u64, &Piece)> = cluster.iter().map(|p| (p.start % stride, p)).collect();
    residues.sort_unstable_by_key(|r| r.0);
    for pair in residues.windows(2) {
        if pair[0].0 + pair[0].1.len > pair[1].0 {
            return overlap(pair[1].1);
        }
    }
    // The last one wraps around to the first of the next block.
    let (first, final_) = (&residues[0], &residues[residues.len() - 1]);
    if final_.0 + final_.1.len > stride + first.0 {
        return overlap(final_.1);
    }
    Ok(())
}
