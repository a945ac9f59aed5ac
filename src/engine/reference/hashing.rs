//! Digests of pages in resident memory, through the table that the engine computes with.

use super::kvlog::{GROUP, Missing};
use super::shared::Shared;
use crate::digest::{LeafDigest, PageDigest, Scratch, TailHasher};
use crate::engine::adapter::{AdapterError, LEASE_WAIT, PageDigests, PageRow};
use crate::mem::{BlockId, ReadLease};
use crate::page::{PageSpan, TokenView};
use std::ops::Range;
use std::time::Instant;

/// Pages under one lease: bounds how long a writer of the tail may have to wait.
const PAGES_PER_LEASE: u32 = 64;

impl Shared {
    /// Hashes `pages` of the request whose blocks are `table`, as if it had `upto` tokens, and
    /// appends them to `out`; on an error `out` is as before.
    pub(crate) fn hash_pages_of(
        &self,
        table: &[BlockId],
        pages: Range<u32>,
        upto: u64,
        out: &mut PageDigests,
    ) -> Result<(), AdapterError> {
        let digester = &self.parts.digester;
        let layout = &self.parts.layout;
        let page_tokens = u64::from(digester.header().page_tokens);
        let per_page = layout.shard().leaves();
        let mut scratch = self.scratch.lock().pop().unwrap_or_else(|| Scratch::new(1));
        let mut leaves: Vec<LeafDigest> = Vec::new();
        let mut fresh = PageDigests::new();
        let mut at = pages.start;
        let hashed = loop {
            if at >= pages.end {
                break Ok(());
            }
            let to = pages.end.min(at.saturating_add(PAGES_PER_LEASE));
            let tokens = u64::from(at) * page_tokens..(u64::from(to) * page_tokens).min(upto);
            leaves.clear();
            leaves.resize((to - at) as usize * per_page, LeafDigest::default());
            let batch = self.read_view(table, tokens, |view, mem| {
                digester.hash_leaves(view, mem, at..to, &mut scratch, None, &mut leaves)?;
                for (page, leaves) in (at..to).zip(leaves.chunks_exact(per_page)) {
                    let span = digester.span(view, page)?;
                    let digest = digester.page_digest(GROUP, span, leaves)?;
                    fresh.push(row(page, span, digest), leaves);
                }
                Ok(())
            });
            if let Err(e) = batch {
                break Err(e);
            }
            at = to;
        };
        self.scratch.lock().push(scratch);
        hashed?;
        for (row, leaves) in fresh.iter() {
            out.push(*row, leaves);
        }
        Ok(())
    }

    /// Hashes the page that ends with token `upto - 1`, extending what `tail` has of it.
    pub(crate) fn hash_tail_of(
        &self,
        table: &[BlockId],
        upto: u64,
        tail: &mut Option<Box<TailHasher>>,
        out: &mut PageDigests,
    ) -> Result<PageDigest, AdapterError> {
        let digester = &self.parts.digester;
        let layout = &self.parts.layout;
        let page_tokens = u64::from(digester.header().page_tokens);
        let page = ((upto - 1) / page_tokens) as u32;
        let to = (upto - u64::from(page) * page_tokens) as u16;
        let hasher = match tail {
            Some(hasher) => hasher,
            None => tail.insert(Box::new(TailHasher::new(digester.clone(), layout)?)),
        };
        if hasher.span().page != page || hasher.span().to > to {
            hasher.reset(page, 0);
        }
        let from = hasher.span().to;
        if from < to {
            let first = u64::from(page) * page_tokens;
            let read = self.read_view(table, first + u64::from(from)..upto, |view, mem| {
                Ok(hasher.extend(view, mem, from..to)?)
            });
            if read.is_err() {
                hasher.reset(page, 0);
                return read.map(|()| PageDigest::default());
            }
        }
        let mut leaves = vec![LeafDigest::default(); layout.shard().leaves()];
        hasher.leaves(&mut leaves)?;
        let span = hasher.span();
        let digest = digester.page_digest(GROUP, span, &leaves)?;
        out.push(row(page, span, digest), &leaves);
        Ok(digest)
    }

    /// Hashes what a set digest still lacks; gives `(upto, digest)` of each page.
    pub(crate) fn hash_missing(
        &self,
        table: &[BlockId],
        missing: &Missing,
        kv_len: u64,
    ) -> Result<Vec<(u64, PageDigest)>, AdapterError> {
        let page_tokens = u64::from(self.parts.digester.header().page_tokens);
        let mut out = PageDigests::new();
        self.hash_pages_of(table, missing.pages.clone(), kv_len, &mut out)?;
        if missing.tail {
            let page = (kv_len / page_tokens) as u32;
            self.hash_pages_of(table, page..page + 1, kv_len, &mut out)?;
        }
        Ok(out
            .iter()
            .map(|(row, _)| {
                let upto = u64::from(row.page) * page_tokens + u64::from(row.valid_tokens);
                (upto, row.digest)
            })
            .collect())
    }

    /// Calls `f` with the view and the bytes of `tokens`, under a lease on their blocks.
    fn read_view<R>(
        &self,
        table: &[BlockId],
        tokens: Range<u64>,
        f: impl FnOnce(&TokenView<'_>, &ReadLease) -> Result<R, AdapterError>,
    ) -> Result<R, AdapterError> {
        let layout = &self.parts.layout;
        let first = (tokens.start / u64::from(layout.block_tokens())) as usize;
        let view = TokenView::new(layout, &table[first..], tokens.clone())?;
        let blocks = view.blocks_of(tokens)?;
        let lease = self
            .parts
            .pool
            .read_until(blocks, Instant::now() + LEASE_WAIT)?;
        f(&view, &lease)
    }
}

fn row(page: u32, span: PageSpan, digest: PageDigest) -> PageRow {
    PageRow {
        group: GROUP,
        page,
        first_slot: span.from,
        valid_tokens: span.to - span.from,
        digest,
    }
}
