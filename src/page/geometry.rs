//! What a group of layers keeps for one token, in model-global terms: no worker, rank or pool.

use super::{PageError, Unsupported};

/// Most layers a group may have.
pub const MAX_LAYERS: usize = 1024;
/// Most KV heads a group may have.
pub const MAX_HEADS: u32 = 1024;
/// Most bytes of one K or V row (one token, one head).
pub const MAX_ROW_BYTES: u32 = 1 << 16;
/// Most bytes of side data of one row.
pub const MAX_SCALE_BYTES: u32 = 1 << 12;

/// Element type of K and V. Digests cover bytes; the type is bound to them through the geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE-754 binary32.
    F32,
    /// IEEE-754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit float, 4 exponent and 3 mantissa bits.
    Fp8E4M3,
    /// 8-bit float, 5 exponent and 2 mantissa bits.
    Fp8E5M2,
    /// Quantized blocks (q8_0 and the like) that we move and compare as bytes.
    Opaque {
        /// The engine's tag of the block format; compared, never interpreted.
        tag: u16,
    },
}

impl Dtype {
    /// Bytes of one element; `None` for opaque blocks.
    pub fn element_bytes(self) -> Option<u32> {
        match self {
            Self::F32 => Some(4),
            Self::F16 | Self::Bf16 => Some(2),
            Self::Fp8E4M3 | Self::Fp8E5M2 => Some(1),
            Self::Opaque { .. } => None,
        }
    }

    pub(super) fn tag(self) -> (u8, u16) {
        match self {
            Self::F32 => (0, 0),
            Self::F16 => (1, 0),
            Self::Bf16 => (2, 0),
            Self::Fp8E4M3 => (3, 0),
            Self::Fp8E5M2 => (4, 0),
            Self::Opaque { tag } => (5, tag),
        }
    }

    pub(super) fn from_tag(tag: u8, opaque: u16) -> Result<Self, PageError> {
        let plain = match tag {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Bf16,
            3 => Self::Fp8E4M3,
            4 => Self::Fp8E5M2,
            5 => return Ok(Self::Opaque { tag: opaque }),
            other => return Err(Unsupported::Dtype(other).into()),
        };
        if opaque != 0 {
            return Err(PageError::NotCanonical { what: "opaque tag" });
        }
        Ok(plain)
    }
}

/// How a group's slots behave. Kinds whose written slots do not stay are refused by type, see
/// [`Unsupported`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvKind {
    /// Full attention with K and V rows: MHA, GQA, MQA.
    Attention,
    /// Multi-head latent attention: one latent row per token and layer, no V, one "head".
    Mla,
    /// Attention over the last `window` tokens: earlier tokens may have been evicted, so a view of
    /// it carries the range that is retained.
    SlidingWindow {
        /// Tokens attended to, the current one included.
        window: u32,
    },
}

impl KvKind {
    pub(super) fn tag(self) -> (u8, u32) {
        match self {
            Self::Attention => (0, 0),
            Self::Mla => (1, 0),
            Self::SlidingWindow { window } => (2, window),
        }
    }

    pub(super) fn from_tag(tag: u8, window: u32) -> Result<Self, PageError> {
        let kind = match tag {
            0 => Self::Attention,
            1 => Self::Mla,
            2 => return Ok(Self::SlidingWindow { window }),
            3 => return Err(Unsupported::CircularBuffer.into()),
            4 => return Err(Unsupported::MutableState.into()),
            5 => return Err(Unsupported::RewritesTail.into()),
            other => return Err(Unsupported::KvKind(other).into()),
        };
        if window != 0 {
            return Err(PageError::NotCanonical { what: "window" });
        }
        Ok(kind)
    }
}

/// One part of what a token keeps for one layer and head; the order is the canonical one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Component {
    /// Key row (MLA: the latent row).
    K = 0,
    /// Value row.
    V = 1,
    /// Scales of the key row.
    KScale = 2,
    /// Scales of the value row.
    VScale = 3,
}

impl Component {
    /// All of them, in canonical order.
    pub const ALL: [Self; 4] = [Self::K, Self::V, Self::KScale, Self::VScale];
}

/// One group of layers whose KV has the same shape and lives under one block table.
///
/// Sizes are bytes per token and head. Call [`GroupGeometry::validate`] on one built by hand;
/// headers and layouts do so themselves.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupGeometry {
    /// Group number, unique in its object set.
    pub group: u16,
    /// How its slots behave.
    pub kind: KvKind,
    /// Element type of K and V.
    pub dtype: Dtype,
    /// Global layer ids, strictly ascending.
    pub layers: Vec<u32>,
    /// Global KV heads of each layer (before any tensor-parallel split).
    pub kv_heads: u32,
    /// Bytes of one K row.
    pub k_bytes: u32,
    /// Bytes of one V row; 0 for MLA.
    pub v_bytes: u32,
    /// Bytes of side data of one K row; 0 if none.
    pub k_scale_bytes: u32,
    /// Bytes of side data of one V row; 0 if none.
    pub v_scale_bytes: u32,
}

