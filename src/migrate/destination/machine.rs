//! The destination's machine: attempts, decisions, and the freeing of what was staged.

use std::collections::VecDeque;

use super::fence::Fence;
use super::stream::{Offered, Pulling};
use super::{Action, Do, Done, Event, Staged};
use crate::id::{MigrationEpoch, RequestId, WorkerRef};
use crate::migrate::decide::{Ops, Pursuit};
use crate::migrate::io::{Op, Payload, Peer, Report, Step, StoreReply, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg};
use crate::migrate::shaper::Shaper;
use crate::route::mutants::mutant;
use crate::route::{Cause, Intent, Party, Verdict, same_worker};

/// One request that may come to this worker, over all attempts to move it here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Destination {
    pub(super) request: RequestId,
    pub(super) me: WorkerRef,
    pub(super) limits: Limits,
    /// The highest attempt found pending in the record.
    highest: MigrationEpoch,
    pub(super) attempt: Option<Box<Attempt>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Attempt {
    pub(super) request: RequestId,
    coordinator: Peer,
    pub(super) source: Peer,
    spec: Payload,
    pub(super) ops: Ops,
    pub(super) pursuit: Pursuit,
    pub(super) stage: Stage,
    /// The local action under way, other than pulls and hashes.
    pub(super) busy: Option<Op>,
    pub(super) staged: Option<Staged>,
    pub(super) shaper: Shaper,
    /// Offers not verified yet, in order.
    pub(super) offers: VecDeque<Offered>,
    pub(super) pull: Option<Pulling>,
    /// Hashes under way, with the replica each is for.
    pub(super) hashes: Vec<(Op, u16)>,
    /// Tokens resident and verified on every replica.
    pub(super) verified: u64,
    /// What the fence sent, and how far it got here.
    pub(super) fence: Option<Box<Fence>>,
    pub(super) armed: bool,
    /// Bytes of the stage that a lost writer may still touch.
    pub(super) quarantined: u64,
    verdict: Option<Verdict>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// Is the intent really in the record?
    Validating,
    Staging,
    Streaming,
    /// The push is here; waiting until no pull and no hash is under way.
    Draining,
    Landing,
    Verifying,
    Attaching,
    Importing,
    ReExporting,
    Arming,
    /// Armed; the compare-and-swap is under way or in doubt.
    Committing,
    /// This worker owns the request and runs it.
    Launched,
    /// Not the owner; waiting until nothing is under way, then freeing.
    Freeing,
}

impl Destination {
    /// No attempt yet.
    pub fn new(request: RequestId, me: WorkerRef, limits: Limits) -> Self {
        Self {
            request,
            me,
            limits,
            highest: MigrationEpoch(0),
            attempt: None,
        }
    }

    /// Other bounds for the attempts to come; an attempt under way keeps its own. One that launched
    /// the request here is over: the request may have left again and be about to come back.
    pub fn set_limits(&mut self, limits: Limits) {
        if self.attempt.is_none() || self.is_launched() {
            self.limits = limits;
        }
    }

    /// Whether the request runs here by this machine's commit.
    pub fn is_launched(&self) -> bool {
        self.attempt
            .as_ref()
            .is_some_and(|a| a.stage == Stage::Launched)
    }

    /// Tokens that are resident and verified in the attempt under way.
    pub fn verified(&self) -> Option<u64> {
        self.attempt.as_ref().map(|a| a.verified)
    }

    /// Whether nothing is held here.
    pub fn is_idle(&self) -> bool {
        self.attempt.is_none()
    }

