//! The running set digest: one step per sealed page, a constant number of steps at the fence.

use std::sync::Arc;

use super::{DigestError, Digester, PageDigest, SetDigest};
use crate::page::{KvKind, PageError, PageSpan};

/// Digest over all pages of an object set, bound to its header, the order of pages and their token
/// ranges.
///
/// Each group is a hash chain, `state = H(state, page, slots, page digest)`; the set digest hashes
/// the chains' states and tails. So sealed pages can be pushed as they are verified, a clone costs
/// a few words, and [`finish`](Self::finish) does not depend on the context's length.
#[derive(Clone)]
pub struct SetHasher {
    digester: Arc<Digester>,
    groups: Vec<Chain>,
}

#[derive(Clone)]
struct Chain {
    group: u16,
    retained_from: u64,
    next_page: u32,
    state: [u8; 32],
}

const INIT: u8 = 0;
const PUSH: u8 = 1;
const FINISH: u8 = 2;

impl SetHasher {
    /// See [`Digester::set_hasher`].
    pub(super) fn new(
        digester: Arc<Digester>,
        retained_from: &[(u16, u64)],
    ) -> Result<Self, DigestError> {
        let header = digester.header();
        for &(group, from) in retained_from {
            let kind = header.groups[digester.group_index(group)?].kind;
            if from > 0 && !matches!(kind, KvKind::SlidingWindow { .. }) {
                let why = "only a sliding window forgets tokens";
                return Err(PageError::Geometry(why).into());
            }
        }
        let mut groups = Vec::with_capacity(header.groups.len());
        for g in &header.groups {
            let from = retained_from.iter().find(|(group, _)| *group == g.group);
            let retained_from = from.map_or(0, |(_, from)| *from);
            let page = retained_from / u64::from(header.page_tokens);
            let next_page = u32::try_from(page).map_err(|_| PageError::NoSuchPage { page })?;
            let mut message = vec![INIT];
            message.extend_from_slice(&digester.header_digest());
            message.extend_from_slice(&g.group.to_le_bytes());
            message.extend_from_slice(&retained_from.to_le_bytes());
            let state = digester.set.hash(&message);
            groups.push(Chain {
                group: g.group,
                retained_from,
                next_page,
                state,
            });
        }
        Ok(Self { digester, groups })
    }

    /// Adds the next sealed page of a group.
    ///
    /// [`DigestError::OutOfOrder`] if it is not the next one or not full to its end (the first
    /// retained page of a sliding window may begin later).
    pub fn push_sealed(
        &mut self,
        group: u16,
        span: PageSpan,
        digest: &PageDigest,
    ) -> Result<(), DigestError> {
        let page_tokens = self.digester.header().page_tokens;
        let at = self.digester.group_index(group)?;
        let chain = &mut self.groups[at];
        let (what, want) = ("page", u64::from(chain.next_page));
        if span.page != chain.next_page || span.page == u32::MAX {
            return Err(DigestError::OutOfOrder {
                what,
                got: span.page.into(),
                want,
            });
        }
        let expect = chain.next_span(page_tokens, u64::MAX);
        if expect != Some(span) {
            let got = u64::from(span.valid());
            let want = expect.map_or(0, |e| e.valid().into());
            return Err(DigestError::OutOfOrder {
                what: "slots",
                got,
                want,
            });
        }
        let mut message = [0u8; 1 + 32 + 8 + 32];
        message[0] = PUSH;
        message[1..33].copy_from_slice(&chain.state);
        message[33..41].copy_from_slice(&span_bytes(span));
        message[41..].copy_from_slice(&digest.0);
        chain.state = self.digester.set.hash(&message);
        chain.next_page += 1;
        Ok(())
    }

    /// The page a group's next [`push_sealed`](Self::push_sealed) must name.
    pub fn next_page(&self, group: u16) -> Result<u32, DigestError> {
        Ok(self.groups[self.digester.group_index(group)?].next_page)
    }

    /// The digest of the set with `kv_len` tokens: sealed pages as pushed, plus each group's tail
    /// page if `kv_len` does not end at a page's end. `self` can go on.
    ///
    /// `tails` names each group that has a tail once, in any order.
    /// [`DigestError::TokenCount`] if sealed pages and tails do not add up to `kv_len`.
    pub fn finish(
        &self,
        kv_len: u64,
        tails: &[(u16, PageDigest)],
    ) -> Result<SetDigest, DigestError> {
        let header = self.digester.header();
        let page_tokens = header.page_tokens;
        let mut message = Vec::with_capacity(64 + self.groups.len() * 96);
        message.push(FINISH);
        message.extend_from_slice(&self.digester.header_digest());
        message.extend_from_slice(&kv_len.to_le_bytes());
        for (group, _) in tails {
            self.digester.group_index(*group)?;
        }
        for chain in &self.groups {
            let group = chain.group;
            let span = chain
                .next_span(page_tokens, kv_len)
                .filter(|s| !s.sealed(page_tokens));
            let mut named = tails.iter().filter(|(g, _)| *g == group);
            let tail = named.next();
            if named.next().is_some() || (span.is_none() && tail.is_some()) {
                return Err(DigestError::UnexpectedTail { group });
            }
            let sealed = u64::from(chain.next_page) * u64::from(page_tokens);
            let have = match (span, tail) {
                (Some(span), Some(_)) => span.tokens(page_tokens).end,
                // The first retained page may begin in its middle.
                _ => sealed.max(chain.retained_from),
            };
            if have != kv_len {
                return Err(DigestError::TokenCount {
                    group,
                    have,
                    want: kv_len,
                });
            }
            message.extend_from_slice(&chain.group.to_le_bytes());
            message.extend_from_slice(&chain.retained_from.to_le_bytes());
            message.extend_from_slice(&chain.state);
            match (span, tail) {
                (Some(span), Some((_, digest))) => {
                    message.push(1);
                    message.extend_from_slice(&span_bytes(span));
                    message.extend_from_slice(&digest.0);
                }
                _ => message.push(0),
            }
        }
        Ok(SetDigest(self.digester.set.hash(&message)))
    }
}

impl Chain {
    /// What the next page holds of `0..kv_len`, if anything.
    fn next_span(&self, page_tokens: u16, kv_len: u64) -> Option<PageSpan> {
        PageSpan::of(self.next_page, page_tokens, &(self.retained_from..kv_len))
    }
}

fn span_bytes(span: PageSpan) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&span.page.to_le_bytes());
    out[4..6].copy_from_slice(&span.from.to_le_bytes());
    out[6..].copy_from_slice(&span.to.to_le_bytes());
    out
}
