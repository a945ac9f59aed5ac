//! Rebuilding a lost request from its journal: KV is computed again, tokens are replayed.

use super::kvlog::{GROUP, PageLog};
use super::model::{PastKv, SeqInput, StepOutput};
use super::shared::Shared;
use super::stage::{Loaded, Ranges, Stage};
use crate::control_state::{Claim, ControlState, RngKind, TokenHasher, TokenLogHash};
use crate::engine::adapter::{
    AdapterError, Armed, JournalImage, LEASE_WAIT, Manifest, RebuildClass, Rebuilt, Result,
    StageId, StageState,
};
use crate::mem::BlockId;
use std::time::Instant;

impl Shared {
    pub(crate) fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt> {
        let (request, epoch) = (image.request, image.epoch);
        let declared = ControlState::decode(&image.checkpoint.control)?;
        contradiction(image, &declared).map_or(Ok(()), |w| Err(AdapterError::Conflict(w)))?;
        let fingerprint = declared.fingerprint();
        let claim = self
            .config
            .profile_policy
            .judge(&fingerprint, &self.parts.fingerprint)?;
        let seal = image.output.len() as u64;
        let log: Vec<u32> = image.prompt.iter().chain(&image.output).copied().collect();
        let kv_len = log.len() as u64 - 1;
        let state = self.state_at_journal(image, declared)?;
        let vocab = self.parts.info.vocab as u32;
        if log.iter().any(|t| *t >= vocab) {
            return Err(AdapterError::Caller("a token outside the vocabulary"));
        }
        let max_tokens = (image.prompt.len() as u64 + u64::from(state.limits.max_output))
            .min(u64::from(state.limits.max_context));

        let table = {
            let inner = &mut *self.inner.lock();
            inner.check_floor(request, epoch)?;
            let known = inner
                .stages
                .iter()
                .find(|(_, s)| s.request == request && s.epoch == epoch);
            if let Some((id, stage)) = known {
                return already(*id, stage, &log);
            }
            if inner.current.contains_key(&request) {
                return Err(AdapterError::Conflict("the request, which runs here,"));
            }
            let needed = inner.blocks.for_tokens(max_tokens.max(kv_len));
            inner
                .blocks
                .take(needed)
                .map_err(|free| AdapterError::OutOfBlocks { needed, free })?
        };
        let built = self.compute_and_check(image, &state, &log, &table, claim);
        let inner = &mut *self.inner.lock();
        let publish = built.and_then(|built| {
            // The lock was given up meanwhile: a newer attempt may have come.
            inner.raise_floor(request, epoch)?;
            if inner.current.contains_key(&request) {
                return Err(AdapterError::Conflict("the request, which runs here,"));
            }
            let twin = |s: &Stage| s.request == request && s.epoch == epoch;
            if inner.stages.values().any(twin) {
                return Err(AdapterError::Conflict(
                    "a rebuild that runs at the same time",
                ));
            }
            Ok(built)
        });
        let (pages, live, class) = match publish {
            Ok(built) => built,
            Err(e) => {
                inner.blocks.give_back(&table);
                return Err(e);
            }
        };
        let mut frozen = Ranges::default();
        frozen.insert(0..kv_len);
        let armed = Armed {
            claim,
            replayed: seal,
            pending_token: state.tokens.pending_token,
            mask_digest: live.matcher.as_ref().map(|m| m.mask_digest()),
        };
        let id = StageId(inner.fresh());
        let stage = Stage {
            request,
            epoch,
            spec: None,
            state: StageState::Armed,
            prompt_len: image.prompt.len(),
            prompt_hash: TokenHasher::new(),
            log,
            max_tokens,
            table,
            written: 0,
            cleared: 0,
            frozen,
            hashing: Vec::new(),
            pages,
            tail: None,
            manifest: Some(Manifest {
                kv_len,
                first_live: vec![(GROUP, 0)],
            }),
            prepared: None,
            loaded: Some(Box::new(Loaded {
                bytes: image.checkpoint.control.clone(),
                declared: state,
                owner_epoch: image.owner_epoch,
                claim,
                live,
                allowed: true,
            })),
            armed: Some(armed),
            class: Some(class),
            activated: None,
        };
        inner.stages.insert(id, stage);
        Ok(Rebuilt {
            stage: id,
            class,
            seal,
        })
    }