    /// Takes one event; appends what is to be done, in order.
    pub fn handle(&mut self, now_ns: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Recv { from, msg, payload } => {
                if msg.request == self.request {
                    self.on_message(now_ns, from, msg, payload, out);
                }
            }
            Event::Store { op, reply } => self.on_store(now_ns, op, &reply, out),
            Event::Timer(timer) => self.on_timer(now_ns, timer, out),
            Event::Local(done) => self.on_done(now_ns, done, out),
        }
    }

    fn on_message(
        &mut self,
        now: u64,
        from: Peer,
        msg: Msg,
        payload: Payload,
        out: &mut Vec<Action>,
    ) {
        if let Body::Reserve { intent } = msg.body {
            return self.on_reserve(now, from, intent, payload, out);
        }
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        if msg.epoch != a.epoch() {
            out.push(Action::Report(Report::Stale("message of another attempt")));
            return;
        }
        match msg.body {
            Body::Offer(offer) if from.is_worker(&a.pursuit.intent().src) => {
                a.on_offer(now, offer, payload, &self.limits, out);
            }
            Body::Push(push) if from.is_worker(&a.pursuit.intent().src) => {
                a.on_push(now, push, payload, &self.limits, out);
            }
            Body::Cancel { cause } | Body::Refuse { cause } => {
                if mutant!(
                    "disarm-on-word",
                    false,
                    a.armed && a.stage != Stage::Launched
                ) {
                    a.verdict = Some(Verdict::Aborted);
                }
                a.give_up(cause, out);
            }
            Body::Outcome => a.pursuit.look(&mut a.ops, out),
            _ => {}
        }
        self.settle(out);
    }

    fn on_reserve(
        &mut self,
        now: u64,
        from: Peer,
        intent: Intent,
        spec: Payload,
        out: &mut Vec<Action>,
    ) {
        if let Some(a) = self.attempt.as_mut() {
            if *a.pursuit.intent() == intent {
                a.coordinator = from;
                a.tell_ready(out);
                return;
            }
            if intent.migration_epoch <= a.epoch() {
                out.push(Action::Report(Report::Stale("reserve of an older attempt")));
                return;
            }
            if a.stage != Stage::Launched {
                // The record cannot hold a later intent unless ours was decided.
                a.pursuit.look(&mut a.ops, out);
                return;
            }
        } else if intent.migration_epoch <= self.highest {
            out.push(Action::Report(Report::Stale("reserve of an older attempt")));
            return;
        }
        if !same_worker(&intent.dst, &self.me) {
            out.push(Action::Report(Report::Stale(
                "reserve for another life of this worker",
            )));
            return;
        }
        let mut a = Box::new(Attempt {
            request: self.request,
            coordinator: from,
            source: Peer::Worker(intent.src.clone()),
            spec,
            ops: Ops::new(intent.migration_epoch),
            pursuit: Pursuit::new(intent, Party::Destination),
            stage: Stage::Validating,
            busy: None,
            staged: None,
            shaper: Shaper::new(
                self.limits.stream_bytes_per_s,
                self.limits.stream_burst_bytes,
                now,
            ),
            offers: VecDeque::new(),
            pull: None,
            hashes: Vec::new(),
            verified: 0,
            fence: None,
            armed: false,
            quarantined: 0,
            verdict: None,
        });
        a.timer(now, TimerKind::Deadline, self.limits.step_ns, out);
        a.pursuit.look(&mut a.ops, out);
        self.attempt = Some(a);
    }

    fn on_store(&mut self, now: u64, op: Op, reply: &StoreReply, out: &mut Vec<Action>) {
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
                a.stage = Stage::Staging;
                let op = a.start();
                out.push(Action::Report(Report::Entered(Step::Reserve)));
                out.push(Action::Do(Do::Stage {
                    op,
                    epoch: a.epoch(),
                    spec: a.spec,
                }));
            }
            Verdict::NotYet if a.stage == Stage::Validating => {
                out.push(Action::Report(Report::Stale(
                    "reserve of an intent that does not stand",
                )));
                self.attempt = None;
            }
            Verdict::Pending | Verdict::NotYet => {}
            decided => {
                a.verdict = Some(decided);
                self.settle(out);
            }
        }
    }

    fn on_timer(&mut self, now: u64, timer: Timer, out: &mut Vec<Action>) {
        let Some(a) = self.attempt.as_mut().filter(|a| a.epoch() == timer.epoch) else {
            return;
        };
        if a.verdict.is_some() {
            return;
        }
        match timer.kind {
            TimerKind::Retry => a.pursuit.retry(&mut a.ops, out),
            TimerKind::Deadline => a.give_up(Cause::Timeout, out),
            TimerKind::Pace => a.pump(now, &self.limits, out),
            TimerKind::Round | TimerKind::Resend => {}
        }
        self.settle(out);
    }

    fn on_done(&mut self, now: u64, done: Done, out: &mut Vec<Action>) {
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        let limits = &self.limits;
        match done {
            Done::Shape { bytes_per_s } => {
                a.shaper.set_rate(bytes_per_s, now);
                a.pump(now, limits, out);
            }
            Done::Cancel { cause } => a.give_up(cause, out),
            Done::Pulled { op, outcome } => a.on_pulled(now, op, outcome, limits, out),
            Done::Hashed { op, result } => a.on_hashed(now, op, result, limits, out),
            Done::SetHashed { op, result } => a.on_set_hashed(op, result, out),
            Done::Staged { op, result } if a.finished(op) => match result {
                Ok(staged) => {
                    a.staged = Some(staged);
                    if !a.is_over() {
                        a.stage = Stage::Streaming;
                        a.timer(now, TimerKind::Deadline, limits.stream_ns, out);
                        a.tell_ready(out);
                    }
                }
                Err(cause) => a.give_up(cause, out),
            },
            Done::Landed { op, result } if a.finished(op) => a.on_landed(result, limits, out),
            Done::Attached { op, result } if a.finished(op) => a.on_attached(result, out),
            Done::ControlImported { op, result } if a.finished(op) => {
                a.on_control_imported(result, out);
            }
            Done::ReExported { op, result } if a.finished(op) => a.on_re_exported(result, out),
            Done::Armed { op, result } if a.finished(op) => {
                a.on_armed(result, &self.me, out);
            }
            _ => {}
        }
        self.settle(out);
    }

    /// Acts on a decision, as far as what is under way allows.
    fn settle(&mut self, out: &mut Vec<Action>) {
        let Some(a) = self.attempt.as_mut() else {
            return;
        };
        let Some(verdict) = a.verdict else { return };
        if mutant!("double-resume", a.stage == Stage::Launched, false) {
            return; // the request has been running since; its `Source` sees to it
        }
        let epoch = a.epoch();
        if let (Verdict::Committed, true, Some(fence)) = (verdict, a.armed, &a.fence) {
            let owner_epoch = a.pursuit.intent().owner_epoch.next();
            let seal = fence.push.certificate.seal;
            let tokens = mutant!(
                "tail-tokens-not-re-emitted",
                fence.push.tokens.clone(),
                Vec::new()
            );
            let seal = mutant!("seal-off-by-one", seal, seal + 1);
            a.stage = Stage::Launched;
            out.push(Action::Do(Do::Emit {
                owner_epoch,
                tokens,
            }));
            out.push(Action::Do(Do::Activate { owner_epoch, seal }));
            out.push(Action::Report(Report::Decided { committed: true }));
            out.push(Action::Report(Report::Entered(Step::Resume)));
            a.clear_timers(out);
            a.tell_everybody(Body::Outcome, out);
            out.push(Action::Report(Report::Released { quarantined: 0 }));
            return;
        }
        if a.stage != Stage::Freeing {
            a.stage = Stage::Freeing;
            out.push(Action::Report(Report::Decided { committed: false }));
            a.clear_timers(out);
            if let Some(pull) = &a.pull {
                out.push(Action::Do(Do::CancelPull { op: pull.op }));
            }
        }
        if a.busy.is_some() || a.pull.is_some() || !a.hashes.is_empty() {
            return;
        }
        let quarantined = a.quarantined;
        if a.staged.is_some() {
            out.push(Action::Report(Report::Entered(Step::Gc)));
            out.push(Action::Do(if a.armed {
                Do::Disarm { epoch, quarantined }
            } else {
                Do::AbortImport { epoch, quarantined }
            }));
        }
        out.push(Action::Report(Report::Released { quarantined }));
        self.attempt = None;
    }
}

