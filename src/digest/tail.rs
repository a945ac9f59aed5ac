//! Leaf digests of a growing tail page, by the slots that came since: a leaf with one token more
//! begins with the leaf before.

use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::gather::{Gather, Pieces, Shape};
use super::keys::Keyed;
use super::lanes::{CHUNK, LANES, Lanes, Stack, Values};
use super::{DigestError, Digester, LeafDigest};
use crate::page::{BlockLayout, PageError, PageSpan, Resident, TokenView};

/// States of all leaves of one page of one shard, extended slot by slot.
///
/// Keeps the last, unfinished KiB of each leaf, so that extending reads only the new slots' rows.
/// Memory: about 1.3 KiB per leaf.
pub struct TailHasher {
    digester: Arc<Digester>,
    group: u16,
    leaves: usize,
    span: PageSpan,
    state: State,
    pieces: Pieces,
}

enum State {
    Blake3 {
        lanes: Lanes,
        /// The last chunk of each leaf, at least one byte of it once a token is in.
        room: Vec<[u8; CHUNK]>,
        /// One per [`LANES`] leaves.
        stacks: Vec<Stack>,
        fill: usize,
        chunks: u64,
    },
    Sha256 {
        start: Sha256,
        leaves: Vec<Sha256>,
    },
}

impl TailHasher {
    /// For pages of the group and shard of `layout`. Begins at page 0 with no slot; see
    /// [`reset`](Self::reset).
    ///
    /// Errors for [`Scheme::Sha256Flat`](super::Scheme::Sha256Flat), which has no leaves, and for
    /// a layout of another object set.
    pub fn new(digester: Arc<Digester>, layout: &BlockLayout) -> Result<Self, DigestError> {
        let scheme = digester.header().scheme;
        if scheme == super::Scheme::Sha256Flat {
            return Err(DigestError::NotIncremental(scheme));
        }
        let leaves = layout.shard().leaves();
        let geometry = layout.geometry();
        let page_bytes =
            usize::from(digester.header().page_tokens) * geometry.leaf_token_bytes() as usize;
        let state = match &digester.keys_of(geometry)?.leaf {
            Keyed::Blake3(key) => State::Blake3 {
                lanes: Lanes::new(key),
                room: vec![[0; CHUNK]; leaves],
                stacks: (0..leaves.div_ceil(LANES))
                    .map(|_| Stack::new(page_bytes.div_ceil(CHUNK)))
                    .collect(),
                fill: 0,
                chunks: 0,
            },
            Keyed::Sha256(start) => State::Sha256 {
                start: start.clone(),
                leaves: vec![start.clone(); leaves],
            },
        };
        Ok(Self {
            group: geometry.group,
            leaves,
            span: PageSpan {
                page: 0,
                from: 0,
                to: 0,
            },
            state,
            pieces: Pieces::default(),
            digester,
        })
    }

    /// Starts over at page `page`, whose first valid slot is `from` (0 but for the first retained
    /// page of a sliding window).
    pub fn reset(&mut self, page: u32, from: u16) {
        self.span = PageSpan {
            page,
            from,
            to: from,
        };
        match &mut self.state {
            State::Blake3 {
                stacks,
                fill,
                chunks,
                ..
            } => {
                stacks.iter_mut().for_each(Stack::clear);
                *fill = 0;
                *chunks = 0;
            }
            State::Sha256 { start, leaves } => leaves.fill(start.clone()),
        }
    }

    /// The page and the slots hashed so far.
    pub fn span(&self) -> PageSpan {
        self.span
    }

