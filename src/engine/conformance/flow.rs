//! What the clauses have in common: starting, stepping, copying, and a migration up to a point.

use super::{Driver, Failed, Pair, Plan};
use crate::control_state::ControlState;
use crate::engine::adapter::{
    AdapterError, Boundary, ControlExport, EngineAdapter, ImportSpec, Manifest, PageDigests,
    PageRow, PinId, Pinned, StageId, View,
};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::page::TokenView;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) const REQUEST: RequestId = RequestId([0x51; 16]);
pub(super) const OTHER: RequestId = RequestId([0x52; 16]);
pub(super) const EPOCH: MigrationEpoch = MigrationEpoch(5);
pub(super) const OWNER: OwnerEpoch = OwnerEpoch(1);

/// Prompt and output are no multiples of usual block and page sizes, so that tails exist.
pub(super) const PLAN: Plan = Plan {
    prompt_tokens: 21,
    seed: 77,
    sampled: true,
    constrained: false,
    max_output: 90,
};

macro_rules! ensure {
    ($cond:expr, $($why:tt)+) => {
        if !$cond {
            return Err($crate::engine::conformance::Failed::Broken(format!($($why)+)));
        }
    };
}
pub(super) use ensure;

/// Names the call whose error broke the clause.
pub(super) trait Said<T> {
    fn said(self, call: &str) -> Result<T, Failed>;
}

impl<T> Said<T> for Result<T, AdapterError> {
    fn said(self, call: &str) -> Result<T, Failed> {
        self.map_err(|e| Failed::Broken(format!("{call}: {e}")))
    }
}

