//! The header of an object set: what both ends must agree on before a byte moves.

use super::codec::Reader;
use super::{Dtype, GroupGeometry, KvKind, MAX_LAYERS, PageError, Unsupported};

/// Most KV groups of one object set.
pub const MAX_GROUPS: usize = 64;
/// Most tokens of a canonical page, and of an engine's block.
pub const MAX_PAGE_TOKENS: u32 = 256;

const MAGIC: [u8; 4] = *b"MLKH";
const VERSION: u8 = 1;

/// How canonical bytes are hashed. The tag travels in the header and is bound to every digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Scheme {
    /// Keyed BLAKE3 per leaf, then over leaves. The default.
    #[default]
    Blake3Leaves = 1,
    /// SHA-256 per leaf, then over leaves.
    Sha256Leaves = 2,
    /// SHA-256 of the packed, zero-filled page, as the published prototype does. Not parallel, and
    /// it needs all heads and layers in one place.
    Sha256Flat = 3,
}

impl Scheme {
    /// All schemes.
    pub const ALL: [Self; 3] = [Self::Blake3Leaves, Self::Sha256Leaves, Self::Sha256Flat];

    /// The tag on the wire.
    pub fn tag(self) -> u8 {
        self as u8
    }

    /// The scheme of a tag; an unknown one is [`Unsupported::Scheme`].
    pub fn from_tag(tag: u8) -> Result<Self, PageError> {
        Self::ALL
            .into_iter()
            .find(|s| s.tag() == tag)
            .ok_or_else(|| Unsupported::Scheme(tag).into())
    }

    /// Its name in benches, options and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Blake3Leaves => "blake3-leaves",
            Self::Sha256Leaves => "sha256-leaves",
            Self::Sha256Flat => "sha256-flat",
        }
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What an object set's bytes mean: model, groups, canonical page size, digest scheme.
///
/// The canonical page size belongs to the object set, not to an engine's block size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectSetHeader {
    /// Identity of weights *and* adapter: two models never share pages.
    pub model: [u8; 32],
    /// The KV groups, ascending by group number.
    pub groups: Vec<GroupGeometry>,
    /// Tokens of a canonical page, 1 to [`MAX_PAGE_TOKENS`].
    pub page_tokens: u16,
    /// Digest scheme of every digest of this set.
    pub scheme: Scheme,
}

impl ObjectSetHeader {
    /// Builds and validates.
    pub fn new(
        model: [u8; 32],
        groups: Vec<GroupGeometry>,
        page_tokens: u16,
        scheme: Scheme,
    ) -> Result<Self, PageError> {
        let header = Self {
            model,
            groups,
            page_tokens,
            scheme,
        };
        header.validate()?;
        Ok(header)
    }

    /// Checks all bounds and each group.
    pub fn validate(&self) -> Result<(), PageError> {
        if self.page_tokens == 0 {
            return Err(PageError::Zero {
                what: "page_tokens",
            });
        }
        if u32::from(self.page_tokens) > MAX_PAGE_TOKENS {
            return Err(PageError::TooLarge {
                what: "page_tokens",
                got: self.page_tokens.into(),
                max: MAX_PAGE_TOKENS.into(),
            });
        }
        group_count(self.groups.len())?;
        if let Some(at) = self
            .groups
            .windows(2)
            .position(|w| w[0].group >= w[1].group)
        {
            return Err(PageError::NotAscending {
                what: "groups",
                at: at + 1,
            });
        }
        self.groups.iter().try_for_each(GroupGeometry::validate)
    }

    /// The group with number `group`.
    pub fn group(&self, group: u16) -> Result<&GroupGeometry, PageError> {
        self.groups
            .iter()
            .find(|g| g.group == group)
            .ok_or(PageError::NoSuchGroup { group })
    }

    /// Bytes one token takes in all groups.
    pub fn token_bytes(&self) -> u64 {
        self.groups.iter().map(GroupGeometry::token_bytes).sum()
    }

    /// Pages that hold `kv_len` tokens, the partial tail page included.
    pub fn pages(&self, kv_len: u64) -> u64 {
        kv_len.div_ceil(self.page_tokens.into())
    }

