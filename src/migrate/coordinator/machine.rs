//! The coordinator's machine: one migration of one request.

use super::{Action, Do, Done, Ended, Event};
use crate::id::{MigrationEpoch, RequestId, WorkerRef};
use crate::migrate::decide::{Ops, Pursuit};
use crate::migrate::io::{Op, Payload, Peer, Report, Step, StoreReply, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg};
use crate::route::{Cause, Intent, Outcome, Party, RouteOp, RouteRecord, Verdict, Versioned};

/// Drives one migration, or sees to one that a dead coordinator left behind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Coordinator {
    request: RequestId,
    driver: u64,
    limits: Limits,
    /// Numbers the store operations before there is an intent of ours.
    ops: Ops,
    dst: Option<WorkerRef>,
    /// Given up before there was an intent; remembered until it is known whether there is one.
    cancelled: Option<Cause>,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    Idle,
    /// Reading the record, to write an intent or to adopt one.
    Reading {
        op: Op,
        adopt: bool,
    },
    /// The store did not answer that read.
    ReadAgain {
        adopt: bool,
    },
    /// Writing the intent; in doubt until a read shows it or a write of it conflicts.
    Preparing {
        op: Option<Op>,
        intent: Box<Intent>,
        base: Box<Versioned>,
    },
    /// Another's intent stands. It is given time to end by itself, then aborted.
    Clearing {
        attempt: Box<Attempt>,
        adopt: bool,
    },
    /// Our intent stands.
    Driving(Box<Attempt>),
    Over,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Attempt {
    ops: Ops,
    pursuit: Pursuit,
    phase: Phase,
    spec: Payload,
    resends: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// The source is asked to pin.
    Pinning,
    /// The destination is asked to reserve.
    Reserving,
    /// The source offers, the destination verifies.
    Streaming,
    /// GO is said; nothing is left to do but to watch.
    Going,
}

impl Coordinator {
    /// A machine that waits for `Start` or `Adopt`. `driver` is a nonce of this coordinator's life.
    pub fn new(request: RequestId, driver: u64, limits: Limits) -> Self {
        Self {
            request,
            driver,
            limits,
            ops: Ops::new(MigrationEpoch(0)),
            dst: None,
            cancelled: None,
            state: State::Idle,
        }
    }

