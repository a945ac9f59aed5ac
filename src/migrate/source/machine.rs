//! The source's machine.

use super::attempt::{Attempt, Stage};
use super::{Action, Boundary, Do, Done, Event, Exported, Sealed};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::decide::Ops;
use crate::migrate::io::{Op, Payload, Peer, Report, Step, StoreReply, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg, Offer, PageClaim, Push};
use crate::route::mutants::mutant;
use crate::route::{Cause, FenceCertificate, Intent, RoutePhase, Verdict, same_worker};

/// One request that this worker owns, over all attempts to move it away.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Source {
    request: RequestId,
    me: WorkerRef,
    owner_epoch: OwnerEpoch,
    limits: Limits,
    /// Tokens known to be journaled.
    acked: u64,
    /// The stream ended by itself.
    ended: bool,
    /// Another worker's request now, or finished: this machine only waits to be dropped.
    gone: bool,
    /// The highest attempt found pending in the record.
    highest: MigrationEpoch,
    attempt: Option<Box<Attempt>>,
    /// Outside an attempt: a look at the record, because the gateway refused our tokens.
    look: Option<Op>,
    look_ops: Ops,
}

impl Source {
    /// A request that `me` may append to under `owner_epoch`; `acked` tokens are journaled.
    pub fn new(
        request: RequestId,
        me: WorkerRef,
        owner_epoch: OwnerEpoch,
        acked: u64,
        limits: Limits,
    ) -> Self {
        Self {
            request,
            me,
            owner_epoch,
            limits,
            acked,
            ended: false,
            gone: false,
            highest: MigrationEpoch(0),
            attempt: None,
            look: None,
            look_ops: Ops::new(MigrationEpoch(0)),
        }
    }

    /// The epoch of this worker's right to append.
    pub fn owner_epoch(&self) -> OwnerEpoch {
        self.owner_epoch
    }

    /// Whether the request is another worker's now, or finished, and all it held here is freed.
    pub fn is_gone(&self) -> bool {
        self.gone && self.attempt.is_none()
    }

    /// Whether an attempt is under way here.
    pub fn is_migrating(&self) -> bool {
        self.attempt.is_some()
    }

    /// How far the attempt under way has come: tokens sealed here, tokens verified there.
    pub fn progress(&self) -> Option<(u64, u64)> {
        self.attempt.as_ref().map(|a| (a.sealed, a.verified))
    }

    /// Whether the request is stopped for an attempt.
    pub fn is_fenced(&self) -> bool {
        self.attempt.as_ref().is_some_and(|a| a.held)
    }

