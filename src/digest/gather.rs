//! From a leaf's canonical bytes to where they lie: sources per leaf, pieces per chunk.

use std::ops::Range;

use super::DigestError;
use super::lanes::{CHUNK, LANES};
use super::simd::{BLOCK, Row};
use crate::page::{BlockLayout, PageError, Resident, TokenView};

/// Rows of one part of one leaf in one block, or the base of them where they are scattered.
#[derive(Clone, Copy)]
pub(super) struct Source<'m> {
    /// From the first slot's row to the end of the last one's; `None` if the plane's rows do not
    /// lie in one piece of the block, so that each is fetched by itself.
    bytes: Option<&'m [u8]>,
    base: u64,
    slot_stride: u64,
}

/// A run of canonical bytes that is contiguous in memory.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Which of a leaf's sources.
    source: u32,
    /// Slot counted from the source's first.
    slot: u32,
    /// Offset within that slot's row.
    at: u32,
    pub(super) len: u32,
    /// Where it goes within its chunk.
    to: u32,
}

/// The canonical bytes of one leaf, for tokens `tokens`, cut at chunk ends. The same for all leaves
/// of a layout and all token ranges of equal length and alignment to blocks.
#[derive(Default)]
pub(super) struct Pieces {
    list: Vec<Piece>,
    /// `list[ends[c - 1] .. ends[c]]` are the pieces of chunk `c`.
    ends: Vec<u32>,
    shape: Option<Shape>,
    /// All pieces are whole 64-byte blocks.
    pub(super) whole_blocks: bool,
}

/// What pieces depend on, beside the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// Bytes already in the first chunk.
    fill: u32,
    tokens: u32,
    /// Slot of the first token; 0 for all ranges inside one block, which look alike.
    phase: u32,
}

impl Shape {
    pub(super) fn of(layout: &BlockLayout, tokens: &Range<u64>, fill: usize) -> Self {
        let bt = u64::from(layout.block_tokens());
        // Callers pass ranges inside one page, which has at most 256 tokens.
        let n = (tokens.end - tokens.start) as u32;
        let phase = (tokens.start % bt) as u32;
        let inside = u64::from(phase) + u64::from(n) <= bt;
        Self {
            fill: fill as u32,
            tokens: n,
            phase: if inside { 0 } else { phase },
        }
    }
}

impl Pieces {
    /// Forgets what was prepared: the layout may be another one.
    pub(super) fn reset(&mut self) {
        self.shape = None;
    }

    /// Lists the pieces for `shape`, unless they are listed already.
    pub(super) fn prepare(&mut self, layout: &BlockLayout, shape: Shape) {
        if self.shape == Some(shape) {
            return;
        }
        self.shape = Some(shape);
        self.list.clear();
        self.ends.clear();
        let bt = layout.block_tokens();
        let parts = layout.parts();
        let mut chunk_at = shape.fill;
        let (mut segment, mut slot, mut in_block) = (0u32, 0u32, shape.phase);
        for _ in 0..shape.tokens {
            for (p, part) in parts.iter().enumerate() {
                let source = segment * parts.len() as u32 + p as u32;
                let mut at = 0;
                while at < part.row {
                    if chunk_at == CHUNK as u32 {
                        self.ends.push(self.list.len() as u32);
                        chunk_at = 0;
                    }
                    let len = (part.row - at).min(CHUNK as u32 - chunk_at);
                    let first_of_chunk = self.ends.last().copied().unwrap_or(0) as usize;
                    let goes_on = layout.contiguous_leaves() && self.list.len() > first_of_chunk;
                    match self.list.last_mut() {
                        Some(last) if goes_on && last.source == source => last.len += len,
                        _ => self.list.push(Piece {
                            source,
                            slot,
                            at,
                            len,
                            to: chunk_at,
                        }),
                    }
                    at += len;
                    chunk_at += len;
                }
            }
            slot += 1;
            in_block += 1;
            if in_block == bt {
                (segment, slot, in_block) = (segment + 1, 0, 0);
            }
        }
        self.ends.push(self.list.len() as u32);
        self.whole_blocks = self
            .list
            .iter()
            .all(|p| (p.len as usize).is_multiple_of(BLOCK));
    }