    /// The checkpoint's state moved on to the end of the journal.
    fn state_at_journal(&self, image: &JournalImage, mut s: ControlState) -> Result<ControlState> {
        let more = image.output.len() as u64 - image.checkpoint.seal;
        s.tokens.output = TokenLogHash::of(&image.output);
        s.tokens.pending_token = image.output.last().copied().unwrap_or(0);
        s.position.kv_len += more;
        s.position.next_pos += more as i64;
        s.identity.state_seq += more;
        if s.rng.rng_kind == RngKind::Counter {
            // One draw for each token.
            s.rng.draws += more;
        }
        Ok(s)
    }

    fn compute_and_check(
        &self,
        image: &JournalImage,
        state: &ControlState,
        log: &[u32],
        table: &[BlockId],
        claim: Claim,
    ) -> Result<(PageLog, Box<super::live::Live>, RebuildClass)> {
        let prompt_hash = TokenLogHash::of(&image.prompt);
        let (live, allowed) = self.live_from(state, log, prompt_hash, image.owner_epoch)?;
        if !allowed {
            return Err(AdapterError::ReplayMismatch(
                "the grammar's refusal of an output token",
            ));
        }
        let kv_len = log.len() - 1;
        self.prefill(&log[..kv_len], table)?;
        let mut pages = PageLog::new(&self.parts.digester)?;
        let at = image.checkpoint.kv_len;
        let digest = self.digest_through(&mut pages, table, at)?;
        let class = match image.checkpoint.set_digest {
            Some(set) if set == digest => RebuildClass::BitExact,
            None if claim == Claim::BitExact => RebuildClass::TokenExactOnly,
            _ => RebuildClass::Recomputed,
        };
        self.digest_through(&mut pages, table, kv_len as u64)?;
        Ok((pages, live, class))
    }

    /// Computes the KV of `tokens` into `table`, chunk by chunk, on this thread.
    fn prefill(&self, tokens: &[u32], table: &[BlockId]) -> Result<()> {
        let per_block = self.config.block_tokens as usize;
        let token_bytes = self.parts.info.token_bytes as usize;
        let mut out = StepOutput::default();
        let mut start = 0usize;
        for chunk in tokens.chunks(self.config.prefill_chunk) {
            let blocks = &table[..start.div_ceil(per_block)];
            let lease = self
                .parts
                .pool
                .read_until(blocks, Instant::now() + LEASE_WAIT)?;
            let input = SeqInput {
                tokens: chunk,
                start,
                past: (start > 0).then_some(PastKv {
                    lease: &lease,
                    layout: &self.parts.layout,
                    table,
                    len: start,
                }),
                want_logits: false,
                fill: None,
            };
            self.parts.model.forward(&[input], &mut out);
            drop(lease);
            let kv: Vec<&[u8]> = out.kv.chunks_exact(token_bytes).collect();
            if !self.write_kv(table, start, &kv) {
                return Err(AdapterError::Busy);
            }
            start += chunk.len();
        }
        Ok(())
    }

    fn digest_through(
        &self,
        pages: &mut PageLog,
        table: &[BlockId],
        kv_len: u64,
    ) -> Result<crate::digest::SetDigest> {
        match pages.set_digest(kv_len)? {
            Ok(set) => Ok(set),
            Err(missing) => {
                for (upto, digest) in self.hash_missing(table, &missing, kv_len)? {
                    pages.record(upto, digest);
                }
                pages
                    .set_digest(kv_len)?
                    .map_err(|m| AdapterError::Bug(format!("pages {:?} still unhashed", m.pages)))
            }
        }
    }
}

fn already(id: StageId, stage: &Stage, log: &[u32]) -> Result<Rebuilt> {
    match (stage.class, &stage.loaded) {
        (Some(class), Some(loaded)) if loaded.live.tokens == log => Ok(Rebuilt {
            stage: id,
            class,
            seal: loaded.live.seal(),
        }),
        _ => Err(AdapterError::Conflict("the journal's image")),
    }
}

/// Where the journal and its checkpoint contradict one another.
fn contradiction(image: &JournalImage, declared: &ControlState) -> Option<&'static str> {
    let point = &image.checkpoint;
    if declared.identity.request_id != image.request {
        return Some("the checkpoint's request");
    }
    if declared.seal() != point.seal || declared.position.kv_len != point.kv_len {
        return Some("the checkpoint's position");
    }
    if (image.output.len() as u64) < point.seal {
        return Some("the journal, shorter than the checkpoint,");
    }
    if TokenLogHash::of(&image.prompt) != declared.tokens.prompt {
        return Some("the journal's prompt");
    }
    let seal = point.seal as usize;
    if TokenLogHash::of(&image.output[..seal]) != declared.tokens.output {
        return Some("the journal's output");
    }
    None
}
