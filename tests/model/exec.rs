//! Executes one label: the machines act, their local work is done at once, the rest is under way.

use super::labels::{Label, party_of};
use super::models::Model;
use super::state::*;
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::acceptor::{self, Acceptor};
use moonlivekv::migrate::coordinator::{self, Coordinator};
use moonlivekv::migrate::destination::{self, Destination, Pulled};
use moonlivekv::migrate::io::{Action, Op, Payload, Peer, StoreReply, Timer, TimerKind};
use moonlivekv::migrate::msg::{Body, Emission, Msg};
use moonlivekv::migrate::recovery::{self, Rebuilder};
use moonlivekv::migrate::source;
use moonlivekv::route::{Cause, Outcome, Revision, RoutePhase, RouteRecord, Versioned};

/// How a pull that was given up ends, unless its writer cannot be stopped.
pub const GIVEN_UP: Pulled = Pulled::Failed;

/// Why a label leads to no state.
pub enum No {
    /// It changes nothing that another label does not.
    Moot,
    /// An invariant of `CONTRACT.md` does not hold.
    Broken(String),
}

pub struct Exec<'m> {
    pub model: &'m Model,
    pub s: State,
    pub broken: Option<String>,
    /// Local completions to go before the process stops (`None`: it does not).
    pub stop_in: Option<u8>,
    pub stopped: bool,
}

/// Applies a label.
pub fn apply(model: &Model, s: &State, label: Label) -> Result<State, No> {
    let mut x = Exec {
        model,
        s: s.clone(),
        broken: None,
        stop_in: None,
        stopped: false,
    };
    x.run(label);
    if let Some(what) = x.broken {
        return Err(No::Broken(what));
    }
    if x.stop_in.is_some() && !x.stopped {
        return Err(No::Moot);
    }
    Ok(x.s)
}