    pub(super) fn chunks(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn of_chunk(&self, chunk: usize) -> &[Piece] {
        let from = if chunk == 0 {
            0
        } else {
            self.ends[chunk - 1] as usize
        };
        &self.list[from..self.ends[chunk] as usize]
    }

    pub(super) fn bytes_of_chunk(&self, chunk: usize) -> usize {
        self.of_chunk(chunk).iter().map(|p| p.len as usize).sum()
    }

    pub(super) fn all(&self) -> &[Piece] {
        &self.list
    }
}

/// Read access to one pool through one view.
pub(super) struct Gather<'m, 'v, R: ?Sized> {
    pub(super) view: &'v TokenView<'v>,
    pub(super) mem: &'m R,
}

impl<'m, R: Resident + ?Sized> Gather<'m, '_, R> {
    /// Appends the sources of one leaf (shard-local layer and head) for `tokens`: part by part,
    /// block segment by block segment. `tokens` must lie in the view.
    pub(super) fn sources(
        &self,
        (layer, head): (usize, usize),
        tokens: &Range<u64>,
        out: &mut Vec<Source<'m>>,
    ) -> Result<(), DigestError> {
        let layout = self.view.layout();
        let bt = u64::from(layout.block_tokens());
        let mut at = tokens.start;
        while at < tokens.end {
            let (block, slot) = self.view.place_unchecked(at);
            let n = (bt - u64::from(slot)).min(tokens.end - at);
            for (p, part) in layout.parts().iter().enumerate() {
                let plane = layout.plane(layer, part.component);
                let base = plane.base
                    + u64::from(block) * plane.block_stride
                    + u64::from(slot) * plane.slot_stride
                    + head as u64 * plane.head_stride;
                let slot_stride = plane.slot_stride;
                let bytes = if layout.in_one_piece(layer, p) {
                    let len = (n - 1) * slot_stride + u64::from(part.row);
                    Some(fetch(self.mem, base, len)?)
                } else {
                    None
                };
                out.push(Source {
                    bytes,
                    base,
                    slot_stride,
                });
            }
            at += n;
        }
        Ok(())
    }

    /// The bytes of one piece, in place.
    #[inline]
    pub(super) fn piece(
        &self,
        sources: &[Source<'m>],
        piece: &Piece,
    ) -> Result<&'m [u8], DigestError> {
        let s = &sources[piece.source as usize];
        let at = u64::from(piece.slot) * s.slot_stride + u64::from(piece.at);
        match s.bytes {
            Some(bytes) => Ok(&bytes[at as usize..][..piece.len as usize]),
            None => fetch(self.mem, s.base + at, piece.len.into()),
        }
    }

    /// A piece of whole blocks in all lanes, in place. `sources` has `per_leaf` entries for each
    /// leaf; lanes without a leaf repeat the first one's, and nobody looks at them.
    #[inline]
    pub(super) fn rows(
        &self,
        sources: &[Source<'m>],
        per_leaf: usize,
        piece: &Piece,
    ) -> Result<[Row<'m>; LANES], DigestError> {
        let mut rows: [Row<'m>; LANES] = [&[]; LANES];
        let mut n = 0;
        for (row, sources) in rows.iter_mut().zip(sources.chunks_exact(per_leaf)) {
            *row = self.piece(sources, piece)?.as_chunks::<BLOCK>().0;
            n += 1;
        }
        let first = rows[0];
        rows[n..].fill(first);
        Ok(rows)
    }

    /// Copies the pieces of one chunk of one leaf to their places in `chunk`.
    #[inline]
    pub(super) fn copy(
        &self,
        sources: &[Source<'m>],
        pieces: &[Piece],
        chunk: &mut [u8; CHUNK],
    ) -> Result<(), DigestError> {
        for piece in pieces {
            let from = self.piece(sources, piece)?;
            let to = &mut chunk[piece.to as usize..][..piece.len as usize];
            copy_row(to, from);
        }
        Ok(())
    }
}

/// Copies a row. The common sizes are spelt out so that each is a few vector moves, not a call.
#[inline]
fn copy_row(to: &mut [u8], from: &[u8]) {
    macro_rules! sizes {
        ($($n:literal)*) => {
            match to.len() {
                $($n => {
                    if let (Some(to), Some(from)) = (to.first_chunk_mut::<$n>(), from.first_chunk::<$n>()) {
                        *to = *from;
                    }
                })*
                _ => to.copy_from_slice(from),
            }
        };
    }
    sizes!(64 128 256 512)
}

fn fetch<R: Resident + ?Sized>(mem: &R, offset: u64, len: u64) -> Result<&[u8], DigestError> {
    // Rows of one block: far below the address space of any machine that holds them.
    let bytes = mem.bytes(offset, len as usize);
    Ok(bytes.ok_or(PageError::Unreachable { offset, len })?)
}
