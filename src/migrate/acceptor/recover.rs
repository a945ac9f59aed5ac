//! Recovery, as the acceptor begins it: the record, then the floor and J in one step, then the
//! rebuild by the new owner.

use super::machine::Acceptor;
use super::{Action, Do};
use crate::id::{OwnerEpoch, WorkerRef};
use crate::migrate::io::{Op, Payload, StoreReply, TimerKind};
use crate::migrate::msg::Body;
use crate::route::mutants::mutant;
use crate::route::{RouteOp, RoutePhase, Versioned, same_worker};

/// A recovery under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Recovery {
    None,
    /// Reading or writing the record (`op` is `None`: in doubt, until the retry timer).
    Beginning {
        target: WorkerRef,
        /// The epoch believed dead, once read. If the record leaves it by another's hand, there is
        /// nothing to recover from.
        expect: Option<OwnerEpoch>,
        op: Option<Op>,
    },
    /// The record names the target; the floor is being journaled.
    Raising {
        target: WorkerRef,
        epoch: OwnerEpoch,
        op: Op,
    },
    Imaging {
        target: WorkerRef,
        epoch: OwnerEpoch,
        journaled: u64,
        op: Op,
    },
    /// The target was told; `op` is a look whether it is done.
    Rebuilding {
        target: WorkerRef,
        epoch: OwnerEpoch,
        journaled: u64,
        image: Payload,
        resends: u16,
        op: Option<Op>,
    },
}

impl Acceptor {
    /// Whether a recovery is under way.
    pub fn is_recovering(&self) -> bool {
        self.recovery != Recovery::None
    }

    pub(super) fn begin_recovery(&mut self, now: u64, target: WorkerRef, out: &mut Vec<Action>) {
        if self.ended || self.recovery != Recovery::None {
            return;
        }
        let op = self.ops.next();
        self.recovery = Recovery::Beginning {
            target,
            expect: None,
            op: Some(op),
        };
        self.timer(now, TimerKind::Deadline, self.limits.step_ns, out);
        out.push(Action::StoreRead { op });
    }

    pub(super) fn retry_recovery(&mut self, out: &mut Vec<Action>) {
        if let Recovery::Beginning { op, .. } | Recovery::Rebuilding { op, .. } = &mut self.recovery
            && op.is_none()
        {
            let read = self.ops.next();
            *op = Some(read);
            out.push(Action::StoreRead { op: read });
        }
    }

    pub(super) fn on_recovery_store(
        &mut self,
        now: u64,
        op: Op,
        reply: StoreReply,
        out: &mut Vec<Action>,
    ) {
        match &mut self.recovery {
            Recovery::Beginning { op: o, .. } if *o == Some(op) => {
                *o = None;
                match reply {
                    StoreReply::Value(v) | StoreReply::Conflict(Some(v)) => self.on_begin(v, out),
                    // Applied is read back, too: the record alone says what stands.
                    StoreReply::Applied(_) => self.retry_recovery(out),
                    StoreReply::InDoubt => {
                        self.timer(now, TimerKind::Retry, self.limits.retry_ns, out);
                    }
                    StoreReply::Absent | StoreReply::Conflict(None) => {
                        self.end_recovery(false, RoutePhase::Finished, out);
                    }
                }
            }
            Recovery::Rebuilding { op: o, epoch, .. } if *o == Some(op) => {
                *o = None;
                if let StoreReply::Value(v) = reply {
                    let moved = v.record.owner_epoch != *epoch;
                    if moved || v.record.phase != RoutePhase::Recovering {
                        let running = !moved && v.record.phase == RoutePhase::Serving;
                        self.end_recovery(running, v.record.phase, out);
                    }
                }
            }
            _ => {}
        }
    }