impl Attempt {
    pub(super) fn epoch(&self) -> MigrationEpoch {
        self.pursuit.intent().migration_epoch
    }

    pub(super) fn start(&mut self) -> Op {
        let op = self.ops.next();
        self.busy = Some(op);
        op
    }

    /// Whether `op` was the local action under way; it no longer is.
    fn finished(&mut self, op: Op) -> bool {
        let ours = self.busy == Some(op);
        if ours {
            self.busy = None;
        }
        ours
    }

    /// How many replicas must hash and compare, each on its own.
    pub(super) fn replicas(&self) -> u16 {
        let all = self.staged.map_or(0, |s| s.replicas);
        mutant!("replica-skipped", all, 1)
    }

    /// Decided, or this party moves to abort: nothing new is begun.
    pub(super) fn is_over(&self) -> bool {
        self.verdict.is_some() || self.pursuit.wants_abort()
    }

    pub(super) fn timer(&self, now: u64, kind: TimerKind, after_ns: u64, out: &mut Vec<Action>) {
        let timer = Timer {
            epoch: self.epoch(),
            kind,
        };
        out.push(Action::SetTimer {
            timer,
            at_ns: now.saturating_add(after_ns),
        });
    }

    pub(super) fn clear_timers(&self, out: &mut Vec<Action>) {
        for kind in [TimerKind::Deadline, TimerKind::Pace, TimerKind::Retry] {
            out.push(Action::ClearTimer(Timer {
                epoch: self.epoch(),
                kind,
            }));
        }
    }