impl Exec<'_> {
    pub fn check(&mut self, number: u8, holds: bool, what: impl FnOnce() -> String) {
        if !holds && self.broken.is_none() {
            self.broken = Some(format!("invariant {number}: {}", what()));
        }
    }

    pub fn worker(&self, w: u8) -> &Worker {
        &self.s.workers[usize::from(w)]
    }

    pub fn edit_worker<R>(&mut self, w: u8, f: impl FnOnce(&mut Worker) -> R) -> R {
        self.s.workers[usize::from(w)].edit(f)
    }

    /// Changes a worker's memory.
    pub fn edit<R>(&mut self, w: u8, f: impl FnOnce(&mut Engine) -> R) -> R {
        self.s.workers[usize::from(w)].edit(|x| x.engine.edit(f))
    }

    fn run(&mut self, label: Label) {
        match label {
            Label::Deliver(i) => {
                let p = self.s.net.remove(i);
                self.deliver(&p);
            }
            Label::DeliverStopped(i, k) => {
                self.stop_in = Some(k);
                self.s.left.pauses -= 1;
                let p = self.s.net.remove(i);
                self.deliver(&p);
            }
            Label::Lose(i) => {
                self.s.left.losses -= 1;
                self.s.left.lost = true;
                self.s.net.remove(i);
            }
            Label::Duplicate(i) => {
                self.s.left.losses -= 1;
                let p = self.s.net[i].clone();
                self.deliver(&p);
            }
            Label::GiveUp(i) => {
                self.s.left.losses -= 1;
                let p = self.s.net.remove(i);
                let Packet::Ask {
                    from,
                    life,
                    mach,
                    op,
                    request,
                    ..
                } = &*p
                else {
                    return;
                };
                let (from, life, mach, op) = (*from, *life, *mach, *op);
                let reply = StoreReply::InDoubt;
                self.s.push(Packet::Answer {
                    to: from,
                    life,
                    mach,
                    op,
                    reply,
                });
                if let Request::Cas { .. } = request {
                    let (request, given_up) = (request.clone(), true);
                    self.s.push(Packet::Ask {
                        from,
                        life,
                        mach,
                        op,
                        request,
                        given_up,
                    });
                }
            }
            Label::Fire(party, mach, timer) => {
                if timer.kind == TimerKind::Deadline {
                    self.s.left.deadlines = self.s.left.deadlines.saturating_sub(1);
                }
                self.fire(party, mach, timer);
            }
            Label::Crash(party) => self.crash(party),
            Label::Step(w) => self.step(w),
            Label::Land(w, i) => self.land_one(w, i, false),
            Label::LandWrong(w, i) => {
                self.s.left.corruptions -= 1;
                self.land_one(w, i, true);
            }
            Label::Break(w, i) => {
                self.s.left.losses -= 1;
                self.s.left.lost = true;
                self.edit(w, |x| x.pulls[i].ended = Some(GIVEN_UP));
            }
            Label::EndPull(w, i, stuck) => self.end_pull(w, i, stuck),
            Label::Start(c, dst) => {
                let life = self.s.life(Party::W(dst));
                let driver = self.driver(c);
                let limits = self.model.limits.clone();
                self.s.coords[usize::from(c)].edit(|x| {
                    x.started = true;
                    x.machine = Some(Coordinator::new(REQUEST, driver, limits));
                });
                let dst = worker_ref(dst, life);
                self.tell_coord(
                    c,
                    coordinator::Event::Local(coordinator::Done::Start { dst }),
                );
            }
            Label::Cancel(c) => {
                let done = coordinator::Done::Cancel {
                    cause: Cause::Cancelled,
                };
                self.tell_coord(c, coordinator::Event::Local(done));
            }
            Label::Suspect(w) => {
                self.s.gateway.edit(|g| g.recoveries += 1);
                let target = worker_ref(w, self.s.life(Party::W(w)));
                self.tell_acceptor(acceptor::Event::Local(acceptor::Done::Recover { target }));
            }
            Label::ResendTokens(w) => {
                let (epoch, tokens) = (self.worker(w).emit_epoch, self.worker(w).unacked.clone());
                self.emit(w, epoch, tokens);
            }
        }
    }

    fn deliver(&mut self, p: &Packet) {
        match p {
            Packet::Msg {
                to,
                from,
                msg,
                payload,
            } => {
                self.arrive(*to, from.clone(), msg.clone(), *payload);
            }
            Packet::Ask {
                from,
                life,
                mach,
                op,
                request,
                given_up,
            } => {
                let reply = self.serve(*from, *life, request);
                if *given_up || self.s.life(*from) != *life {
                    return; // nobody waits for the answer
                }
                self.s.push(Packet::Answer {
                    to: *from,
                    life: *life,
                    mach: *mach,
                    op: *op,
                    reply,
                });
            }
            Packet::Answer {
                to,
                life,
                mach,
                op,
                reply,
            } => {
                if self.s.life(*to) == *life {
                    self.answer(*to, *mach, *op, reply.clone());
                }
            }
            Packet::Source { w, life, done } if self.worker(*w).life == *life => {
                self.tell_source(*w, source::Event::Local(done.clone()));
            }
            Packet::Destination { w, life, done } if self.worker(*w).life == *life => {
                self.tell_destination(*w, destination::Event::Local(done.clone()));
            }
            Packet::Rebuild { w, life, done } if self.worker(*w).life == *life => {
                self.tell_rebuilder(*w, recovery::Event::Local(done.clone()));
            }
            _ => {}
        }
    }

    fn answer(&mut self, to: Party, mach: Mach, op: Op, reply: StoreReply) {
        match (to, mach) {
            (Party::W(w), Mach::Src) => self.tell_source(w, source::Event::Store { op, reply }),
            (Party::W(w), Mach::Dst) => {
                self.tell_destination(w, destination::Event::Store { op, reply });
            }
            (Party::W(w), _) => self.tell_rebuilder(w, recovery::Event::Store { op, reply }),
            (Party::C(c), _) => self.tell_coord(c, coordinator::Event::Store { op, reply }),
            (Party::G, _) => self.tell_acceptor(acceptor::Event::Store { op, reply }),
            (Party::S, _) => {}
        }
    }

    fn arrive(&mut self, to: Party, from: Peer, msg: Msg, payload: Payload) {
        match to {
            Party::W(w) => match &msg.body {
                Body::Reserve { .. } | Body::Offer(_) | Body::Push(_) => {
                    if let Body::Reserve { intent } = &msg.body {
                        self.hint(w, intent.owner_epoch);
                    }
                    self.tell_destination(w, destination::Event::Recv { from, msg, payload });
                }
                Body::Prepare { .. } | Body::Ready { .. } | Body::Verified { .. } | Body::Go => {
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                Body::Rebuild { owner_epoch, .. } => {
                    self.hint(w, *owner_epoch);
                    self.tell_rebuilder(w, recovery::Event::Recv { from, msg, payload });
                }
                Body::Accepted {
                    owner_epoch,
                    through,
                } => {
                    if self.worker(w).emit_epoch == *owner_epoch {
                        let through = *through;
                        self.edit(w, |x| x.unacked.retain(|t| t.seq > through));
                    }
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                Body::Fenced { .. } => {
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                _ => {
                    let (f, m) = (from.clone(), msg.clone());
                    self.tell_source(
                        w,
                        source::Event::Recv {
                            from: f,
                            msg: m,
                            payload,
                        },
                    );
                    self.tell_destination(w, destination::Event::Recv { from, msg, payload });
                }
            },
            Party::C(c) => self.tell_coord(c, coordinator::Event::Recv { from, msg, payload }),
            Party::G => self.tell_acceptor(acceptor::Event::Recv { from, msg, payload }),
            Party::S => {}
        }
    }

    /// A message shows that this worker's run of a lower epoch is over.
    fn hint(&mut self, w: u8, floor: OwnerEpoch) {
        let msg = Msg {
            request: REQUEST,
            epoch: Default::default(),
            body: Body::Fenced { floor },
        };
        let payload = Payload::NONE;
        self.tell_source(
            w,
            source::Event::Recv {
                from: Peer::Gateway,
                msg,
                payload,
            },
        );
    }

    fn fire(&mut self, party: Party, mach: Mach, timer: Timer) {
        let gone = |timers: &mut Vec<(Mach, Timer)>| timers.retain(|t| *t != (mach, timer));
        match party {
            Party::W(w) => {
                self.edit_worker(w, |x| gone(&mut x.timers));
                match mach {
                    Mach::Src => self.tell_source(w, source::Event::Timer(timer)),
                    Mach::Dst => self.tell_destination(w, destination::Event::Timer(timer)),
                    _ => self.tell_rebuilder(w, recovery::Event::Timer(timer)),
                }
            }
            Party::C(c) => {
                self.s.coords[usize::from(c)].edit(|x| gone(&mut x.timers));
                self.tell_coord(c, coordinator::Event::Timer(timer));
            }
            Party::G => {
                self.s.gateway.edit(|x| gone(&mut x.timers));
                self.tell_acceptor(acceptor::Event::Timer(timer));
            }
            Party::S => {}
        }
    }

    /// Arms or disarms a timer.
    fn timer(&mut self, party: Party, mach: Mach, timer: Timer, armed: bool) {
        let set = |timers: &mut Vec<(Mach, Timer)>| {
            timers.retain(|t| *t != (mach, timer));
            if armed {
                timers.push((mach, timer));
                timers.sort();
            }
        };
        match party {
            Party::W(w) => self.edit_worker(w, |x| set(&mut x.timers)),
            Party::C(c) => self.s.coords[usize::from(c)].edit(|x| set(&mut x.timers)),
            Party::G => self.s.gateway.edit(|x| set(&mut x.timers)),
            Party::S => {}
        }
    }

    fn crash(&mut self, party: Party) {
        self.s.left.crashes -= 1;
        let limits = self.model.limits.clone();
        match party {
            Party::W(w) => {
                let life = self.worker(w).life + 1;
                self.s.workers[usize::from(w)] = Part::new(Worker::fresh(w, life, limits));
                self.forget(party);
            }
            Party::C(c) => {
                let driver = self.driver(c) + 16;
                self.s.coords[usize::from(c)].edit(|x| {
                    x.life += 1;
                    x.timers.clear();
                    x.machine = Some(Coordinator::new(REQUEST, driver, limits));
                });
                self.forget(party);
                self.tell_coord(c, coordinator::Event::Local(coordinator::Done::Adopt));
            }
            Party::G => {
                let durable = self.s.gateway.durable.clone();
                self.s.gateway.edit(|g| {
                    g.life += 1;
                    g.timers.clear();
                    g.acceptor = Some(Acceptor::restored(REQUEST, durable, limits));
                });
                self.forget(party);
            }
            Party::S => {
                // What was asked is lost; what was written stays.
                let net = std::mem::take(&mut self.s.net);
                for p in net {
                    match &*p {
                        Packet::Ask { given_up: true, .. } => {}
                        Packet::Ask {
                            from,
                            life,
                            mach,
                            op,
                            ..
                        } => {
                            let (to, life, mach, op) = (*from, *life, *mach, *op);
                            let reply = StoreReply::InDoubt;
                            self.s.push(Packet::Answer {
                                to,
                                life,
                                mach,
                                op,
                                reply,
                            });
                        }
                        _ => self.s.net.push(p),
                    }
                }
                self.s.net.sort_by_key(Part::hash);
            }
        }
    }

    /// What was on its way to an earlier life's operations matters to nobody.
    fn forget(&mut self, party: Party) {
        let now = self.s.life(party);
        self.s.net.retain(|p| match &**p {
            Packet::Answer { to, life, .. } => *to != party || *life == now,
            Packet::Source { w, life, .. }
            | Packet::Destination { w, life, .. }
            | Packet::Rebuild { w, life, .. } => Party::W(*w) != party || *life == now,
            Packet::Ask {
                from,
                life,
                request: Request::Read,
                ..
            } => *from != party || *life == now,
            _ => true,
        });
    }

    fn serve(&mut self, from: Party, life: u64, request: &Request) -> StoreReply {
        match request {
            Request::Read => StoreReply::Value((*self.s.store).clone()),
            Request::Cas { expect, next } => {
                if self.s.store.revision != *expect {
                    return StoreReply::Conflict(Some((*self.s.store).clone()));
                }
                let by = match from {
                    Party::W(w) => Some(worker_ref(w, life)),
                    _ => None,
                };
                self.wrote(next, by);
                let revision = Revision(expect.0 + 1);
                self.s.store = Part::new(Versioned {
                    revision,
                    record: (**next).clone(),
                });
                StoreReply::Applied(revision)
            }
        }
    }

    /// Checks a write of the record against what went before it.
    fn wrote(&mut self, new: &RouteRecord, by: Option<moonlivekv::id::WorkerRef>) {
        let old = self.s.store.record.clone();
        self.check(2, new.generation == old.generation.next(), || {
            "generation".into()
        });
        if new.owner_epoch != old.owner_epoch {
            let next = new.owner_epoch == old.owner_epoch.next();
            self.check(1, next, || "owner epoch jumped".into());
            let owner = (new.owner_epoch, new.owner.clone());
            self.s.truth.edit(|t| t.owners.push(owner));
        }
        match (&old.intent, &new.intent) {
            (None, Some(intent)) => {
                let m = intent.migration_epoch;
                let fresh = self.s.truth.intents.iter().all(|i| i.migration_epoch < m);
                self.check(2, fresh, || format!("attempt {m} began twice"));
                self.s.truth.edit(|t| t.intents.push(intent.clone()));
            }
            (Some(intent), None) => {
                let m = intent.migration_epoch;
                let last = new.last.clone().filter(|d| d.migration_epoch == m);
                let twice = self.s.truth.decision(m).is_some();
                self.check(2, last.is_some() && !twice, || {
                    format!("attempt {m}: {last:?}")
                });
                let Some(last) = last else { return };
                if let Outcome::Committed(cert) = &last.outcome {
                    let right = by.as_ref() == Some(&intent.dst)
                        && new.owner == intent.dst
                        && cert.migration_epoch == m
                        && cert.src == intent.src
                        && cert.owner_epoch == old.owner_epoch;
                    self.check(4, right, || {
                        format!("{intent:?} committed by {by:?}: {cert:?}")
                    });
                }
                self.s.truth.edit(|t| t.decisions.push((m, last.outcome)));
            }
            (a, b) => self.check(2, a == b, || "an intent was replaced undecided".into()),
        }
    }

    pub fn driver(&self, c: u8) -> u64 {
        self.s.coords[usize::from(c)].life * 16 + u64::from(c)
    }

    fn peer(&self, party: Party) -> Peer {
        match party {
            Party::W(w) => Peer::Worker(worker_ref(w, self.worker(w).life)),
            Party::C(c) => Peer::Coordinator(self.driver(c)),
            Party::G | Party::S => Peer::Gateway,
        }
    }

    /// What all machines ask of their executors alike; the rest is handed back.
    pub fn common<A>(&mut self, party: Party, mach: Mach, action: Action<A>) -> Option<A> {
        let life = self.s.life(party);
        match action {
            Action::StoreRead { op } => {
                self.s.push(Packet::Ask {
                    from: party,
                    life,
                    mach,
                    op,
                    request: Request::Read,
                    given_up: false,
                });
            }
            Action::StoreCas { op, expect, next } => {
                let request = Request::Cas { expect, next };
                self.s.push(Packet::Ask {
                    from: party,
                    life,
                    mach,
                    op,
                    request,
                    given_up: false,
                });
            }
            Action::Send { to, msg, payload } => {
                let (from, to) = (self.peer(party), party_of(&to));
                self.s.push(Packet::Msg {
                    to,
                    from,
                    msg,
                    payload,
                });
            }
            Action::SetTimer { timer, .. } => self.timer(party, mach, timer, true),
            Action::ClearTimer(timer) => self.timer(party, mach, timer, false),
            Action::Report(_) => {}
            Action::Do(what) => return Some(what),
        }
        None
    }

    pub fn emit(&mut self, w: u8, owner_epoch: OwnerEpoch, tokens: Vec<Emission>) {
        if !tokens.is_empty() {
            let body = Body::Emit {
                owner_epoch,
                tokens,
            };
            let msg = Msg {
                request: REQUEST,
                epoch: Default::default(),
                body,
            };
            let from = self.peer(Party::W(w));
            self.s.push(Packet::Msg {
                to: Party::G,
                from,
                msg,
                payload: Payload::NONE,
            });
        }
    }

    /// Whether a process goes on to its next local completion, or stops here.
    pub fn goes_on(&mut self) -> bool {
        match &mut self.stop_in {
            Some(0) if !self.stopped => {
                self.stopped = true;
                false
            }
            Some(k) if !self.stopped => {
                *k -= 1;
                true
            }
            _ => true,
        }
    }

    pub fn tell_coord(&mut self, c: u8, event: coordinator::Event) {
        let Some(mut machine) = self.s.coords[usize::from(c)].machine.clone() else {
            return;
        };
        let mut out = Vec::new();
        machine.handle(0, event, &mut out);
        let over = machine.is_over();
        self.s.coords[usize::from(c)].edit(|x| x.machine = Some(machine));
        for action in out {
            self.common(Party::C(c), Mach::Coord, action);
        }
        if over {
            self.s.coords[usize::from(c)].edit(|x| {
                x.machine = None;
                x.timers.clear();
            });
        }
    }

    pub fn tell_acceptor(&mut self, event: acceptor::Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut machine = self
                .s
                .gateway
                .edit(|g| g.acceptor.take())
                .expect("not at work");
            let mut out = Vec::new();
            machine.handle(0, event, &mut out);
            let ordered = machine.delivered() <= machine.journaled()
                && machine.journaled() <= self.s.gateway.durable.tokens.len() as u64;
            self.check(5, ordered, || "D <= J <= what is durable".into());
            self.s.gateway.edit(|g| g.acceptor = Some(machine));
            for action in out {
                let Some(what) = self.common(Party::G, Mach::Acc, action) else {
                    continue;
                };
                self.do_acceptor(what, &mut events);
            }
        }
    }

    fn do_acceptor(&mut self, what: acceptor::Do, events: &mut Vec<acceptor::Event>) {
        use acceptor::{Do, Done, Event};
        match what {
            Do::Append {
                op,
                owner_epoch,
                tokens,
            } => {
                for t in &tokens {
                    self.accepted(owner_epoch, t);
                }
                self.s.gateway.edit(|g| g.durable.tokens.extend(tokens));
                let through = self.s.gateway.durable.tokens.len() as u64;
                events.push(Event::Local(Done::Appended { op, through }));
            }
            Do::RaiseFloor { op, floor, owner } => {
                self.s.gateway.edit(|g| {
                    g.durable.floor = floor;
                    g.durable.owner = owner;
                });
                events.push(Event::Local(Done::FloorRaised { op }));
            }
            Do::Deliver { through } => {
                let durable = self.s.gateway.durable.tokens.len() as u64;
                self.check(5, through <= durable, || {
                    "delivered what is not durable".into()
                });
                events.push(Event::Local(Done::Delivered { through }));
            }
            Do::BuildImage { op, through } => {
                let durable = self.s.gateway.durable.clone();
                let whole = durable.tokens.len() as u64 == through;
                self.check(12, whole, || "J is not what the journal has".into());
                let record = self.s.store.record.clone();
                if record.phase == RoutePhase::Recovering {
                    let below = durable.floor < record.owner_epoch;
                    self.check(12, !below, || "J given away below the floor".into());
                    self.s.truth.edit(|t| t.given_away = record.owner_epoch);
                }
                let payload = Payload(1 + through);
                events.push(Event::Local(Done::ImageBuilt { op, payload }));
            }
            Do::Alarm { seq, .. } => self.check(5, false, || format!("two tokens {seq}")),
            Do::Closed | Do::Recovered { .. } => {}
        }
    }

    fn accepted(&mut self, epoch: OwnerEpoch, t: &Emission) {
        let truth = (*self.s.truth).clone();
        let next = u64::from(truth.accepted) + 1;
        self.check(5, t.seq == next, || {
            format!("token {} accepted, {next} is next", t.seq)
        });
        self.check(5, u64::from(t.token) == t.seq, || {
            format!("token {} is wrong", t.seq)
        });
        let falls = epoch < truth.accepted_epoch;
        self.check(1, !falls, || {
            format!("epoch {epoch} after {}", truth.accepted_epoch)
        });
        let late = epoch < truth.given_away;
        self.check(12, !late, || {
            format!("epoch {epoch} after J went to {}", truth.given_away)
        });
        let owned = truth.owners.iter().any(|(e, _)| *e == epoch);
        self.check(1, owned, || format!("nobody owns epoch {epoch}"));
        let seq = t.seq as u8;
        self.s.truth.edit(|t| {
            t.accepted = seq;
            t.accepted_epoch = epoch;
        });
    }
}

impl Worker {
    pub fn fresh(w: u8, life: u64, limits: moonlivekv::migrate::limits::Limits) -> Self {
        let me = worker_ref(w, life);
        Self {
            life,
            source: Part::new(None),
            destination: Part::new(Some(Destination::new(REQUEST, me.clone(), limits.clone()))),
            rebuilder: Part::new(Some(Rebuilder::new(REQUEST, me, limits))),
            engine: Part::new(Engine::default()),
            timers: Vec::new(),
        }
    }
}
