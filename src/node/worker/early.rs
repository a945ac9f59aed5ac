//! The fence's last slots, sent ahead of the push.
//!
//! The slots are known as soon as the request is held; the digest and the control state that the
//! push claims take the source as long again. So the slots leave first, in a frame of their own, and
//! the destination puts them in place and hashes them there while the source still works. The push
//! follows without them.
//!
//! What arrives here is believed no more than a pulled page: it goes into the stage's own blocks, is
//! hashed where it lies, and the set digest over all of it must equal the one that the push claims.
//! Slots once hashed cannot be written again, unless the stage reopens them, which throws their
//! digests away. A frame of another attempt, or behind the push, is dropped.
//!
//! Should the frame be lost, the first push finds its slots missing and the attempt is given up
//! before anything was decided; a push sent again carries them.

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use super::core::Core;
use super::corrupt;
use super::source::SourceHands;
use crate::drive::kind;
use crate::engine::adapter::{AdapterError, PageDigests, StageId, View};
use crate::id::{MigrationEpoch, RequestId};
use crate::migrate::io::Peer;
use crate::node::kv::{self, KvError};
use crate::node::measure::at;
use crate::node::packed;
use crate::route::{DecodeError, Reader};

/// Most slots that go ahead: more of them would take longer on the way than the source needs.
const MOST: u64 = 64;
/// Request, attempt, first and last token.
const HEAD: usize = 16 + 8 + 8 + 8;

/// What the source sent ahead.
pub struct Ahead {
    /// Which tokens.
    pub tokens: Range<u64>,
    /// Their packed slots.
    pub bytes: Vec<u8>,
    /// The push that leaves them out was sent; the next one has them.
    pub used: bool,
}

/// What came ahead, at the destination.
pub struct Early {
    /// Which tokens.
    pub tokens: Range<u64>,
    /// The pages that they end, hashed in place.
    pub pages: PageDigests,
}

fn head(request: RequestId, epoch: MigrationEpoch, tokens: &Range<u64>) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..16].copy_from_slice(&request.0);
    head[16..24].copy_from_slice(&epoch.0.to_le_bytes());
    head[24..32].copy_from_slice(&tokens.start.to_le_bytes());
    head[32..].copy_from_slice(&tokens.end.to_le_bytes());
    head
}

/// Whose slots, of which attempt, which tokens, their packed bytes.
pub type Frame<'a> = (RequestId, MigrationEpoch, Range<u64>, &'a [u8]);

/// Reads the frame: between one and 64 tokens, whose bytes are checked where they are landed.
pub fn read(frame: &[u8]) -> Result<Frame<'_>, DecodeError> {
    let mut r = Reader::new(frame);
    let request = RequestId(r.array("early.request")?);
    let epoch = MigrationEpoch(r.u64("early.epoch")?);
    let tokens = r.u64("early.from")?..r.u64("early.to")?;
    let many = tokens.end.checked_sub(tokens.start);
    if !many.is_some_and(|n| (1..=MOST).contains(&n)) {
        return Err(DecodeError::Range("early.to"));
    }
    let left = r.left();
    Ok((request, epoch, tokens, r.raw(left, "early.slots")?))
}

impl SourceHands<'_> {
    /// Sends the slots from `verified` on; to be called as soon as the request is held.
    pub(super) fn send_ahead(&mut self, verified: u64, kv_len: u64) {
        let (core, request, epoch) = (self.core, self.slot.request, self.at.epoch);
        self.at.ahead = None;
        let tokens = verified..kv_len;
        let many = kv_len.saturating_sub(verified);
        let (Some(pin), Some(destination)) = (&self.at.pinned, self.at.destination.clone()) else {
            return;
        };
        if !(1..=MOST).contains(&many) || self.at.options.null_handoff {
            return;
        }
        let (engine, header) = (&*core.adapter, &core.capabilities.header);
        let mut bytes = Vec::new();
        let view = View::Pin(pin.pin);
        if packed::gather(engine, header, view, tokens.clone(), &mut bytes).is_err() {
            return; // The export meets it again, and says so.
        }
        let to = Peer::Worker(destination);
        let send = |epoch, bytes: &[u8]| {
            let head = head(request, epoch, &tokens);
            let parts = [IoSlice::new(&head), IoSlice::new(bytes)];
            core.hint(&to, kind::EARLY, &parts)
        };
        if corrupt::ahead(core, epoch, &bytes, send) {
            self.at.ahead = Some(Ahead {
                tokens,
                bytes,
                used: false,
            });
        }
    }
}

