//! The import specification: what a source tells about a request and its pool before anything is
//! copied. It is the payload of the protocol's `Prepared` and `Reserve`.

use std::sync::Arc;

use super::options::Options;
use crate::control_state::{Fingerprint, RngKind};
use crate::engine::adapter::{Capabilities, ImportSpec, Pinned};
use crate::id::{MigrationEpoch, RequestId};
use crate::page::{BlockLayout, GroupGeometry, ObjectSetHeader, Plane, Shard};
use crate::route::{DecodeError, Reader, Writer};

const MAGIC: [u8; 4] = *b"MLS1";
const MAX_HEADER: usize = 1 << 20;
const MAX_PLANES: usize = 1 << 16;
const MAX_IDS: usize = 1 << 14;
const MAX_GROUPS: usize = 64;
const MAX_GRANT: usize = 4096;

/// One group's pool at the source.
#[derive(Debug, Clone)]
pub struct SourcePool {
    /// Which group.
    pub group: u16,
    /// Where its bytes lie in the region that the grant opens.
    pub layout: Arc<BlockLayout>,
    /// What the bulk transport needs to reach the region, opaque here.
    pub grant: Vec<u8>,
}

/// Everything a destination needs to reserve room and to read.
#[derive(Debug, Clone)]
pub struct SourceSpec {
    /// Geometry and scheme.
    pub header: ObjectSetHeader,
    /// The source engine's build and numerics.
    pub fingerprint: Fingerprint,
    /// Generator that must be continued.
    pub rng: RngKind,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Most tokens the request can ever hold.
    pub max_tokens: u64,
    /// First token held, by group.
    pub first_live: Vec<(u16, u64)>,
    /// The pools.
    pub pools: Vec<SourcePool>,
    /// What the operator chose.
    pub options: Options,
}

/// The generator that a destination must be able to continue, best known before the control state
/// travels: counter-based where the engine has it.
pub fn rng_of(capabilities: &Capabilities) -> RngKind {
    let kinds = &capabilities.rng_kinds;
    let counter = kinds
        .contains(&RngKind::Counter)
        .then_some(RngKind::Counter);
    counter.or(kinds.first().copied()).unwrap_or_default()
}

impl SourceSpec {
    /// Describes a pinned request.
    pub fn new(
        capabilities: &Capabilities,
        pinned: &Pinned,
        pools: Vec<SourcePool>,
        options: Options,
    ) -> Self {
        Self {
            header: capabilities.header.clone(),
            fingerprint: capabilities.fingerprint,
            rng: rng_of(capabilities),
            prompt_tokens: pinned.prompt_tokens,
            max_tokens: pinned.max_tokens,
            first_live: pinned.first_live.clone(),
            pools,
            options,
        }
    }

    /// What the destination's engine is asked for.
    pub fn import(&self, request: RequestId, epoch: MigrationEpoch) -> ImportSpec {
        ImportSpec {
            request,
            epoch,
            header: self.header.clone(),
            source: self.fingerprint,
            rng: self.rng,
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.max_tokens,
            first_live: self.first_live.clone(),
        }
    }

    /// The pool of a group.
    pub fn pool(&self, group: u16) -> Option<&SourcePool> {
        self.pools.iter().find(|p| p.group == group)
    }

