//! From the push to the commit: land, verify in place, attach, import and re-export the control
//! state, arm, commit.

use super::machine::{Attempt, Stage};
use super::{Action, Do};
use crate::id::WorkerRef;
use crate::migrate::io::{Action as Act, Op, Payload, Report, Step, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::Push;
use crate::route::mutants::mutant;
use crate::route::{Cause, ControlSeal, same_worker};

/// What the fence sent.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Fence {
    pub(super) push: Push,
    payload: Payload,
    /// Replicas whose set digest came back equal.
    equal: u16,
    differs: bool,
}

impl Attempt {
    pub(super) fn on_push(
        &mut self,
        now: u64,
        push: Push,
        payload: Payload,
        limits: &Limits,
        out: &mut Vec<Action>,
    ) {
        let (Some(staged), Stage::Streaming, false) = (self.staged, self.stage, self.is_over())
        else {
            return; // a second copy, or too late
        };
        let cert = &push.certificate;
        let intent = self.pursuit.intent();
        let fits = cert.request == self.request
            && cert.migration_epoch == intent.migration_epoch
            && cert.owner_epoch == intent.owner_epoch
            && same_worker(&cert.src, &intent.src)
            && cert.control.offset == cert.seal
            && cert.control.owner_epoch == cert.owner_epoch
            && push.replicas.len() == usize::from(staged.replicas)
            && (staged.replicas != 1 || push.replicas[0] == cert.set_digest)
            && push.tail_from <= self.verified
            && self.verified <= cert.kv_len;
        if !fits {
            out.push(Act::Report(Report::Stale(
                "push that does not fit its intent",
            )));
            return self.give_up(Cause::SetMismatch, out);
        }
        out.push(Act::Report(Report::Entered(Step::ImportTail)));
        self.timer(now, TimerKind::Deadline, limits.fence_ns, out);
        self.stage = Stage::Draining;
        self.fence = Some(Box::new(Fence {
            push,
            payload,
            equal: 0,
            differs: false,
        }));
        // The push brings all that is not verified yet.
        let front_in_hash = usize::from(!self.hashes.is_empty());
        self.offers.truncate(front_in_hash);
        if let Some(pull) = &self.pull {
            out.push(Act::Do(Do::CancelPull { op: pull.op }));
        }
        self.land_when_quiet(out);
    }

    /// Lands the push once nobody else writes or hashes the stage.
    pub(super) fn land_when_quiet(&mut self, out: &mut Vec<Action>) {
        let quiet = self.pull.is_none() && self.hashes.is_empty() && self.busy.is_none();
        let (Stage::Draining, true, false, Some(fence)) =
            (self.stage, quiet, self.is_over(), &self.fence)
        else {
            return;
        };
        let (payload, payload_from) = (fence.payload, fence.push.tail_from);
        let (from, to) = (self.verified, fence.push.certificate.kv_len);
        self.stage = Stage::Landing;
        let op = self.start();
        out.push(Act::Do(Do::Land {
            op,
            payload,
            payload_from,
            from,
            to,
        }));
    }

    pub(super) fn on_landed(
        &mut self,
        result: Result<(), Cause>,
        limits: &Limits,
        out: &mut Vec<Action>,
    ) {
        if !self.goes_on(result, out) {
            return;
        }
        out.push(Act::Report(Report::Entered(Step::Verify)));
        if mutant!("arm-before-verify", false, true) {
            return self.attach(out);
        }
        self.stage = Stage::Verifying;
        let Some(fence) = &self.fence else { return };
        let kv_len = fence.push.certificate.kv_len;
        let from = if limits.verify_full { 0 } else { self.verified };
        for replica in 0..self.replicas() {
            let op = self.ops.next();
            self.hashes.push((op, replica));
            out.push(Act::Do(Do::HashSet {
                op,
                replica,
                from,
                kv_len,
            }));
        }
    }

    pub(super) fn on_set_hashed(
        &mut self,
        op: Op,
        result: Result<[u8; 32], Cause>,
        out: &mut Vec<Action>,
    ) {
        let Some(i) = self.hashes.iter().position(|(o, _)| *o == op) else {
            return;
        };
        let (_, replica) = self.hashes.swap_remove(i);
        let replicas = self.replicas();
        let Some(fence) = &mut self.fence else { return };
        match result {
            Ok(actual) => {
                let expected = fence.push.replicas.get(usize::from(replica));
                if mutant!("tail-skipped", expected == Some(&actual), true) {
                    fence.equal += 1;
                } else {
                    fence.differs = true;
                    out.push(Act::Report(Report::Mismatch {
                        replica,
                        page: u32::MAX,
                    }));
                }
            }
            Err(cause) => self.give_up(cause, out),
        }
        let Some(fence) = &self.fence else { return };
        if !self.hashes.is_empty() || self.is_over() {
            return;
        }
        if fence.differs {
            self.give_up(Cause::SetMismatch, out);
        } else if fence.equal == replicas {
            self.attach(out);
        }
    }

    fn attach(&mut self, out: &mut Vec<Action>) {
        let Some(fence) = &self.fence else { return };
        let kv_len = fence.push.certificate.kv_len;
        self.stage = Stage::Attaching;
        let op = self.start();
        out.push(Act::Do(Do::Attach { op, kv_len }));
    }

    pub(super) fn on_attached(&mut self, result: Result<(), Cause>, out: &mut Vec<Action>) {
        if !self.goes_on(result, out) {
            return;
        }
        let Some(fence) = &self.fence else { return };
        let payload = fence.payload;
        self.stage = Stage::Importing;
        let op = self.start();
        out.push(Act::Do(Do::ImportControl { op, payload }));
    }

    pub(super) fn on_control_imported(&mut self, result: Result<(), Cause>, out: &mut Vec<Action>) {
        if !self.goes_on(result, out) {
            return;
        }
        self.stage = Stage::ReExporting;
        let owner_epoch = self.pursuit.intent().owner_epoch;
        let op = self.start();
        out.push(Act::Do(Do::ReExport { op, owner_epoch }));
    }

    pub(super) fn on_re_exported(
        &mut self,
        result: Result<ControlSeal, Cause>,
        out: &mut Vec<Action>,
    ) {
        let Some(fence) = &self.fence else { return };
        let expected = fence.push.certificate.control;
        let equal = result.map(|actual| actual == expected);
        if !self.goes_on(equal.map(|_| ()), out) {
            return;
        }
        if equal != Ok(true) {
            return self.give_up(Cause::ControlMismatch, out);
        }
        out.push(Act::Report(Report::Entered(Step::Arm)));
        self.stage = Stage::Arming;
        let op = self.start();
        out.push(Act::Do(Do::Arm { op }));
    }

    pub(super) fn on_armed(
        &mut self,
        result: Result<(), Cause>,
        me: &WorkerRef,
        out: &mut Vec<Action>,
    ) {
        self.armed = result.is_ok();
        if !self.goes_on(result, out) {
            return;
        }
        let Some(fence) = &self.fence else { return };
        let certificate = fence.push.certificate.clone();
        self.clear_timers(out); // from here on only the record can end it
        out.push(Act::Report(Report::Entered(Step::Commit)));
        self.stage = Stage::Committing;
        self.pursuit
            .commit(me.clone(), certificate, &mut self.ops, out);
    }

    /// Whether the fence's next step may begin after one that ended with `result`.
    fn goes_on(&mut self, result: Result<(), Cause>, out: &mut Vec<Action>) -> bool {
        if let Err(cause) = result {
            self.give_up(cause, out);
        }
        !self.is_over()
    }
}
