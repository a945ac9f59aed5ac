//! The adapter that breaks one promise, see [`Fault`].

use super::{Driver, Emitted, Fault, Plan};
use crate::control_state::ControlState;
use crate::engine::adapter::*;
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::WriteLease;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

pub(super) struct Spoilt {
    inner: Box<dyn Driver>,
    adapter: Arc<Bad>,
}

impl Spoilt {
    pub(super) fn new(inner: Box<dyn Driver>, fault: Fault) -> Self {
        let adapter = Arc::new(Bad {
            inner: inner.adapter(),
            fault,
            memory: Mutex::default(),
        });
        Self { inner, adapter }
    }
}

impl Driver for Spoilt {
    fn adapter(&self) -> Arc<dyn EngineAdapter> {
        self.adapter.clone()
    }
    fn resident(&self) -> Arc<dyn EngineAdapter> {
        self.inner.resident()
    }
    fn start(&mut self, request: RequestId, plan: &Plan) -> Result<(), String> {
        self.inner.start(request, plan)
    }
    fn step(&mut self) {
        self.inner.step();
    }
    fn emitted(&self, request: RequestId) -> Vec<Emitted> {
        self.inner.emitted(request)
    }
    fn abort(&mut self, request: RequestId) {
        self.inner.abort(request);
        if self.adapter.is(Fault::PinEndsWithRequest) {
            let pins = self.adapter.memory().pins.clone();
            for (pin, _) in pins.iter().filter(|(_, of)| **of == request) {
                let _ = self.adapter.inner.unpin(*pin);
            }
        }
    }
    fn rewrite_sealed_slot(&mut self, request: RequestId, token: u64) -> bool {
        self.inner.rewrite_sealed_slot(request, token)
    }
}

/// What the faults need to remember.
#[derive(Default)]
struct Memory {
    epochs: HashMap<RequestId, MigrationEpoch>,
    pins: HashMap<PinId, RequestId>,
    stages: HashMap<(RequestId, MigrationEpoch), StageId>,
    specs: HashMap<StageId, ImportSpec>,
    controls: HashMap<StageId, (Vec<u8>, OwnerEpoch)>,
    committed: Vec<StageId>,
    digests: HashMap<(View, u16, u32, u16), PageRow>,
    seals: u64,
    exports: u64,
}

struct Bad {
    inner: Arc<dyn EngineAdapter>,
    fault: Fault,
    memory: Mutex<Memory>,
}

impl Bad {
    fn is(&self, fault: Fault) -> bool {
        self.fault == fault
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, Memory> {
        self.memory
            .lock()
            .expect("no fault panics with the lock held")
    }

    /// The highest epoch seen, whatever the call's own.
    fn raised(&self, request: RequestId, epoch: MigrationEpoch) -> MigrationEpoch {
        if !self.is(Fault::EpochIgnored) {
            return epoch;
        }
        let mut memory = self.memory();
        let seen = memory.epochs.entry(request).or_default();
        *seen = epoch.max(*seen);
        *seen
    }

    fn mask<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(AdapterError::Unknown(_)) if self.is(Fault::UnknownIsBusy) => {
                Err(AdapterError::Busy)
            }
            other => other,
        }
    }

    /// Every block of a view, group by group.
    fn blocks(&self, view: View, upto: u64) -> Result<Vec<(PoolInfo, Vec<u32>)>> {
        let header = self.inner.capabilities().header;
        header
            .groups
            .iter()
            .map(|g| {
                Ok((
                    self.inner.pool(g.group)?,
                    self.inner.table(view, g.group, 0..upto)?,
                ))
            })
            .collect()
    }

    /// Writes to the first KV byte of a block, as a careless kernel would.
    fn scribble(&self, info: &PoolInfo, block: u32) {
        let Ok(mut extents) = info.layout.extents(block) else {
            return;
        };
        if let (Some((offset, _)), Ok(mut lease)) = (extents.next(), info.pool.write(&[block])) {
            lease.bytes_mut(offset, 1)[0] ^= 0x40;
        }
    }

    fn armed(&self, stage: StageId) -> Option<Armed> {
        let (bytes, _) = self.memory().controls.get(&stage).cloned()?;
        let state = ControlState::decode(&bytes).ok()?;
        Some(Armed {
            claim: crate::control_state::Claim::BitExact,
            replayed: state.seal(),
            pending_token: state.tokens.pending_token,
            mask_digest: state.grammar.map(|g| g.next_mask_digest),
        })
    }
}