    /// Whether this migration is over.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Takes one event; appends what is to be done, in order.
    pub fn handle(&mut self, now_ns: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Recv { from, msg, payload } => {
                if msg.request == self.request {
                    self.on_message(now_ns, from, msg, payload, out);
                }
            }
            Event::Store { op, reply } => self.on_store(now_ns, op, reply, out),
            Event::Timer(timer) => self.on_timer(now_ns, timer, out),
            Event::Local(Done::Start { dst }) if self.state == State::Idle => {
                self.dst = Some(dst);
                self.read(false, out);
            }
            Event::Local(Done::Adopt) if self.state == State::Idle => self.read(true, out),
            Event::Local(Done::Cancel { cause }) => self.on_cancel(cause, out),
            Event::Local(_) => {}
        }
    }

    fn read(&mut self, adopt: bool, out: &mut Vec<Action>) {
        let op = self.ops.next();
        self.state = State::Reading { op, adopt };
        out.push(Action::StoreRead { op });
    }

    fn on_cancel(&mut self, cause: Cause, out: &mut Vec<Action>) {
        match &mut self.state {
            State::Driving(a) => a.give_up(cause, self.request, out),
            State::Idle => self.end(Ended::Nothing, out),
            State::Over => {}
            _ => {
                self.cancelled.get_or_insert(cause);
            }
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
        let (State::Driving(a) | State::Clearing { attempt: a, .. }) = &mut self.state else {
            return;
        };
        if msg.epoch != a.epoch() {
            out.push(Action::Report(Report::Stale("message of another attempt")));
            return;
        }
        let from_source = from.is_worker(&a.pursuit.intent().src);
        match (msg.body, a.phase) {
            (Body::Outcome, _) => a.pursuit.look(&mut a.ops, out),
            (Body::Refuse { cause }, _) => a.give_up(cause, self.request, out),
            // It decoded on since: GO again once it has caught up.
            (
                Body::Progress {
                    converged: false, ..
                },
                Phase::Going,
            ) if from_source => {
                a.phase = Phase::Streaming;
            }
            (Body::Prepared, Phase::Pinning) if from_source => {
                a.spec = payload;
                a.enter(Phase::Reserving, now, &self.limits, self.request, out);
            }
            (Body::Progress { converged, .. }, Phase::Reserving | Phase::Streaming)
                if from_source =>
            {
                if converged {
                    a.enter(Phase::Going, now, &self.limits, self.request, out);
                } else if a.phase == Phase::Reserving {
                    a.enter(Phase::Streaming, now, &self.limits, self.request, out);
                }
            }
            _ => {}
        }
    }

    fn on_timer(&mut self, now: u64, timer: Timer, out: &mut Vec<Action>) {
        let (limits, request) = (&self.limits, self.request);
        match &mut self.state {
            State::ReadAgain { adopt } if timer.epoch.0 == 0 => {
                let adopt = *adopt;
                self.read(adopt, out);
            }
            State::Preparing { op, .. } if op.is_none() && timer.epoch.0 == 0 => {
                let read = self.ops.next();
                *op = Some(read);
                out.push(Action::StoreRead { op: read });
            }
            State::Driving(a) | State::Clearing { attempt: a, .. } if timer.epoch == a.epoch() => {
                match timer.kind {
                    TimerKind::Retry => a.pursuit.retry(&mut a.ops, out),
                    TimerKind::Deadline => a.give_up(Cause::Timeout, request, out),
                    TimerKind::Resend if a.resends < limits.resends => {
                        a.resends += 1;
                        a.say(now, limits, request, out);
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }

    fn on_store(&mut self, now: u64, op: Op, reply: StoreReply, out: &mut Vec<Action>) {
        match &mut self.state {
            State::Reading { op: o, adopt } if *o == op => {
                let adopt = *adopt;
                match reply {
                    StoreReply::Value(found) => self.on_record(now, found, adopt, out),
                    StoreReply::Absent => self.end(Ended::NoSuchRequest, out),
                    _ => {
                        self.state = State::ReadAgain { adopt };
                        self.retry_later(now, out);
                    }
                }
            }
            State::Preparing {
                op: o,
                intent,
                base,
            } if *o == Some(op) => {
                let found = match reply {
                    StoreReply::Applied(revision) => {
                        let write = RouteOp::Prepare {
                            intent: (**intent).clone(),
                        };
                        match base.record.apply(&write) {
                            Ok(record) => Versioned { revision, record },
                            Err(refused) => return self.end(Ended::Refused(refused), out),
                        }
                    }
                    StoreReply::Value(found) | StoreReply::Conflict(Some(found)) => found,
                    StoreReply::Absent | StoreReply::Conflict(None) => {
                        return self.end(Ended::NoSuchRequest, out);
                    }
                    StoreReply::InDoubt => {
                        *o = None;
                        return self.retry_later(now, out);
                    }
                };
                if found.record.intent.as_ref() == Some(&**intent) {
                    self.drive(now, found, out);
                } else {
                    // Ours is not there. If the record did not move since it was read, our write may
                    // still arrive, and the next one is the same write: only one can take place. If
                    // it moved, ours can no longer arrive, or was decided already.
                    self.on_record(now, found, false, out);
                }
            }
            State::Driving(a) | State::Clearing { attempt: a, .. } => {
                let retry_ns = self.limits.retry_ns;
                let verdict = a
                    .pursuit
                    .on_store(now, retry_ns, op, &reply, &mut a.ops, out);
                if let Some(v @ (Verdict::Committed | Verdict::Aborted | Verdict::Superseded)) =
                    verdict
                {
                    self.on_verdict(v, &reply, out);
                }
            }
            _ => {}
        }
    }

    /// The record, read before there is an intent of ours in it.
    fn on_record(&mut self, now: u64, found: Versioned, adopt: bool, out: &mut Vec<Action>) {
        if let Some(intent) = &found.record.intent {
            let mut a = Box::new(Attempt::new(intent.clone(), found.clone(), Phase::Going));
            // Time enough for a fenced attempt to end by itself.
            a.timer(now, TimerKind::Deadline, self.limits.fence_ns, out);
            if let Some(cause) = self.cancelled.filter(|_| intent.driver == self.driver) {
                a.give_up(cause, self.request, out);
            }
            self.state = State::Clearing { attempt: a, adopt };
            return;
        }
        let Some(dst) = self.dst.clone().filter(|_| !adopt) else {
            return self.end(Ended::Nothing, out);
        };
        let intent = found.record.next_intent(dst, self.driver);
        let same = matches!(&self.state, State::Preparing { intent: i, .. } if **i == intent);
        if self.cancelled.is_some() && !same {
            return self.end(Ended::Nothing, out);
        }
        match found.record.apply(&RouteOp::Prepare {
            intent: intent.clone(),
        }) {
            Ok(next) => {
                let op = self.ops.next();
                let expect = found.revision;
                out.push(Action::Report(Report::Entered(Step::Prepare)));
                out.push(Action::StoreCas {
                    op,
                    expect,
                    next: Box::new(next),
                });
                self.state = State::Preparing {
                    op: Some(op),
                    intent: Box::new(intent),
                    base: Box::new(found),
                };
            }
            Err(refused) => self.end(Ended::Refused(refused), out),
        }
    }

    fn drive(&mut self, now: u64, found: Versioned, out: &mut Vec<Action>) {
        let Some(intent) = found.record.intent.clone() else {
            return;
        };
        let mut a = Box::new(Attempt::new(intent, found, Phase::Pinning));
        let whole = self.limits.step_ns.saturating_add(self.limits.stream_ns);
        a.timer(now, TimerKind::Deadline, whole, out);
        match self.cancelled {
            Some(cause) => a.give_up(cause, self.request, out),
            None => a.enter(Phase::Pinning, now, &self.limits, self.request, out),
        }
        self.state = State::Driving(a);
    }

    fn on_verdict(&mut self, verdict: Verdict, reply: &StoreReply, out: &mut Vec<Action>) {
        let (State::Driving(a) | State::Clearing { attempt: a, .. }) = &self.state else {
            return;
        };
        let epoch = a.epoch();
        a.clear_timers(out);
        // A notice, so that nobody waits for a time-out.
        a.tell_workers(Body::Outcome, self.request, out);
        out.push(Action::Report(Report::Decided {
            committed: verdict == Verdict::Committed,
        }));
        if let State::Clearing { adopt: false, .. } = self.state {
            if self.cancelled.is_some() {
                return self.end(Ended::Nothing, out);
            }
            return self.read(false, out);
        }
        let cause = match reply {
            StoreReply::Value(v) | StoreReply::Conflict(Some(v)) => abort_cause(&v.record, epoch),
            _ => a.pursuit.cause(),
        };
        let ended = match verdict {
            Verdict::Committed => Ended::Committed { epoch },
            Verdict::Aborted => Ended::Aborted { epoch, cause },
            _ => Ended::Superseded { epoch },
        };
        self.end(ended, out);
    }

    fn end(&mut self, ended: Ended, out: &mut Vec<Action>) {
        self.state = State::Over;
        out.push(Action::Do(Do::Finished(ended)));
    }

    fn retry_later(&self, now: u64, out: &mut Vec<Action>) {
        let timer = Timer {
            epoch: MigrationEpoch(0),
            kind: TimerKind::Retry,
        };
        let at_ns = now.saturating_add(self.limits.retry_ns);
        out.push(Action::SetTimer { timer, at_ns });
    }
}

fn abort_cause(record: &RouteRecord, epoch: MigrationEpoch) -> Option<Cause> {
    let last = record
        .last
        .as_ref()
        .filter(|d| d.migration_epoch == epoch)?;
    match last.outcome {
        Outcome::Aborted { cause, .. } => Some(cause),
        _ => None,
    }
}

impl Attempt {
    fn new(intent: Intent, known: Versioned, phase: Phase) -> Self {
        Self {
            ops: Ops::new(intent.migration_epoch),
            pursuit: Pursuit::from_known(intent, Party::Coordinator, known),
            phase,
            spec: Payload::NONE,
            resends: 0,
        }
    }

    fn epoch(&self) -> MigrationEpoch {
        self.pursuit.intent().migration_epoch
    }

    fn timer(&self, now: u64, kind: TimerKind, after_ns: u64, out: &mut Vec<Action>) {
        let timer = Timer {
            epoch: self.epoch(),
            kind,
        };
        out.push(Action::SetTimer {
            timer,
            at_ns: now.saturating_add(after_ns),
        });
    }

    fn clear_timers(&self, out: &mut Vec<Action>) {
        for kind in [TimerKind::Deadline, TimerKind::Resend, TimerKind::Retry] {
            out.push(Action::ClearTimer(Timer {
                epoch: self.epoch(),
                kind,
            }));
        }
    }

    fn enter(
        &mut self,
        phase: Phase,
        now: u64,
        limits: &Limits,
        request: RequestId,
        out: &mut Vec<Action>,
    ) {
        self.phase = phase;
        self.resends = 0;
        self.say(now, limits, request, out);
    }

    /// Says what this phase has to say, and again later if nothing comes of it.
    fn say(&self, now: u64, limits: &Limits, request: RequestId, out: &mut Vec<Action>) {
        let intent = self.pursuit.intent().clone();
        if self.pursuit.wants_abort() || self.phase == Phase::Streaming {
            return;
        }
        let (to, body, payload) = match self.phase {
            Phase::Pinning => (intent.src.clone(), Body::Prepare { intent }, Payload::NONE),
            Phase::Reserving => (intent.dst.clone(), Body::Reserve { intent }, self.spec),
            Phase::Streaming | Phase::Going => (intent.src, Body::Go, Payload::NONE),
        };
        let msg = Msg {
            request,
            epoch: self.epoch(),
            body,
        };
        out.push(Action::Send {
            to: Peer::Worker(to),
            msg,
            payload,
        });
        self.timer(now, TimerKind::Resend, limits.resend_ns, out);
    }

    fn tell_workers(&self, body: Body, request: RequestId, out: &mut Vec<Action>) {
        let intent = self.pursuit.intent();
        for worker in [&intent.src, &intent.dst] {
            let msg = Msg {
                request,
                epoch: self.epoch(),
                body: body.clone(),
            };
            let to = Peer::Worker(worker.clone());
            out.push(Action::Send {
                to,
                msg,
                payload: Payload::NONE,
            });
        }
    }

    fn give_up(&mut self, cause: Cause, request: RequestId, out: &mut Vec<Action>) {
        if self.pursuit.abort(cause, &mut self.ops, out) {
            out.push(Action::Report(Report::GivingUp(cause)));
            self.tell_workers(Body::Cancel { cause }, request, out);
        }
    }
}
