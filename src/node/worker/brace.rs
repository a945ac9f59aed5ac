//! Before the fence: both ends practise it, again and again until it comes, and the link between them
//! carries what a push will weigh.
//!
//! A CPU that had nothing to do for three milliseconds has lost its caches (its core slept, or did
//! somebody else's work), and a fence is code that runs once: cold, its parts take ten times what
//! they take warm. So from GO on, while the request still decodes its last step, each end does its
//! part of a fence every millisecond and throws the outcome away. That costs the pause nothing, and a
//! few percent of one CPU for one step at most.
//!
//! The frame that the source sends is a hint. It is no message of the protocol: lost or late it
//! changes nothing that any machine can see. What it brings of the token log is compared with what
//! the push brings, so a forged one costs the attempt at most.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::{Core, SEND};
use super::source::SourceHands;
use crate::drive::{Expect, kind};
use crate::engine::adapter::{AdapterError, Boundary, PageDigests, View};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::migrate::io::Peer;
use crate::node::packed;
use crate::node::parcels::PushParcel;
use crate::route::{DecodeError, Reader};

/// What precedes the practice push: request, attempt, tokens verified.
const HEAD: usize = 16 + 8 + 8;
/// Pause between two practices: long enough to cost little, short enough for caches to stay warm.
const EVERY: Duration = Duration::from_millis(1);
/// Most practices for one fence: a step that takes longer than all of them is waited for cold.
const TIMES: u32 = 16;
/// What a destination does until the slots of the fence come.
pub(super) const EXPECT: Expect = Expect::Warm {
    every: EVERY,
    times: TIMES,
};

/// A fence is near: what the destination practises on.
pub struct Braced {
    request: RequestId,
    epoch: MigrationEpoch,
    verified: u64,
    section: PushParcel,
}

fn head(request: RequestId, epoch: MigrationEpoch, verified: u64) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(&request.0);
    head[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    head[24..].copy_from_slice(&verified.to_le_bytes());
    head
}

fn read_head(frame: &[u8]) -> Result<(RequestId, MigrationEpoch, u64, &[u8]), DecodeError> {
    let mut r = Reader::new(frame);
    let request = RequestId(r.array("brace.request")?);
    let epoch = MigrationEpoch(r.u64("brace.epoch")?);
    let verified = r.u64("brace.verified")?;
    let left = r.left();
    Ok((request, epoch, verified, r.raw(left, "brace.push")?))
}

impl SourceHands<'_> {
    /// Practises the export on the last verified slot and sends the outcome ahead; whether there
    /// was anything to practise.
    fn brace(&mut self) -> bool {
        let (core, request, epoch) = (self.core, self.slot.request, self.at.epoch);
        let Some(destination) = self.at.destination.clone() else {
            return false;
        };
        let push = self.practise();
        let head = head(request, epoch, self.at.told);
        let bytes = push.as_deref().unwrap_or_default();
        let parts = [IoSlice::new(&head), IoSlice::new(bytes)];
        core.hint(&Peer::Worker(destination), kind::BRACE, &parts);
        push.is_some()
    }

    /// An export of the last boundary passed, on the last verified slot; `None` where there is
    /// nothing to practise.
    fn practise(&self) -> Option<Vec<u8>> {
        let (core, verified) = (self.core, self.at.told);
        let pin = self.at.pinned.as_ref()?.pin;
        if verified == 0 || self.at.options.null_handoff {
            return None;
        }
        let (engine, header) = (&*core.adapter, &core.capabilities.header);
        let section = PushParcel {
            tokens_from: verified,
            tokens: engine.token_log(pin.into(), verified).unwrap_or_default(),
            owner_epoch: OwnerEpoch(0),
            control: engine.rehearse_export(pin)?,
        };
        let mut push = section.encode();
        // Neither failure matters: the fence will meet it again and say so.
        let last = verified - 1..verified;
        let _ = packed::gather(engine, header, pin.into(), last, &mut push);
        let _ = engine.hash_tail(pin.into(), verified, &mut PageDigests::new());
        Some(push)
    }

    /// Holds the request at its next step boundary, practising until then.
    pub(super) fn hold_braced(&mut self, deadline: Instant) -> Result<Boundary, AdapterError> {
        let (core, request, epoch) = (self.core, self.slot.request, self.at.epoch);
        // An engine with nothing to practise is asked once, for as long as there is time.
        let mut times = if self.brace() { TIMES } else { 0 };
        loop {
            let until = match times {
                0 => deadline,
                _ => deadline.min(Instant::now() + EVERY),
            };
            match core.adapter.hold(request, epoch, until) {
                // The step under way takes longer.
                Err(AdapterError::DrainDeadline) if until < deadline => {
                    times = match self.practise() {
                        Some(_) => times - 1,
                        None => 0,
                    };
                }
                held => return held,
            }
        }
    }
}

