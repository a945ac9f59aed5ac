//! The mirror: blocks of this process that stand for a remote engine's slots.
//!
//! Transports read and write local blocks under leases; a remote engine's memory cannot be leased.
//! So each view gets blocks of a pool here. A pin's slots are fetched when its table is asked for;
//! they are sealed and do not change, so each is fetched once. A stage's slots are written here and
//! sent before anything hashes or commits them, when the lease that wrote them has ended. Digests
//! are always the engine's, over what arrived in its own memory.

use super::{slots, v1 as pb};
use crate::engine::adapter::{AdapterError, LEASE_WAIT, PoolInfo, Result, View, What};
use crate::mem::{BlockPool, MemError, Region, WriteLease};
use crate::page::{
    BlockLayout, GroupGeometry, KvSplit, LayoutSpec, Major, Order, Shard, TokenView,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_TOKENS: u32 = 16;

/// Most blocks of one group's mirror: the ledger holds some hundred bytes for each, whatever of its
/// memory is used. Enough for an engine whose pool holds 16 million tokens.
const MAX_BLOCKS: u64 = (1 << 21) + 64;

/// Where the blocks of a group lie that mirror a pool as the engine describes it.
pub(super) fn layout(geometry: &GroupGeometry, pool: &pb::GroupPool) -> Result<BlockLayout> {
    let shard = Shard {
        layers: pool.layers.clone(),
        heads: pool.heads.clone(),
    };
    // A view's last block is shared with no other view, so allow for more than the tokens need.
    let blocks = pool
        .tokens
        .div_ceil(BLOCK_TOKENS.into())
        .saturating_mul(2)
        .saturating_add(64);
    let blocks = u32::try_from(blocks)
        .ok()
        .filter(|b| u64::from(*b) <= MAX_BLOCKS)
        .ok_or(AdapterError::Caller(
            "the engine's pool is too large to mirror",
        ))?;
    let spec = LayoutSpec::new(
        Major::Block,
        KvSplit::InRow,
        Order::Nhd,
        BLOCK_TOKENS,
        blocks,
    );
    Ok(spec.build(&Arc::new(geometry.clone()), shard)?)
}

/// One group's blocks.
pub(super) struct Mirror {
    pub(super) info: PoolInfo,
    /// Blocks given back while a lease on them was out.
    deferred: Mutex<Vec<u32>>,
}

impl Mirror {
    /// For an engine whose pool holds so many tokens of this group; memory is taken as it is used.
    pub(super) fn new(geometry: &GroupGeometry, pool: &pb::GroupPool) -> Result<Self> {
        let layout = layout(geometry, pool)?;
        let blocks = layout.blocks();
        let region = Region::memfd("moonlive-engine-mirror", layout.region_len())?;
        // A layout's own blocks always have extents.
        let pool = BlockPool::new(region, blocks, |b| {
            layout.extents(b).into_iter().flatten().collect::<Vec<_>>()
        })?;
        let info = PoolInfo {
            pool,
            layout: Arc::new(layout),
        };
        Ok(Self {
            info,
            deferred: Mutex::default(),
        })
    }

    fn alloc(&self, n: usize) -> Result<Vec<u32>> {
        self.release(&[]);
        Ok(self.info.pool.alloc(n)?)
    }

    /// Gives blocks back; one under a lease follows when the lease has ended.
    fn release(&self, blocks: &[u32]) {
        let mut deferred = self.deferred.lock();
        deferred.extend_from_slice(blocks);
        deferred.retain(|b| matches!(self.info.pool.release(&[*b]), Err(MemError::Busy { .. })));
    }
}

/// One view's part of one group.
struct Part {
    /// Token at which the first block begins.
    base: u64,
    blocks: Vec<u32>,
    /// A pin: slots below it have been fetched.
    fetched: u64,
    /// A stage: slots that were given out to be written and have not been sent.
    unsent: Vec<Range<u64>>,
}

impl Part {
    fn span(&self, tokens: &Range<u64>) -> Result<Range<usize>> {
        let size = u64::from(BLOCK_TOKENS);
        let limit = self.base + self.blocks.len() as u64 * size;
        if tokens.start < self.base || tokens.end > limit {
            return Err(AdapterError::OutOfRange {
                asked: tokens.end,
                limit,
            });
        }
        let from = (tokens.start - self.base) / size;
        let to = (tokens.end - self.base).div_ceil(size).max(from);
        Ok(from as usize..to as usize)
    }

    fn table(&self, tokens: &Range<u64>) -> Result<&[u32]> {
        Ok(&self.blocks[self.span(tokens)?])
    }
}

/// One view's part of every group.
type Parts = Arc<Mutex<HashMap<u16, Part>>>;

/// All views of one remote engine.
pub(super) struct Mirrors {
    groups: HashMap<u16, Mirror>,
    views: Mutex<HashMap<View, Parts>>,
}

/// What the mirror needs of the engine: bytes of sealed slots, and a place for written ones.
pub(super) trait Slots {
    /// Checks `tokens` as `table` does and fetches `tokens.start.max(from) ..`, at most a part.
    fn read(&self, view: View, group: u16, tokens: &Range<u64>, from: u64) -> Result<Vec<u8>>;
    /// Checks that `tokens` may be written; with data, writes them.
    fn write(
        &self,
        view: View,
        group: u16,
        tokens: &Range<u64>,
        data: Option<Vec<u8>>,
    ) -> Result<()>;
}

impl Mirrors {
    pub(super) fn new(groups: HashMap<u16, Mirror>) -> Self {
        Self {
            groups,
            views: Mutex::default(),
        }
    }

    pub(super) fn group(&self, group: u16) -> Result<&Mirror> {
        self.groups
            .get(&group)
            .ok_or(AdapterError::Unknown(What::Group(group)))
    }

    /// Begins to mirror a view; does nothing for one that is mirrored. `capacity` blocks are taken
    /// at once for a stage, as its table must not fail later.
    pub(super) fn open(&self, view: View, first_live: &[(u16, u64)], capacity: u64) -> Result<()> {
        let mut views = self.views.lock();
        if views.contains_key(&view) {
            return Ok(());
        }
        let mut parts = HashMap::new();
        for (group, mirror) in &self.groups {
            let live = first_live
                .iter()
                .find(|(g, _)| g == group)
                .map_or(0, |(_, t)| *t);
            let base = live / u64::from(BLOCK_TOKENS) * u64::from(BLOCK_TOKENS);
            let want = capacity.saturating_sub(base).div_ceil(BLOCK_TOKENS.into()) as usize;
            match mirror.alloc(want) {
                Ok(blocks) => {
                    let part = Part {
                        base,
                        blocks,
                        fetched: live,
                        unsent: Vec::new(),
                    };
                    parts.insert(*group, part);
                }
                Err(e) => {
                    self.give_back(&parts);
                    return Err(e);
                }
            }
        }
        views.insert(view, Arc::new(Mutex::new(parts)));
        Ok(())
    }

    fn give_back(&self, parts: &HashMap<u16, Part>) {
        for (group, part) in parts {
            if let Some(mirror) = self.groups.get(group) {
                mirror.release(&part.blocks);
            }
        }
    }

    /// Ends the mirroring of a view, if it is mirrored; also retries what was under a lease before.
    pub(super) fn close(&self, view: View) {
        let parts = self.views.lock().remove(&view);
        if let Some(parts) = parts {
            self.give_back(&parts.lock());
        }
        self.groups.values().for_each(|m| m.release(&[]));
    }

    fn parts(&self, view: View) -> Option<Parts> {
        self.views.lock().get(&view).cloned()
    }

    /// The local blocks of a view, after fetching what a pin has not got yet.
    pub(super) fn table(
        &self,
        engine: &dyn Slots,
        view: View,
        group: u16,
        tokens: Range<u64>,
    ) -> Result<Vec<u32>> {
        let Some(parts) = self.parts(view) else {
            // The engine knows best what to say about it.
            engine.read(view, group, &tokens, tokens.end)?;
            return Err(unknown(view));
        };
        let mut parts = parts.lock();
        let mirror = self.group(group);
        if let (View::Pin(_), Ok(mirror)) = (view, &mirror)
            && let Some(part) = parts.get_mut(&group)
        {
            return fetch(engine, view, mirror, group, part, &tokens);
        }
        engine.read(view, group, &tokens, tokens.end)?;
        mirror?;
        let part = parts.get(&group).ok_or(unknown(view))?;
        Ok(part.table(&tokens)?.to_vec())
    }

    /// A lease to write a stage's slots, remembered until they are sent.
    pub(super) fn write(
        &self,
        engine: &dyn Slots,
        view: View,
        group: u16,
        tokens: Range<u64>,
    ) -> Result<WriteLease> {
        engine.write(view, group, &tokens, None)?;
        let mirror = self.group(group)?;
        let parts = self.parts(view).ok_or(unknown(view))?;
        let mut parts = parts.lock();
        let part = parts.get_mut(&group).ok_or(unknown(view))?;
        let blocks = part.table(&tokens)?;
        let lease = mirror.info.pool.write(blocks)?;
        if !tokens.is_empty() {
            part.unsent.push(tokens);
        }
        Ok(lease)
    }

    /// Sends what was written below `upto`. `must` names the slots that the caller is about to
    /// hash: while a lease on those is out, `Busy`; others may wait.
    pub(super) fn send(
        &self,
        engine: &dyn Slots,
        view: View,
        upto: u64,
        must: &Range<u64>,
    ) -> Result<()> {
        let Some(parts) = self.parts(view) else {
            return Ok(());
        };
        let mut parts = parts.lock();
        for (group, part) in parts.iter_mut() {
            let mirror = self.group(*group)?;
            let mut waiting = Vec::new();
            for range in std::mem::take(&mut part.unsent) {
                let needed = range.start < must.end && must.start < range.end;
                let sent = match range.start < upto {
                    true => send_range(engine, view, *group, mirror, part, &range, needed),
                    false => Ok(false),
                };
                match sent {
                    Ok(true) => {}
                    Ok(false) => waiting.push(range),
                    Err(e) => {
                        // Nothing is forgotten on an error; slots sent twice are the same slots.
                        waiting.push(range);
                        part.unsent.append(&mut waiting);
                        return Err(e);
                    }
                }
            }
            part.unsent = waiting;
        }
        Ok(())
    }
}

fn unknown(view: View) -> AdapterError {
    AdapterError::Unknown(match view {
        View::Pin(p) => What::Pin(p),
        View::Stage(s) => What::Stage(s),
    })
}

fn fetch(
    engine: &dyn Slots,
    view: View,
    mirror: &Mirror,
    group: u16,
    part: &mut Part,
    tokens: &Range<u64>,
) -> Result<Vec<u32>> {
    // Checks the whole range and fetches nothing if nothing is missing.
    let layout = &mirror.info.layout;
    let missing = part.fetched.min(tokens.end)..tokens.end;
    if missing.is_empty() {
        engine.read(view, group, tokens, tokens.end)?;
    }
    for piece in slots::parts(layout, missing) {
        let whole = tokens.start.min(piece.start)..piece.end;
        let bytes = engine.read(view, group, &whole, piece.start)?;
        let have = part.base + part.blocks.len() as u64 * u64::from(BLOCK_TOKENS);
        if piece.end > have {
            let more = (piece.end - have).div_ceil(BLOCK_TOKENS.into()) as usize;
            part.blocks.extend(mirror.alloc(more)?);
        }
        let table = part.table(&piece)?;
        let seen = TokenView::new(layout, table, piece.clone())?;
        let mut lease = mirror
            .info
            .pool
            .write_until(table, Instant::now() + LEASE_WAIT)?;
        slots::scatter(&bytes, &seen, &mut lease, piece.clone())?;
        part.fetched = piece.end;
    }
    Ok(part.table(tokens)?.to_vec())
}

/// Whether the range was sent; `false` if its lease is still out and it is not needed yet.
fn send_range(
    engine: &dyn Slots,
    view: View,
    group: u16,
    mirror: &Mirror,
    part: &Part,
    range: &Range<u64>,
    needed: bool,
) -> Result<bool> {
    let table = part.table(range)?;
    let lease = match needed {
        true => mirror
            .info
            .pool
            .read_until(table, Instant::now() + LEASE_WAIT)?,
        false => match mirror.info.pool.read(table) {
            Ok(lease) => lease,
            Err(MemError::Busy { .. }) => return Ok(false),
            Err(e) => return Err(e.into()),
        },
    };
    let layout = &mirror.info.layout;
    let seen = TokenView::new(layout, table, range.clone())?;
    for piece in slots::parts(layout, range.clone()) {
        let data = slots::gather(&seen, &lease, piece.clone())?;
        engine.write(view, group, &piece, Some(data))?;
    }
    Ok(true)
}