/// The call must fail, and so.
pub(super) fn refused<T>(
    result: Result<T, AdapterError>,
    call: &str,
    so: impl Fn(&AdapterError) -> bool,
) -> Result<(), Failed> {
    match result {
        Ok(_) => Err(Failed::Broken(format!("{call} succeeded"))),
        Err(e) if so(&e) => Ok(()),
        Err(e) => Err(Failed::Broken(format!(
            "{call} failed in the wrong way: {e}"
        ))),
    }
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub(super) fn start(
    driver: &mut dyn Driver,
    request: RequestId,
    plan: &Plan,
) -> Result<(), Failed> {
    driver.start(request, plan).map_err(Failed::Skipped)
}

/// Steps until a request has emitted `output` tokens (distinct numbers, the highest of them).
pub(super) fn decode(
    driver: &mut dyn Driver,
    request: RequestId,
    output: u64,
) -> Result<(), Failed> {
    for _ in 0..200 + 10 * output {
        if last_seq(driver, request) >= output {
            return Ok(());
        }
        driver.step();
    }
    let reached = last_seq(driver, request);
    Err(Failed::Broken(format!(
        "{request} emits no more after token {reached}, {output} were to come"
    )))
}

pub(super) fn last_seq(driver: &dyn Driver, request: RequestId) -> u64 {
    driver
        .emitted(request)
        .iter()
        .map(|e| e.seq)
        .max()
        .unwrap_or(0)
}

/// The emitted tokens by number, with the first emission of each; an unequal repeat is a breach.
pub(super) fn output(driver: &dyn Driver, request: RequestId) -> Result<Vec<u32>, Failed> {
    let mut tokens = Vec::new();
    for e in driver.emitted(request) {
        let at = (e.seq as usize).wrapping_sub(1);
        match tokens.get(at) {
            Some(have) => ensure!(*have == e.token, "token {} was emitted as two", e.seq),
            None => {
                ensure!(
                    at == tokens.len(),
                    "token {} follows {}",
                    e.seq,
                    tokens.len()
                );
                tokens.push(e.token);
            }
        }
    }
    Ok(tokens)
}

pub(super) fn groups(adapter: &dyn EngineAdapter) -> Vec<u16> {
    let header = adapter.capabilities().header;
    header.groups.iter().map(|g| g.group).collect()
}

pub(super) fn page_tokens(adapter: &dyn EngineAdapter) -> u64 {
    adapter.capabilities().header.page_tokens.into()
}

/// First token of a group that a view still has.
pub(super) fn first_live(pinned: &[(u16, u64)], group: u16) -> u64 {
    pinned
        .iter()
        .find(|(g, _)| *g == group)
        .map_or(0, |(_, t)| *t)
}

/// Free blocks of all pools of an engine, each pool once.
pub(super) fn free_blocks(driver: &dyn Driver) -> Result<usize, Failed> {
    let adapter = &*driver.resident();
    let mut pools = Vec::new();
    for group in groups(adapter) {
        let pool = adapter.pool(group).said("pool")?.pool;
        if !pools.iter().any(|p| Arc::ptr_eq(p, &pool)) {
            pools.push(pool);
        }
    }
    Ok(pools.iter().map(|p| p.stats().free).sum())
}

/// References on the blocks that hold `tokens` of a view, group by group.
pub(super) fn references(
    adapter: &dyn EngineAdapter,
    view: View,
    tokens: Range<u64>,
) -> Result<Vec<u32>, Failed> {
    let mut refs = Vec::new();
    for group in groups(adapter) {
        let pool = adapter.pool(group).said("pool")?.pool;
        for block in adapter.table(view, group, tokens.clone()).said("table")? {
            refs.push(pool.refs(block).map_err(|e| e.to_string())?);
        }
    }
    Ok(refs)
}

/// Digests of all pages of all groups below `upto`, hashed anew.
pub(super) fn hash_all(
    adapter: &dyn EngineAdapter,
    view: View,
    live: &[(u16, u64)],
    upto: u64,
) -> Result<Vec<PageRow>, Failed> {
    let size = page_tokens(adapter);
    let mut out = PageDigests::new();
    for group in groups(adapter) {
        let first = (first_live(live, group) / size) as u32;
        let pages = first..upto.div_ceil(size) as u32;
        adapter
            .hash_pages(view, group, pages, upto, &mut out)
            .said("hash_pages")?;
    }
    Ok(out.iter().map(|(row, _)| *row).collect())
}

/// Flips one bit of a token's KV in resident memory, behind the adapter's back.
pub(super) fn flip_bit(
    adapter: &dyn EngineAdapter,
    view: View,
    group: u16,
    token: u64,
) -> Result<(), Failed> {
    let info = adapter.pool(group).said("pool")?;
    let table = adapter.table(view, group, token..token + 1).said("table")?;
    let slot = (token % u64::from(info.layout.block_tokens())) as u32;
    let shard = info.layout.shard();
    let offset = info
        .layout
        .locate(
            shard.layers[0],
            shard.heads[0],
            crate::page::Component::K,
            table[0],
            slot,
        )
        .map_err(|e| e.to_string())?;
    let mut lease = info
        .pool
        .write_until(&table, soon())
        .map_err(|e| e.to_string())?;
    lease.bytes_mut(offset, 1)[0] ^= 0x10;
    Ok(())
}

/// Copies the KV of `tokens`, all groups, from a pin to a stage, one row at a time.
pub(super) fn copy(
    source: &dyn EngineAdapter,
    pin: PinId,
    destination: &dyn EngineAdapter,
    stage: StageId,
    live: &[(u16, u64)],
    tokens: Range<u64>,
) -> Result<(), Failed> {
    for group in groups(source) {
        let tokens = tokens.start.max(first_live(live, group))..tokens.end;
        if tokens.is_empty() {
            continue;
        }
        let (from, to) = (
            source.pool(group).said("pool")?,
            destination.pool(group).said("pool")?,
        );
        let (from_table, to_table) = (
            source
                .table(pin.into(), group, tokens.clone())
                .said("table of the pin")?,
            destination
                .table(stage.into(), group, tokens.clone())
                .said("table of the stage")?,
        );
        let text = |e: crate::page::PageError| Failed::Broken(format!("a table does not fit: {e}"));
        let from_view = TokenView::new(&from.layout, &from_table, tokens.clone()).map_err(text)?;
        let to_view = TokenView::new(&to.layout, &to_table, tokens.clone()).map_err(text)?;
        let read = from
            .pool
            .read_until(&from_table, soon())
            .map_err(|e| e.to_string())?;
        let mut write = destination
            .stage_write(stage, group, tokens.clone())
            .said("stage_write")?;
        for token in tokens {
            let (a, b) = (
                from_view.place(token).map_err(text)?,
                to_view.place(token).map_err(text)?,
            );
            for (layer, head) in to.layout.shard().iter() {
                for component in from.layout.components() {
                    let len = from.layout.geometry().row_bytes(*component) as usize;
                    let at = |l: &crate::page::BlockLayout, (block, slot)| {
                        l.locate(layer, head, *component, block, slot).map_err(text)
                    };
                    let (src, dst) = (at(&from.layout, a)?, at(&to.layout, b)?);
                    let row = read.try_bytes(src, len).map_err(|e| e.to_string())?;
                    write
                        .try_bytes_mut(dst, len)
                        .map_err(|e| e.to_string())?
                        .copy_from_slice(row);
                }
            }
        }
    }
    Ok(())
}

/// How far a migration is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Upto {
    Reserved,
    Copied,
    Hashed,
    Committed,
    Loaded,
    Armed,
}

