//! Practice for a fence, at both ends, while the request still decodes.
//!
//! What a fence does comes once in minutes, between steps that fill every cache with something else:
//! done unprepared it costs ten times what it costs a second time. So it is done before, on the last
//! boundary passed, and again until the fence comes. At the destination the first practice also
//! leaves something behind: the request rebuilt up to that boundary, from which the fence goes on.

use super::live::Live;
use super::shared::Shared;
use super::stage::Prepared;
use crate::control_state::{self as cs, ControlDigest, ControlState};
use crate::digest::SetDigest;
use crate::engine::adapter::{PinId, StageId, StageState};
use crate::id::OwnerEpoch;
use std::hint::black_box;

/// Output tokens beyond which a practice replay would hold up the fence itself.
const REPLAY: u64 = 16_384;
/// Stands where the digest of the KV set will.
const NO_SET: SetDigest = SetDigest([0; 32]);

impl Prepared {
    /// Whether a fence at `state` goes on from here: everything but what moves with each token is
    /// the same. The tokens themselves need no look: both stand in one log that only grows.
    pub(crate) fn leads_to(&self, state: &ControlState) -> bool {
        terms(&self.declared) == terms(state)
            && self.declared.tokens.output.count <= state.tokens.output.count
    }
}

/// The parts of a control state that no step changes. Every member is named here, so that a new one
/// cannot be forgotten.
fn terms(state: &ControlState) -> impl PartialEq + '_ {
    let ControlState {
        identity: cs::Identity {
            request_id,
            state_seq: _,
        },
        engine,
        model,
        numerics_profile,
        lora,
        tokens:
            cs::Tokens {
                prompt,
                output: _,
                pending_token: _,
            },
        position: cs::Position {
            kv_len: _,
            next_pos: _,
        },
        limits,
        sampler,
        penalties,
        rng:
            cs::Rng {
                rng_kind,
                seed,
                draws: _,
                rng_state,
            },
        constraints,
        grammar,
        parsers,
        stops,
        detokenizer:
            cs::Detokenizer {
                detok_kind,
                prefix_offset: _,
                read_offset: _,
                last_special: _,
                held_text: _,
                pending_utf8: _,
            },
        stream:
            cs::Stream {
                sent_bytes: _,
                sent_tokens: _,
                stream_seq: _,
                output_kind,
                stream_interval,
            },
        logprobs,
        usage:
            cs::Usage {
                usage_prompt,
                usage_completion: _,
                usage_cached,
                include_usage,
            },
        scheduling,
        kv_groups: _,
        mutable_state,
        extensions,
    } = state;
    let grammar = grammar.as_ref().map(|g| {
        let cs::Grammar {
            kind,
            backend,
            backend_version,
            source,
            start_index,
            accepted: _,
            terminated: _,
            next_mask_digest: _,
        } = g;
        (kind, backend, backend_version, source, start_index)
    });
    (
        (
            request_id,
            engine,
            model,
            numerics_profile,
            lora,
            prompt,
            limits,
            sampler,
            penalties,
        ),
        (
            rng_kind,
            seed,
            rng_state,
            constraints,
            grammar,
            parsers,
            stops,
            detok_kind,
        ),
        (output_kind, stream_interval, logprobs),
        (
            usage_prompt,
            usage_cached,
            include_usage,
            scheduling,
            mutable_state,
            extensions,
        ),
    )
}

impl Shared {
    /// What a practice import may be given: the control state at this boundary.
    pub(crate) fn preview_of(&self, live: &Live) -> Option<Vec<u8>> {
        self.control_of(live, NO_SET).ok()?.encode().ok()
    }

    /// The control state at some boundary passed, if one was passed since the pin.
    pub(crate) fn rehearse_export(&self, pin: PinId) -> Option<Vec<u8>> {
        let inner = self.inner.lock();
        let (_, entry) = inner.pinned(pin).ok()?;
        let bytes = match entry.live.as_deref() {
            Some(live) => self.preview_of(live)?,
            // A step has the live state; what it was earlier serves as well.
            None => {
                let earlier = entry.preview.clone()?;
                ControlState::decode(&earlier).ok()?.encode().ok()?
            }
        };
        black_box(ControlDigest::of(&bytes, entry.seal(), entry.owner_epoch));
        Some(bytes)
    }

    /// Decodes, replays and encodes a control state against what the stage has of the token log.
    pub(crate) fn rehearse_import(&self, id: StageId, preview: &[u8]) {
        let Ok(declared) = ControlState::decode(preview) else {
            return;
        };
        let (prompt, output) = (declared.tokens.prompt.count, declared.tokens.output.count);
        let (log, hash) = {
            let inner = self.inner.lock();
            let Ok(stage) = inner.stage(id) else { return };
            let fits = stage.state == StageState::Open
                && declared.identity.request_id == stage.request
                && prompt == stage.prompt_len as u64
                && output <= REPLAY;
            if !fits {
                return;
            }
            if let Some(prepared) = &stage.prepared
                && prepared.leads_to(&declared)
            {
                return self.practise(prepared);
            }
            let wanted = usize::try_from(prompt.saturating_add(output)).unwrap_or(usize::MAX);
            match stage.log.get(..wanted) {
                Some(log) => (log.to_vec(), stage.prompt_hash.finish()),
                None => return,
            }
        };
        let Ok((live, allowed)) = self.live_from(&declared, &log, hash, OwnerEpoch(0)) else {
            return;
        };
        let prepared = Prepared {
            declared,
            live,
            allowed,
        };
        self.practise(&prepared);
        let mut inner = self.inner.lock();
        if let Ok(stage) = inner.stage_mut(id)
            && stage.state == StageState::Open
        {
            stage.prepared = Some(Box::new(prepared));
        }
    }

    /// What the fence will do with a request once its last tokens are replayed.
    fn practise(&self, prepared: &Prepared) {
        if self.refuse_foreign(&prepared.declared).is_ok()
            && let Ok(state) = self.control_of(&prepared.live, NO_SET)
            && let Ok(bytes) = state.encode()
        {
            black_box(ControlDigest::of(
                &bytes,
                prepared.live.seal(),
                OwnerEpoch(0),
            ));
            black_box(state == prepared.declared);
        }
    }
}
