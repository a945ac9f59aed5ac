//! The acceptor's machine: floor, log, and the reads that a higher epoch forces.

use std::collections::VecDeque;

use super::recover::Recovery;
use super::{Action, Do, Done, Event};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::decide::Ops;
use crate::migrate::io::{Op, Payload, Peer, StoreReply, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Emission, Msg};
use crate::route::mutants::mutant;
use crate::route::{RouteOp, RoutePhase, RouteRecord, Versioned, same_worker};

/// Most batches of tokens kept while the record is read; more are dropped and come again.
const MAX_WAITING: usize = 64;

/// What the journal knows of a request; a restarted gateway begins with it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Durable {
    /// The lowest epoch accepted.
    pub floor: OwnerEpoch,
    /// Its owner.
    pub owner: WorkerRef,
    /// All journaled tokens, from number 1.
    pub tokens: Vec<Emission>,
}

/// What is kept of a journaled token, to tell an equal duplicate from a conflicting one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Kept {
    token: u32,
    rest: u64,
}

impl Kept {
    fn of(e: &Emission) -> Self {
        // FNV-1a: guards against faults, not against forgery.
        let mut h = 0xcbf2_9ce4_8422_2325u64;
        for b in e
            .text
            .iter()
            .copied()
            .chain([e.finish.is_some().into(), e.finish.unwrap_or(0)])
        {
            h = (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
        }
        Self {
            token: e.token,
            rest: h,
        }
    }
}

/// Accepts the tokens of one request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Acceptor {
    pub(super) request: RequestId,
    pub(super) limits: Limits,
    pub(super) floor: OwnerEpoch,
    owner: WorkerRef,
    log: Vec<Kept>,
    /// J: what is known to survive a crash.
    journaled: u64,
    /// D: what the client has; never more than J.
    delivered: u64,
    /// The last token is in the log, or the client is gone.
    pub(super) ended: bool,
    /// Two tokens claimed one number: nothing more is accepted.
    halted: bool,
    pub(super) ops: Ops,
    /// A read of the record because of a higher epoch, and the batches that wait for it.
    reading: Option<Op>,
    waiting: VecDeque<(WorkerRef, OwnerEpoch, Vec<Emission>)>,
    finishing: Finishing,
    pub(super) recovery: Recovery,
}

/// Writing the end of the stream into the record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Finishing {
    No,
    Waiting(Op),
    InDoubt,
    Done,
}

impl Acceptor {
    /// A request just admitted to `owner` under epoch 1.
    pub fn admitted(request: RequestId, owner: WorkerRef, limits: Limits) -> Self {
        let durable = Durable {
            floor: OwnerEpoch(1),
            owner,
            tokens: Vec::new(),
        };
        Self::restored(request, durable, limits)
    }

    /// After a restart of the gateway. Its executor numbers operations of each life apart.
    pub fn restored(request: RequestId, durable: Durable, limits: Limits) -> Self {
        let journaled = durable.tokens.len() as u64;
        Self {
            request,
            limits,
            floor: durable.floor,
            owner: durable.owner,
            ended: durable.tokens.last().is_some_and(|t| t.finish.is_some()),
            log: durable.tokens.iter().map(Kept::of).collect(),
            journaled,
            delivered: 0,
            halted: false,
            ops: Ops::new(MigrationEpoch(0)),
            reading: None,
            waiting: VecDeque::new(),
            finishing: Finishing::No,
            recovery: Recovery::None,
        }
    }

    /// The lowest epoch accepted.
    pub fn floor(&self) -> OwnerEpoch {
        self.floor
    }

    /// The log J: tokens `1..=journaled` survive a crash.
    pub fn journaled(&self) -> u64 {
        self.journaled
    }

    /// The delivered cursor D.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Whether the stream has ended.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Tokens accepted, journaled or on their way into the journal.
    pub(super) fn accepted(&self) -> u64 {
        self.log.len() as u64
    }

