//! Leaf digests of a growing tail page, by the slots that came since: a leaf with one token more
//! begins with the leaf before.

use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::gather::{Gather, Pieces, Shape};
use super::keys::Keyed;
use super::lanes::{CHUNK, LANES, Lanes};
use super::simd::BLOCK;
use super::tail_lanes::{Gathered, InPlace, Leaves};
use super::{DigestError, Digester, LeafDigest, Scheme};
use crate::page::{BlockLayout, PageError, PageSpan, Resident, TokenView};

/// States of all leaves of one page of one shard, extended slot by slot.
///
/// Extending reads only the new slots' rows. Memory: at most about 1.3 KiB per leaf.
pub struct TailHasher {
    digester: Arc<Digester>,
    group: u16,
    leaves: usize,
    span: PageSpan,
    state: State,
    pieces: Pieces,
}

enum State {
    InPlace(InPlace),
    Gathered(Gathered),
    Sha256 { start: Sha256, leaves: Vec<Sha256> },
}

impl TailHasher {
    /// For pages of the group and shard of `layout`. Begins at page 0 with no slot; see
    /// [`reset`](Self::reset).
    ///
    /// Errors for [`Scheme::Sha256Flat`], which has no leaves, and for a layout of another object
    /// set.
    pub fn new(digester: Arc<Digester>, layout: &BlockLayout) -> Result<Self, DigestError> {
        let header = digester.header();
        if header.scheme == Scheme::Sha256Flat {
            return Err(DigestError::NotIncremental(header.scheme));
        }
        let geometry = layout.geometry();
        let leaves = layout.shard().leaves();
        let token_bytes = geometry.leaf_token_bytes() as usize;
        let chunks = (usize::from(header.page_tokens) * token_bytes).div_ceil(CHUNK);
        let state = match &digester.keys_of(geometry)?.leaf {
            Keyed::Blake3(key) => {
                let lanes = Lanes::new(key);
                let whole_blocks = geometry
                    .components()
                    .all(|c| (geometry.row_bytes(c) as usize).is_multiple_of(BLOCK));
                match lanes.in_place().filter(|_| whole_blocks) {
                    Some(kernel) => {
                        State::InPlace(InPlace::new(kernel, leaves.div_ceil(LANES), chunks))
                    }
                    None => State::Gathered(Gathered::new(lanes, leaves, chunks)),
                }
            }
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
            State::InPlace(state) => state.reset(),
            State::Gathered(state) => state.reset(),
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
    /// After [`PageError::Unreachable`] some leaves have taken the slots and others not: call
    /// [`reset`](Self::reset). Every other error leaves the state as it was.
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
        let fill = match &self.state {
            State::InPlace(state) => state.fill(),
            State::Gathered(state) => state.fill(),
            State::Sha256 { .. } => 0,
        };
        let pieces = &mut self.pieces;
        pieces.reset();
        pieces.prepare(layout, Shape::of(layout, &tokens, fill));
        let mut leaves = Leaves::new(Gather { view, mem }, tokens, shard.heads.len());
        let n = self.leaves;
        let batch = |b: usize| b * LANES..n.min(b * LANES + LANES);
        match &mut self.state {
            State::InPlace(state) => {
                for b in 0..n.div_ceil(LANES) {
                    leaves.load(batch(b))?;
                    state.extend(b, &leaves, pieces)?;
                }
                state.advance(pieces);
            }
            State::Gathered(state) => {
                for b in 0..n.div_ceil(LANES) {
                    leaves.load(batch(b))?;
                    state.extend(b, &leaves, pieces)?;
                }
                state.advance(pieces);
            }
            State::Sha256 { leaves: states, .. } => {
                for (i, sha) in states.iter_mut().enumerate() {
                    leaves.load(i..i + 1)?;
                    for piece in pieces.all() {
                        sha.update(leaves.piece(piece)?);
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
            let what = "leaf list";
            return Err(PageError::BufferLen { what, got, want }.into());
        }
        self.digester.check_span(self.span)?;
        match &self.state {
            State::InPlace(state) => state.leaves(out),
            State::Gathered(state) => state.leaves(out),
            State::Sha256 { leaves, .. } => {
                for (out, sha) in out.iter_mut().zip(leaves) {
                    out.0 = sha.clone().finalize().into();
                }
            }
        }
        Ok(())
    }
}
