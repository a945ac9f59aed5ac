//! Hashing of resident pages: leaves on SIMD lanes, ranges of leaves on threads.

use std::ops::Range;

use rayon::ThreadPool;
use sha2::{Digest as _, Sha256};

use super::batch::{PerThread, gathered, in_place, sha256};
use super::gather::{Gather, Pieces, Shape, Source};
use super::keys::Keyed;
use super::lanes::{CHUNK, LANES, Lanes};
use super::simd::Avx512;
use super::{DigestError, Digester, LeafDigest, PageDigest, Scheme};
use crate::page::{PageError, PageSpan, Resident, TokenView};

/// Pages whose leaves are hashed before they are folded into page digests: enough to keep all
/// threads busy, few enough to keep the leaf buffer small.
const PAGES_AT_ONCE: usize = 64;

/// Working memory of the hashing calls, owned by the caller and reused: nothing is allocated per
/// page.
pub struct Scratch {
    threads: Vec<PerThread>,
    leaves: Vec<LeafDigest>,
    buf: Vec<u8>,
}

impl Scratch {
    /// For calls that use up to `threads` threads (at least 1).
    pub fn new(threads: usize) -> Self {
        Self {
            threads: (0..threads.max(1)).map(|_| PerThread::new()).collect(),
            leaves: Vec::new(),
            buf: Vec::new(),
        }
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new(1)
    }
}

/// The pages of one call.
struct Job<'m, 'v, R: ?Sized> {
    gather: Gather<'m, 'v, R>,
    first_page: u32,
    page_tokens: u16,
    leaves: usize,
    heads: usize,
}

/// Up to [`LANES`] leaves of equal shape.
struct Batch {
    at: usize,
    lanes: usize,
    shape: Shape,
}

impl<'m, R: Resident + ?Sized> Job<'m, '_, R> {
    /// The leaves from lane `at` on that fit in one batch; their sources.
    fn batch(
        &self,
        at: usize,
        end: usize,
        sources: &mut Vec<Source<'m>>,
    ) -> Result<Batch, DigestError> {
        sources.clear();
        let layout = self.gather.view.layout();
        let mut page = self.page_of(at);
        let mut tokens = self.tokens(page);
        let shape = Shape::of(layout, &tokens, 0);
        let mut lanes = 0;
        while lanes < LANES && at + lanes < end {
            let here = self.page_of(at + lanes);
            if here != page {
                page = here;
                tokens = self.tokens(page);
                if Shape::of(layout, &tokens, 0) != shape {
                    break;
                }
            }
            self.gather
                .sources(self.leaf_of(at + lanes), &tokens, sources)?;
            lanes += 1;
        }
        Ok(Batch { at, lanes, shape })
    }

    fn page_of(&self, lane: usize) -> u32 {
        // Lanes are pages times leaves of a range of u32 pages.
        self.first_page + (lane / self.leaves) as u32
    }

    fn tokens(&self, page: u32) -> Range<u64> {
        match PageSpan::of(page, self.page_tokens, &self.gather.view.tokens()) {
            Some(span) => span.tokens(self.page_tokens),
            None => 0..0,
        }
    }

    fn leaf_of(&self, lane: usize) -> (usize, usize) {
        let leaf = lane % self.leaves;
        (leaf / self.heads, leaf % self.heads)
    }
}

