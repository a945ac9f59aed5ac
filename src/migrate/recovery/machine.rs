//! The rebuilder's machine.

use super::{Action, Do, Done, Event};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::decide::Ops;
use crate::migrate::io::{Op, Payload, Peer, Report, StoreReply, Timer, TimerKind};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg};
use crate::route::{Cause, RouteOp, RoutePhase, RouteRecord, Versioned};

/// Rebuilds one request on this worker.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rebuilder {
    request: RequestId,
    me: WorkerRef,
    limits: Limits,
    ops: Ops,
    /// The epoch to run under.
    epoch: OwnerEpoch,
    journaled: u64,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    Idle,
    /// Is this worker really the one the record names?
    Checking {
        op: Option<Op>,
        image: Payload,
    },
    Rebuilding(Op),
    /// Rebuilt; completing by compare-and-swap (`None`: in doubt, until the retry timer).
    Completing(Option<Op>),
    Running,
}

impl Rebuilder {
    /// Nothing to rebuild yet.
    pub fn new(request: RequestId, me: WorkerRef, limits: Limits) -> Self {
        Self {
            request,
            me,
            limits,
            ops: Ops::new(MigrationEpoch(0)),
            epoch: OwnerEpoch(0),
            journaled: 0,
            state: State::Idle,
        }
    }

    /// Whether nothing is held here.
    pub fn is_idle(&self) -> bool {
        self.state == State::Idle
    }

    /// Whether the request runs here by this machine's doing.
    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Takes one event; appends what is to be done, in order.
    pub fn handle(&mut self, now_ns: u64, event: Event, out: &mut Vec<Action>) {
        match event {
            Event::Recv { msg, payload, .. } if msg.request == self.request => {
                if let Body::Rebuild {
                    owner_epoch,
                    journaled,
                } = msg.body
                {
                    self.on_rebuild(owner_epoch, journaled, payload, out);
                }
            }
            Event::Recv { .. } => {}
            Event::Store { op, reply } => self.on_store(now_ns, op, reply, out),
            Event::Timer(Timer {
                kind: TimerKind::Retry,
                ..
            }) => self.look(out),
            Event::Timer(_) => {}
            Event::Local(Done::Rebuilt { op, result }) => self.on_rebuilt(op, result, out),
        }
    }

    fn on_rebuild(
        &mut self,
        epoch: OwnerEpoch,
        journaled: u64,
        image: Payload,
        out: &mut Vec<Action>,
    ) {
        if epoch <= self.epoch {
            if self.state == State::Running {
                self.tell_gateway(out); // the notice was lost
            }
            return;
        }
        match self.state {
            State::Idle | State::Running | State::Checking { .. } => {
                self.epoch = epoch;
                self.journaled = journaled;
                let op = self.ops.next();
                self.state = State::Checking {
                    op: Some(op),
                    image,
                };
                out.push(Action::StoreRead { op });
            }
            // A later recovery has begun: the record will say so; the message comes again.
            State::Rebuilding(_) => {}
            State::Completing(_) => self.look(out),
        }
    }

    /// Reads the record again, if a read or write is in doubt.
    fn look(&mut self, out: &mut Vec<Action>) {
        if let State::Checking { op, .. } | State::Completing(op) = &mut self.state
            && op.is_none()
        {
            let read = self.ops.next();
            *op = Some(read);
            out.push(Action::StoreRead { op: read });
        }
    }

    fn is_mine(&self, record: &RouteRecord) -> bool {
        record.owner == self.me && record.owner_epoch == self.epoch
    }

    fn on_store(&mut self, now: u64, op: Op, reply: StoreReply, out: &mut Vec<Action>) {
        let waited = match &mut self.state {
            State::Checking { op: o, .. } | State::Completing(o) => o,
            _ => return,
        };
        if *waited != Some(op) {
            return;
        }
        *waited = None;
        let found = match reply {
            StoreReply::Value(found) | StoreReply::Conflict(Some(found)) => found,
            StoreReply::Applied(_) => return self.run(out),
            StoreReply::InDoubt => {
                let timer = Timer {
                    epoch: MigrationEpoch(0),
                    kind: TimerKind::Retry,
                };
                let at_ns = now.saturating_add(self.limits.retry_ns);
                return out.push(Action::SetTimer { timer, at_ns });
            }
            StoreReply::Absent | StoreReply::Conflict(None) => return self.discard(out),
        };
        let Versioned { revision, record } = found;
        match (&self.state, self.is_mine(&record), record.phase) {
            (State::Checking { image, .. }, true, RoutePhase::Recovering) => {
                let (image, owner_epoch, journaled) = (*image, self.epoch, self.journaled);
                let op = self.ops.next();
                self.state = State::Rebuilding(op);
                out.push(Action::Do(Do::Rebuild {
                    op,
                    image,
                    owner_epoch,
                    journaled,
                }));
            }
            (State::Completing(_), true, RoutePhase::Recovering) => {
                let write = RouteOp::CompleteRecovery {
                    by: self.me.clone(),
                    owner_epoch: self.epoch,
                };
                match record.apply(&write) {
                    Ok(next) => {
                        let op = self.ops.next();
                        self.state = State::Completing(Some(op));
                        out.push(Action::StoreCas {
                            op,
                            expect: revision,
                            next: Box::new(next),
                        });
                    }
                    Err(_) => self.discard(out),
                }
            }
            (State::Completing(_), true, RoutePhase::Serving) => self.run(out),
            _ => self.discard(out),
        }
    }

    fn on_rebuilt(&mut self, op: Op, result: Result<(), Cause>, out: &mut Vec<Action>) {
        if self.state != State::Rebuilding(op) {
            return;
        }
        match result {
            Ok(()) => {
                self.state = State::Completing(None);
                self.look(out);
            }
            Err(cause) => {
                self.state = State::Idle;
                out.push(Action::Report(Report::GivingUp(cause)));
            }
        }
    }

    fn run(&mut self, out: &mut Vec<Action>) {
        self.state = State::Running;
        let (owner_epoch, journaled) = (self.epoch, self.journaled);
        out.push(Action::Do(Do::Activate {
            owner_epoch,
            journaled,
        }));
        self.tell_gateway(out);
    }

    fn tell_gateway(&self, out: &mut Vec<Action>) {
        let msg = Msg {
            request: self.request,
            epoch: MigrationEpoch(0),
            body: Body::Outcome,
        };
        out.push(Action::Send {
            to: Peer::Gateway,
            msg,
            payload: Payload::NONE,
        });
    }

    /// The request is somebody else's: frees what was rebuilt, if anything was.
    fn discard(&mut self, out: &mut Vec<Action>) {
        if matches!(self.state, State::Completing(_)) {
            out.push(Action::Do(Do::Discard {
                owner_epoch: self.epoch,
            }));
        }
        self.state = State::Idle;
    }
}
