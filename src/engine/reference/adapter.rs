//! [`EngineAdapter`] for the reference engine: each call is a method of one of the files beside it.

use super::engine::Engine;
use super::identity::ENGINE_KIND;
use super::kvlog::GROUP;
use crate::control_state::RngKind;
use crate::engine::adapter::{
    Activated, Activation, AdapterError, Armed, Boundary, Capabilities, Checkpoint, ControlExport,
    EngineAdapter, ImportSpec, JournalImage, Manifest, MutableState, PageDigests, PinId, Pinned,
    PoolInfo, RebuildClass, Rebuilt, Released, Result, Sealed, StageId, TailWrites, View, What,
};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::WriteLease;
use std::ops::Range;
use std::time::Instant;

impl EngineAdapter for Engine {
    fn capabilities(&self) -> Capabilities {
        let shared = self.shared();
        let info = &shared.parts.info;
        Capabilities {
            incarnation: shared.incarnation,
            engine_kind: ENGINE_KIND,
            fingerprint: shared.parts.fingerprint,
            model: info.model,
            weights_version: info.weights_version,
            tokenizer: info.tokenizer,
            header: shared.parts.digester.header().clone(),
            max_context: info.max_context,
            rng_kinds: vec![RngKind::Greedy, RngKind::Counter],
            batch_invariant: true,
            partial_sequence: true,
            mutable_state: MutableState::None,
            tail: TailWrites::AppendOnly,
            rebuild: RebuildClass::BitExact,
        }
    }

    fn pool(&self, group: u16) -> Result<PoolInfo> {
        if group != GROUP {
            return Err(AdapterError::Unknown(What::Group(group)));
        }
        let parts = &self.shared().parts;
        Ok(PoolInfo {
            pool: parts.pool.clone(),
            layout: parts.layout.clone(),
        })
    }

    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned> {
        self.shared().pin(request, epoch)
    }

    fn unpin(&self, pin: PinId) -> Result<Released> {
        self.shared().unpin(pin)
    }

    fn seal_through(&self, pin: PinId) -> Result<Sealed> {
        self.shared().seal_through(pin)
    }

    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>> {
        self.shared().table_of(view, group, tokens)
    }

    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>> {
        self.shared().token_log_of(view, from)
    }

    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        self.shared()
            .hash_view(view, group, pages, upto_tokens, out)
    }

    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()> {
        self.shared().hash_view_tail(view, upto_tokens, out)
    }

    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        deadline: Instant,
    ) -> Result<Boundary> {
        self.shared().hold(request, epoch, deadline)
    }

    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
        self.shared().release_hold(request, epoch)
    }

    fn rehearse_export(&self, pin: PinId) -> Option<Vec<u8>> {
        self.shared().rehearse_export(pin)
    }

    fn rehearse_import(&self, stage: StageId, preview: &[u8]) {
        self.shared().rehearse_import(stage, preview);
    }

    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport> {
        match view {
            View::Pin(pin) => self.shared().export_pinned(pin, owner_epoch),
            View::Stage(stage) => self.shared().export_staged(stage, owner_epoch),
        }
    }

    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released> {
        self.shared().retire(request, epoch)
    }

    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId> {
        self.shared().prepare_import(spec)
    }

    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()> {
        self.shared().import_tokens(stage, from, tokens)
    }

    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease> {
        self.shared().stage_write(stage, group, tokens)
    }

    fn reopen(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<()> {
        self.shared().reopen(stage, group, &tokens)
    }

    fn commit_import(&self, stage: StageId, manifest: &Manifest) -> Result<()> {
        self.shared().commit_import(stage, manifest)
    }

    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()> {
        self.shared().import_control(stage, bytes, owner_epoch)
    }

    fn arm(&self, stage: StageId) -> Result<Armed> {
        self.shared().arm(stage)
    }

    fn disarm(&self, stage: StageId) -> Result<Released> {
        self.shared().drop_stage(stage, true)
    }

    fn abort_import(&self, stage: StageId) -> Result<Released> {
        self.shared().drop_stage(stage, false)
    }

    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated> {
        self.shared().activate(stage, activation)
    }

    fn journal_checkpoint(&self, request: RequestId, deadline: Instant) -> Result<Checkpoint> {
        self.shared().journal_checkpoint(request, deadline)
    }

    fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt> {
        self.shared().rebuild_from_journal(image)
    }
}