/// A migration under way; the request is held at the source.
pub(super) struct Migration {
    pub(super) source: Arc<dyn EngineAdapter>,
    pub(super) destination: Arc<dyn EngineAdapter>,
    /// Their memory, see [`Driver::resident`].
    pub(super) source_memory: Arc<dyn EngineAdapter>,
    pub(super) destination_memory: Arc<dyn EngineAdapter>,
    pub(super) pinned: Pinned,
    pub(super) boundary: Boundary,
    pub(super) control: ControlExport,
    pub(super) spec: ImportSpec,
    pub(super) stage: StageId,
    /// What the source and the destination hashed; the latter is empty before `Hashed`.
    pub(super) expected: Vec<PageRow>,
    pub(super) actual: Vec<PageRow>,
}

impl Migration {
    pub(super) fn manifest(&self) -> Manifest {
        Manifest {
            kv_len: self.boundary.kv_len,
            first_live: self.pinned.first_live.clone(),
        }
    }
}

/// Pins, holds and reserves: what every migration starts with.
pub(super) fn reserve(pair: &Pair, request: RequestId) -> Result<Migration, Failed> {
    let (source, destination) = (pair.source.adapter(), pair.destination.adapter());
    let pinned = source.pin(request, EPOCH).said("pin")?;
    let boundary = source.hold(request, EPOCH, soon()).said("hold")?;
    let sealed = source.seal_through(pinned.pin).said("seal_through")?;
    ensure!(!sealed.dirty, "an undisturbed request is dirty");
    let control = source
        .export_control(pinned.pin.into(), OWNER)
        .said("export_control of the source")?;
    let state = ControlState::decode(&control.bytes)
        .map_err(|e| format!("the source's control state cannot be read: {e}"))?;
    let expected = hash_all(
        &*source,
        pinned.pin.into(),
        &pinned.first_live,
        boundary.kv_len,
    )?;
    let spec = ImportSpec {
        request,
        epoch: EPOCH,
        header: source.capabilities().header,
        source: source.capabilities().fingerprint,
        rng: state.rng.rng_kind,
        prompt_tokens: pinned.prompt_tokens,
        max_tokens: pinned.max_tokens,
        first_live: pinned.first_live.clone(),
    };
    let stage = destination.prepare_import(&spec).said("prepare_import")?;
    Ok(Migration {
        source,
        destination,
        source_memory: pair.source.resident(),
        destination_memory: pair.destination.resident(),
        pinned,
        boundary,
        control,
        spec,
        stage,
        expected,
        actual: Vec::new(),
    })
}

/// Takes a migration on from `Reserved`.
pub(super) fn advance(m: &mut Migration, upto: Upto) -> Result<(), Failed> {
    let (source, destination, stage) = (&*m.source, &*m.destination, m.stage);
    let (pin, live, kv_len) = (m.pinned.pin, &m.pinned.first_live, m.boundary.kv_len);
    if upto >= Upto::Copied {
        let tokens = source.token_log(pin.into(), 0).said("token_log")?;
        destination
            .import_tokens(stage, 0, &tokens)
            .said("import_tokens")?;
        let start = live.iter().map(|(_, t)| *t).min().unwrap_or(0);
        copy(source, pin, destination, stage, live, start..kv_len)?;
    }
    if upto >= Upto::Hashed {
        m.actual = hash_all(destination, stage.into(), live, kv_len)?;
        ensure!(
            m.actual == m.expected,
            "pages that were copied row by row hash otherwise at the destination"
        );
    }
    if upto >= Upto::Committed {
        let manifest = m.manifest();
        destination
            .commit_import(stage, &manifest)
            .said("commit_import")?;
    }
    if upto >= Upto::Loaded {
        destination
            .import_control(stage, &m.control.bytes, OWNER)
            .said("import_control")?;
    }
    if upto >= Upto::Armed {
        destination.arm(stage).said("arm")?;
    }
    Ok(())
}

/// Starts a request at the source, decodes `output` tokens and migrates it up to a point.
pub(super) fn migrate(
    pair: &mut Pair,
    plan: &Plan,
    output: u64,
    upto: Upto,
) -> Result<Migration, Failed> {
    start(&mut *pair.source, REQUEST, plan)?;
    decode(&mut *pair.source, REQUEST, output)?;
    let mut m = reserve(pair, REQUEST)?;
    advance(&mut m, upto)?;
    Ok(m)
}

/// One step further than the migration is.
pub(super) fn step_to(m: &Migration, upto: Upto) -> Result<(), Failed> {
    match upto {
        Upto::Committed => m
            .destination
            .commit_import(m.stage, &m.manifest())
            .said("commit_import"),
        Upto::Loaded => m
            .destination
            .import_control(m.stage, &m.control.bytes, OWNER)
            .said("import_control"),
        Upto::Armed => m.destination.arm(m.stage).said("arm").map(|_| ()),
        _ => Ok(()),
    }
}
