//! Before the fence: both ends practise it once, and the link between them carries what a push will
//! weigh.
//!
//! The source calls [`SourceHands::brace`] when GO has come and before it holds the request: the
//! request decodes on meanwhile, so this costs the pause nothing. The frame it sends to the
//! destination is a hint. It is no message of the protocol; lost, late or forged, it changes nothing
//! that any machine can see.

use std::io::IoSlice;
use std::sync::Arc;
use std::time::Instant;

use super::core::{Core, SEND};
use super::source::SourceHands;
use crate::drive::kind;
use crate::engine::adapter::{PageDigests, View};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::migrate::io::Peer;
use crate::node::packed;
use crate::node::parcels::PushParcel;
use crate::route::{DecodeError, Reader};

/// What precedes the practice push: request, attempt, tokens verified.
const HEAD: usize = 16 + 8 + 8;

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
    /// Practises the export on the last verified slot and sends the outcome ahead.
    pub(super) fn brace(&mut self) {
        let (core, request, epoch) = (self.core, self.slot.request, self.at.epoch);
        let Some(destination) = self.at.destination.clone() else {
            return;
        };
        let mut push = Vec::new();
        let verified = self.at.told;
        if let Some(pin) = self.at.pinned.as_ref().map(|p| p.pin)
            && verified > 0
            && !self.at.options.null_handoff
        {
            let (engine, header) = (&*core.adapter, &core.capabilities.header);
            let section = PushParcel {
                tokens_from: verified,
                tokens: engine.token_log(pin.into(), verified).unwrap_or_default(),
                owner_epoch: OwnerEpoch(0),
                control: engine.rehearse_export(pin).unwrap_or_default(),
            };
            push = section.encode();
            // Neither failure matters: the fence will meet it again and say so.
            let _ = packed::gather(
                engine,
                header,
                pin.into(),
                verified - 1..verified,
                &mut push,
            );
            let _ = engine.hash_tail(pin.into(), verified, &mut PageDigests::new());
        }
        let head = head(request, epoch, verified);
        let parts = [IoSlice::new(&head), IoSlice::new(&push)];
        core.hint(&Peer::Worker(destination), kind::BRACE, &parts);
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
        let Some(slot) = self.slot(request) else {
            return;
        };
        let state = slot.lock();
        let at = &state.incoming;
        let expected = at.epoch == epoch
            && !at.fenced
            && at.source.as_ref().is_some_and(|s| from.is_worker(s));
        let Some(stage) = at.stage.filter(|_| expected) else {
            return;
        };
        let resident = state.destination.as_ref().and_then(|d| d.verified());
        if let Ok((section, _)) = PushParcel::decode(push)
            && resident == Some(verified)
            && verified > 0
        {
            let (engine, header) = (&*self.adapter, &self.capabilities.header);
            let view = View::Stage(stage);
            let _ = packed::gather(
                engine,
                header,
                view,
                verified - 1..verified,
                &mut Vec::new(),
            );
            let _ = engine.hash_tail(view, verified, &mut PageDigests::new());
            engine.rehearse_import(stage, &section.control);
        }
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