    /// Takes one event; appends what is to be done, in order.
    pub fn handle(&mut self, now_ns: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Recv { from, msg, .. } => {
                if msg.request == self.request {
                    self.on_message(now_ns, from, msg, out);
                }
            }
            Event::Store { op, reply } => self.on_store(now_ns, op, &reply, out),
            Event::Timer(timer) => self.on_timer(now_ns, timer, out),
            Event::Local(done) => self.on_done(now_ns, done, out),
        }
    }

    fn on_message(&mut self, now: u64, from: Peer, msg: Msg, out: &mut Vec<Action>) {
        match msg.body {
            Body::Prepare { intent } => return self.on_prepare(now, from, intent, out),
            Body::Accepted {
                owner_epoch,
                through,
            } => {
                if owner_epoch == self.owner_epoch {
                    self.acked = self.acked.max(through);
                }
                return;
            }
            Body::Fenced { floor } => {
                if floor > self.owner_epoch {
                    self.look_at_record(out);
                }
                return;
            }
            _ => {}
        }
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        if msg.epoch != a.epoch() {
            out.push(Action::Report(Report::Stale("message of another attempt")));
            return;
        }
        match msg.body {
            Body::Ready {
                replicas,
                align_tokens,
            } if a.is_destination(&from)
                && a.stage == Stage::Pinned
                && replicas > 0
                && align_tokens > 0 =>
            {
                a.replicas = replicas;
                a.align = u64::from(align_tokens);
                a.stage = Stage::Streaming;
                a.reseal = true;
                a.resends = 0;
                a.deadline(now, self.limits.stream_ns, out);
                out.push(Action::Report(Report::Entered(Step::Stream)));
                a.pump(now, &self.limits, out);
            }
            Body::Verified { through }
                if a.is_destination(&from)
                    && a.stage == Stage::Streaming
                    && through > a.verified
                    && through <= a.sealed =>
            {
                a.verified = through;
                a.offered = a.offered.max(through);
                a.window.retain(|to| *to > through);
                a.resends = 0;
                a.reseal = true;
                // With nothing left the next seal tells, of what was decoded meanwhile; after GO
                // there is nothing to tell.
                if a.left() > 0 && !a.go {
                    a.tell_progress(false, self.request, out);
                }
                a.pump(now, &self.limits, out);
            }
            Body::Go if from == a.coordinator && a.stage == Stage::Streaming => {
                if a.sealed > 0 && a.sealed - a.verified <= u64::from(self.limits.go_tokens) {
                    a.go = true;
                    a.pump(now, &self.limits, out);
                } else {
                    a.tell_progress(false, self.request, out);
                }
            }
            Body::Cancel { cause } | Body::Refuse { cause } => {
                a.give_up(cause, self.request, out);
            }
            Body::Outcome => a.pursuit.look(&mut a.ops, out),
            _ => {}
        }
    }

    fn on_prepare(&mut self, now: u64, from: Peer, intent: Intent, out: &mut Vec<Action>) {
        let refuse = |cause, out: &mut Vec<Action>| {
            let msg = Msg {
                request: self.request,
                epoch: intent.migration_epoch,
                body: Body::Refuse { cause },
            };
            out.push(Action::Send {
                to: from.clone(),
                msg,
                payload: Payload::NONE,
            });
        };
        if let Some(a) = self.attempt.as_mut() {
            if *a.pursuit.intent() == intent {
                a.coordinator = from;
                a.tell_prepared(self.request, out);
            } else if intent.migration_epoch > a.epoch() {
                // The record cannot hold a later intent unless ours was decided.
                a.pursuit.look(&mut a.ops, out);
            } else {
                out.push(Action::Report(Report::Stale("prepare of an older attempt")));
            }
            return;
        }
        if intent.migration_epoch <= self.highest {
            out.push(Action::Report(Report::Stale("prepare of an older attempt")));
            return;
        }
        if self.gone
            || self.ended
            || !same_worker(&intent.src, &self.me)
            || intent.owner_epoch != self.owner_epoch
        {
            return refuse(Cause::SourceRefused, out);
        }
        let mut a = Box::new(Attempt::new(intent, from));
        a.deadline(now, self.limits.step_ns, out);
        a.pursuit.look(&mut a.ops, out);
        self.attempt = Some(a);
    }

    /// The gateway does not take our tokens any more: who owns the request?
    fn look_at_record(&mut self, out: &mut Vec<Action>) {
        if let Some(a) = self.attempt.as_mut() {
            a.pursuit.look(&mut a.ops, out);
        } else if self.look.is_none() && !self.gone {
            let op = self.look_ops.next();
            self.look = Some(op);
            out.push(Action::StoreRead { op });
        }
    }

    fn on_store(&mut self, now: u64, op: Op, reply: &StoreReply, out: &mut Vec<Action>) {
        if self.look == Some(op) {
            self.look = None;
            let lost = match reply {
                StoreReply::Value(v) => {
                    v.record.phase == RoutePhase::Finished
                        || v.record.owner_epoch > self.owner_epoch
                }
                StoreReply::Absent => true,
                _ => false,
            };
            if lost && self.attempt.is_none() {
                self.gone = true;
                out.push(Action::Do(Do::Retire { quarantined: 0 }));
            }
            return;
        }
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        let Some(verdict) =
            a.pursuit
                .on_store(now, self.limits.retry_ns, op, reply, &mut a.ops, out)
        else {
            return;
        };
        match verdict {
            Verdict::Pending if a.stage == Stage::Validating && !a.pursuit.wants_abort() => {
                self.highest = a.epoch();
                a.stage = Stage::Pinning;
                let op = a.start();
                out.push(Action::Report(Report::Entered(Step::Prepare)));
                out.push(Action::Do(Do::Pin {
                    op,
                    epoch: a.epoch(),
                }));
            }
            Verdict::NotYet if a.stage == Stage::Validating => {
                out.push(Action::Report(Report::Stale(
                    "prepare of an intent that does not stand",
                )));
                self.attempt = None;
            }
            Verdict::Pending | Verdict::NotYet => {}
            decided => {
                if a.verdict.is_none() && a.stage != Stage::Freeing {
                    a.verdict = Some(decided);
                    self.settle(out);
                }
            }
        }
    }

    fn on_timer(&mut self, now: u64, timer: Timer, out: &mut Vec<Action>) {
        let Some(a) = self.attempt.as_mut().filter(|a| a.epoch() == timer.epoch) else {
            return;
        };
        if a.stage == Stage::Freeing {
            return;
        }
        match timer.kind {
            TimerKind::Retry => a.pursuit.retry(&mut a.ops, out),
            TimerKind::Deadline => {
                if mutant!("unfence-on-timer", false, a.held) {
                    a.held = false;
                    out.push(Action::Do(Do::ReleaseHold));
                }
                a.give_up(Cause::Timeout, self.request, out);
            }
            TimerKind::Round => {
                a.reseal = true;
                a.pump(now, &self.limits, out);
            }
            TimerKind::Resend => match a.stage {
                Stage::Streaming if a.window.is_empty() => {}
                _ if a.resends >= self.limits.resends && a.stage == Stage::Streaming => {
                    a.give_up(Cause::PeerLost, self.request, out);
                }
                Stage::Streaming => {
                    // Offers or their answers were lost: begin again behind what is verified.
                    a.resends += 1;
                    a.window.clear();
                    a.offered = a.verified;
                    a.pump(now, &self.limits, out);
                }
                Stage::Fenced => {
                    a.resends += 1;
                    a.send_push(now, &self.limits, self.request, out);
                }
                _ => {}
            },
            TimerKind::Pace => {}
        }
    }

    fn on_done(&mut self, now: u64, done: Done, out: &mut Vec<Action>) {
        match done {
            Done::Acked { through } => self.acked = self.acked.max(through),
            Done::Ended => {
                self.ended = true;
                if let Some(a) = self.attempt.as_mut().filter(|a| !a.held) {
                    a.give_up(Cause::RequestEnded, self.request, out);
                }
            }
            Done::Cancel { cause } => {
                if let Some(a) = self.attempt.as_mut() {
                    a.give_up(cause, self.request, out);
                }
            }
            Done::Pinned { op, result } => self.on_pinned(op, result, out),
            Done::Sealed { op, result } => self.on_sealed(now, op, result, out),
            Done::Hashed { op, result } => self.on_hashed(now, op, result, out),
            Done::Held { op, result } => self.on_held(op, result, out),
            Done::Exported { op, result } => self.on_exported(now, op, result, out),
            Done::Revoked { op, quarantined } => self.on_revoked(op, quarantined, out),
        }
    }

    /// The attempt whose action `op` was; `None` if it is not the one under way.
    fn finished(&mut self, op: Op) -> Option<&mut Attempt> {
        let a = self.attempt.as_mut().filter(|a| a.busy == Some(op))?;
        a.busy = None;
        Some(a)
    }

    fn on_pinned(&mut self, op: Op, result: Result<Payload, Cause>, out: &mut Vec<Action>) {
        let request = self.request;
        let Some(a) = self.finished(op) else { return };
        match result {
            Ok(spec) => {
                a.spec = Some(spec);
                a.stage = Stage::Pinned;
                if a.verdict.is_none() && !a.pursuit.wants_abort() {
                    a.tell_prepared(request, out);
                }
            }
            Err(cause) => a.give_up(cause, request, out),
        }
        self.settle(out);
    }

    fn on_sealed(
        &mut self,
        now: u64,
        op: Op,
        result: Result<Sealed, Cause>,
        out: &mut Vec<Action>,
    ) {
        let (request, limits) = (self.request, &self.limits.clone());
        let Some(a) = self.finished(op) else { return };
        match result {
            Ok(s) if s.dirty => a.give_up(Cause::SealDirty, request, out),
            Ok(s) => {
                a.sealed = a.sealed.max(s.stable_len);
                let converged = a.has_converged(limits);
                a.tell_progress(converged, request, out);
                if converged || a.left() == 0 {
                    a.timer(now, TimerKind::Round, limits.round_ns, out);
                }
                a.pump(now, limits, out);
            }
            Err(cause) => a.give_up(cause, request, out),
        }
        self.settle(out);
    }

    fn on_hashed(
        &mut self,
        now: u64,
        op: Op,
        result: Result<(Vec<PageClaim>, Payload), Cause>,
        out: &mut Vec<Action>,
    ) {
        let (request, limits) = (self.request, &self.limits.clone());
        let Some(a) = self.finished(op) else { return };
        match result {
            Ok((claims, payload)) => {
                let (from, to) = a.hashing;
                // A resend may have gone back meanwhile: then this range comes again.
                if from == a.offered {
                    a.offered = to;
                    a.window.push_back(to);
                    let body = Body::Offer(Offer { from, to, claims });
                    a.send_destination(request, body, payload, out);
                    a.timer(now, TimerKind::Resend, limits.resend_ns, out);
                }
                a.pump(now, limits, out);
            }
            Err(cause) => a.give_up(cause, request, out),
        }
        self.settle(out);
    }

    fn on_held(&mut self, op: Op, result: Result<Boundary, Cause>, out: &mut Vec<Action>) {
        let request = self.request;
        let (owner_epoch, acked) = (self.owner_epoch, self.acked);
        let Some(a) = self.finished(op) else { return };
        match result {
            Ok(b) => {
                a.held = true;
                a.boundary = Some(b);
                let wrong = if b.dirty {
                    Some(Cause::SealDirty)
                } else if b.ended {
                    Some(Cause::RequestEnded)
                } else if b.kv_len < a.verified {
                    Some(Cause::Engine)
                } else {
                    None
                };
                if let Some(cause) = wrong {
                    a.give_up(cause, request, out);
                } else if a.verdict.is_none() && !a.pursuit.wants_abort() {
                    a.stage = Stage::Exporting;
                    let op = a.start();
                    out.push(Action::Report(Report::Entered(Step::CopyTail)));
                    out.push(Action::Do(Do::Export {
                        op,
                        from: a.verified,
                        kv_len: b.kv_len,
                        owner_epoch,
                        tokens_from: acked + 1,
                        replicas: a.replicas,
                    }));
                }
            }
            Err(cause) => a.give_up(cause, request, out),
        }
        self.settle(out);
    }

    fn on_exported(
        &mut self,
        now: u64,
        op: Op,
        result: Result<Exported, Cause>,
        out: &mut Vec<Action>,
    ) {
        let (me, request, limits) = (self.me.clone(), self.request, &self.limits.clone());
        let owner_epoch = self.owner_epoch;
        let Some(a) = self.finished(op) else { return };
        match (result, a.boundary) {
            (Ok(x), Some(b)) if a.verdict.is_none() && !a.pursuit.wants_abort() => {
                let certificate = FenceCertificate {
                    request,
                    migration_epoch: a.epoch(),
                    owner_epoch,
                    src: me,
                    seal: b.seal,
                    kv_len: b.kv_len,
                    set_digest: x.set_digest,
                    control: x.control,
                };
                let push = Push {
                    certificate,
                    tail_from: a.verified,
                    replicas: x.replicas,
                    control_bytes: x.control_bytes,
                    tail_bytes: x.tail_bytes,
                    tokens: x.tokens,
                };
                a.push = Some((Box::new(push), x.payload));
                a.stage = Stage::Fenced;
                a.resends = 0;
                a.send_push(now, limits, request, out);
                if mutant!("source-freed-before-decision", false, true) {
                    out.push(Action::Do(Do::Retire { quarantined: 0 }));
                }
            }
            (Err(cause), _) => a.give_up(cause, request, out),
            _ => {}
        }
        self.settle(out);
    }

    fn on_revoked(&mut self, op: Op, quarantined: u64, out: &mut Vec<Action>) {
        let Some(a) = self.finished(op) else { return };
        let (epoch, verdict) = (a.epoch(), a.verdict);
        self.attempt = None;
        self.free(epoch, verdict, true, quarantined, out);
    }

    /// Acts on a decision, as far as the local action under way allows.
    fn settle(&mut self, out: &mut Vec<Action>) {
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        let Some(verdict) = a.verdict else { return };
        if a.stage == Stage::Freeing {
            return;
        }
        if verdict == Verdict::Aborted && a.held {
            a.held = false;
            out.push(Action::Do(Do::ReleaseHold));
        }
        if a.busy.is_some() {
            return;
        }
        let epoch = a.epoch();
        out.push(Action::Report(Report::Decided {
            committed: verdict == Verdict::Committed,
        }));
        for kind in [
            TimerKind::Deadline,
            TimerKind::Resend,
            TimerKind::Round,
            TimerKind::Retry,
        ] {
            out.push(Action::ClearTimer(Timer { epoch, kind }));
        }
        if a.spec.is_some() {
            out.push(Action::Report(Report::Entered(Step::Gc)));
            a.stage = Stage::Freeing;
            let op = a.start();
            out.push(Action::Do(Do::Revoke { op, epoch }));
        } else {
            self.attempt = None;
            self.free(epoch, Some(verdict), false, 0, out);
        }
    }

    /// The last act of an attempt: nobody reads on its behalf any more.
    fn free(
        &mut self,
        epoch: MigrationEpoch,
        verdict: Option<Verdict>,
        pinned: bool,
        quarantined: u64,
        out: &mut Vec<Action>,
    ) {
        if verdict == Some(Verdict::Aborted) {
            if pinned {
                out.push(Action::Do(Do::Unpin { epoch, quarantined }));
            }
        } else {
            self.gone = true;
            out.push(Action::Do(Do::Retire { quarantined }));
        }
        out.push(Action::Report(Report::Released { quarantined }));
    }
}