impl GroupGeometry {
    /// MHA, GQA or MQA without side data. Errors as [`validate`](Self::validate), and for an opaque
    /// `dtype`, whose row size must be given by hand.
    pub fn attention(
        group: u16,
        layers: impl IntoIterator<Item = u32>,
        kv_heads: u32,
        head_dim: u32,
        dtype: Dtype,
    ) -> Result<Self, PageError> {
        let element = dtype.element_bytes().ok_or(PageError::Geometry(
            "an opaque dtype has no element size; give row bytes by hand",
        ))?;
        let row = element.checked_mul(head_dim).ok_or(PageError::Overflow)?;
        let geometry = Self {
            group,
            kind: KvKind::Attention,
            dtype,
            layers: layers.into_iter().collect(),
            kv_heads,
            k_bytes: row,
            v_bytes: row,
            k_scale_bytes: 0,
            v_scale_bytes: 0,
        };
        geometry.validate()?;
        Ok(geometry)
    }

    /// Latent attention: one row of `row_bytes` per token and layer (576 bf16 = 1152 B; packed fp8
    /// = 656 B).
    pub fn mla(
        group: u16,
        layers: impl IntoIterator<Item = u32>,
        row_bytes: u32,
        dtype: Dtype,
    ) -> Result<Self, PageError> {
        let geometry = Self {
            group,
            kind: KvKind::Mla,
            dtype,
            layers: layers.into_iter().collect(),
            kv_heads: 1,
            k_bytes: row_bytes,
            v_bytes: 0,
            k_scale_bytes: 0,
            v_scale_bytes: 0,
        };
        geometry.validate()?;
        Ok(geometry)
    }

    /// Checks every bound and that kind, dtype and sizes agree.
    pub fn validate(&self) -> Result<(), PageError> {
        ascending("layers", &self.layers, MAX_LAYERS)?;
        bounded("kv_heads", self.kv_heads, MAX_HEADS)?;
        bounded("k_bytes", self.k_bytes, MAX_ROW_BYTES)?;
        for (what, got, max) in [
            ("v_bytes", self.v_bytes, MAX_ROW_BYTES),
            ("k_scale_bytes", self.k_scale_bytes, MAX_SCALE_BYTES),
            ("v_scale_bytes", self.v_scale_bytes, MAX_SCALE_BYTES),
        ] {
            if got > max {
                let (got, max) = (got.into(), max.into());
                return Err(PageError::TooLarge { what, got, max });
            }
        }
        match self.kind {
            KvKind::Mla if self.v_bytes != 0 || self.v_scale_bytes != 0 => {
                return Err(PageError::Geometry("MLA has no V rows"));
            }
            KvKind::Mla if self.kv_heads != 1 => {
                return Err(PageError::Geometry(
                    "MLA has one latent row per layer, so one head",
                ));
            }
            KvKind::Attention | KvKind::SlidingWindow { .. } if self.v_bytes == 0 => {
                return Err(PageError::Geometry("attention needs V rows"));
            }
            KvKind::SlidingWindow { window: 0 } => return Err(PageError::Zero { what: "window" }),
            _ => {}
        }
        if let Some(element) = self.dtype.element_bytes()
            && !(self.k_bytes.is_multiple_of(element) && self.v_bytes.is_multiple_of(element))
        {
            return Err(PageError::Geometry(
                "a row is not a whole number of elements",
            ));
        }
        Ok(())
    }

    /// Bytes of one row of `component`; 0 if this group has none.
    pub fn row_bytes(&self, component: Component) -> u32 {
        match component {
            Component::K => self.k_bytes,
            Component::V => self.v_bytes,
            Component::KScale => self.k_scale_bytes,
            Component::VScale => self.v_scale_bytes,
        }
    }

