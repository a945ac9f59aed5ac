//! The adapter's calls on a request that comes in, up to its control state; [`super::arm`] has what
//! comes after.

use super::kvlog::{GROUP, PageLog};
use super::shared::{Inner, Shared};
use super::stage::{Loaded, Ranges, Stage};
use crate::control_state::{ControlDigest, ControlState, Refusal, RngKind, TokenHasher};
use crate::engine::adapter::{
    AdapterError, ControlExport, ImportSpec, Manifest, Result, StageId, StageState,
};
use crate::id::OwnerEpoch;
use crate::mem::WriteLease;
use std::ops::Range;

pub(super) fn needs(is: StageState, needs: StageState) -> AdapterError {
    AdapterError::StageState { is, needs }
}

impl Shared {
    pub(crate) fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId> {
        let inner = &mut *self.inner.lock();
        inner.check_floor(spec.request, spec.epoch)?;
        let known = inner
            .stages
            .iter()
            .find(|(_, s)| s.request == spec.request && s.epoch == spec.epoch);
        if let Some((id, stage)) = known {
            return match &stage.spec {
                Some(earlier) if earlier == spec => Ok(*id),
                _ => Err(AdapterError::Conflict("the import's specification")),
            };
        }
        if inner.current.contains_key(&spec.request) {
            return Err(AdapterError::Conflict("the request, which runs here,"));
        }
        self.fits(spec)?;
        let blocks = inner.blocks.for_tokens(spec.max_tokens);
        let table = inner
            .blocks
            .take(blocks)
            .map_err(|free| AdapterError::OutOfBlocks {
                needed: blocks,
                free,
            })?;
        inner.raise_floor(spec.request, spec.epoch)?;
        let id = StageId(inner.fresh());
        let stage = Stage {
            request: spec.request,
            epoch: spec.epoch,
            spec: Some(spec.clone()),
            state: StageState::Open,
            log: Vec::new(),
            prompt_len: spec.prompt_tokens as usize,
            prompt_hash: TokenHasher::new(),
            max_tokens: spec.max_tokens,
            table,
            written: 0,
            cleared: 0,
            frozen: Ranges::default(),
            hashing: Vec::new(),
            pages: PageLog::new(&self.parts.digester)?,
            tail: None,
            manifest: None,
            prepared: None,
            loaded: None,
            armed: None,
            class: None,
            activated: None,
        };
        inner.stages.insert(id, stage);
        Ok(id)
    }

    fn fits(&self, spec: &ImportSpec) -> Result<()> {
        let own = self.parts.digester.header();
        let differs = |what| Err(AdapterError::Incompatible(what));
        if spec.header.model != own.model {
            return differs("the model");
        }
        if spec.header.groups != own.groups {
            return differs("the KV geometry");
        }
        if spec.header.page_tokens != own.page_tokens {
            return differs("the canonical page size");
        }
        if spec.header.scheme != own.scheme {
            return differs("the digest scheme");
        }
        if spec.max_tokens > u64::from(self.parts.info.max_context) {
            return differs("the longest context");
        }
        if spec.prompt_tokens == 0 || spec.prompt_tokens > spec.max_tokens {
            return Err(AdapterError::Caller(
                "a request holds at least one prompt token, and at most max_tokens",
            ));
        }
        if spec.first_live != [(GROUP, 0)] {
            return differs("the first live token");
        }
        if !matches!(spec.rng, RngKind::Greedy | RngKind::Counter) {
            return Err(Refusal::OpaqueRng.into());
        }
        self.config
            .profile_policy
            .judge(&spec.source, &self.parts.fingerprint)?;
        Ok(())
    }

    pub(crate) fn import_tokens(&self, id: StageId, from: u64, tokens: &[u32]) -> Result<()> {
        let vocab = self.parts.info.vocab as u32;
        let inner = &mut *self.inner.lock();
        let stage = inner.stage_mut(id)?;
        if !matches!(stage.state, StageState::Open | StageState::Committed) {
            return Err(needs(stage.state, StageState::Committed));
        }
        let have = stage.log.len() as u64;
        if from > have {
            return Err(AdapterError::OutOfRange {
                asked: from,
                limit: have,
            });
        }
        let (asked, limit) = (
            from.saturating_add(tokens.len() as u64),
            stage.max_tokens + 1,
        );
        if asked > limit {
            return Err(AdapterError::OutOfRange { asked, limit });
        }
        if tokens.iter().any(|t| *t >= vocab) {
            return Err(AdapterError::Caller("a token outside the vocabulary"));
        }
        let known = &stage.log[from as usize..];
        let again = known.len().min(tokens.len());
        if known[..again] != tokens[..again] {
            return Err(AdapterError::Conflict("a token"));
        }
        for token in &tokens[again..] {
            if stage.log.len() < stage.prompt_len {
                stage.prompt_hash.push(*token);
            }
            stage.log.push(*token);
        }
        Ok(())
    }