    /// Takes one event; appends what is to be done, in order.
    pub fn handle(&mut self, now_ns: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Recv {
                from: Peer::Worker(from),
                msg,
                ..
            } if msg.request == self.request => match msg.body {
                Body::Emit {
                    owner_epoch,
                    tokens,
                } => {
                    self.on_tokens(from, owner_epoch, tokens, out);
                }
                Body::Outcome => self.on_recovery_notice(out),
                _ => {}
            },
            Event::Recv { .. } => {}
            Event::Store { op, reply } => {
                if self.reading == Some(op) {
                    self.on_read(now_ns, reply, out);
                } else if self.finishing == Finishing::Waiting(op) {
                    self.on_finish(now_ns, reply, out);
                } else {
                    self.on_recovery_store(now_ns, op, reply, out);
                }
            }
            Event::Timer(timer) => self.on_timer(now_ns, timer, out),
            Event::Local(done) => self.on_done(now_ns, done, out),
        }
    }

    fn on_tokens(
        &mut self,
        from: WorkerRef,
        epoch: OwnerEpoch,
        tokens: Vec<Emission>,
        out: &mut Vec<Action>,
    ) {
        if mutant!("accepts-lower-epoch", epoch < self.floor, false) {
            return self.refuse(&from, out);
        }
        if epoch > self.floor {
            // Whose epoch is that? Only the record can say.
            if self.waiting.len() < MAX_WAITING {
                self.waiting.push_back((from, epoch, tokens));
            }
            if self.reading.is_none() {
                self.read(out);
            }
            return;
        }
        if epoch == self.floor && !same_worker(&from, &self.owner) {
            return self.refuse(&from, out);
        }
        self.append(from, epoch, tokens, out);
    }

    fn append(
        &mut self,
        from: WorkerRef,
        epoch: OwnerEpoch,
        tokens: Vec<Emission>,
        out: &mut Vec<Action>,
    ) {
        let mut fresh = Vec::new();
        for token in tokens {
            if self.halted {
                break;
            }
            let kept = Kept::of(&token);
            match usize::try_from(token.seq)
                .ok()
                .and_then(|seq| seq.checked_sub(1))
            {
                Some(i) if i < self.log.len() => {
                    if self.log[i] != kept {
                        self.halted = true;
                        out.push(Action::Do(Do::Alarm {
                            seq: token.seq,
                            from: from.clone(),
                        }));
                    }
                }
                Some(i) if i == self.log.len() && !self.ended => {
                    self.ended = token.finish.is_some();
                    self.log.push(kept);
                    fresh.push(token);
                }
                _ => break, // a gap: it comes again, from J + 1
            }
        }
        if !fresh.is_empty() {
            let op = self.ops.next();
            out.push(Action::Do(Do::Append {
                op,
                owner_epoch: epoch,
                tokens: fresh,
            }));
        } else if !self.halted {
            // Nothing new: say again where the log stands, so that the worker can go on from there.
            self.tell_accepted(out);
        }
    }

    fn refuse(&self, from: &WorkerRef, out: &mut Vec<Action>) {
        self.send(from, Body::Fenced { floor: self.floor }, Payload::NONE, out);
    }

    fn tell_accepted(&self, out: &mut Vec<Action>) {
        let body = Body::Accepted {
            owner_epoch: self.floor,
            through: self.journaled,
        };
        self.send(&self.owner, body, Payload::NONE, out);
    }

    pub(super) fn send(&self, to: &WorkerRef, body: Body, payload: Payload, out: &mut Vec<Action>) {
        let msg = Msg {
            request: self.request,
            epoch: MigrationEpoch(0),
            body,
        };
        out.push(Action::Send {
            to: Peer::Worker(to.clone()),
            msg,
            payload,
        });
    }

    fn read(&mut self, out: &mut Vec<Action>) {
        let op = self.ops.next();
        self.reading = Some(op);
        out.push(Action::StoreRead { op });
    }

    /// The record, read because a batch carries a higher epoch than the floor.
    fn on_read(&mut self, now: u64, reply: StoreReply, out: &mut Vec<Action>) {
        self.reading = None;
        let record = match reply {
            StoreReply::Value(found) => Some(found.record),
            StoreReply::Absent => None,
            _ => return self.timer(now, TimerKind::Retry, self.limits.retry_ns, out),
        };
        let waiting = std::mem::take(&mut self.waiting);
        for (from, epoch, tokens) in waiting {
            let may = |r: &RouteRecord| r.may_append(&from, epoch);
            if epoch > self.floor && record.as_ref().is_some_and(may) {
                self.raise_floor(epoch, from.clone(), out);
            }
            // The floor may have risen since these tokens came: they are judged again.
            if epoch > self.floor {
                self.refuse(&from, out);
            } else if mutant!("epoch-checked-at-admission-only", true, false) {
                self.on_tokens(from, epoch, tokens, out);
            } else {
                self.append(from, epoch, tokens, out);
            }
        }
    }

    /// From this call on no token of a lower epoch is accepted. Returns the key of the action after
    /// which that survives a crash.
    pub(super) fn raise_floor(
        &mut self,
        floor: OwnerEpoch,
        owner: WorkerRef,
        out: &mut Vec<Action>,
    ) -> Op {
        self.floor = floor;
        self.owner = owner.clone();
        let op = self.ops.next();
        out.push(Action::Do(Do::RaiseFloor { op, floor, owner }));
        op
    }

    fn on_done(&mut self, now: u64, done: Done, out: &mut Vec<Action>) {
        match done {
            Done::Appended { through, .. } => {
                self.journaled = self.journaled.max(through.min(self.accepted()));
                out.push(Action::Do(Do::Deliver {
                    through: self.journaled,
                }));
                self.tell_accepted(out);
                if self.ended && self.journaled == self.accepted() {
                    self.finish(out);
                }
            }
            Done::Delivered { through } => {
                self.delivered = self.delivered.max(through.min(self.journaled));
            }
            Done::Hangup => {
                self.ended = true;
                self.finish(out);
            }
            Done::FloorRaised { op } => self.on_floor_raised(op, out),
            Done::ImageBuilt { op, payload } => self.on_image_built(now, op, payload, out),
            Done::Recover { target } => self.begin_recovery(now, target, out),
        }
    }

    fn on_timer(&mut self, now: u64, timer: Timer, out: &mut Vec<Action>) {
        match timer.kind {
            TimerKind::Retry => {
                if !self.waiting.is_empty() && self.reading.is_none() {
                    self.read(out);
                }
                if self.finishing == Finishing::InDoubt {
                    self.finishing = Finishing::No;
                    self.finish(out);
                }
                self.retry_recovery(out);
            }
            TimerKind::Resend => self.resend_rebuild(now, out),
            TimerKind::Deadline => self.recovery_timed_out(out),
            TimerKind::Round | TimerKind::Pace => {}
        }
    }

    pub(super) fn timer(&self, now: u64, kind: TimerKind, after_ns: u64, out: &mut Vec<Action>) {
        let timer = Timer {
            epoch: MigrationEpoch(0),
            kind,
        };
        out.push(Action::SetTimer {
            timer,
            at_ns: now.saturating_add(after_ns),
        });
    }

    /// Writes the end of the stream into the record: first reads it.
    pub(super) fn finish(&mut self, out: &mut Vec<Action>) {
        if self.finishing == Finishing::No {
            let op = self.ops.next();
            self.finishing = Finishing::Waiting(op);
            out.push(Action::StoreRead { op });
        }
    }

    fn on_finish(&mut self, now: u64, reply: StoreReply, out: &mut Vec<Action>) {
        let found = match reply {
            StoreReply::Value(found) | StoreReply::Conflict(Some(found)) => found,
            StoreReply::InDoubt => {
                self.finishing = Finishing::InDoubt;
                return self.timer(now, TimerKind::Retry, self.limits.retry_ns, out);
            }
            StoreReply::Applied(_) | StoreReply::Absent | StoreReply::Conflict(None) => {
                self.finishing = Finishing::Done;
                return out.push(Action::Do(Do::Closed));
            }
        };
        let Versioned { revision, record } = found;
        match record.apply(&RouteOp::Finish {
            expect: record.owner_epoch,
        }) {
            Ok(next) => {
                let op = self.ops.next();
                self.finishing = Finishing::Waiting(op);
                out.push(Action::StoreCas {
                    op,
                    expect: revision,
                    next: Box::new(next),
                });
            }
            Err(_) => {
                self.finishing = Finishing::Done;
                debug_assert_eq!(record.phase, RoutePhase::Finished);
                out.push(Action::Do(Do::Closed));
            }
        }
    }
}