    /// Hashes the slots `slots` of the page, which must follow those hashed so far. `view` must
    /// cover their tokens, and `mem` give access to their rows; no other byte is read.
    ///
    /// After an error the state is undefined until [`reset`](Self::reset).
    pub fn extend<R: Resident + ?Sized>(
        &mut self,
        view: &TokenView<'_>,
        mem: &R,
        slots: Range<u16>,
    ) -> Result<(), DigestError> {
        let layout = view.layout();
        self.digester.keys_of(layout.geometry())?;
        let shard = layout.shard();
        if layout.geometry().group != self.group || shard.leaves() != self.leaves {
            return Err(PageError::GeometryMismatch.into());
        }
        let page_tokens = self.digester.header().page_tokens;
        if slots.start != self.span.to {
            let (got, want) = (slots.start.into(), self.span.to.into());
            return Err(DigestError::OutOfOrder {
                what: "slot",
                got,
                want,
            });
        }
        if slots.is_empty() {
            return Ok(());
        }
        if slots.end > page_tokens {
            return Err(PageError::NoSuchPage {
                page: self.span.page.into(),
            }
            .into());
        }
        let new = PageSpan {
            page: self.span.page,
            from: slots.start,
            to: slots.end,
        };
        let tokens = new.tokens(page_tokens);
        view.check(&tokens)?;
        let gather = Gather { view, mem };
        self.pieces.reset();
        let heads = shard.heads.len();
        let leaf = |i: usize| (i / heads, i % heads);
        let mut sources = Vec::new();
        match &mut self.state {
            State::Blake3 {
                lanes,
                room,
                stacks,
                fill,
                chunks,
            } => {
                // A full chunk is kept until a byte follows it: until then it may be the leaf's
                // last, which BLAKE3 hashes differently.
                self.pieces
                    .prepare(layout, Shape::of(layout, &tokens, *fill));
                let n = self.pieces.chunks();
                let mut last = 0;
                for (b, (room, stack)) in room.chunks_mut(LANES).zip(stacks).enumerate() {
                    sources.clear();
                    for i in 0..room.len() {
                        gather.sources(leaf(b * LANES + i), &tokens, &mut sources)?;
                    }
                    let per_leaf = sources.len() / room.len();
                    for c in 0..n {
                        let list = self.pieces.of_chunk(c);
                        if c > 0 {
                            push_full(lanes, room, stack, *chunks + c as u64 - 1);
                        }
                        for (chunk, sources) in room.iter_mut().zip(sources.chunks_exact(per_leaf))
                        {
                            gather.copy(sources, list, chunk)?;
                        }
                    }
                }
                for piece in self.pieces.of_chunk(n - 1) {
                    last += piece.len as usize;
                }
                *fill = if n == 1 { *fill + last } else { last };
                *chunks += n as u64 - 1;
            }
            State::Sha256 { leaves, .. } => {
                self.pieces.prepare(layout, Shape::of(layout, &tokens, 0));
                for (i, sha) in leaves.iter_mut().enumerate() {
                    sources.clear();
                    gather.sources(leaf(i), &tokens, &mut sources)?;
                    for piece in self.pieces.all() {
                        sha.update(gather.piece(&sources, piece)?);
                    }
                }
            }
        }
        self.span.to = slots.end;
        Ok(())
    }

    /// The digests of all leaves as they stand, in the canonical order of the shard; the state can
    /// be extended further. Errors if no slot is hashed yet or `out` has not one entry per leaf.
    pub fn leaves(&self, out: &mut [LeafDigest]) -> Result<(), DigestError> {
        if out.len() != self.leaves {
            let (got, want) = (out.len(), self.leaves);
            return Err(PageError::BufferLen {
                what: "leaf list",
                got,
                want,
            }
            .into());
        }
        self.digester.check_span(self.span)?;
        match &self.state {
            State::Blake3 {
                lanes,
                room,
                stacks,
                fill,
                chunks,
            } => {
                let batches = room.chunks(LANES).zip(stacks).zip(out.chunks_mut(LANES));
                for ((room, stack), out) in batches {
                    let n = room.len();
                    let mut inputs: [&[u8]; LANES] = [&[]; LANES];
                    for (input, chunk) in inputs.iter_mut().zip(room) {
                        *input = chunk;
                    }
                    let mut values: Values = [0; _];
                    lanes.chunks(&inputs[..n], *fill, *chunks, *chunks == 0, &mut values);
                    stack.finish(lanes, &mut values, n);
                    for (out, value) in out.iter_mut().zip(values.as_chunks::<32>().0) {
                        out.0 = *value;
                    }
                }
            }
            State::Sha256 { leaves, .. } => {
                for (out, sha) in out.iter_mut().zip(leaves) {
                    out.0 = sha.clone().finalize().into();
                }
            }
        }
        Ok(())
    }
}

/// Takes the full last chunk of some leaves into their stack.
fn push_full(lanes: &Lanes, room: &[[u8; CHUNK]], stack: &mut Stack, counter: u64) {
    let n = room.len();
    let mut inputs: [&[u8]; LANES] = [&[]; LANES];
    for (input, chunk) in inputs.iter_mut().zip(room) {
        *input = chunk;
    }
    let mut values: Values = [0; _];
    lanes.chunks(&inputs[..n], CHUNK, counter, false, &mut values);
    stack.push(lanes, counter, &mut values, n);
}
