//! The null handoff: the fence's hops and its compare-and-swap with nothing in them.
//!
//! It tells what a handoff costs at the least on a machine, so that the pause can be judged beside
//! it. The same machines, messages, threads and store access as for a migration; where those would
//! move, hash, import or export something, nothing is done, and the destination echoes the source's
//! claims instead of judging them. The request does not survive it: it is dropped at both ends.
//!
//! Since it commits what nobody verified, only a worker that was started for a bench takes part; at
//! any other the option is ignored by the source and refused by the destination.

use super::destination::DestinationHands;
use super::source::SourceHands;
use crate::id::OwnerEpoch;
use crate::migrate::destination::{Do, Done};
use crate::migrate::io::Payload;
use crate::migrate::msg::Push;
use crate::migrate::source::Exported;
use crate::node::measure::at;
use crate::route::{Cause, ControlSeal};

/// What the source claimed, to be echoed.
#[derive(Debug, Clone)]
pub struct Claim {
    set: [u8; 32],
    control: ControlSeal,
}

impl Claim {
    /// Of a push.
    pub fn of(push: &Push) -> Self {
        Self {
            set: push.certificate.set_digest,
            control: push.certificate.control,
        }
    }
}

impl SourceHands<'_> {
    /// Nothing to export.
    pub(super) fn null_export(&mut self, owner_epoch: OwnerEpoch) -> Result<Exported, Cause> {
        let seal = self
            .at
            .boundary
            .as_ref()
            .map(|b| b.seal)
            .ok_or(Cause::SourceRefused)?;
        self.core
            .measures
            .at(self.slot.request, self.at.epoch, at::EXPORTED);
        Ok(Exported {
            set_digest: [0; 32],
            replicas: vec![[0; 32]],
            control: ControlSeal {
                hash: [0; 16],
                offset: seal,
                owner_epoch,
            },
            control_bytes: 0,
            tail_bytes: 0,
            tokens: Vec::new(),
            payload: Payload::NONE,
        })
    }
}

impl DestinationHands<'_> {
    /// The fence's work, not done; gives other work back.
    pub(super) fn null_perform(&mut self, claim: &Claim, work: Do) -> Result<Option<Done>, Do> {
        let (request, epoch) = (self.slot.request, self.at.epoch);
        let note = |name| self.core.measures.at(request, epoch, name);
        Ok(Some(match work {
            Do::Land { op, .. } => {
                note(at::LANDED);
                Done::Landed { op, result: Ok(()) }
            }
            Do::HashSet { op, .. } => {
                note(at::VERIFIED);
                Done::SetHashed {
                    op,
                    result: Ok(claim.set),
                }
            }
            Do::Attach { op, .. } => Done::Attached { op, result: Ok(()) },
            Do::ImportControl { op, .. } => Done::ControlImported { op, result: Ok(()) },
            Do::ReExport { op, .. } => {
                note(at::CONTROL);
                Done::ReExported {
                    op,
                    result: Ok(claim.control),
                }
            }
            Do::Arm { op } => {
                note(at::ARMED);
                Done::Armed { op, result: Ok(()) }
            }
            Do::Emit { .. } => return Ok(None),
            Do::Activate { .. } => {
                note(at::LAUNCH);
                self.at.fenced = false;
                self.give_back(epoch);
                return Ok(None);
            }
            other => return Err(other),
        }))
    }
}