    fn on_begin(&mut self, found: Versioned, out: &mut Vec<Action>) {
        let Recovery::Beginning { target, expect, op } = &mut self.recovery else {
            return;
        };
        let Versioned { revision, record } = found;
        let begun = expect.is_some_and(|e| record.owner_epoch == e.next())
            && record.phase == RoutePhase::Recovering
            && same_worker(&record.owner, target);
        if begun && self.ended {
            // The last token came while the record was being written: there is nothing to go on
            // with, and a rebuilt worker would decode past the end.
            self.end_recovery(false, RoutePhase::Finished, out);
            if self.journaled() == self.accepted() {
                self.finish(out);
            }
            return;
        }
        if begun {
            let (target, epoch) = (target.clone(), record.owner_epoch);
            let op = if mutant!("recovery-without-floor", true, false) {
                self.raise_floor(epoch, target.clone(), out)
            } else {
                let (floor, owner) = (self.floor, target.clone());
                let op = self.ops.next();
                out.push(Action::Do(Do::RaiseFloor { op, floor, owner }));
                op
            };
            self.recovery = Recovery::Raising { target, epoch, op };
            return;
        }
        if expect.is_some_and(|e| record.owner_epoch != e) || record.phase == RoutePhase::Finished {
            // A commit, a rival recovery or the end of the stream came first.
            let running = record.phase == RoutePhase::Serving;
            return self.end_recovery(running, record.phase, out);
        }
        let write = RouteOp::BeginRecovery {
            expect: record.owner_epoch,
            target: target.clone(),
        };
        match record.apply(&write) {
            Ok(next) => {
                *expect = Some(record.owner_epoch);
                let cas = self.ops.next();
                *op = Some(cas);
                out.push(Action::StoreCas {
                    op: cas,
                    expect: revision,
                    next: Box::new(next),
                });
            }
            Err(_) => self.end_recovery(false, record.phase, out),
        }
    }

    pub(super) fn on_floor_raised(&mut self, op: Op, out: &mut Vec<Action>) {
        let Recovery::Raising {
            target,
            epoch,
            op: o,
        } = &self.recovery
        else {
            return;
        };
        if *o != op {
            return;
        }
        // The floor was raised in the step that sent this action, so nothing was accepted since but
        // under the new epoch, which does not run yet: the log is J.
        let (target, epoch, journaled) = (target.clone(), *epoch, self.accepted());
        let op = self.ops.next();
        self.recovery = Recovery::Imaging {
            target,
            epoch,
            journaled,
            op,
        };
        out.push(Action::Do(Do::BuildImage {
            op,
            through: journaled,
        }));
    }

    pub(super) fn on_image_built(
        &mut self,
        now: u64,
        op: Op,
        image: Payload,
        out: &mut Vec<Action>,
    ) {
        let Recovery::Imaging {
            target,
            epoch,
            journaled,
            op: o,
        } = &self.recovery
        else {
            return;
        };
        if *o != op {
            return;
        }
        self.recovery = Recovery::Rebuilding {
            target: target.clone(),
            epoch: *epoch,
            journaled: *journaled,
            image,
            resends: 0,
            op: None,
        };
        self.send_rebuild(now, out);
    }

    fn send_rebuild(&self, now: u64, out: &mut Vec<Action>) {
        if let Recovery::Rebuilding {
            target,
            epoch,
            journaled,
            image,
            ..
        } = &self.recovery
        {
            let body = Body::Rebuild {
                owner_epoch: *epoch,
                journaled: *journaled,
            };
            self.send(target, body, *image, out);
            self.timer(now, TimerKind::Resend, self.limits.resend_ns, out);
        }
    }

    pub(super) fn resend_rebuild(&mut self, now: u64, out: &mut Vec<Action>) {
        let most = self.limits.resends;
        if let Recovery::Rebuilding { resends, .. } = &mut self.recovery
            && *resends < most
        {
            *resends += 1;
            self.send_rebuild(now, out);
        }
    }

    /// The target says that it runs: look.
    pub(super) fn on_recovery_notice(&mut self, out: &mut Vec<Action>) {
        if matches!(self.recovery, Recovery::Rebuilding { .. }) {
            self.retry_recovery(out);
        }
    }

    /// The target takes too long: the executor picks another one and begins again, one epoch up.
    pub(super) fn recovery_timed_out(&mut self, out: &mut Vec<Action>) {
        if self.recovery != Recovery::None {
            self.end_recovery(false, RoutePhase::Recovering, out);
        }
    }

    fn end_recovery(&mut self, running: bool, phase: RoutePhase, out: &mut Vec<Action>) {
        self.recovery = Recovery::None;
        out.push(Action::Do(Do::Recovered { running, phase }));
    }
}
