//! BLAKE3 states of leaves that grow in step: sixteen to a batch, as in [`super::batch`].

use std::ops::Range;

use super::gather::{Gather, Piece, Pieces, Source};
use super::lanes::{CHUNK, CHUNK_END, LANES, Lanes, ROOT, Stack, Values};
use super::simd::{self, Avx512, BLOCK, Row};
use super::{DigestError, LeafDigest};
use crate::page::Resident;

/// The sources of some leaves' new rows.
pub(super) struct Leaves<'m, 'v, R: ?Sized> {
    gather: Gather<'m, 'v, R>,
    tokens: Range<u64>,
    heads: usize,
    loaded: usize,
    sources: Vec<Source<'m>>,
}

impl<'m, 'v, R: Resident + ?Sized> Leaves<'m, 'v, R> {
    pub(super) fn new(gather: Gather<'m, 'v, R>, tokens: Range<u64>, heads: usize) -> Self {
        let sources = Vec::new();
        Self {
            gather,
            tokens,
            heads,
            loaded: 0,
            sources,
        }
    }

    /// Finds the new rows of the leaves `leaves` of the shard.
    pub(super) fn load(&mut self, leaves: Range<usize>) -> Result<(), DigestError> {
        self.sources.clear();
        self.loaded = leaves.len();
        for leaf in leaves {
            let place = (leaf / self.heads, leaf % self.heads);
            self.gather
                .sources(place, &self.tokens, &mut self.sources)?;
        }
        Ok(())
    }

    /// A piece of the one leaf loaded.
    pub(super) fn piece(&self, piece: &Piece) -> Result<&'m [u8], DigestError> {
        self.gather.piece(&self.sources, piece)
    }

    fn rows(&self, piece: &Piece) -> Result<[Row<'m>; LANES], DigestError> {
        let per_leaf = self.sources.len() / self.loaded;
        self.gather.rows(&self.sources, per_leaf, piece)
    }
}

/// Rows of whole blocks, read where they lie.
pub(super) struct InPlace {
    kernel: Avx512,
    batches: Vec<Batch>,
    /// Blocks of the last chunk, the pending one included.
    blocks: usize,
    /// Chunks before it.
    chunks: u32,
}

struct Batch {
    values: simd::Values,
    /// The last block of each leaf, not compressed yet: it may be the leaf's last, which BLAKE3
    /// treats differently.
    pending: [[[u8; BLOCK]; 1]; LANES],
    stack: Vec<simd::Values>,
}

impl InPlace {
    /// For leaves of up to `chunks` chunks.
    pub(super) fn new(kernel: Avx512, batches: usize, chunks: usize) -> Self {
        let batch = || Batch {
            values: kernel.start(),
            pending: [[[0; BLOCK]]; LANES],
            stack: Vec::with_capacity(chunks.max(1).ilog2() as usize + 1),
        };
        Self {
            kernel,
            batches: (0..batches).map(|_| batch()).collect(),
            blocks: 0,
            chunks: 0,
        }
    }

    pub(super) fn reset(&mut self) {
        for batch in &mut self.batches {
            batch.values = self.kernel.start();
            batch.stack.clear();
        }
        self.blocks = 0;
        self.chunks = 0;
    }

    /// Bytes of the last chunk.
    pub(super) fn fill(&self) -> usize {
        self.blocks * BLOCK
    }

    /// Hashes the new pieces of the leaves of batch `b`, which `leaves` has loaded.
    pub(super) fn extend<R: Resident + ?Sized>(
        &mut self,
        b: usize,
        leaves: &Leaves<'_, '_, R>,
        pieces: &Pieces,
    ) -> Result<(), DigestError> {
        let kernel = &self.kernel;
        let Batch {
            values,
            pending,
            stack,
        } = &mut self.batches[b];
        let none = [&[][..]; LANES];
        let (mut at, mut chunk) = (self.blocks, self.chunks);
        for c in 0..pieces.chunks() {
            let list = pieces.of_chunk(c);
            let last_chunk = c + 1 == pieces.chunks();
            if c == 0 && at > 0 {
                // Now it is known whether a block follows the pending one in its chunk.
                let end = if list.is_empty() { CHUNK_END } else { 0 };
                compress_block(kernel, values, pending, (chunk, at - 1), end);
            }
            for (i, piece) in list.iter().enumerate() {
                let mut rows = leaves.rows(piece)?;
                let last_row = i + 1 == list.len();
                if last_row && last_chunk {
                    for (pending, row) in pending.iter_mut().zip(&mut rows) {
                        if let Some((block, before)) = row.split_last() {
                            pending[0] = *block;
                            *row = before;
                        }
                    }
                }
                if !rows[0].is_empty() {
                    let mut words = kernel.load(&rows);
                    let end = if last_row && !last_chunk {
                        CHUNK_END
                    } else {
                        0
                    };
                    kernel.rows((values, &mut words), &rows, &none, (chunk, at), end);
                }
                at += piece.len as usize / BLOCK;
            }
            if !last_chunk {
                let mut total = chunk + 1;
                while total & 1 == 0
                    && let Some(left) = stack.pop()
                {
                    kernel.parents(&left, values, false);
                    total >>= 1;
                }
                stack.push(*values);
                *values = kernel.start();
                at = 0;
                chunk += 1;
            }
        }
        Ok(())
    }

