//! KV of one request at one side: hashing ranges of tokens, and the running set digest.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::digest::{Digester, PageDigest, SetDigest, SetHasher};
use crate::engine::adapter::{AdapterError, EngineAdapter, PageDigests, PageRow, View};
use crate::migrate::msg::PageClaim;
use crate::page::{ObjectSetHeader, PageError, PageSpan};

/// Why KV could not be hashed, gathered or landed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum KvError {
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] AdapterError),
    /// A layout does not fit.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Digests could not be combined.
    #[error(transparent)]
    Digest(#[from] crate::digest::DigestError),
    /// A block could not be leased.
    #[error(transparent)]
    Mem(#[from] crate::mem::MemError),
    /// Bytes of the wrong length.
    #[error("the packed slots have {got} bytes, {want} are due")]
    Length {
        /// Bytes given.
        got: usize,
        /// Bytes due.
        want: usize,
    },
}

/// Hashes the pages that overlap `tokens`, each from its first token and up to `tokens.end` at most.
/// A page that ends inside the range is finished from its kept leaf states, so a growing tail costs
/// its new slots only.
pub fn hash_range(
    engine: &dyn EngineAdapter,
    header: &ObjectSetHeader,
    view: View,
    tokens: Range<u64>,
    out: &mut PageDigests,
) -> Result<(), KvError> {
    if tokens.is_empty() {
        return Ok(());
    }
    let per_page = u64::from(header.page_tokens);
    let mut page = tokens.start / per_page;
    if !tokens.start.is_multiple_of(per_page) {
        engine.hash_tail(view, tokens.end.min((page + 1) * per_page), out)?;
        page += 1;
    }
    let full = tokens.end / per_page;
    if page < full {
        for group in &header.groups {
            engine.hash_pages(view, group.group, page_range(page, full)?, tokens.end, out)?;
        }
        page = full;
    }
    if page == full && !tokens.end.is_multiple_of(per_page) {
        engine.hash_tail(view, tokens.end, out)?;
    }
    Ok(())
}

/// Hashes everything again from resident memory, with nothing kept from before.
pub fn hash_all(
    engine: &dyn EngineAdapter,
    header: &ObjectSetHeader,
    view: View,
    kv_len: u64,
    out: &mut PageDigests,
) -> Result<(), KvError> {
    let pages = page_range(0, kv_len.div_ceil(u64::from(header.page_tokens)))?;
    for group in &header.groups {
        engine.hash_pages(view, group.group, pages.clone(), kv_len, out)?;
    }
    Ok(())
}

fn page_range(from: u64, to: u64) -> Result<Range<u32>, KvError> {
    let narrow = |v: u64| u32::try_from(v).map_err(|_| PageError::Overflow);
    Ok(narrow(from)?..narrow(to)?)
}

/// The pages as the protocol's claims of one replica, ascending by page. A model with several KV
/// groups has one claim a page: the hash over its groups' digests in ascending order.
pub fn claims(header: &ObjectSetHeader, pages: &PageDigests) -> Vec<PageClaim> {
    let mut by_page: BTreeMap<u32, (u16, Vec<PageDigest>)> = BTreeMap::new();
    for (row, _) in pages.iter() {
        let slot = by_page
            .entry(row.page)
            .or_insert((row.valid_tokens, Vec::new()));
        slot.0 = slot.0.min(row.valid_tokens);
        slot.1.push(row.digest);
    }
    let claim = |(page, (valid, digests)): (u32, (u16, Vec<PageDigest>))| PageClaim {
        replica: 0,
        page,
        valid,
        digest: joined(header, &digests).0,
    };
    by_page.into_iter().map(claim).collect()
}

fn joined(header: &ObjectSetHeader, digests: &[PageDigest]) -> PageDigest {
    match (digests, header.groups.len()) {
        ([one], 1) => *one,
        (many, _) => {
            let mut hasher = blake3::Hasher::new_derive_key("moonlivekv page over groups v1");
            many.iter().for_each(|d| {
                hasher.update(&d.0);
            });
            PageDigest(*hasher.finalize().as_bytes())
        }
    }
}

/// The running digest of one view's pages: full pages as they are hashed, in any order; the partial
/// last page and the end at the fence.
pub struct SetRun {
    digester: Arc<Digester>,
    hasher: SetHasher,
    /// Every full page's latest digest: a page that came out wrong is fetched and hashed again.
    pages: BTreeMap<(u16, u32), PageDigest>,
}

impl SetRun {
    /// Of no pages.
    pub fn new(digester: Arc<Digester>) -> Result<Self, KvError> {
        let hasher = digester.set_hasher(&[])?;
        Ok(Self {
            digester,
            hasher,
            pages: BTreeMap::new(),
        })
    }

    fn page_tokens(&self) -> u16 {
        self.digester.header().page_tokens
    }

    /// Takes the full pages among those hashed.
    pub fn add(&mut self, pages: &PageDigests) -> Result<(), KvError> {
        let page_tokens = self.page_tokens();
        let mut changed = false;
        for (row, _) in pages.iter().filter(|(r, _)| r.valid_tokens == page_tokens) {
            let before = self.pages.insert((row.group, row.page), row.digest);
            let chained = row.page < self.hasher.next_page(row.group)?;
            changed |= chained && before != Some(row.digest);
        }
        if changed {
            self.hasher = self.digester.set_hasher(&[])?;
        }
        let groups: Vec<u16> = self
            .digester
            .header()
            .groups
            .iter()
            .map(|g| g.group)
            .collect();
        for group in groups {
            loop {
                let page = self.hasher.next_page(group)?;
                let Some(digest) = self.pages.get(&(group, page)) else {
                    break;
                };
                let span = PageSpan {
                    page,
                    from: 0,
                    to: page_tokens,
                };
                self.hasher.push_sealed(group, span, digest)?;
            }
        }
        Ok(())
    }

    /// First token that is not in a full page taken so far, over all groups.
    pub fn covered(&self) -> Result<u64, KvError> {
        let mut least = u32::MAX;
        for group in &self.digester.header().groups {
            least = least.min(self.hasher.next_page(group.group)?);
        }
        Ok(u64::from(least) * u64::from(self.page_tokens()))
    }

    /// The digest over `0..kv_len`; the pages from [`covered`](Self::covered) on must be among
    /// `pages`. The running state can go on afterwards.
    pub fn finish(&mut self, pages: &PageDigests, kv_len: u64) -> Result<SetDigest, KvError> {
        self.add(pages)?;
        let page_tokens = u64::from(self.page_tokens());
        let (page, valid) = (kv_len / page_tokens, kv_len % page_tokens);
        let is_tail = |r: &PageRow| {
            valid > 0 && u64::from(r.page) == page && u64::from(r.valid_tokens) == valid
        };
        let rows = pages.iter().map(|(r, _)| r).filter(|r| is_tail(r));
        // A tail hashed twice in one range stands there twice, equal; the last one counts.
        let tails: BTreeMap<u16, PageDigest> = rows.map(|r| (r.group, r.digest)).collect();
        let tails: Vec<(u16, PageDigest)> = tails.into_iter().collect();
        Ok(self.hasher.finish(kv_len, &tails)?)
    }
}
