//! Practice for a fence, at both ends, while the request still decodes.
//!
//! What a fence does comes once in minutes, between steps that fill every cache with something else:
//! done unprepared it costs two to three times what it costs a second time. So it is done once
//! before, on the last boundary passed, and the outcome thrown away.

use super::shared::Shared;
use crate::control_state::{ControlDigest, ControlState};
use crate::digest::SetDigest;
use crate::engine::adapter::{PinId, StageId, StageState};
use crate::id::OwnerEpoch;
use std::hint::black_box;

/// Output tokens beyond which a practice replay would take longer than it saves.
const REPLAY: u64 = 1024;

impl Shared {
    /// The control state at the last boundary; `None` in the middle of a step.
    pub(crate) fn rehearse_export(&self, pin: PinId) -> Option<Vec<u8>> {
        let inner = self.inner.lock();
        let (_, entry) = inner.pinned(pin).ok()?;
        let live = entry.live.as_deref()?;
        let state = self.control_of(live, SetDigest([0; 32])).ok()?;
        let bytes = state.encode().ok()?;
        black_box(ControlDigest::of(&bytes, live.seal(), entry.owner_epoch));
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
            let wanted = usize::try_from(prompt.saturating_add(output)).unwrap_or(usize::MAX);
            match stage.log.get(..wanted).filter(|_| fits) {
                Some(log) => (log.to_vec(), stage.prompt_hash.finish()),
                None => return,
            }
        };
        if let Ok((live, _)) = self.live_from(&declared, &log, hash, OwnerEpoch(0))
            && let Ok(state) = self.control_of(&live, SetDigest([0; 32]))
            && let Ok(bytes) = state.encode()
        {
            black_box(ControlDigest::of(&bytes, live.seal(), OwnerEpoch(0)));
        }
    }
}