    /// The components this group has, in canonical order.
    pub fn components(&self) -> impl Iterator<Item = Component> + '_ {
        Component::ALL
            .into_iter()
            .filter(|&c| self.row_bytes(c) != 0)
    }

    /// Bytes one token adds to one leaf: all components of one layer and head.
    pub fn leaf_token_bytes(&self) -> u32 {
        // Bounded by MAX_ROW_BYTES and MAX_SCALE_BYTES: cannot overflow.
        self.k_bytes + self.v_bytes + self.k_scale_bytes + self.v_scale_bytes
    }

    /// Leaves of a page: layers times heads.
    pub fn leaves(&self) -> usize {
        self.layers.len() * self.kv_heads as usize
    }

    /// Bytes one token takes in all layers and heads of this group.
    pub fn token_bytes(&self) -> u64 {
        self.leaves() as u64 * u64::from(self.leaf_token_bytes())
    }

    /// The shard that holds everything.
    pub fn whole(&self) -> Shard {
        Shard {
            layers: self.layers.clone(),
            heads: (0..self.kv_heads).collect(),
        }
    }
}

/// Which *global* layers and KV heads one pool holds: a rank of a tensor- or pipeline-parallel
/// worker. A head may be in several shards (more ranks than heads: replicas).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Global layer ids, strictly ascending.
    pub layers: Vec<u32>,
    /// Global KV head ids, strictly ascending.
    pub heads: Vec<u32>,
}

impl Shard {
    /// Rank `rank` of `size` tensor-parallel ranks, the usual split: heads in equal consecutive
    /// parts, or, with more ranks than heads, each head on `size / heads` consecutive ranks.
    /// Errors if neither divides the other.
    pub fn tensor_parallel(
        geometry: &GroupGeometry,
        rank: u32,
        size: u32,
    ) -> Result<Self, PageError> {
        if size == 0 {
            return Err(PageError::Zero {
                what: "tensor-parallel size",
            });
        }
        if rank >= size {
            let max = u64::from(size) - 1;
            return Err(PageError::TooLarge {
                what: "rank",
                got: rank.into(),
                max,
            });
        }
        let n = geometry.kv_heads;
        let heads = if n.is_multiple_of(size) {
            let each = n / size;
            (rank * each..(rank + 1) * each).collect()
        } else if size.is_multiple_of(n) {
            let head = rank / (size / n);
            vec![head]
        } else {
            return Err(PageError::Geometry(
                "tensor-parallel size and KV heads do not divide one another",
            ));
        };
        Ok(Self {
            layers: geometry.layers.clone(),
            heads,
        })
    }

    /// Checks that this is a non-empty part of `geometry`.
    pub fn validate(&self, geometry: &GroupGeometry) -> Result<(), PageError> {
        ascending("shard layers", &self.layers, MAX_LAYERS)?;
        ascending("shard heads", &self.heads, MAX_HEADS as usize)?;
        for &id in &self.layers {
            if geometry.layers.binary_search(&id).is_err() {
                return Err(PageError::NotInGeometry { what: "layer", id });
            }
        }
        match self.heads.last() {
            Some(&id) if id >= geometry.kv_heads => {
                Err(PageError::NotInGeometry { what: "head", id })
            }
            _ => Ok(()),
        }
    }

    /// Leaves this shard holds.
    pub fn leaves(&self) -> usize {
        self.layers.len() * self.heads.len()
    }

    /// Position of a global layer in this shard.
    pub fn layer_index(&self, layer: u32) -> Option<usize> {
        self.layers.binary_search(&layer).ok()
    }

    /// Position of a global head in this shard.
    pub fn head_index(&self, head: u32) -> Option<usize> {
        self.heads.binary_search(&head).ok()
    }

    /// The (layer, head) pairs, in canonical order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.layers
            .iter()
            .flat_map(|&l| self.heads.iter().map(move |&h| (l, h)))
    }

    /// What both hold; `None` if nothing.
    pub fn intersection(&self, other: &Self) -> Option<Self> {
        let common = |a: &[u32], b: &[u32]| -> Vec<u32> {
            a.iter()
                .copied()
                .filter(|id| b.binary_search(id).is_ok())
                .collect()
        };
        let layers = common(&self.layers, &other.layers);
        let heads = common(&self.heads, &other.heads);
        (!layers.is_empty() && !heads.is_empty()).then_some(Self { layers, heads })
    }
}

fn bounded(what: &'static str, got: u32, max: u32) -> Result<(), PageError> {
    if got == 0 {
        return Err(PageError::Zero { what });
    }
    if got > max {
        return Err(PageError::TooLarge {
            what,
            got: got.into(),
            max: max.into(),
        });
    }
    Ok(())
}

fn ascending(what: &'static str, ids: &[u32], max: usize) -> Result<(), PageError> {
    if ids.is_empty() {
        return Err(PageError::Zero { what });
    }
    if ids.len() > max {
        return Err(PageError::TooLarge {
            what,
            got: ids.len() as u64,
            max: max as u64,
        });
    }
    match ids.windows(2).position(|w| w[0] >= w[1]) {
        Some(at) => Err(PageError::NotAscending { what, at: at + 1 }),
        None => Ok(()),
    }
}
