//! The adapter's last calls on a request that comes in: arm it, then activate or drop it.

use super::clock::clock_ns;
use super::dest::needs;
use super::entry::Phase;
use super::kvlog::{GROUP, PageLog};
use super::shared::{Shared, Slot};
use crate::control_state::ControlState;
use crate::engine::adapter::{
    Activated, Activation, AdapterError, Armed, Released, Result, StageId, StageState,
};

impl Shared {
    pub(crate) fn arm(&self, id: StageId) -> Result<Armed> {
        let mut inner = self.inner.lock();
        let stage = inner.stage(id)?;
        if let Some(armed) = stage.armed {
            return match stage.state {
                StageState::Armed => Ok(armed),
                is => Err(needs(is, StageState::Loaded)),
            };
        }
        if stage.state != StageState::Loaded {
            return Err(needs(stage.state, StageState::Loaded));
        }
        let kv_len = stage.manifest.as_ref().map_or(0, |m| m.kv_len);
        if let Some(token) = stage.frozen.first_missing(&(0..kv_len)) {
            return Err(AdapterError::NotHashed {
                group: GROUP,
                token,
            });
        }
        let set = self.staged_set_digest(&mut inner, id)?;
        let stage = inner.stage_mut(id)?;
        let Some(loaded) = &stage.loaded else {
            return Err(needs(stage.state, StageState::Loaded));
        };
        let held = self.control_of(&loaded.live, set)?;
        if let Some(what) = disagreement(&held, &loaded.declared, loaded.allowed) {
            return Err(AdapterError::ReplayMismatch(what));
        }
        let armed = Armed {
            claim: loaded.claim,
            replayed: loaded.live.seal(),
            pending_token: held.tokens.pending_token,
            mask_digest: held.grammar.map(|g| g.next_mask_digest),
        };
        stage.armed = Some(armed);
        stage.state = StageState::Armed;
        Ok(armed)
    }

    pub(crate) fn drop_stage(&self, id: StageId, armed_too: bool) -> Result<Released> {
        let inner = &mut *self.inner.lock();
        let Some(stage) = inner.stages.get(&id) else {
            return Ok(Released::default());
        };
        match stage.state {
            StageState::Active => return Err(needs(StageState::Active, StageState::Open)),
            StageState::Armed if !armed_too => {
                return Err(needs(StageState::Armed, StageState::Open));
            }
            _ => {}
        }
        let table = inner
            .stages
            .remove(&id)
            .map(|s| s.table)
            .unwrap_or_default();
        inner.blocks.give_back(&table);
        self.work.notify_one();
        Ok(Released {
            blocks: table.len() as u64,
        })
    }

    pub(crate) fn activate(&self, id: StageId, activation: Activation) -> Result<Activated> {
        let inner = &mut *self.inner.lock();
        let stage = inner.stage(id)?;
        let asked = activation.owner_epoch;
        if let Some(current) = stage.activated {
            return if current == asked {
                Ok(Activated::Already)
            } else {
                Err(AdapterError::OwnerEpoch { asked, current })
            };
        }
        let Some(loaded) = &stage.loaded else {
            return Err(needs(stage.state, StageState::Armed));
        };
        if stage.state != StageState::Armed {
            return Err(needs(stage.state, StageState::Armed));
        }
        if asked <= loaded.owner_epoch {
            return Err(AdapterError::OwnerEpoch {
                asked,
                current: loaded.owner_epoch,
            });
        }
        let seal = loaded.live.seal();
        if activation.reemit_from == 0 || activation.reemit_from > seal + 1 {
            return Err(AdapterError::OutOfRange {
                asked: activation.reemit_from,
                limit: seal + 1,
            });
        }
        if inner.current.contains_key(&stage.request) {
            return Err(AdapterError::Conflict("the request, which runs here,"));
        }
        // Nothing can fail from here on, but for an invariant of ours.
        let pages = PageLog::new(&self.parts.digester)?;
        let stage = inner.stage_mut(id)?;
        let Some(loaded) = stage.loaded.take() else {
            return Err(needs(stage.state, StageState::Armed));
        };
        let mut live = *loaded.live;
        live.owner_epoch = asked;
        if let Some(carried) = &mut live.carried {
            // From here on this engine is the source.
            carried.engine_kind = super::ENGINE_KIND;
            carried.fingerprint = self.parts.fingerprint;
        }
        // The stage keeps its name, to recognize a repeat, and gives away all else.
        let request = stage.request;
        stage.state = StageState::Active;
        stage.activated = Some(asked);
        stage.tail = None;
        let log = std::mem::take(&mut stage.log);
        let pages = std::mem::replace(&mut stage.pages, pages);
        let mut entry = self.entry_of(live, log, pages);
        entry.phase = Phase::Running;
        entry.table = std::mem::take(&mut stage.table);
        entry.stable = entry.log.len() - 1;
        entry.max_tokens = stage.max_tokens;
        if let Some(live) = &entry.live
            && activation.reemit_from <= seal
        {
            for event in live.events(activation.reemit_from, &self.parts.vocabulary) {
                self.sink.token(event);
            }
        }
        inner.forget_end(request);
        inner.forget_stages();
        let slot = Slot(inner.fresh());
        inner.entries.insert(slot, entry);
        inner.current.insert(request, slot);
        inner.running.push(slot);
        let at_ns = clock_ns();
        self.work.notify_one();
        Ok(Activated::Now { at_ns })
    }
}

/// The first part in which the state that this engine holds differs from the one declared.
fn disagreement(
    held: &ControlState,
    declared: &ControlState,
    allowed: bool,
) -> Option<&'static str> {
    if !allowed {
        Some("the grammar's refusal of an output token")
    } else if held.grammar != declared.grammar {
        Some("the grammar's state")
    } else if held.detokenizer != declared.detokenizer {
        Some("the detokenizer's state")
    } else if held.stream != declared.stream {
        Some("the stream's position")
    } else if held.kv_groups != declared.kv_groups {
        Some("the digest of the KV set")
    } else if held != declared {
        Some("the control state")
    } else {
        None
    }
}
