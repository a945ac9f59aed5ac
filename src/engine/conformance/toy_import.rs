//! How the toy turns a control state, or a journal, into a request.

use super::Plan;
use super::toy::{CONTEXT, Request, Stage, Toy, VOCAB, allowed, fingerprint, shown};
use super::toy_adapter::stage_of;
use crate::control_state::{ControlState, RngKind, TokenLogHash, mask_digest};
use crate::engine::adapter::*;
use crate::id::OwnerEpoch;

impl Toy {
    /// Control bytes as a request of this engine's, checked against the token log.
    pub(super) fn load(&self, stage: &Stage, bytes: &[u8], owner: OwnerEpoch) -> Result<Request> {
        let c = ControlState::decode(bytes)?;
        let mismatch = |what| Err(AdapterError::ReplayMismatch(what));
        let prompt = stage.spec.prompt_tokens as usize;
        if c.identity.request_id != stage.spec.request {
            return mismatch("the request's id");
        }
        self.policy.judge(&c.fingerprint(), &fingerprint())?;
        let logs = stage.tokens.split_at_checked(prompt);
        let Some((head, tail)) = logs else {
            return mismatch("the prompt");
        };
        if TokenLogHash::of(head) != c.tokens.prompt || TokenLogHash::of(tail) != c.tokens.output {
            return mismatch("the token log");
        }
        if tail.last() != Some(&c.tokens.pending_token) {
            return mismatch("the pending token");
        }
        if stage
            .manifest
            .as_ref()
            .is_none_or(|m| m.kv_len != c.position.kv_len)
        {
            return mismatch("kv_len");
        }
        Ok(Request {
            plan: Plan {
                prompt_tokens: prompt as u32,
                seed: c.rng.seed,
                sampled: c.rng.rng_kind == RngKind::Counter,
                constrained: c.grammar.is_some(),
                max_output: c.limits.max_output,
            },
            prompt,
            tokens: stage.tokens.clone(),
            kv_len: c.position.kv_len,
            table: stage.table.clone(),
            owner,
            held: None,
            state_seq: c.identity.state_seq,
            source: Some((c.fingerprint(), c.engine.engine_kind)),
            seed: c.rng.seed,
            draws: c.rng.draws,
        })
    }

    /// What arming checks: the replay of the output must end where the control state says.
    pub(super) fn replay(&self, r: &Request, c: &ControlState) -> Result<Option<[u8; 32]>> {
        let output = &r.tokens[r.prompt..];
        let (accepted, (sent, held)) = (output.len() as u64, shown(output));
        let mask = c
            .grammar
            .as_ref()
            .map(|_| mask_digest(VOCAB, |t| allowed(accepted, t)));
        if let Some(g) = &c.grammar
            && (Some(g.next_mask_digest) != mask || u64::from(g.accepted) != accepted)
        {
            return Err(AdapterError::ReplayMismatch("the grammar's mask"));
        }
        if *c.detokenizer.held_text != *held
            || c.stream.sent_bytes != sent
            || u64::from(c.detokenizer.read_offset) != accepted
        {
            return Err(AdapterError::ReplayMismatch("the detokenizer"));
        }
        Ok(mask)
    }

    pub(super) fn rebuild(&self, image: &JournalImage) -> Result<Rebuilt> {
        let control = ControlState::decode(&image.checkpoint.control)?;
        let at = control.seal() as usize;
        let short = AdapterError::Conflict("the journal, which is shorter than its checkpoint,");
        let head = image.output.get(..at).ok_or(short)?;
        if TokenLogHash::of(head) != control.tokens.output
            || TokenLogHash::of(&image.prompt) != control.tokens.prompt
        {
            return Err(AdapterError::Conflict("the journal"));
        }
        let tokens = [&image.prompt[..], &image.output[..]].concat();
        let kv_len = tokens.len() as u64 - 1;
        let prompt = image.prompt.len() as u64;
        let spec = ImportSpec {
            request: image.request,
            epoch: image.epoch,
            header: self.digester.header().clone(),
            source: control.fingerprint(),
            rng: control.rng.rng_kind,
            prompt_tokens: prompt,
            max_tokens: (prompt + u64::from(control.limits.max_output)).min(CONTEXT.into()),
            first_live: vec![(0, 0)],
        };
        let id = self.prepare_import(&spec)?;
        let mut state = self.lock();
        let s = stage_of(&mut state, id)?;
        for token in 0..kv_len {
            self.write_kv(&tokens, &s.table, token)?;
        }
        let same = Some(self.set_digest(&s.table, control.position.kv_len)?)
            == image.checkpoint.set_digest;
        s.tokens = tokens;
        s.hashed[..kv_len as usize].fill(true);
        let manifest = |kv_len| {
            Some(Manifest {
                kv_len,
                first_live: vec![(0, 0)],
            })
        };
        // The checkpoint is loaded at its own length, then taken on to the journal's end.
        let full = std::mem::take(&mut s.tokens);
        s.tokens = full[..image.prompt.len() + at].to_vec();
        s.manifest = manifest(control.position.kv_len);
        let mut r = self.load(s, &image.checkpoint.control, image.owner_epoch)?;
        if r.plan.sampled {
            r.draws += (image.output.len() - at) as u64;
        }
        (r.tokens, r.kv_len, s.tokens, s.manifest) = (full.clone(), kv_len, full, manifest(kv_len));
        s.request = Some((r, Vec::new(), image.owner_epoch));
        s.state = StageState::Armed;
        let class = if same {
            RebuildClass::BitExact
        } else {
            RebuildClass::TokenExactOnly
        };
        Ok(Rebuilt {
            stage: id,
            class,
            seal: image.output.len() as u64,
        })
    }
}