impl EngineAdapter for Bad {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn pool(&self, group: u16) -> Result<PoolInfo> {
        self.mask(self.inner.pool(group))
    }

    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned> {
        let pinned = self.mask(self.inner.pin(request, self.raised(request, epoch)))?;
        self.memory().pins.insert(pinned.pin, request);
        Ok(pinned)
    }

    fn unpin(&self, pin: PinId) -> Result<Released> {
        self.inner.unpin(pin)
    }

    fn seal_through(&self, pin: PinId) -> Result<Sealed> {
        let mut sealed = self.mask(self.inner.seal_through(pin))?;
        match self.fault {
            Fault::WatermarkAhead => sealed.stable_len = sealed.accepted,
            Fault::DirtHidden => sealed.dirty = false,
            Fault::SealedRewritten => {
                let seals = {
                    let mut memory = self.memory();
                    memory.seals += 1;
                    memory.seals
                };
                if seals == 3 {
                    for (info, table) in self.blocks(pin.into(), sealed.stable_len)? {
                        self.scribble(&info, table[0]);
                    }
                }
            }
            _ => {}
        }
        Ok(sealed)
    }

    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>> {
        let mut table = self.mask(self.inner.table(view, group, tokens))?;
        if let View::Stage(stage) = view
            && self.is(Fault::CommitReorders)
            && self.memory().committed.contains(&stage)
        {
            table.reverse();
        }
        Ok(table)
    }

    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>> {
        self.mask(self.inner.token_log(view, from))
    }

    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        let mut fresh = PageDigests::new();
        let page_tokens = u64::from(self.inner.capabilities().header.page_tokens);
        self.mask(
            self.inner
                .hash_pages(view, group, pages.clone(), upto_tokens, &mut fresh),
        )?;
        if self.is(Fault::HashesWholePages) {
            // The whole last page where the engine lets it, under the label of the part.
            let whole = u64::from(pages.end) * page_tokens;
            let mut padded = PageDigests::new();
            if self
                .inner
                .hash_pages(view, group, pages, whole, &mut padded)
                .is_ok()
            {
                for ((row, _), (wide, leaves)) in fresh.iter().zip(padded.iter()) {
                    out.push(
                        PageRow {
                            digest: wide.digest,
                            ..*row
                        },
                        leaves,
                    );
                }
                return Ok(());
            }
        }
        let mut rows: Vec<(PageRow, Vec<_>)> =
            fresh.iter().map(|(r, l)| (*r, l.to_vec())).collect();
        match self.fault {
            Fault::PagesByBlock => {
                let span = u64::from(rows[0].0.page) * page_tokens..upto_tokens;
                let mut by_block: Vec<(u32, usize)> = rows
                    .iter()
                    .enumerate()
                    .filter_map(|(i, (row, _))| {
                        let first = u64::from(row.page) * page_tokens;
                        let token = first.max(span.start);
                        let table = self.inner.table(view, group, token..token + 1).ok()?;
                        Some((table[0], i))
                    })
                    .collect();
                by_block.sort_by_key(|(block, i)| (std::cmp::Reverse(*block), *i));
                rows = by_block.into_iter().map(|(_, i)| rows[i].clone()).collect();
            }
            Fault::DigestsCached => {
                let mut memory = self.memory();
                for (row, _) in &mut rows {
                    let key = (view, group, row.page, row.valid_tokens);
                    *row = *memory.digests.entry(key).or_insert(*row);
                }
            }
            _ => {}
        }
        for (row, leaves) in rows {
            out.push(row, &leaves);
        }
        Ok(())
    }

    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()> {
        self.mask(self.inner.hash_tail(view, upto_tokens, out))
    }

    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary> {
        let epoch = self.raised(request, epoch);
        let held = self.inner.hold(request, epoch, deadline);
        if self.is(Fault::HoldsAnything)
            && matches!(
                held,
                Err(AdapterError::Refused(
                    crate::control_state::Refusal::NoOutputYet
                ))
            )
        {
            let sealed = Sealed {
                stable_len: 0,
                accepted: 0,
                generation: 0,
                dirty: false,
            };
            return Ok(Boundary {
                seal: 0,
                kv_len: 0,
                pending_token: 0,
                sealed,
                last_step_done_ns: 0,
            });
        }
        let boundary = self.mask(held)?;
        match self.fault {
            Fault::HoldLetsGo => self.inner.release_hold(request, epoch)?,
            Fault::HoldFrees => {
                let pin = self.inner.pin(request, epoch)?.pin;
                for (info, table) in self.blocks(pin.into(), boundary.kv_len)? {
                    info.pool.release(&table)?;
                }
            }
            _ => {}
        }
        Ok(boundary)
    }

    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
        if self.is(Fault::ReleaseForgets) {
            return Ok(());
        }
        self.mask(
            self.inner
                .release_hold(request, self.raised(request, epoch)),
        )
    }

    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport> {
        let mut export = self.mask(self.inner.export_control(view, owner_epoch))?;
        match (self.fault, view) {
            (Fault::ControlDrifts, View::Pin(_)) => {
                let mut memory = self.memory();
                memory.exports += 1;
                let mut state = ControlState::decode(&export.bytes)?;
                state.identity.state_seq += memory.exports;
                export.bytes = state.encode()?;
            }
            (Fault::ControlEchoed, View::Stage(stage)) => {
                if let Some((bytes, _)) = self.memory().controls.get(&stage) {
                    export.bytes.clone_from(bytes);
                }
            }
            _ => {}
        }
        export.digest = crate::control_state::ControlDigest::of(
            &export.bytes,
            export.digest.offset,
            owner_epoch,
        );
        Ok(export)
    }

    fn export_state(&self, view: View, group: u16) -> Result<Vec<u8>> {
        self.inner.export_state(view, group)
    }

    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released> {
        let epoch = self.raised(request, epoch);
        match self.inner.retire(request, epoch) {
            Err(AdapterError::NotHeld) if self.is(Fault::RetireRunning) => {
                let soon = Instant::now() + LEASE_WAIT;
                self.inner.hold(request, epoch, soon)?;
                self.inner.retire(request, epoch)
            }
            other => self.mask(other),
        }
    }

    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId> {
        let mut spec = spec.clone();
        spec.epoch = self.raised(spec.request, spec.epoch);
        if self.is(Fault::ProfileIgnored) {
            spec.source = self.inner.capabilities().fingerprint;
        }
        let key = (spec.request, spec.epoch);
        let stage = match self.inner.prepare_import(&spec) {
            Err(AdapterError::Conflict(_)) if self.is(Fault::KeyIgnored) => {
                let first = self.memory().stages.get(&key).copied();
                first.ok_or(AdapterError::Busy)?
            }
            other => other?,
        };
        let mut memory = self.memory();
        memory.stages.insert(key, stage);
        memory.specs.insert(stage, spec);
        Ok(stage)
    }

    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()> {
        match self.inner.import_tokens(stage, from, tokens) {
            Err(AdapterError::Conflict(_)) if self.is(Fault::LogConflictsIgnored) => Ok(()),
            other => self.mask(other),
        }
    }

    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease> {
        match self.inner.stage_write(stage, group, tokens.clone()) {
            Err(AdapterError::Frozen { .. }) if self.is(Fault::FreezeBypassed) => {
                let table = self.inner.table(stage.into(), group, tokens)?;
                Ok(self.inner.pool(group)?.pool.write(&table)?)
            }
            other => self.mask(other),
        }
    }

    fn reopen(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<()> {
        self.mask(self.inner.reopen(stage, group, tokens))
    }

    fn commit_import(&self, stage: StageId, manifest: &Manifest) -> Result<()> {
        self.mask(self.inner.commit_import(stage, manifest))?;
        self.memory().committed.push(stage);
        Ok(())
    }

    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()> {
        let mut given = bytes.to_vec();
        if let Ok(mut state) = ControlState::decode(bytes) {
            match self.fault {
                Fault::ControlMangled => state.rng.draws += 1,
                Fault::ControlEchoed => state.rng.seed ^= 0x5eed,
                Fault::ArmTrusts => {
                    self.memory().controls.insert(stage, (given, owner_epoch));
                    // Whatever contradicts the replay is not even looked at.
                    return match self.inner.import_control(stage, bytes, owner_epoch) {
                        Err(AdapterError::ReplayMismatch(_)) => Ok(()),
                        other => other,
                    };
                }
                _ => {}
            }
            given = state.encode()?;
        }
        self.mask(self.inner.import_control(stage, &given, owner_epoch))?;
        let mut memory = self.memory();
        memory.controls.insert(stage, (bytes.to_vec(), owner_epoch));
        Ok(())
    }

    fn import_state(&self, stage: StageId, group: u16, bytes: &[u8]) -> Result<()> {
        self.inner.import_state(stage, group, bytes)
    }

    fn arm(&self, stage: StageId) -> Result<Armed> {
        match (self.fault, self.inner.arm(stage)) {
            (
                Fault::ArmTrusts,
                Err(AdapterError::ReplayMismatch(_) | AdapterError::StageState { .. }),
            ) => self.armed(stage).ok_or(AdapterError::Busy),
            (
                Fault::ArmHashesItself | Fault::ReopenedCountsAsHashed,
                Err(AdapterError::NotHashed { .. }),
            ) => {
                let kv_len = {
                    let memory = self.memory();
                    let (bytes, _) = memory.controls.get(&stage).ok_or(AdapterError::Busy)?;
                    ControlState::decode(bytes)?.position.kv_len
                };
                let mut out = PageDigests::new();
                let page = u64::from(self.inner.capabilities().header.page_tokens);
                for group in self.inner.capabilities().header.groups {
                    let pages = 0..kv_len.div_ceil(page) as u32;
                    self.inner
                        .hash_pages(stage.into(), group.group, pages, kv_len, &mut out)?;
                }
                self.inner.arm(stage)
            }
            (Fault::ArmRuns, Ok(armed)) => {
                let activation = Activation {
                    owner_epoch: OwnerEpoch(1 << 40),
                    reemit_from: armed.replayed + 1,
                };
                self.inner.activate(stage, activation)?;
                Ok(armed)
            }
            (_, other) => self.mask(other),
        }
    }

    fn disarm(&self, stage: StageId) -> Result<Released> {
        self.inner.disarm(stage)
    }

    fn abort_import(&self, stage: StageId) -> Result<Released> {
        match self.fault {
            Fault::AbortLeaks => {
                let first = self.memory().specs.remove(&stage).is_some();
                Ok(Released {
                    blocks: u64::from(first),
                })
            }
            Fault::AbortWaitsForLeases => {
                let spec = self.memory().specs.get(&stage).cloned();
                if let Some(spec) = spec {
                    for (info, table) in self.blocks(stage.into(), spec.max_tokens)? {
                        info.pool.write(&table)?;
                    }
                }
                self.inner.abort_import(stage)
            }
            _ => self.inner.abort_import(stage),
        }
    }

    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated> {
        match self.mask(self.inner.activate(stage, activation))? {
            Activated::Already if self.is(Fault::ActivatesAgain) => Ok(Activated::Now { at_ns: 0 }),
            other => Ok(other),
        }
    }

    fn journal_checkpoint(&self, request: RequestId, deadline: Instant) -> Result<Checkpoint> {
        self.mask(self.inner.journal_checkpoint(request, deadline))
    }

    fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt> {
        let mut rebuilt = self.inner.rebuild_from_journal(image)?;
        if self.is(Fault::RebuildBoasts) {
            rebuilt.class = RebuildClass::BitExact;
        }
        Ok(rebuilt)
    }
}