    pub(crate) fn stage_write(
        &self,
        id: StageId,
        group: u16,
        tokens: Range<u64>,
    ) -> Result<WriteLease> {
        if group != GROUP {
            return Err(AdapterError::Unknown(crate::engine::adapter::What::Group(
                group,
            )));
        }
        let inner = &mut *self.inner.lock();
        let stage = inner.stage_mut(id)?;
        if stage.state != StageState::Open {
            return Err(needs(stage.state, StageState::Open));
        }
        if tokens.end > stage.max_tokens || tokens.start > tokens.end {
            return Err(AdapterError::OutOfRange {
                asked: tokens.end.max(tokens.start),
                limit: stage.max_tokens,
            });
        }
        if let Some(token) = stage.frozen.first_in(&tokens) {
            return Err(AdapterError::Frozen { group, token });
        }
        let overlaps = |r: &Range<u64>| r.start < tokens.end && tokens.start < r.end;
        if stage.hashing.iter().any(overlaps) {
            return Err(AdapterError::Busy);
        }
        let per_block = u64::from(self.config.block_tokens);
        let blocks = (tokens.start / per_block) as usize..tokens.end.div_ceil(per_block) as usize;
        // Given under the lock: a later hash or commit finds it out.
        let mut lease = self.parts.pool.write(&stage.table[blocks])?;
        // What commit must find zero is zeroed now, while the source still decodes: the rest of the
        // last block, and the next one, which the fence's few slots may reach.
        let used = tokens.end.div_ceil(per_block);
        if tokens.is_empty() || tokens.end < stage.written {
            return Ok(lease); // a second try: what comes after it is not free to be zeroed
        }
        stage.written = tokens.end;
        // Half a block of margin: more than a fence brings.
        if stage.cleared >= tokens.end + per_block / 2 {
            return Ok(lease);
        }
        // In the midst of a STREAM the next write covers it: a fence comes behind small ones.
        if tokens.end - tokens.start > 2 * per_block {
            return Ok(lease);
        }
        let from = stage.cleared.max(tokens.end);
        let last = stage.table[used as usize - 1];
        let mut next = stage
            .table
            .get(used as usize)
            .and_then(|b| self.parts.pool.write(&[*b]).ok().map(|lease| (*b, lease)));
        let clear_to = (used + u64::from(next.is_some())) * per_block;
        if from < used * per_block {
            self.zero_slots(&mut lease, last, from - (used - 1) * per_block)?;
        }
        if let Some((block, lease)) = &mut next
            && from < clear_to
        {
            self.zero_slots(lease, *block, from.saturating_sub(used * per_block))?;
        }
        stage.cleared = stage.cleared.max(clear_to);
        Ok(lease)
    }

    pub(crate) fn reopen(&self, id: StageId, group: u16, tokens: &Range<u64>) -> Result<()> {
        if group != GROUP {
            let unknown = crate::engine::adapter::What::Group(group);
            return Err(AdapterError::Unknown(unknown));
        }
        let inner = &mut *self.inner.lock();
        let stage = inner.stage_mut(id)?;
        if stage.state != StageState::Open {
            return Err(needs(stage.state, StageState::Open));
        }
        if tokens.end > stage.max_tokens || tokens.start > tokens.end {
            return Err(AdapterError::OutOfRange {
                asked: tokens.end.max(tokens.start),
                limit: stage.max_tokens,
            });
        }
        let overlaps = |r: &Range<u64>| r.start < tokens.end && tokens.start < r.end;
        if stage.hashing.iter().any(overlaps) {
            return Err(AdapterError::Busy);
        }
        stage.frozen.remove(tokens);
        // Leaf states over slots that may change are worth nothing.
        stage.tail = None;
        Ok(())
    }

