//! Keys: every digest is bound to its domain, scheme and geometry by the key it is hashed under.
//! Keying costs nothing; a prefix would, as it shifts every chunk.

use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::{DigestError, LeafDigest, PageDigest, Scheme, SetHasher};
use crate::page::{GroupGeometry, ObjectSetHeader, PageError, PageSpan, Shard, encode_geometry};

const LEAF: &str = "MoonLiveKV v1 leaf";
const PAGE: &str = "MoonLiveKV v1 page";
const SET: &str = "MoonLiveKV v1 set";
const HEADER: &str = "MoonLiveKV v1 header";

/// A hash function under a key: keyed BLAKE3, or SHA-256 over a first block that holds the key (so
/// the key costs one cached compression).
#[derive(Clone)]
pub(super) enum Keyed {
    Blake3([u8; 32]),
    Sha256(Sha256),
}

impl Keyed {
    fn derive(scheme: Scheme, domain: &str, material: &[u8]) -> Self {
        match scheme {
            Scheme::Blake3Leaves => Self::Blake3(blake3::derive_key(domain, material)),
            Scheme::Sha256Leaves | Scheme::Sha256Flat => {
                let key = Sha256::new()
                    .chain_update(domain)
                    .chain_update([0])
                    .chain_update(material)
                    .finalize();
                Self::Sha256(Sha256::new().chain_update(key).chain_update([0; 32]))
            }
        }
    }

    pub(super) fn hash(&self, message: &[u8]) -> [u8; 32] {
        match self {
            Self::Blake3(key) => blake3::keyed_hash(key, message).into(),
            Self::Sha256(start) => start.clone().chain_update(message).finalize().into(),
        }
    }
}

pub(super) struct GroupKeys {
    pub(super) leaf: Keyed,
    page: Keyed,
}

/// Hashes the pages of one object set. Made once per header; immutable, shared by threads.
pub struct Digester {
    header: ObjectSetHeader,
    header_digest: [u8; 32],
    groups: Vec<GroupKeys>,
    pub(super) set: Keyed,
}

impl Digester {
    /// Derives all keys of a header. Errors if the header is invalid.
    pub fn new(header: ObjectSetHeader) -> Result<Self, DigestError> {
        header.validate()?;
        let scheme = header.scheme;
        let encoded = header.encode();
        let header_digest = Keyed::derive(scheme, HEADER, &[]).hash(&encoded);
        let groups = header
            .groups
            .iter()
            .map(|g| {
                let mut material = vec![scheme.tag()];
                material.extend_from_slice(&header.page_tokens.to_le_bytes());
                encode_geometry(g, &mut material);
                GroupKeys {
                    leaf: Keyed::derive(scheme, LEAF, &material),
                    page: Keyed::derive(scheme, PAGE, &material),
                }
            })
            .collect();
        let set = Keyed::derive(scheme, SET, &[scheme.tag()]);
        Ok(Self {
            header,
            header_digest,
            groups,
            set,
        })
    }

    /// The header the keys come from.
    pub fn header(&self) -> &ObjectSetHeader {
        &self.header
    }

    /// Digest of the header's encoding; bound into every set digest.
    pub fn header_digest(&self) -> [u8; 32] {
        self.header_digest
    }

    /// A running set digest without pages yet. `retained_from` gives `(group, first token)` for
    /// sliding-window groups that have forgotten their first tokens (while pinned they forget no
    /// more); groups not named retain all.
    ///
    /// Errors if a group does not exist or is no sliding window.
    pub fn set_hasher(
        self: &Arc<Self>,
        retained_from: &[(u16, u64)],
    ) -> Result<SetHasher, DigestError> {
        SetHasher::new(self.clone(), retained_from)
    }

    pub(super) fn group_index(&self, group: u16) -> Result<usize, DigestError> {
        let at = self.header.groups.iter().position(|g| g.group == group);
        Ok(at.ok_or(PageError::NoSuchGroup { group })?)
    }

    /// The keys for a layout's group, after checking that the layout is of this object set.
    pub(super) fn keys_of(&self, geometry: &GroupGeometry) -> Result<&GroupKeys, DigestError> {
        let at = self.group_index(geometry.group)?;
        if self.header.groups[at] != *geometry {
            return Err(PageError::GeometryMismatch.into());
        }
        Ok(&self.groups[at])
    }

