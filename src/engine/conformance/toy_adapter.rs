//! The contract over the toy.

use super::Emitted;
use super::toy::{CONTEXT, PAGE, Pin, Request, Stage, State, Toy, fingerprint};
use crate::control_state::{ControlDigest, ControlState, Refusal, RngKind};
use crate::engine::adapter::*;
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::WriteLease;
use std::ops::Range;
use std::time::Instant;

/// A view's tokens, table and end of what may be read.
struct Seen {
    table: Vec<u32>,
    tokens: Vec<u32>,
    limit: u64,
    dirty: bool,
}

fn raise(state: &mut State, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
    let floor = state.floors.entry(request).or_default();
    if epoch < *floor {
        return Err(AdapterError::StaleEpoch {
            asked: epoch,
            floor: *floor,
        });
    }
    *floor = epoch;
    Ok(())
}

fn pin_of(state: &mut State, id: PinId) -> Result<&mut Pin> {
    let unknown = AdapterError::Unknown(What::Pin(id));
    let (request, epoch) = match state.pins.get(&id) {
        Some(pin) => (pin.request, pin.epoch),
        None => return Err(unknown),
    };
    raise(state, request, epoch)?;
    state.pins.get_mut(&id).ok_or(unknown)
}

pub(super) fn stage_of(state: &mut State, id: StageId) -> Result<&mut Stage> {
    let unknown = AdapterError::Unknown(What::Stage(id));
    let (request, epoch) = match state.stages.get(&id) {
        Some(stage) => (stage.spec.request, stage.spec.epoch),
        None => return Err(unknown),
    };
    raise(state, request, epoch)?;
    state.stages.get_mut(&id).ok_or(unknown)
}

fn request_of(state: &mut State, id: RequestId) -> Result<&mut Request> {
    let unknown = AdapterError::Unknown(What::Request(id));
    state.requests.get_mut(&id).ok_or(unknown)
}

fn pinned_request(state: &mut State, id: PinId) -> Result<Request> {
    let pin = pin_of(state, id)?;
    let (request, ended) = (pin.request, pin.ended.clone());
    match ended {
        Some(r) => Ok(r),
        None => Ok(request_of(state, request)?.clone()),
    }
}

fn needs(stage: &Stage, needs: StageState) -> Result<()> {
    match stage.state == needs {
        true => Ok(()),
        false => Err(AdapterError::StageState {
            is: stage.state,
            needs,
        }),
    }
}

fn see(state: &mut State, view: View) -> Result<Seen> {
    match view {
        View::Pin(id) => {
            let dirty = pin_of(state, id)?.dirty;
            let r = pinned_request(state, id)?;
            Ok(Seen {
                table: r.table,
                tokens: r.tokens,
                limit: r.kv_len,
                dirty,
            })
        }
        View::Stage(id) => {
            let stage = stage_of(state, id)?;
            Ok(Seen {
                table: stage.table.clone(),
                tokens: stage.tokens.clone(),
                limit: stage.spec.max_tokens,
                dirty: false,
            })
        }
    }
}

fn within(asked: u64, limit: u64) -> Result<()> {
    match asked <= limit {
        true => Ok(()),
        false => Err(AdapterError::OutOfRange { asked, limit }),
    }
}

fn sealed(r: &Request, dirty: bool) -> Sealed {
    Sealed {
        stable_len: r.kv_len,
        accepted: r.tokens.len() as u64,
        generation: 1,
        dirty,
    }
}

impl Toy {
    fn known_group(&self, group: u16) -> Result<()> {
        match group {
            0 => Ok(()),
            other => Err(AdapterError::Unknown(What::Group(other))),
        }
    }