    pub(crate) fn commit_import(&self, id: StageId, manifest: &Manifest) -> Result<()> {
        let inner = &mut *self.inner.lock();
        let per_block = u64::from(self.config.block_tokens);
        let stage = inner.stage_mut(id)?;
        if let Some(earlier) = &stage.manifest {
            return if earlier == manifest {
                Ok(())
            } else {
                Err(AdapterError::Conflict("the manifest"))
            };
        }
        if stage.state != StageState::Open {
            return Err(needs(stage.state, StageState::Open));
        }
        if manifest.kv_len > stage.max_tokens {
            return Err(AdapterError::OutOfRange {
                asked: manifest.kv_len,
                limit: stage.max_tokens,
            });
        }
        if manifest.kv_len == 0 {
            return Err(AdapterError::Caller("a request has KV for its prompt"));
        }
        if manifest.first_live != [(GROUP, 0)] {
            return Err(AdapterError::Incompatible("the first live token"));
        }
        // No write lease may be out. A block hashed to its end cannot have one; the others are
        // leased here, which also keeps readers away while the rest of the last one is zeroed.
        let used = manifest.kv_len.div_ceil(per_block);
        let mut open: Vec<u32> = stage
            .frozen
            .gaps(0..manifest.kv_len)
            .flat_map(|gap| gap.start / per_block..gap.end.div_ceil(per_block))
            .chain([used - 1])
            .map(|b| stage.table[b as usize])
            .collect();
        open.sort_unstable();
        open.dedup();
        let mut lease = self.parts.pool.write(&open)?;
        if stage.written > manifest.kv_len || stage.cleared < used * per_block {
            let last = stage.table[used as usize - 1];
            self.zero_slots(&mut lease, last, manifest.kv_len - (used - 1) * per_block)?;
        }
        stage.manifest = Some(manifest.clone());
        stage.state = StageState::Committed;
        Ok(())
    }