    pub(super) fn send(&self, to: &Peer, body: Body, out: &mut Vec<Action>) {
        let msg = Msg {
            request: self.request,
            epoch: self.epoch(),
            body,
        };
        out.push(Action::Send {
            to: to.clone(),
            msg,
            payload: Payload::NONE,
        });
    }

    /// Tells the source first: it waits.
    pub(super) fn tell_everybody(&self, body: Body, out: &mut Vec<Action>) {
        self.send(&self.source, body.clone(), out);
        self.send(&self.coordinator, body, out);
    }

    fn tell_ready(&self, out: &mut Vec<Action>) {
        if let (Some(staged), Stage::Streaming) = (self.staged, self.stage) {
            let ready = Body::Ready {
                replicas: staged.replicas,
                align_tokens: staged.align_tokens,
            };
            self.tell_everybody(ready, out);
        }
    }

    /// Moves to abort and says so; what is staged stays until there is evidence. No effect once
    /// this party moves to commit.
    pub(super) fn give_up(&mut self, cause: Cause, out: &mut Vec<Action>) {
        if self.verdict.is_none() && self.pursuit.abort(cause, &mut self.ops, out) {
            out.push(Action::Report(Report::GivingUp(cause)));
            self.tell_everybody(Body::Refuse { cause }, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, OwnerEpoch, RouteGeneration, WorkerId};

    fn worker(name: &str) -> WorkerRef {
        WorkerRef {
            id: WorkerId::new(name).unwrap(),
            incarnation: Incarnation(1),
        }
    }

    #[test]
    fn a_request_that_comes_back_is_verified_as_its_new_attempt_asks() {
        let request = RequestId([7; 16]);
        let mut d = Destination::new(request, worker("b"), Limits::default());
        let msg = Msg {
            request,
            epoch: MigrationEpoch(1),
            body: Body::Reserve {
                intent: Intent {
                    migration_epoch: MigrationEpoch(1),
                    generation: RouteGeneration(2),
                    owner_epoch: OwnerEpoch(1),
                    driver: 5,
                    src: worker("a"),
                    dst: worker("b"),
                },
            },
        };
        let reserve = Event::Recv {
            from: Peer::Gateway,
            msg,
            payload: Payload::NONE,
        };
        d.handle(1, reserve, &mut Vec::new());
        let full = Limits {
            verify_full: true,
            ..Limits::default()
        };
        d.set_limits(full.clone());
        assert!(!d.limits.verify_full, "an attempt under way keeps its own");
        d.attempt.as_mut().unwrap().stage = Stage::Launched;
        d.set_limits(full);
        assert!(d.limits.verify_full);
    }
}