    fn drop_stage(&self, id: StageId, force: bool) -> Result<Released> {
        let mut state = self.lock();
        let Some(stage) = state.stages.get(&id) else {
            return Ok(Released::default());
        };
        let (is, needs) = (stage.state, StageState::Open);
        match is {
            StageState::Active => {
                return Err(AdapterError::StageState {
                    is,
                    needs: StageState::Armed,
                });
            }
            StageState::Armed if !force => return Err(AdapterError::StageState { is, needs }),
            _ => {}
        }
        let stage = state.stages.remove(&id).expect("looked at above");
        self.release(&mut state, &stage.table);
        Ok(Released {
            blocks: stage.table.len() as u64,
        })
    }

    fn new_stage(&self, state: &mut State, spec: &ImportSpec) -> Result<StageId> {
        let mut table = Vec::new();
        self.grow(&mut table, spec.max_tokens)?;
        state.next_id += 1;
        let id = StageId(state.next_id);
        let stage = Stage {
            spec: spec.clone(),
            state: StageState::Open,
            table,
            tokens: Vec::new(),
            hashed: vec![false; spec.max_tokens as usize],
            manifest: None,
            request: None,
            armed: None,
            activated: None,
        };
        state.stages.insert(id, stage);
        Ok(id)
    }
}