impl Core {
    /// Sends a frame that is no message of the protocol; whether it left.
    pub(super) fn hint(&self, to: &Peer, what: u16, parts: &[IoSlice<'_>]) -> bool {
        let Some(mesh) = self.mesh() else {
            return false;
        };
        match mesh.send(to, what, 0, parts, Instant::now() + SEND) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, "a hint was not sent");
                false
            }
        }
    }

    /// A source is about to fence.
    pub fn braced(self: &Arc<Self>, from: &Peer, frame: &[u8]) {
        let Ok((request, epoch, verified, push)) = read_head(frame) else {
            tracing::debug!("a hint cannot be read");
            return;
        };
        *self.braced.lock() = PushParcel::decode(push).ok().map(|(section, _)| Braced {
            request,
            epoch,
            verified,
            section,
        });
        self.keep_braced(from);
    }

    /// Practises the import that a source has announced, until it comes.
    pub fn keep_braced(self: &Arc<Self>, from: &Peer) {
        let mut braced = self.braced.lock();
        if let Some(b) = &*braced
            && !self.practise_import(from, b)
        {
            *braced = None;
        }
    }

    /// Whether the import is still to come.
    fn practise_import(&self, from: &Peer, b: &Braced) -> bool {
        let Some(slot) = self.slot(b.request) else {
            return false;
        };
        let state = slot.lock();
        let at = &state.incoming;
        let expected = at.epoch == b.epoch
            && !at.fenced
            && at.source.as_ref().is_some_and(|s| from.is_worker(s));
        let Some(stage) = at.stage.filter(|_| expected) else {
            return false;
        };
        let resident = state.destination.as_ref().and_then(|d| d.verified());
        let verified = b.verified;
        if resident != Some(verified) || verified == 0 {
            return false;
        }
        let (engine, header) = (&*self.adapter, &self.capabilities.header);
        let view = View::Stage(stage);
        let last = verified - 1..verified;
        let _ = packed::gather(engine, header, view, last, &mut Vec::new());
        let _ = engine.hash_tail(view, verified, &mut PageDigests::new());
        // The log has to reach as far as the control state does. Other tokens than the source's
        // would not get past the push, which brings them again.
        let (from, tokens) = (b.section.tokens_from, &b.section.tokens);
        if engine.import_tokens(stage, from, tokens).is_ok() {
            engine.rehearse_import(stage, &b.section.control);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_read_as_it_was_written_and_every_cut_of_its_head_is_refused() {
        let mut frame = head(RequestId([7; 16]), MigrationEpoch(3), 40).to_vec();
        frame.extend_from_slice(b"push");
        let read = read_head(&frame).unwrap();
        assert_eq!(
            read,
            (RequestId([7; 16]), MigrationEpoch(3), 40, &b"push"[..])
        );
        for cut in 0..HEAD {
            assert!(read_head(&frame[..cut]).is_err());
        }
    }
}
