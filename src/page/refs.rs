//! References to pages: what a store, a manifest or another worker keeps of one, and the set of all
//! pages of a request.

use super::Unsupported;
use super::codec::Reader;
use super::{Dtype, GroupGeometry, KvKind, ObjectSetHeader, PageError, PageSpan, Scheme, Shard};
use crate::id::RequestId;

/// Longest store key, in bytes.
pub const MAX_STORE_KEY: usize = 256;
/// Most pages of one object set.
pub const MAX_PAGES: usize = 1 << 22;
/// Most tensor-parallel ranks.
pub const MAX_TP: u16 = 1024;

const MAGIC: [u8; 4] = *b"MLKS";
const VERSION: u8 = 1;

/// Which part of a group's layers and heads an object holds: a tensor-parallel rank and a
/// consecutive part of the group's layers (a pipeline stage).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Part {
    /// Tensor-parallel rank.
    pub tp_rank: u16,
    /// Tensor-parallel size, 1 if not split.
    pub tp_size: u16,
    /// Position in the group's layer list of the first layer held.
    pub first_layer: u32,
    /// Layers held.
    pub layers: u32,
}

impl Part {
    /// All layers and heads.
    pub fn whole(geometry: &GroupGeometry) -> Self {
        Self::rank(geometry, 0, 1)
    }

    /// All layers of one tensor-parallel rank.
    pub fn rank(geometry: &GroupGeometry, tp_rank: u16, tp_size: u16) -> Self {
        // At most MAX_LAYERS.
        let layers = geometry.layers.len() as u32;
        Self {
            tp_rank,
            tp_size,
            first_layer: 0,
            layers,
        }
    }

    /// The global layer and head ids. Errors if they are not in the geometry.
    pub fn shard(&self, geometry: &GroupGeometry) -> Result<Shard, PageError> {
        if self.tp_size > MAX_TP {
            let (got, max) = (self.tp_size.into(), MAX_TP.into());
            return Err(PageError::TooLarge {
                what: "tensor-parallel size",
                got,
                max,
            });
        }
        let heads =
            Shard::tensor_parallel(geometry, self.tp_rank.into(), self.tp_size.into())?.heads;
        if self.layers == 0 {
            return Err(PageError::Zero {
                what: "layers of a part",
            });
        }
        let from = self.first_layer as usize;
        let layers = geometry
            .layers
            .get(from..from.saturating_add(self.layers as usize))
            .ok_or(PageError::NotInGeometry {
                what: "layer",
                id: self.first_layer,
            })?
            .to_vec();
        Ok(Shard { layers, heads })
    }
}

/// One stored page: K and V of all layers and heads of its part, for its tokens, packed.
///
/// Made by [`PageRef::new`], so that what follows from the geometry cannot contradict it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PageRef {
    /// KV group.
    pub group: u16,
    /// Page index and valid slots.
    pub span: PageSpan,
    /// Part of the model it holds.
    pub part: Part,
    /// Element type.
    pub dtype: Dtype,
    /// KV heads held.
    pub kv_heads: u32,
    /// Elements of one K row of one head (bytes for opaque blocks).
    pub head_dim: u32,
    /// `[layers, heads, tokens of a page, bytes of a token]`.
    pub shape: [u32; 4],
    /// Bytes from one entry of each dimension of `shape` to the next, packed.
    pub strides: [u64; 4],
    /// Bytes of the packed page, unused slots included (as zeros).
    pub byte_len: u64,
    /// Key of the object in a store, if it is in one.
    pub store_key: Option<String>,
    /// Generation of the page's memory: a reused page is another one.
    pub generation: u64,
    /// First 128 bits of the page digest; the only place where it is truncated.
    pub digest: [u8; 16],
    /// Scheme of the digest.
    pub scheme: Scheme,
}