impl EngineAdapter for Toy {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            incarnation: self.incarnation,
            engine_kind: 99,
            fingerprint: fingerprint(),
            model: [0x6d; 32],
            weights_version: 1,
            tokenizer: [0x74; 32],
            header: self.digester.header().clone(),
            max_context: CONTEXT,
            rng_kinds: vec![RngKind::Greedy, RngKind::Counter],
            batch_invariant: true,
            partial_sequence: true,
            mutable_state: MutableState::None,
            tail: TailWrites::AppendOnly,
            rebuild: RebuildClass::BitExact,
        }
    }

    fn pool(&self, group: u16) -> Result<PoolInfo> {
        self.known_group(group)?;
        Ok(self.info.clone())
    }

    fn pin(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Pinned> {
        let mut state = self.lock();
        let r = request_of(&mut state, request)?.clone();
        raise(&mut state, request, epoch)?;
        let same = |p: &&Pin| p.request == request && p.epoch == epoch;
        let known = state.pins.iter().find(|(_, p)| same(p)).map(|(id, _)| *id);
        let pin = match known {
            Some(id) => id,
            None => {
                self.info.pool.retain(&r.table)?;
                state.next_id += 1;
                let (id, blocks) = (PinId(state.next_id), r.table.clone());
                let pin = Pin {
                    request,
                    epoch,
                    blocks,
                    dirty: false,
                    ended: None,
                };
                state.pins.insert(id, pin);
                id
            }
        };
        Ok(Pinned {
            pin,
            generation: 1,
            prompt_tokens: r.prompt as u64,
            max_tokens: (r.prompt as u64 + u64::from(r.plan.max_output)).min(CONTEXT.into()),
            first_live: vec![(0, 0)],
        })
    }

    fn unpin(&self, pin: PinId) -> Result<Released> {
        let mut state = self.lock();
        let Some(pin) = state.pins.remove(&pin) else {
            return Ok(Released::default());
        };
        self.release(&mut state, &pin.blocks);
        Ok(Released {
            blocks: pin.blocks.len() as u64,
        })
    }

    fn seal_through(&self, pin: PinId) -> Result<Sealed> {
        let mut state = self.lock();
        let dirty = pin_of(&mut state, pin)?.dirty;
        Ok(sealed(&pinned_request(&mut state, pin)?, dirty))
    }

    fn table(&self, view: View, group: u16, tokens: Range<u64>) -> Result<Vec<u32>> {
        let seen = see(&mut self.lock(), view)?;
        self.known_group(group)?;
        within(tokens.end, seen.limit)?;
        let size = u64::from(self.info.layout.block_tokens());
        let blocks = tokens.start / size..tokens.end.div_ceil(size).max(tokens.start / size);
        Ok(seen.table[blocks.start as usize..blocks.end as usize].to_vec())
    }

    fn token_log(&self, view: View, from: u64) -> Result<Vec<u32>> {
        let seen = see(&mut self.lock(), view)?;
        within(from, seen.tokens.len() as u64)?;
        Ok(seen.tokens[from as usize..].to_vec())
    }

    fn hash_pages(
        &self,
        view: View,
        group: u16,
        pages: Range<u32>,
        upto_tokens: u64,
        out: &mut PageDigests,
    ) -> Result<()> {
        let mut state = self.lock();
        let seen = see(&mut state, view)?;
        self.known_group(group)?;
        within(upto_tokens, seen.limit)?;
        within(pages.end.into(), upto_tokens.div_ceil(PAGE.into()))?;
        if seen.dirty {
            return Err(AdapterError::SealedDirty);
        }
        let digests = self.digests(&seen.table, pages.clone(), upto_tokens)?;
        for (page, digest) in pages.zip(digests) {
            let first = u64::from(page) * u64::from(PAGE);
            let valid = (upto_tokens - first).min(PAGE.into());
            if let View::Stage(id) = view {
                let hashed = &mut stage_of(&mut state, id)?.hashed;
                hashed[first as usize..(first + valid) as usize].fill(true);
            }
            let row = PageRow {
                group,
                page,
                first_slot: 0,
                valid_tokens: valid as u16,
                digest,
            };
            out.push(row, &[]);
        }
        Ok(())
    }

    fn hash_tail(&self, view: View, upto_tokens: u64, out: &mut PageDigests) -> Result<()> {
        see(&mut self.lock(), view)?;
        let last = upto_tokens
            .checked_sub(1)
            .ok_or(AdapterError::Caller("no token has no page"))?;
        let page = (last / u64::from(PAGE)) as u32;
        self.hash_pages(view, 0, page..page + 1, upto_tokens, out)
    }

    fn hold(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        _deadline: Instant,
    ) -> Result<Boundary> {
        let mut state = self.lock();
        request_of(&mut state, request)?;
        raise(&mut state, request, epoch)?;
        let dirty = state.pins.values().any(|p| p.request == request && p.dirty);
        let r = request_of(&mut state, request)?;
        let Some(pending_token) = r.tokens[r.prompt..].last().copied() else {
            return Err(Refusal::NoOutputYet.into());
        };
        if r.held.is_none() {
            r.state_seq += 1;
        }
        r.held = Some(epoch);
        Ok(Boundary {
            seal: (r.tokens.len() - r.prompt) as u64,
            kv_len: r.kv_len,
            pending_token,
            sealed: sealed(r, dirty),
            last_step_done_ns: 0,
        })
    }

    fn release_hold(&self, request: RequestId, epoch: MigrationEpoch) -> Result<()> {
        let mut state = self.lock();
        request_of(&mut state, request)?;
        raise(&mut state, request, epoch)?;
        request_of(&mut state, request)?.held = None;
        Ok(())
    }

    fn export_control(&self, view: View, owner_epoch: OwnerEpoch) -> Result<ControlExport> {
        let mut state = self.lock();
        let (id, r) = match view {
            View::Pin(pin) => {
                let id = pin_of(&mut state, pin)?.request;
                let r = pinned_request(&mut state, pin)?;
                r.held.ok_or(AdapterError::NotHeld)?;
                (id, r)
            }
            View::Stage(stage) => {
                let stage = stage_of(&mut state, stage)?;
                let (is, needs) = (stage.state, StageState::Loaded);
                let (r, ..) = stage
                    .request
                    .as_ref()
                    .ok_or(AdapterError::StageState { is, needs })?;
                (stage.spec.request, r.clone())
            }
        };
        if r.owner != owner_epoch {
            return Err(AdapterError::OwnerEpoch {
                asked: owner_epoch,
                current: r.owner,
            });
        }
        let control = self.control(id, &r)?;
        let bytes = control.encode()?;
        let digest = ControlDigest::of(&bytes, control.seal(), owner_epoch);
        Ok(ControlExport { bytes, digest })
    }

    fn retire(&self, request: RequestId, epoch: MigrationEpoch) -> Result<Released> {
        let mut state = self.lock();
        if !state.requests.contains_key(&request) {
            return Ok(Released::default());
        }
        raise(&mut state, request, epoch)?;
        if request_of(&mut state, request)?.held.is_none() {
            return Err(AdapterError::NotHeld);
        }
        Ok(Released {
            blocks: self.end(&mut state, request),
        })
    }

    fn prepare_import(&self, spec: &ImportSpec) -> Result<StageId> {
        let mut state = self.lock();
        raise(&mut state, spec.request, spec.epoch)?;
        let same = |s: &&Stage| s.spec.request == spec.request && s.spec.epoch == spec.epoch;
        if let Some((id, stage)) = state.stages.iter().find(|(_, s)| same(s)) {
            return match stage.spec == *spec {
                true => Ok(*id),
                false => Err(AdapterError::Conflict("the import's specification")),
            };
        }
        if state.requests.contains_key(&spec.request) {
            return Err(AdapterError::Conflict("the request, which runs here,"));
        }
        if spec.header != *self.digester.header() {
            return Err(AdapterError::Incompatible("the object set's header"));
        }
        if spec.max_tokens > CONTEXT.into() {
            return Err(AdapterError::Incompatible("the length of the context"));
        }
        self.policy.judge(&spec.source, &fingerprint())?;
        if !self.capabilities().rng_kinds.contains(&spec.rng) {
            return Err(Refusal::OpaqueRng.into());
        }
        self.new_stage(&mut state, spec)
    }

    fn import_tokens(&self, stage: StageId, from: u64, tokens: &[u32]) -> Result<()> {
        let mut state = self.lock();
        let stage = stage_of(&mut state, stage)?;
        if stage.state > StageState::Committed {
            return Err(AdapterError::StageState {
                is: stage.state,
                needs: StageState::Open,
            });
        }
        let have = stage.tokens.len() as u64;
        within(from, have)?;
        within(from + tokens.len() as u64, stage.spec.max_tokens + 1)?;
        let known = (have - from).min(tokens.len() as u64) as usize;
        if stage.tokens[from as usize..from as usize + known] != tokens[..known] {
            return Err(AdapterError::Conflict("a token"));
        }
        stage.tokens.extend_from_slice(&tokens[known..]);
        Ok(())
    }

    fn stage_write(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<WriteLease> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        self.known_group(group)?;
        needs(s, StageState::Open)?;
        within(tokens.end, s.spec.max_tokens)?;
        let span = tokens.start as usize..tokens.end as usize;
        if let Some(at) = s.hashed[span].iter().position(|h| *h) {
            return Err(AdapterError::Frozen {
                group,
                token: tokens.start + at as u64,
            });
        }
        let size = u64::from(self.info.layout.block_tokens());
        let blocks = tokens.start / size..tokens.end.div_ceil(size).max(tokens.start / size);
        Ok(self
            .info
            .pool
            .write(&s.table[blocks.start as usize..blocks.end as usize])?)
    }

    fn reopen(&self, stage: StageId, group: u16, tokens: Range<u64>) -> Result<()> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        self.known_group(group)?;
        needs(s, StageState::Open)?;
        within(tokens.end, s.spec.max_tokens)?;
        s.hashed[tokens.start as usize..tokens.end as usize].fill(false);
        Ok(())
    }

    fn commit_import(&self, stage: StageId, manifest: &Manifest) -> Result<()> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        if let Some(known) = &s.manifest {
            return match known == manifest {
                true => Ok(()),
                false => Err(AdapterError::Conflict("the manifest")),
            };
        }
        needs(s, StageState::Open)?;
        within(manifest.kv_len, s.spec.max_tokens)?;
        s.manifest = Some(manifest.clone());
        s.state = StageState::Committed;
        Ok(())
    }

    fn import_control(&self, stage: StageId, bytes: &[u8], owner_epoch: OwnerEpoch) -> Result<()> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        if let Some((_, known, owner)) = &s.request {
            return match known == bytes && *owner == owner_epoch {
                true => Ok(()),
                false => Err(AdapterError::Conflict("the control state")),
            };
        }
        needs(s, StageState::Committed)?;
        let request = self.load(s, bytes, owner_epoch)?;
        s.request = Some((request, bytes.to_vec(), owner_epoch));
        s.state = StageState::Loaded;
        Ok(())
    }

    fn arm(&self, stage: StageId) -> Result<Armed> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        if let Some(armed) = s.armed {
            return Ok(armed);
        }
        needs(s, StageState::Loaded)?;
        let (r, bytes, _) = s.request.as_ref().expect("loaded");
        let control = ControlState::decode(bytes)?;
        if let Some(token) = s.hashed[..r.kv_len as usize].iter().position(|h| !h) {
            return Err(AdapterError::NotHashed {
                group: 0,
                token: token as u64,
            });
        }
        let armed = Armed {
            claim: self.policy.judge(&control.fingerprint(), &fingerprint())?,
            replayed: control.seal(),
            pending_token: control.tokens.pending_token,
            mask_digest: self.replay(r, &control)?,
        };
        s.state = StageState::Armed;
        s.armed = Some(armed);
        Ok(armed)
    }

    fn disarm(&self, stage: StageId) -> Result<Released> {
        self.drop_stage(stage, true)
    }

    fn abort_import(&self, stage: StageId) -> Result<Released> {
        self.drop_stage(stage, false)
    }

    fn activate(&self, stage: StageId, activation: Activation) -> Result<Activated> {
        let mut state = self.lock();
        let s = stage_of(&mut state, stage)?;
        let asked = activation.owner_epoch;
        if let Some(current) = s.activated {
            return match current == asked {
                true => Ok(Activated::Already),
                false => Err(AdapterError::OwnerEpoch { asked, current }),
            };
        }
        needs(s, StageState::Armed)?;
        let (mut r, _, current) = s.request.clone().expect("armed");
        if asked <= current {
            return Err(AdapterError::OwnerEpoch { asked, current });
        }
        let seal = (r.tokens.len() - r.prompt) as u64;
        if activation.reemit_from == 0 {
            return Err(AdapterError::OutOfRange {
                asked: 0,
                limit: seal + 1,
            });
        }
        within(activation.reemit_from, seal + 1)?;
        s.activated = Some(asked);
        s.state = StageState::Active;
        let id = s.spec.request;
        r.owner = asked;
        // The source is what a later export names: this engine.
        r.source = None;
        let emitted = state.emitted.entry(id).or_default();
        for seq in activation.reemit_from..=seal {
            let token = r.tokens[r.prompt + seq as usize - 1];
            emitted.push(Emitted {
                owner_epoch: asked,
                seq,
                token,
            });
        }
        state.requests.insert(id, r);
        Ok(Activated::Now { at_ns: 0 })
    }

    fn journal_checkpoint(&self, request: RequestId, _deadline: Instant) -> Result<Checkpoint> {
        let mut state = self.lock();
        let r = request_of(&mut state, request)?.clone();
        if r.tokens.len() == r.prompt {
            return Err(Refusal::NoOutputYet.into());
        }
        let control = self.control(request, &r)?;
        Ok(Checkpoint {
            seal: control.seal(),
            kv_len: r.kv_len,
            control: control.encode()?,
            set_digest: Some(self.set_digest(&r.table, r.kv_len)?),
        })
    }

    fn rebuild_from_journal(&self, image: &JournalImage) -> Result<Rebuilt> {
        self.rebuild(image)
    }
}