impl Digester {
    /// Hashes the leaves of `pages`, as they lie in `mem` through `view`, into `out`: page after
    /// page, each with the leaves of the view's shard in canonical order. Which slots of a page are
    /// valid follows from the view's tokens.
    ///
    /// `threads` spreads the work over a pool, at most as wide as `scratch`; without it all is done
    /// on this thread.
    ///
    /// Errors if the view is of another object set, holds no token of some page, or `mem` does not
    /// give access to the rows; for [`Scheme::Sha256Flat`]; if `out` has not one entry per leaf.
    pub fn hash_leaves<R: Resident + Sync + ?Sized>(
        &self,
        view: &TokenView<'_>,
        mem: &R,
        pages: Range<u32>,
        scratch: &mut Scratch,
        threads: Option<&ThreadPool>,
        out: &mut [LeafDigest],
    ) -> Result<(), DigestError> {
        let layout = view.layout();
        let keys = self.keys_of(layout.geometry())?;
        if self.header().scheme == Scheme::Sha256Flat {
            return Err(DigestError::NeedsWholePage(Scheme::Sha256Flat));
        }
        let leaves = layout.shard().leaves();
        let want = pages.len() * leaves;
        if out.len() != want {
            let what = "leaf list";
            return Err(PageError::BufferLen {
                what,
                got: out.len(),
                want,
            }
            .into());
        }
        let page_tokens = self.header().page_tokens;
        self.check_pages(view, &pages)?;
        let job = Job {
            gather: Gather { view, mem },
            first_page: pages.start,
            page_tokens,
            leaves,
            heads: layout.shard().heads.len(),
        };
        let width = threads.map_or(1, |pool| {
            pool.current_num_threads().min(scratch.threads.len())
        });
        let batches = want.div_ceil(LANES);
        let (Some(pool), true) = (threads, width > 1 && batches > 1) else {
            let all = 0..want;
            return hash_lanes(&job, &keys.leaf, all, &mut scratch.threads[0], out);
        };
        let each = batches.div_ceil(width) * LANES;
        let parts = scratch
            .threads
            .iter_mut()
            .zip(out.chunks_mut(each))
            .enumerate();
        pool.scope(|scope| {
            for (i, (own, out)) in parts {
                let job = &job;
                scope.spawn(move |_| {
                    let lanes = i * each..i * each + out.len();
                    own.failed = hash_lanes(job, &keys.leaf, lanes, own, out).err();
                });
            }
        });
        match scratch.threads.iter_mut().find_map(|t| t.failed.take()) {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }

    /// Digests of `pages` as they lie in `mem` through `view`, one entry of `out` per page, in any
    /// scheme. The view must hold the whole model; with tensor or pipeline parallelism use
    /// [`hash_leaves`](Self::hash_leaves) on each rank and a [`LeafTable`](super::LeafTable).
    pub fn hash_pages<R: Resident + Sync + ?Sized>(
        &self,
        view: &TokenView<'_>,
        mem: &R,
        pages: Range<u32>,
        scratch: &mut Scratch,
        threads: Option<&ThreadPool>,
        out: &mut [PageDigest],
    ) -> Result<(), DigestError> {
        let layout = view.layout();
        let geometry = layout.geometry();
        let leaves = geometry.leaves();
        if layout.shard().leaves() != leaves {
            let missing = |&(l, h): &(u32, u32)| {
                let shard = layout.shard();
                shard.layer_index(l).is_none() || shard.head_index(h).is_none()
            };
            let (layer, head) = geometry.whole().iter().find(missing).unwrap_or_default();
            return Err(PageError::MissingLeaf { layer, head }.into());
        }
        if out.len() != pages.len() {
            let (got, want) = (out.len(), pages.len());
            return Err(PageError::BufferLen {
                what: "page digest list",
                got,
                want,
            }
            .into());
        }
        if self.header().scheme == Scheme::Sha256Flat {
            return self.hash_flat(view, mem, pages, scratch, threads, out);
        }
        let mut list = std::mem::take(&mut scratch.leaves);
        let mut buf = std::mem::take(&mut scratch.buf);
        list.resize(
            PAGES_AT_ONCE.min(pages.len()) * leaves,
            LeafDigest::default(),
        );
        let mut from = pages.start;
        let mut result = Ok(());
        for out in out.chunks_mut(PAGES_AT_ONCE) {
            let part = from..from + out.len() as u32;
            from = part.end;
            let list = &mut list[..out.len() * leaves];
            result = self
                .hash_leaves(view, mem, part.clone(), scratch, threads, list)
                .and_then(|()| self.fold(view, part, list, &mut buf, out));
            if result.is_err() {
                break;
            }
        }
        scratch.leaves = list;
        scratch.buf = buf;
        result
    }

    fn fold(
        &self,
        view: &TokenView<'_>,
        pages: Range<u32>,
        leaves: &[LeafDigest],
        buf: &mut Vec<u8>,
        out: &mut [PageDigest],
    ) -> Result<(), DigestError> {
        let geometry = view.layout().geometry();
        for ((page, leaves), out) in pages.zip(leaves.chunks_exact(geometry.leaves())).zip(out) {
            let span = self.span(view, page)?;
            *out = self.page_digest_with(geometry.group, span, leaves, buf)?;
        }
        Ok(())
    }

    /// The valid slots of a page of this object set in a view.
    pub fn span(&self, view: &TokenView<'_>, page: u32) -> Result<PageSpan, DigestError> {
        let span = PageSpan::of(page, self.header().page_tokens, &view.tokens());
        Ok(span.ok_or(PageError::NoSuchPage { page: page.into() })?)
    }

    /// That every page of a range has tokens. Tokens are contiguous, so its ends decide.
    fn check_pages(&self, view: &TokenView<'_>, pages: &Range<u32>) -> Result<(), DigestError> {
        if let Some(last) = pages.end.checked_sub(1)
            && !pages.is_empty()
        {
            self.span(view, pages.start)?;
            self.span(view, last)?;
        }
        Ok(())
    }

    fn hash_flat<R: Resident + Sync + ?Sized>(
        &self,
        view: &TokenView<'_>,
        mem: &R,
        pages: Range<u32>,
        scratch: &mut Scratch,
        threads: Option<&ThreadPool>,
        out: &mut [PageDigest],
    ) -> Result<(), DigestError> {
        self.keys_of(view.layout().geometry())?;
        self.check_pages(view, &pages)?;
        let width = threads.map_or(1, |pool| {
            pool.current_num_threads().min(scratch.threads.len())
        });
        let flat = |pages: Range<u32>, own: &mut PerThread, out: &mut [PageDigest]| {
            let gather = Gather { view, mem };
            own.pieces.reset();
            let mut sources = Vec::new();
            for (page, out) in pages.zip(out) {
                *out = self.flat_page(&gather, page, &mut own.pieces, &mut sources)?;
            }
            Ok(())
        };
        let (Some(pool), true) = (threads, width > 1 && pages.len() > 1) else {
            return flat(pages, &mut scratch.threads[0], out);
        };
        let each = pages.len().div_ceil(width);
        let parts = scratch
            .threads
            .iter_mut()
            .zip(out.chunks_mut(each))
            .enumerate();
        pool.scope(|scope| {
            for (i, (own, out)) in parts {
                let flat = &flat;
                let from = pages.start + (i * each) as u32;
                scope.spawn(move |_| {
                    own.failed = flat(from..from + out.len() as u32, own, out).err();
                });
            }
        });
        match scratch.threads.iter_mut().find_map(|t| t.failed.take()) {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }

    /// SHA-256 of the packed page, slots that are not valid as zeros.
    fn flat_page<'m, R: Resident + ?Sized>(
        &self,
        gather: &Gather<'m, '_, R>,
        page: u32,
        pieces: &mut Pieces,
        sources: &mut Vec<Source<'m>>,
    ) -> Result<PageDigest, DigestError> {
        let layout = gather.view.layout();
        let span = self.span(gather.view, page)?;
        let tokens = span.tokens(self.header().page_tokens);
        pieces.prepare(layout, Shape::of(layout, &tokens, 0));
        let token_bytes = layout.geometry().leaf_token_bytes() as usize;
        let before = usize::from(span.from) * token_bytes;
        let after = usize::from(self.header().page_tokens - span.to) * token_bytes;
        let mut sha = Sha256::new();
        let shard = layout.shard();
        for layer in 0..shard.layers.len() {
            for head in 0..shard.heads.len() {
                sources.clear();
                gather.sources((layer, head), &tokens, sources)?;
                zeros(&mut sha, before);
                for piece in pieces.all() {
                    sha.update(gather.piece(sources, piece)?);
                }
                zeros(&mut sha, after);
            }
        }
        Ok(PageDigest(sha.finalize().into()))
    }
}

fn zeros(sha: &mut Sha256, mut n: usize) {
    const ZEROS: [u8; CHUNK] = [0; CHUNK];
    while n > 0 {
        let len = n.min(CHUNK);
        sha.update(&ZEROS[..len]);
        n -= len;
    }
}

enum Kernel<'k> {
    Blake3(Lanes, Option<Avx512>),
    Sha256(&'k Sha256),
}

/// Hashes a range of the flat list of (page, leaf) pairs: lanes run on across page ends, so that
/// shards with few leaves fill them too.
fn hash_lanes<R: Resident + ?Sized>(
    job: &Job<'_, '_, R>,
    key: &Keyed,
    range: Range<usize>,
    own: &mut PerThread,
    out: &mut [LeafDigest],
) -> Result<(), DigestError> {
    let layout = job.gather.view.layout();
    let kernel = match key {
        Keyed::Blake3(key) => {
            let lanes = Lanes::new(key);
            Kernel::Blake3(lanes, lanes.in_place())
        }
        Keyed::Sha256(start) => Kernel::Sha256(start),
    };
    own.pieces.reset();
    // One batch ahead, so that its first rows can be asked for while this one is hashed.
    let (mut sources, mut ahead) = (Vec::new(), Vec::new());
    let mut batch = job.batch(range.start, range.end, &mut sources)?;
    while batch.lanes > 0 {
        let end = batch.at + batch.lanes;
        let next = job.batch(end, range.end, &mut ahead)?;
        own.pieces.prepare(layout, batch.shape);
        let out = &mut out[batch.at - range.start..][..batch.lanes];
        match &kernel {
            Kernel::Blake3(_, Some(kernel)) if own.pieces.whole_blocks => {
                let ahead = if next.shape == batch.shape {
                    &ahead[..]
                } else {
                    &[]
                };
                in_place(&job.gather, kernel, (&sources, ahead), own, out)?;
            }
            Kernel::Blake3(lanes, _) => gathered(&job.gather, lanes, &sources, own, out)?,
            Kernel::Sha256(start) => sha256(&job.gather, start, &sources, &own.pieces, out)?,
        }
        std::mem::swap(&mut sources, &mut ahead);
        batch = next;
    }
    Ok(())
}
