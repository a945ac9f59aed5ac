//! Up to sixteen leaves of one shape, hashed together.

use sha2::{Digest as _, Sha256};

use super::gather::{Gather, Pieces, Source};
use super::lanes::{CHUNK, CHUNK_END, LANES, Lanes, ROOT, Stack, Values};
use super::simd::{self, Avx512, BLOCK};
use super::{DigestError, LeafDigest};
use crate::page::{MAX_PAGE_TOKENS, Resident};

/// Most chunks of a leaf: 256 tokens of at most four rows, of at most 64 KiB each.
const MAX_CHUNKS: usize = MAX_PAGE_TOKENS as usize * 4 * 64;

/// Working memory of one thread.
pub(super) struct PerThread {
    lanes: Box<[[u8; CHUNK]; LANES]>,
    stack: Stack,
    values: Vec<simd::Values>,
    pub(super) pieces: Pieces,
    pub(super) failed: Option<DigestError>,
}

impl PerThread {
    pub(super) fn new() -> Self {
        Self {
            lanes: Box::new([[0; CHUNK]; LANES]),
            stack: Stack::new(MAX_CHUNKS),
            values: Vec::with_capacity(MAX_CHUNKS.ilog2() as usize + 1),
            pieces: Pieces::default(),
            failed: None,
        }
    }
}

/// A batch for the kernel that reads rows where they lie.
struct InPlace<'m, 'a, R: ?Sized> {
    gather: &'a Gather<'m, 'a, R>,
    kernel: &'a Avx512,
    sources: &'a [Source<'m>],
    /// The next batch's, or none.
    ahead: &'a [Source<'m>],
    per_leaf: usize,
    pieces: &'a Pieces,
}

/// Where all rows are whole blocks: no copy, and the next rows are asked for while these are hashed.
/// `sources` are this batch's and, if it looks the same, the next one's.
pub(super) fn in_place<'m, R: Resident + ?Sized>(
    gather: &Gather<'m, '_, R>,
    kernel: &Avx512,
    (sources, ahead): (&[Source<'m>], &[Source<'m>]),
    own: &mut PerThread,
    out: &mut [LeafDigest],
) -> Result<(), DigestError> {
    let per_leaf = sources.len() / out.len();
    let pieces = &own.pieces;
    let batch = InPlace {
        gather,
        kernel,
        sources,
        ahead,
        per_leaf,
        pieces,
    };
    let values = batch.hash(&mut own.values)?;
    for (out, digest) in out.iter_mut().zip(values.digests()) {
        out.0 = digest;
    }
    Ok(())
}

impl<'m, R: Resident + ?Sized> InPlace<'m, '_, R> {
    fn hash(&self, stack: &mut Vec<simd::Values>) -> Result<simd::Values, DigestError> {
        let (kernel, pieces) = (self.kernel, self.pieces);
        let chunks = pieces.chunks();
        let mut list = pieces.all().iter();
        let mut next = [&[][..]; LANES];
        if let Some(first) = list.next() {
            next = self.gather.rows(self.sources, self.per_leaf, first)?;
        }
        let mut values = kernel.start();
        let mut words = kernel.load(&next);
        stack.clear();
        for chunk in 0..chunks {
            values = kernel.start();
            let of_chunk = pieces.of_chunk(chunk);
            let mut at = 0;
            for (i, piece) in of_chunk.iter().enumerate() {
                let this = next;
                next = match (list.next(), pieces.all().first()) {
                    (Some(piece), _) => self.gather.rows(self.sources, self.per_leaf, piece)?,
                    (None, Some(first)) => self.gather.rows(self.ahead, self.per_leaf, first)?,
                    (None, None) => [&[]; LANES],
                };
                let end = match (i + 1 == of_chunk.len(), chunks) {
                    (false, _) => 0,
                    (true, 1) => CHUNK_END | ROOT,
                    (true, _) => CHUNK_END,
                };
                kernel.rows(
                    (&mut values, &mut words),
                    &this,
                    &next,
                    (chunk as u32, at),
                    end,
                );
                at += piece.len as usize / BLOCK;
            }
            if chunk + 1 < chunks {
                let mut total = chunk + 1;
                while total & 1 == 0
                    && let Some(left) = stack.pop()
                {
                    kernel.parents(&left, &mut values, false);
                    total >>= 1;
                }
                stack.push(values);
            }
        }
        while let Some(left) = stack.pop() {
            kernel.parents(&left, &mut values, stack.is_empty());
        }
        Ok(values)
    }
}

/// Chunk by chunk across leaves through the blake3 crate, rows copied together where they are not
/// contiguous. Works for every layout and size.
pub(super) fn gathered<R: Resident + ?Sized>(
    gather: &Gather<'_, '_, R>,
    lanes: &Lanes,
    sources: &[Source<'_>],
    own: &mut PerThread,
    out: &mut [LeafDigest],
) -> Result<(), DigestError> {
    let n = out.len();
    let per_leaf = sources.len() / n;
    let PerThread {
        lanes: room,
        stack,
        pieces,
        ..
    } = own;
    let chunks = pieces.chunks();
    let mut values: Values = [0; _];
    stack.clear();
    for chunk in 0..chunks {
        let list = pieces.of_chunk(chunk);
        let len = pieces.bytes_of_chunk(chunk);
        let mut inputs: [&[u8]; LANES] = [&[]; LANES];
        if let [piece] = list {
            // Contiguous in memory: hashed where it lies.
            for (input, sources) in inputs.iter_mut().zip(sources.chunks_exact(per_leaf)) {
                *input = gather.piece(sources, piece)?;
            }
        } else {
            for (lane, sources) in room.iter_mut().zip(sources.chunks_exact(per_leaf)) {
                gather.copy(sources, list, lane)?;
            }
            for (input, lane) in inputs.iter_mut().zip(room.iter()) {
                *input = lane;
            }
        }
        let root = chunks == 1;
        lanes.chunks(&inputs[..n], len, chunk as u64, root, &mut values);
        if chunk + 1 < chunks {
            stack.push(lanes, chunk as u64, &mut values, n);
        }
    }
    stack.finish(lanes, &mut values, n);
    for (out, value) in out.iter_mut().zip(values.as_chunks::<32>().0) {
        out.0 = *value;
    }
    Ok(())
}

/// Leaf after leaf.
pub(super) fn sha256<R: Resident + ?Sized>(
    gather: &Gather<'_, '_, R>,
    start: &Sha256,
    sources: &[Source<'_>],
    pieces: &Pieces,
    out: &mut [LeafDigest],
) -> Result<(), DigestError> {
    let per_leaf = sources.len() / out.len();
    for (out, sources) in out.iter_mut().zip(sources.chunks_exact(per_leaf)) {
        let mut sha = start.clone();
        for piece in pieces.all() {
            sha.update(gather.piece(sources, piece)?);
        }
        out.0 = sha.finalize().into();
    }
    Ok(())
}