    /// All batches have taken the pieces.
    pub(super) fn advance(&mut self, pieces: &Pieces) {
        let last = pieces.chunks() - 1;
        let new = pieces.bytes_of_chunk(last) / BLOCK;
        self.blocks = if last == 0 { self.blocks + new } else { new };
        self.chunks += last as u32;
    }

    pub(super) fn leaves(&self, out: &mut [LeafDigest]) {
        let root = if self.chunks == 0 { ROOT } else { 0 };
        for (batch, out) in self.batches.iter().zip(out.chunks_mut(LANES)) {
            let mut values = batch.values;
            let at = (self.chunks, self.blocks - 1);
            let end = CHUNK_END | root;
            compress_block(&self.kernel, &mut values, &batch.pending, at, end);
            for (depth, left) in batch.stack.iter().enumerate().rev() {
                self.kernel.parents(left, &mut values, depth == 0);
            }
            for (out, digest) in out.iter_mut().zip(values.digests()) {
                out.0 = digest;
            }
        }
    }
}

fn compress_block(
    kernel: &Avx512,
    values: &mut simd::Values,
    block: &[[[u8; BLOCK]; 1]; LANES],
    at: (u32, usize),
    end: u8,
) {
    let rows: [Row<'_>; LANES] = std::array::from_fn(|lane| &block[lane][..]);
    let mut words = kernel.load(&rows);
    kernel.rows((values, &mut words), &rows, &[&[]; LANES], at, end);
}

/// Rows of any size: the last chunk of each leaf is kept until a byte follows it.
pub(super) struct Gathered {
    lanes: Lanes,
    room: Vec<[u8; CHUNK]>,
    /// One per [`LANES`] leaves.
    stacks: Vec<Stack>,
    fill: usize,
    chunks: u64,
}

impl Gathered {
    /// For leaves of up to `chunks` chunks.
    pub(super) fn new(lanes: Lanes, leaves: usize, chunks: usize) -> Self {
        let batches = leaves.div_ceil(LANES);
        Self {
            lanes,
            room: vec![[0; CHUNK]; leaves],
            stacks: (0..batches).map(|_| Stack::new(chunks)).collect(),
            fill: 0,
            chunks: 0,
        }
    }

    pub(super) fn reset(&mut self) {
        self.stacks.iter_mut().for_each(Stack::clear);
        self.fill = 0;
        self.chunks = 0;
    }

    /// Bytes of the last chunk.
    pub(super) fn fill(&self) -> usize {
        self.fill
    }

    /// Hashes the new pieces of the leaves of batch `b`, which `leaves` has loaded.
    pub(super) fn extend<R: Resident + ?Sized>(
        &mut self,
        b: usize,
        leaves: &Leaves<'_, '_, R>,
        pieces: &Pieces,
    ) -> Result<(), DigestError> {
        let n = leaves.loaded;
        let room = &mut self.room[b * LANES..][..n];
        let per_leaf = leaves.sources.len() / n;
        for c in 0..pieces.chunks() {
            if c > 0 {
                let mut values: Values = [0; _];
                let counter = self.chunks + c as u64 - 1;
                let full = inputs(room);
                self.lanes
                    .chunks(&full[..n], CHUNK, counter, false, &mut values);
                self.stacks[b].push(&self.lanes, counter, &mut values, n);
            }
            let list = pieces.of_chunk(c);
            for (chunk, sources) in room.iter_mut().zip(leaves.sources.chunks_exact(per_leaf)) {
                leaves.gather.copy(sources, list, chunk)?;
            }
        }
        Ok(())
    }

    /// All batches have taken the pieces.
    pub(super) fn advance(&mut self, pieces: &Pieces) {
        let last = pieces.chunks() - 1;
        let new = pieces.bytes_of_chunk(last);
        self.fill = if last == 0 { self.fill + new } else { new };
        self.chunks += last as u64;
    }

    pub(super) fn leaves(&self, out: &mut [LeafDigest]) {
        let batches = self.room.chunks(LANES).zip(&self.stacks);
        for ((room, stack), out) in batches.zip(out.chunks_mut(LANES)) {
            let n = room.len();
            let mut values: Values = [0; _];
            let (inputs, root) = (inputs(room), self.chunks == 0);
            self.lanes
                .chunks(&inputs[..n], self.fill, self.chunks, root, &mut values);
            stack.finish(&self.lanes, &mut values, n);
            for (out, value) in out.iter_mut().zip(values.as_chunks::<32>().0) {
                out.0 = *value;
            }
        }
    }
}

fn inputs(room: &[[u8; CHUNK]]) -> [&[u8]; LANES] {
    let mut inputs: [&[u8]; LANES] = [&[]; LANES];
    for (input, chunk) in inputs.iter_mut().zip(room) {
        *input = chunk;
    }
    inputs
}