impl PageRef {
    /// A reference to the page `span` of `group`.
    ///
    /// Errors if the group, part or slots are not of this object set, or the key is empty or longer
    /// than [`MAX_STORE_KEY`].
    pub fn new(
        header: &ObjectSetHeader,
        group: u16,
        span: PageSpan,
        part: Part,
        generation: u64,
        digest: [u8; 16],
        store_key: Option<String>,
    ) -> Result<Self, PageError> {
        let geometry = header.group(group)?;
        let shard = part.shard(geometry)?;
        if span.from >= span.to || span.to > header.page_tokens {
            return Err(PageError::NoSuchPage {
                page: span.page.into(),
            });
        }
        if span.from > 0 && !matches!(geometry.kind, KvKind::SlidingWindow { .. }) {
            return Err(PageError::Geometry("only a sliding window forgets tokens"));
        }
        match &store_key {
            Some(key) if key.is_empty() => return Err(PageError::Zero { what: "store key" }),
            Some(key) if key.len() > MAX_STORE_KEY => {
                let (got, max) = (key.len() as u64, MAX_STORE_KEY as u64);
                return Err(PageError::TooLarge {
                    what: "store key",
                    got,
                    max,
                });
            }
            _ => {}
        }
        let token = geometry.leaf_token_bytes();
        let shape = [
            shard.layers.len() as u32,
            shard.heads.len() as u32,
            header.page_tokens.into(),
            token,
        ];
        // Every factor is bounded: 2^10 layers, 2^10 heads, 2^8 tokens, 2^18 bytes.
        let leaf = u64::from(token) * u64::from(header.page_tokens);
        let layer = leaf * shard.heads.len() as u64;
        Ok(Self {
            group,
            span,
            part,
            dtype: geometry.dtype,
            kv_heads: shape[1],
            head_dim: geometry.k_bytes / geometry.dtype.element_bytes().unwrap_or(1),
            shape,
            strides: [layer, leaf, token.into(), 1],
            byte_len: layer * u64::from(shape[0]),
            store_key,
            generation,
            digest,
            scheme: header.scheme,
        })
    }

    /// Valid tokens.
    pub fn valid_tokens(&self) -> u16 {
        self.span.valid()
    }
}

/// All pages of one request at one length: every group, every part, every page that is retained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvObjectSet {
    /// Whose KV it is.
    pub request: RequestId,
    /// What its bytes mean.
    pub header: ObjectSetHeader,
    /// Tokens that have KV.
    pub kv_len: u64,
    /// First token retained by each group of the header, in its order.
    pub retained_from: Vec<u64>,
    /// Ascending by group, part and page.
    pub pages: Vec<PageRef>,
}

impl KvObjectSet {
    /// Checks that the pages are those of this header and length: for each group the parts cover
    /// every leaf, and each part has exactly the pages that its retained tokens fill.
    pub fn validate(&self) -> Result<(), PageError> {
        self.header.validate()?;
        if self.retained_from.len() != self.header.groups.len() {
            let (got, want) = (self.retained_from.len(), self.header.groups.len());
            return Err(PageError::BufferLen {
                what: "retained_from",
                got,
                want,
            });
        }
        let mut rest = &self.pages[..];
        for (geometry, &from) in self.header.groups.iter().zip(&self.retained_from) {
            if from > self.kv_len {
                let (got, max) = (from, self.kv_len);
                return Err(PageError::TooLarge {
                    what: "retained_from",
                    got,
                    max,
                });
            }
            if from > 0 && !matches!(geometry.kind, KvKind::SlidingWindow { .. }) {
                return Err(PageError::Geometry("only a sliding window forgets tokens"));
            }
            rest = self.validate_group(geometry, from, rest)?;
        }
        match rest.first() {
            None => Ok(()),
            Some(page) => Err(PageError::NoSuchPage {
                page: page.span.page.into(),
            }),
        }
    }