impl Core {
    /// Slots that a push will claim came ahead of it.
    pub fn early(self: &Arc<Self>, from: &Peer, frame: &[u8]) {
        let Ok((request, epoch, tokens, bytes)) = read(frame) else {
            tracing::debug!("slots sent ahead cannot be read");
            return;
        };
        let Some(slot) = self.slot(request) else {
            return;
        };
        let mut state = slot.lock();
        let state = &mut *state;
        let verified = state.destination.as_ref().and_then(|d| d.verified());
        let at = &mut state.incoming;
        let expected = at.epoch == epoch
            && !at.fenced
            && at.early.is_none()
            && at.pulls.is_empty()
            && verified == Some(tokens.start)
            && at.source.as_ref().is_some_and(|s| from.is_worker(s));
        let (Some(stage), Some(set), true) = (at.stage, at.set.as_ref(), expected) else {
            return;
        };
        let covered = set.covered().map(|c| c.max(tokens.start));
        match covered.and_then(|from| self.land_early(stage, &tokens, from, bytes)) {
            Ok(pages) => {
                self.measures.at(request, epoch, at::EARLY);
                at.early = Some(Early { tokens, pages });
            }
            // Whatever it is, the push meets it again.
            Err(error) => tracing::debug!(%error, %request, "slots sent ahead do not fit"),
        }
    }

    fn land_early(
        &self,
        stage: StageId,
        tokens: &Range<u64>,
        hash_from: u64,
        bytes: &[u8],
    ) -> Result<PageDigests, KvError> {
        let (engine, header) = (&*self.adapter, &self.capabilities.header);
        packed::land(engine, header, stage, bytes, tokens.start, tokens.clone())?;
        let mut pages = PageDigests::new();
        kv::hash_range(
            engine,
            header,
            View::Stage(stage),
            hash_from..tokens.end,
            &mut pages,
        )?;
        Ok(pages)
    }

    /// Whether the slots that a push left out are in place. What came ahead and is not what the push
    /// claims is opened again, to be written by the push.
    pub(super) fn settle_early(
        &self,
        early: &mut Option<Early>,
        stage: StageId,
        tokens: &Range<u64>,
        pushed: &[u8],
    ) -> Result<bool, AdapterError> {
        match early {
            Some(e) if e.tokens == *tokens && pushed.is_empty() => Ok(true),
            Some(e) => {
                for group in &self.capabilities.header.groups {
                    self.adapter.reopen(stage, group.group, e.tokens.clone())?;
                }
                *early = None;
                Ok(false)
            }
            None => Ok(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_sent_ahead_are_read_as_written_and_no_other_number_of_them() {
        let frame = |tokens: Range<u64>| {
            let mut frame = head(RequestId([7; 16]), MigrationEpoch(3), &tokens).to_vec();
            frame.extend_from_slice(b"slots");
            frame
        };
        let good = frame(40..41);
        let want = (RequestId([7; 16]), MigrationEpoch(3), 40..41, &b"slots"[..]);
        assert_eq!(read(&good).unwrap(), want);
        for cut in 0..HEAD {
            assert!(read(&good[..cut]).is_err());
        }
        for (from, to) in [(40, 40), (41, 40), (0, MOST + 1), (0, u64::MAX)] {
            assert!(read(&frame(from..to)).is_err());
        }
    }
}