    /// The payload's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.raw(&MAGIC);
        w.bytes(&self.header.encode());
        w.raw(&self.fingerprint.engine_build);
        w.raw(&self.fingerprint.numerics_profile);
        w.u16(self.rng as u16);
        w.u64(self.prompt_tokens);
        w.u64(self.max_tokens);
        w.u32(self.first_live.len() as u32);
        for (group, first) in &self.first_live {
            w.u16(*group);
            w.u64(*first);
        }
        w.u32(self.pools.len() as u32);
        for pool in &self.pools {
            w.u16(pool.group);
            put_layout(&mut w, &pool.layout);
            w.bytes(&pool.grant);
        }
        self.options.put(&mut w);
        w.0
    }

    /// Reads the payload; bounded, and the layouts are checked as any other.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.array::<4>("spec.magic")? != MAGIC {
            return Err(DecodeError::Version("import specification"));
        }
        let header = ObjectSetHeader::decode(r.bytes(MAX_HEADER, "spec.header")?)
            .map_err(|_| DecodeError::Range("spec.header"))?;
        let fingerprint = Fingerprint {
            engine_build: r.array("spec.engine_build")?,
            numerics_profile: r.array("spec.numerics_profile")?,
        };
        let rng = rng_from(r.u16("spec.rng")?)?;
        let prompt_tokens = r.u64("spec.prompt_tokens")?;
        let max_tokens = r.u64("spec.max_tokens")?;
        let n = r.count(MAX_GROUPS, 10, "spec.first_live")?;
        let mut first_live = Vec::with_capacity(n);
        for _ in 0..n {
            first_live.push((r.u16("spec.first_live")?, r.u64("spec.first_live")?));
        }
        let n = r.count(MAX_GROUPS, 8, "spec.pools")?;
        let mut pools = Vec::with_capacity(n);
        for _ in 0..n {
            let group = r.u16("spec.group")?;
            let geometry = header
                .group(group)
                .map_err(|_| DecodeError::Range("spec.group"))?;
            let layout = Arc::new(get_layout(&mut r, geometry)?);
            let grant = r.bytes(MAX_GRANT, "spec.grant")?.to_vec();
            pools.push(SourcePool {
                group,
                layout,
                grant,
            });
        }
        let options = Options::get(&mut r)?;
        r.end()?;
        Ok(Self {
            header,
            fingerprint,
            rng,
            prompt_tokens,
            max_tokens,
            first_live,
            pools,
            options,
        })
    }
}

fn rng_from(tag: u16) -> Result<RngKind, DecodeError> {
    use RngKind::*;
    [
        Greedy,
        Counter,
        VllmMurmur,
        SglangMurmur,
        TorchGenerator,
        Mt19937,
    ]
    .into_iter()
    .find(|k| *k as u16 == tag)
    .ok_or(DecodeError::Range("spec.rng"))
}

fn put_ids(w: &mut Writer, ids: &[u32]) {
    w.u32(ids.len() as u32);
    ids.iter().for_each(|id| w.u32(*id));
}

fn get_ids(r: &mut Reader<'_>, what: &'static str) -> Result<Vec<u32>, DecodeError> {
    let n = r.count(MAX_IDS, 4, what)?;
    (0..n).map(|_| r.u32(what)).collect()
}

fn put_layout(w: &mut Writer, layout: &BlockLayout) {
    put_ids(w, &layout.shard().layers);
    put_ids(w, &layout.shard().heads);
    w.u32(layout.blocks());
    w.u32(layout.block_tokens());
    w.u64(layout.region_len());
    let (layers, components) = (layout.shard().layers.len(), layout.components().len());
    w.u32((layers * components) as u32);
    for layer in 0..layers {
        for component in 0..components {
            let p = layout.plane(layer, component);
            for v in [p.base, p.block_stride, p.slot_stride, p.head_stride] {
                w.u64(v);
            }
        }
    }
}

fn get_layout(r: &mut Reader<'_>, geometry: &GroupGeometry) -> Result<BlockLayout, DecodeError> {
    let layers = get_ids(r, "layout.layers")?;
    let heads = get_ids(r, "layout.heads")?;
    let blocks = r.u32("layout.blocks")?;
    let block_tokens = r.u32("layout.block_tokens")?;
    let region_len = r.u64("layout.region_len")?;
    let n = r.count(MAX_PLANES, 32, "layout.planes")?;
    let mut planes = Vec::with_capacity(n);
    for _ in 0..n {
        planes.push(Plane {
            base: r.u64("layout.plane")?,
            block_stride: r.u64("layout.plane")?,
            slot_stride: r.u64("layout.plane")?,
            head_stride: r.u64("layout.plane")?,
        });
    }
    let geometry = Arc::new(geometry.clone());
    BlockLayout::from_planes(
        geometry,
        Shard { layers, heads },
        blocks,
        block_tokens,
        planes,
        region_len,
    )
    .map_err(|_| DecodeError::Range("layout"))
}
