//! Page digests of one request, as its engine hashed them from resident memory.
//!
//! Slots below the watermark do not change while somebody relies on them, so a full page's digest
//! is kept, and the set digest is finished at the fence in constant time.

use crate::digest::{DigestError, Digester, PageDigest, SetDigest, SetHasher};
use crate::page::PageSpan;
use std::ops::Range;
use std::sync::Arc;

/// The one KV group of this engine.
pub(crate) const GROUP: u16 = 0;

/// See the [module](self).
#[derive(Clone)]
pub(crate) struct PageLog {
    digester: Arc<Digester>,
    pages: Vec<Option<PageDigest>>,
    chain: SetHasher,
    tail: Option<(u64, PageDigest)>,
}

/// What must be hashed before a set digest can be given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Full pages from the first unknown one on; empty if all are known.
    pub pages: Range<u32>,
    /// The partial page at the end.
    pub tail: bool,
}

impl PageLog {
    /// Of a request without pages.
    pub(crate) fn new(digester: &Arc<Digester>) -> Result<Self, DigestError> {
        Ok(Self {
            digester: digester.clone(),
            pages: Vec::new(),
            chain: digester.set_hasher(&[])?,
            tail: None,
        })
    }

    fn page_tokens(&self) -> u64 {
        self.digester.header().page_tokens.into()
    }

    /// Notes the digest of the page that ends with (or holds) token `upto - 1`.
    pub(crate) fn record(&mut self, upto: u64, digest: PageDigest) {
        if !upto.is_multiple_of(self.page_tokens()) {
            self.tail = Some((upto, digest));
            return;
        }
        let page = (upto / self.page_tokens()) as usize - 1;
        if self.pages.len() <= page {
            self.pages.resize(page + 1, None);
        }
        let changed = self.pages[page].is_some_and(|d| d != digest);
        self.pages[page] = Some(digest);
        if changed && let Ok(fresh) = self.digester.set_hasher(&[]) {
            self.chain = fresh;
        }
        // Now rather than when the set digest is asked for: that is in a fence.
        if let Err(error) = self.advance() {
            tracing::debug!(%error, "the running digest waits for its end");
        }
    }

    /// Chains the full pages that are known and follow each other.
    fn advance(&mut self) -> Result<(), DigestError> {
        let page_tokens = self.digester.header().page_tokens;
        loop {
            let page = self.chain.next_page(GROUP)?;
            let Some(Some(digest)) = self.pages.get(page as usize) else {
                return Ok(());
            };
            let span = PageSpan {
                page,
                from: 0,
                to: page_tokens,
            };
            self.chain.push_sealed(GROUP, span, digest)?;
        }
    }

    /// The digest of the first `kv_len` tokens.
    pub(crate) fn set_digest(
        &mut self,
        kv_len: u64,
    ) -> Result<Result<SetDigest, Missing>, DigestError> {
        let full = (kv_len / self.page_tokens()) as u32;
        let partial = !kv_len.is_multiple_of(self.page_tokens());
        self.advance()?;
        let next = self.chain.next_page(GROUP)?;
        let tail = self.tail.filter(|(upto, _)| *upto == kv_len);
        if next < full || (partial && tail.is_none()) {
            return Ok(Err(Missing {
                pages: next.min(full)..full,
                tail: partial && tail.is_none(),
            }));
        }
        if next > full {
            // Asked for a point that lies back.
            let mut chain = self.digester.set_hasher(&[])?;
            for (page, digest) in self.pages.iter().flatten().take(full as usize).enumerate() {
                let span = PageSpan {
                    page: page as u32,
                    from: 0,
                    to: self.digester.header().page_tokens,
                };
                chain.push_sealed(GROUP, span, digest)?;
            }
            return self.finish(&chain, kv_len, tail).map(Ok);
        }
        self.finish(&self.chain, kv_len, tail).map(Ok)
    }

    fn finish(
        &self,
        chain: &SetHasher,
        kv_len: u64,
        tail: Option<(u64, PageDigest)>,
    ) -> Result<SetDigest, DigestError> {
        match tail {
            Some((_, digest)) if !kv_len.is_multiple_of(self.page_tokens()) => {
                chain.finish(kv_len, &[(GROUP, digest)])
            }
            _ => chain.finish(kv_len, &[]),
        }
    }
}