    /// Digest of a page from *all* its leaves in canonical order (layers ascending, then heads):
    /// geometry, valid slots and content, not its page number.
    ///
    /// Errors for [`Scheme::Sha256Flat`], whose page digest does not come from leaves, for a wrong
    /// number of leaves and for slots outside the page.
    pub fn page_digest(
        &self,
        group: u16,
        span: PageSpan,
        leaves: &[LeafDigest],
    ) -> Result<PageDigest, DigestError> {
        self.page_digest_with(group, span, leaves, &mut Vec::new())
    }

    /// As [`page_digest`](Self::page_digest); `buf` is reused between pages.
    pub(super) fn page_digest_with(
        &self,
        group: u16,
        span: PageSpan,
        leaves: &[LeafDigest],
        buf: &mut Vec<u8>,
    ) -> Result<PageDigest, DigestError> {
        let at = self.group_index(group)?;
        let scheme = self.header.scheme;
        if scheme == Scheme::Sha256Flat {
            return Err(DigestError::NeedsWholePage(scheme));
        }
        let want = self.header.groups[at].leaves();
        if leaves.len() != want {
            let what = "leaf list";
            return Err(PageError::BufferLen {
                what,
                got: leaves.len(),
                want,
            }
            .into());
        }
        self.check_span(span)?;
        buf.clear();
        buf.extend_from_slice(&span.from.to_le_bytes());
        buf.extend_from_slice(&span.to.to_le_bytes());
        for leaf in leaves {
            buf.extend_from_slice(&leaf.0);
        }
        Ok(PageDigest(self.groups[at].page.hash(buf)))
    }

    pub(super) fn check_span(&self, span: PageSpan) -> Result<(), DigestError> {
        if span.from >= span.to || span.to > self.header.page_tokens {
            return Err(PageError::NoSuchPage {
                page: span.page.into(),
            }
            .into());
        }
        Ok(())
    }
}

/// Collects the leaves that tensor- and pipeline-parallel ranks hashed into the list of a whole
/// page. Reused from page to page.
///
/// Every replica of a replicated head must be added and agree with the others.
pub struct LeafTable {
    whole: Shard,
    leaves: Vec<LeafDigest>,
    have: Vec<bool>,
}

impl LeafTable {
    /// An empty table for pages of `geometry`.
    pub fn new(geometry: &GroupGeometry) -> Self {
        let n = geometry.leaves();
        Self {
            whole: geometry.whole(),
            leaves: vec![LeafDigest::default(); n],
            have: vec![false; n],
        }
    }

    /// Forgets all leaves: the next page begins.
    pub fn clear(&mut self) {
        self.have.fill(false);
    }

    /// Adds one rank's leaves of this page, in the canonical order of its shard.
    ///
    /// [`DigestError::ReplicaMismatch`] if another rank gave another digest for the same leaf.
    pub fn add(&mut self, shard: &Shard, leaves: &[LeafDigest]) -> Result<(), DigestError> {
        if leaves.len() != shard.leaves() {
            let (got, want) = (leaves.len(), shard.leaves());
            return Err(PageError::BufferLen {
                what: "leaf list",
                got,
                want,
            }
            .into());
        }
        for ((layer, head), leaf) in shard.iter().zip(leaves) {
            let l = self.whole.layer_index(layer);
            let l = l.ok_or(PageError::NotInGeometry {
                what: "layer",
                id: layer,
            })?;
            let h = self.whole.head_index(head);
            let h = h.ok_or(PageError::NotInGeometry {
                what: "head",
                id: head,
            })?;
            let at = l * self.whole.heads.len() + h;
            if self.have[at] && self.leaves[at] != *leaf {
                return Err(DigestError::ReplicaMismatch { layer, head });
            }
            self.leaves[at] = *leaf;
            self.have[at] = true;
        }
        Ok(())
    }

    /// All leaves of the page; [`PageError::MissingLeaf`] names the first that no rank gave.
    pub fn complete(&self) -> Result<&[LeafDigest], DigestError> {
        match self.have.iter().position(|have| !have) {
            None => Ok(&self.leaves),
            Some(at) => {
                let n = self.whole.heads.len();
                let (layer, head) = (self.whole.layers[at / n], self.whole.heads[at % n]);
                Err(PageError::MissingLeaf { layer, head }.into())
            }
        }
    }
}