    /// Checks one group's pages at the start of `rest`; returns what follows them.
    fn validate_group<'a>(
        &self,
        geometry: &GroupGeometry,
        from: u64,
        rest: &'a [PageRef],
    ) -> Result<&'a [PageRef], PageError> {
        let n = rest
            .iter()
            .take_while(|p| p.group == geometry.group)
            .count();
        let (mut mine, rest) = rest.split_at(n);
        let page_tokens = self.header.page_tokens;
        let first = from / u64::from(page_tokens);
        let end = self.kv_len.div_ceil(page_tokens.into());
        let pages = if from < self.kv_len { first..end } else { 0..0 };
        let mut covered = vec![false; geometry.leaves()];
        let mut last = None;
        while let Some(head) = mine.first() {
            let part = head.part;
            if last.is_some_and(|last| last >= part) {
                return Err(PageError::NotCanonical {
                    what: "order of parts",
                });
            }
            last = Some(part);
            for page in pages.clone() {
                let number = u32::try_from(page).map_err(|_| PageError::NoSuchPage { page })?;
                let span = PageSpan::of(number, page_tokens, &(from..self.kv_len));
                let (this, after) = mine.split_first().ok_or(PageError::NoSuchPage { page })?;
                let (digest, key) = (this.digest, this.store_key.clone());
                let span = span.ok_or(PageError::NoSuchPage { page })?;
                let group = geometry.group;
                let want = PageRef::new(
                    &self.header,
                    group,
                    span,
                    part,
                    this.generation,
                    digest,
                    key,
                )?;
                if *this != want {
                    return Err(PageError::NotCanonical {
                        what: "page reference",
                    });
                }
                mine = after;
            }
            if pages.is_empty() {
                return Err(PageError::NoSuchPage {
                    page: head.span.page.into(),
                });
            }
            let shard = part.shard(geometry)?;
            for (layer, head) in shard.iter() {
                let l = geometry.layers.binary_search(&layer).unwrap_or_default();
                covered[l * geometry.kv_heads as usize + head as usize] = true;
            }
        }
        match covered.iter().position(|c| !c) {
            Some(at) if !pages.is_empty() => Err(PageError::MissingLeaf {
                layer: geometry.layers[at / geometry.kv_heads as usize],
                head: at as u32 % geometry.kv_heads,
            }),
            _ => Ok(rest),
        }
    }

    /// The one encoding of this set.
    pub fn encode(&self) -> Vec<u8> {
        let header = self.header.encode();
        let mut out = Vec::with_capacity(64 + header.len() + self.pages.len() * 64);
        out.extend_from_slice(&MAGIC);
        out.push(VERSION);
        out.extend_from_slice(&self.request.0);
        // A valid header has at most 64 groups of at most 1024 layers.
        out.extend_from_slice(&(header.len() as u32).to_le_bytes());
        out.extend_from_slice(&header);
        out.extend_from_slice(&self.kv_len.to_le_bytes());
        for from in &self.retained_from {
            out.extend_from_slice(&from.to_le_bytes());
        }
        out.extend_from_slice(&(self.pages.len() as u32).to_le_bytes());
        for p in &self.pages {
            out.extend_from_slice(&p.group.to_le_bytes());
            out.extend_from_slice(&p.part.tp_rank.to_le_bytes());
            out.extend_from_slice(&p.part.tp_size.to_le_bytes());
            out.extend_from_slice(&p.part.first_layer.to_le_bytes());
            out.extend_from_slice(&p.part.layers.to_le_bytes());
            out.extend_from_slice(&p.span.page.to_le_bytes());
            out.extend_from_slice(&p.span.from.to_le_bytes());
            out.extend_from_slice(&p.span.to.to_le_bytes());
            out.extend_from_slice(&p.generation.to_le_bytes());
            out.extend_from_slice(&p.digest);
            let key = p.store_key.as_deref().unwrap_or_default();
            out.extend_from_slice(&(key.len() as u16).to_le_bytes());
            out.extend_from_slice(key.as_bytes());
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote of a valid set and nothing else. Allocates at most
    /// in proportion to `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, PageError> {
        let mut r = Reader(bytes);
        if r.array::<4>("magic")? != MAGIC {
            return Err(PageError::Magic {
                what: "KV object set",
            });
        }
        match r.u8("version")? {
            VERSION => {}
            other => return Err(Unsupported::Version(other).into()),
        }
        let request = RequestId(r.array("request")?);
        let n = r.u32("header length")? as usize;
        let header = ObjectSetHeader::decode(r.take(n, "header")?)?;
        let kv_len = r.u64("kv_len")?;
        let retained_from = header
            .groups
            .iter()
            .map(|_| r.u64("retained_from"))
            .collect::<Result<_, _>>()?;
        let n = r.u32("page count")? as usize;
        if n > MAX_PAGES {
            let (got, max) = (n as u64, MAX_PAGES as u64);
            return Err(PageError::TooLarge {
                what: "pages",
                got,
                max,
            });
        }
        let mut pages = Vec::new();
        for _ in 0..n {
            pages.push(decode_page(&header, &mut r)?);
        }
        r.end()?;
        let set = Self {
            request,
            header,
            kv_len,
            retained_from,
            pages,
        };
        set.validate()?;
        Ok(set)
    }
}

fn decode_page(header: &ObjectSetHeader, r: &mut Reader<'_>) -> Result<PageRef, PageError> {
    let group = r.u16("group")?;
    let part = Part {
        tp_rank: r.u16("tp_rank")?,
        tp_size: r.u16("tp_size")?,
        first_layer: r.u32("first_layer")?,
        layers: r.u32("layers")?,
    };
    let span = PageSpan {
        page: r.u32("page")?,
        from: r.u16("from")?,
        to: r.u16("to")?,
    };
    let generation = r.u64("generation")?;
    let digest = r.array("digest")?;
    let n = usize::from(r.u16("store key length")?);
    let key = std::str::from_utf8(r.take(n, "store key")?)
        .map_err(|_| PageError::NotCanonical { what: "store key" })?;
    let key = (!key.is_empty()).then(|| key.to_owned());
    PageRef::new(header, group, span, part, generation, digest, key)
}