    /// Zeroes the slots of `block` from `from` on, in as few runs as the layout allows.
    fn zero_slots(&self, lease: &mut WriteLease, block: u32, from: u64) -> Result<()> {
        let layout = &self.parts.layout;
        let row = u64::from(layout.geometry().k_bytes);
        let heads = u64::from(layout.geometry().kv_heads);
        let slots = u64::from(self.config.block_tokens).saturating_sub(from);
        for p in 0..self.parts.info.layers as usize * 2 {
            let plane = layout.plane(p / 2, p % 2);
            let at = plane.base + u64::from(block) * plane.block_stride + from * plane.slot_stride;
            // (number, stride) of what repeats outside a run, and the run.
            let mut dims = [(slots, plane.slot_stride), (heads, plane.head_stride)];
            let mut run = row;
            for _ in 0..2 {
                for (n, stride) in &mut dims {
                    if *n > 1 && *stride == run {
                        run *= *n;
                        *n = 1;
                    }
                }
            }
            for i in 0..dims[0].0 {
                for j in 0..dims[1].0 {
                    let start = at + i * dims[0].1 + j * dims[1].1;
                    lease.try_bytes_mut(start, run as usize)?.fill(0);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn import_control(
        &self,
        id: StageId,
        bytes: &[u8],
        owner_epoch: OwnerEpoch,
    ) -> Result<()> {
        let mut inner = self.inner.lock();
        let stage = inner.stage(id)?;
        match (stage.state, &stage.loaded) {
            (StageState::Loaded | StageState::Armed, Some(l)) => {
                return if l.bytes == bytes && l.owner_epoch == owner_epoch {
                    Ok(())
                } else {
                    Err(AdapterError::Conflict("the control state"))
                };
            }
            (StageState::Committed, _) => {}
            (is, _) => return Err(needs(is, StageState::Committed)),
        }
        let declared = ControlState::decode(bytes)?;
        let claim = self.check_declared(stage, &declared)?;
        let stage = inner.stage_mut(id)?;
        let prepared = stage.prepared.take().filter(|p| p.leads_to(&declared));
        let have = prepared.as_ref().map_or(0, |p| p.live.tokens.len());
        let (log, prompt_hash) = (stage.log[have..].to_vec(), stage.prompt_hash.finish());
        // The replay may take a while with a long output; a second caller may come first.
        let replayed = parking_lot::MutexGuard::unlocked(&mut inner, || match prepared {
            Some(prepared) => self.go_on(*prepared, &declared, &log, owner_epoch),
            None => self.live_from(&declared, &log, prompt_hash, owner_epoch),
        });
        let (live, allowed) = replayed?;
        let stage = inner.stage_mut(id)?;
        if stage.state != StageState::Committed {
            return Err(AdapterError::Conflict("a control state imported meanwhile"));
        }
        stage.loaded = Some(Box::new(Loaded {
            bytes: bytes.to_vec(),
            declared,
            owner_epoch,
            claim,
            live,
            allowed,
        }));
        stage.state = StageState::Loaded;
        Ok(())
    }

    fn check_declared(
        &self,
        stage: &Stage,
        declared: &ControlState,
    ) -> Result<crate::control_state::Claim> {
        let mismatch = |what| Err(AdapterError::ReplayMismatch(what));
        if declared.identity.request_id != stage.request {
            return mismatch("the request");
        }
        if declared.tokens.prompt.count != stage.prompt_len as u64 {
            return mismatch("the length of the prompt");
        }
        if stage.manifest.as_ref().map(|m| m.kv_len) != Some(declared.position.kv_len) {
            return mismatch("the number of tokens with KV");
        }
        if stage.log.len() as u64 != declared.position.kv_len + 1 {
            return mismatch("the number of tokens");
        }
        if let Some(spec) = &stage.spec {
            if declared.fingerprint() != spec.source {
                return mismatch("the source's build or numerics");
            }
            // A request that draws nothing goes on under any generator.
            let draws = declared.rng.rng_kind != RngKind::Greedy;
            if draws && declared.rng.rng_kind != spec.rng {
                return mismatch("the generator");
            }
        }
        let claim = self
            .config
            .profile_policy
            .judge(&declared.fingerprint(), &self.parts.fingerprint)?;
        let most = declared
            .tokens
            .prompt
            .count
            .saturating_add(u64::from(declared.limits.max_output))
            .min(u64::from(declared.limits.max_context));
        if most > stage.max_tokens {
            return Err(AdapterError::Incompatible("the capacity reserved"));
        }
        Ok(claim)
    }

    pub(crate) fn export_staged(&self, id: StageId, owner: OwnerEpoch) -> Result<ControlExport> {
        let mut inner = self.inner.lock();
        let stage = inner.stage(id)?;
        let (state, Some(loaded)) = (stage.state, &stage.loaded) else {
            return Err(needs(stage.state, StageState::Loaded));
        };
        if !matches!(state, StageState::Loaded | StageState::Armed) {
            return Err(needs(state, StageState::Loaded));
        }
        if loaded.owner_epoch != owner {
            return Err(AdapterError::OwnerEpoch {
                asked: owner,
                current: loaded.owner_epoch,
            });
        }
        let set = self.staged_set_digest(&mut inner, id)?;
        let stage = inner.stage(id)?;
        let Some(loaded) = &stage.loaded else {
            return Err(needs(stage.state, StageState::Loaded));
        };
        let bytes = self.control_of(&loaded.live, set)?.encode()?;
        let digest = ControlDigest::of(&bytes, loaded.live.seal(), owner);
        Ok(ControlExport { bytes, digest })
    }

    /// The set digest of a committed stage, hashing (and freezing) what no call has hashed yet.
    pub(super) fn staged_set_digest(
        &self,
        inner: &mut parking_lot::MutexGuard<'_, Inner>,
        id: StageId,
    ) -> Result<crate::digest::SetDigest> {
        loop {
            let stage = inner.stage_mut(id)?;
            let kv_len = stage.manifest.as_ref().map_or(0, |m| m.kv_len);
            let missing = match stage.pages.set_digest(kv_len)? {
                Ok(set) => return Ok(set),
                Err(missing) => missing,
            };
            let table = stage.table.clone();
            let hashed = parking_lot::MutexGuard::unlocked(inner, || {
                self.hash_missing(&table, &missing, kv_len)
            })?;
            let stage = inner.stage_mut(id)?;
            let page = u64::from(self.parts.digester.header().page_tokens);
            for (upto, digest) in hashed {
                // Committed: nobody can write any more, so what was read is what stays.
                stage.frozen.insert((upto - 1) / page * page..upto);
                stage.pages.record(upto, digest);
            }
        }
    }
}