    /// The one encoding of this header.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.groups.len() * 256);
        out.extend_from_slice(&MAGIC);
        out.push(VERSION);
        out.push(self.scheme.tag());
        out.extend_from_slice(&self.page_tokens.to_le_bytes());
        out.extend_from_slice(&self.model);
        out.extend_from_slice(&(self.groups.len() as u16).to_le_bytes());
        for group in &self.groups {
            out.extend_from_slice(&group.group.to_le_bytes());
            encode_geometry(group, &mut out);
        }
        out
    }

    /// Reads what [`encode`](Self::encode) wrote and nothing else: every other byte string is a
    /// typed error. Allocates at most in proportion to `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, PageError> {
        let mut r = Reader(bytes);
        if r.array::<4>("magic")? != MAGIC {
            return Err(PageError::Magic {
                what: "object set header",
            });
        }
        match r.u8("version")? {
            VERSION => {}
            other => return Err(Unsupported::Version(other).into()),
        }
        let scheme = Scheme::from_tag(r.u8("scheme")?)?;
        let page_tokens = r.u16("page_tokens")?;
        let model = r.array("model")?;
        let n = usize::from(r.u16("group count")?);
        group_count(n)?;
        let mut groups = Vec::with_capacity(n);
        for _ in 0..n {
            let group = r.u16("group")?;
            groups.push(decode_geometry(group, &mut r)?);
        }
        r.end()?;
        Self::new(model, groups, page_tokens, scheme)
    }
}

fn group_count(n: usize) -> Result<(), PageError> {
    match n {
        0 => Err(PageError::Zero { what: "groups" }),
        n if n > MAX_GROUPS => Err(PageError::TooLarge {
            what: "groups",
            got: n as u64,
            max: MAX_GROUPS as u64,
        }),
        _ => Ok(()),
    }
}

/// The geometry without its group number: what digest keys are derived from.
pub(crate) fn encode_geometry(g: &GroupGeometry, out: &mut Vec<u8>) {
    let (kind, window) = g.kind.tag();
    let (dtype, opaque) = g.dtype.tag();
    out.push(kind);
    out.extend_from_slice(&window.to_le_bytes());
    out.push(dtype);
    out.extend_from_slice(&opaque.to_le_bytes());
    for v in [
        g.kv_heads,
        g.k_bytes,
        g.v_bytes,
        g.k_scale_bytes,
        g.v_scale_bytes,
        g.layers.len() as u32,
    ] {
        out.extend_from_slice(&v.to_le_bytes());
    }
    for layer in &g.layers {
        out.extend_from_slice(&layer.to_le_bytes());
    }
}

fn decode_geometry(group: u16, r: &mut Reader<'_>) -> Result<GroupGeometry, PageError> {
    let kind_tag = r.u8("kind")?;
    let kind = KvKind::from_tag(kind_tag, r.u32("window")?)?;
    let dtype_tag = r.u8("dtype")?;
    let dtype = Dtype::from_tag(dtype_tag, r.u16("opaque tag")?)?;
    let kv_heads = r.u32("kv_heads")?;
    let k_bytes = r.u32("k_bytes")?;
    let v_bytes = r.u32("v_bytes")?;
    let k_scale_bytes = r.u32("k_scale_bytes")?;
    let v_scale_bytes = r.u32("v_scale_bytes")?;
    let n = r.u32("layer count")? as usize;
    if n > MAX_LAYERS {
        let (got, max) = (n as u64, MAX_LAYERS as u64);
        return Err(PageError::TooLarge {
            what: "layers",
            got,
            max,
        });
    }
    let raw = r.take(n * 4, "layers")?;
    let layers = raw
        .as_chunks::<4>()
        .0
        .iter()
        .map(|c| u32::from_le_bytes(*c))
        .collect();
    Ok(GroupGeometry {
        group,
        kind,
        dtype,
        layers,
        kv_heads,
        k_bytes,
        v_bytes,
        k_scale_bytes,
        v_scale_bytes,
    })
}
