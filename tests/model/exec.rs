//! Executes one label: the machines act, their local work is done at once, the rest is under way.

use std::collections::VecDeque;

use super::labels::{Base, Label, timers};
use super::models::Model;
use super::state::*;
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::migrate::acceptor::{self, Acceptor};
use moonlivekv::migrate::coordinator::{self, Coordinator};
use moonlivekv::migrate::destination::{self, Destination, Pulled};
use moonlivekv::migrate::io::{Action, Op, Payload, Peer, Report, StoreReply, Timer, TimerKind};
use moonlivekv::migrate::msg::{Body, Msg};
use moonlivekv::migrate::recovery::{self, Rebuilder};
use moonlivekv::migrate::source;

/// How a pull that was given up ends, unless its writer cannot be stopped.
pub const GIVEN_UP: Pulled = Pulled::Failed;

/// Why a label leads to no state.
pub enum No {
    /// It changes nothing that another label does not.
    Moot,
    /// An invariant of `CONTRACT.md` does not hold.
    Broken(String),
}

/// What a step did, as far as mishaps can strike it.
#[derive(Default)]
pub struct Did {
    pub sent: u8,
    pub asked: u8,
    pub completions: u8,
    /// Who acted; where somebody's memory was read, he too.
    pub actors: Vec<Party>,
    /// Deadlines of the first actor that are armed afterwards.
    pub deadlines: Vec<(Party, Mach, Timer)>,
}

pub struct Exec<'m> {
    pub model: &'m Model,
    pub s: State,
    pub broken: Option<String>,
    pub label: Label,
    pub did: Did,
    stopped: bool,
    pub struck: usize,
    /// What follows in the same step, after the actions at hand.
    pub then: VecDeque<Then>,
    /// Whoever acts has just given up an attempt.
    pub gives_up: bool,
    /// What the store operations that are asked for now belong to (see [`Packet::Ask`]).
    pub tag: u8,
}

/// What follows at once.
pub enum Then {
    /// The answer to a read.
    Answer(Party, Mach, Op, StoreReply, u8),
    /// The store is asked again.
    Retry(Party, Mach, Timer, u8),
    /// Tokens are acknowledged.
    Ack(u8, Msg),
}

/// Applies a label.
pub fn apply(model: &Model, s: &State, label: Label) -> Result<(State, Did), No> {
    let mut x = Exec::new(model, s.clone(), label);
    x.run(label.base);
    x.what_follows();
    if let Some((party, mach, timer)) = label.fire {
        x.s.left.deadlines -= 1;
        x.fire(party, mach, timer);
        x.what_follows();
    }
    let mishaps = label.mishaps.iter().flatten().count();
    x.s.left.losses -= mishaps as u8;
    if label.stop.is_some() {
        x.s.left.pauses -= 1;
    }
    if let Some(party) = label.crash {
        x.crash(party);
        x.what_follows();
    }
    x.notices();
    if let Some(what) = x.broken {
        return Err(No::Broken(what));
    }
    if (label.stop.is_some() && !x.stopped) || x.struck < mishaps {
        return Err(No::Moot);
    }
    x.prune();
    let one = if label.base == Base::Nothing {
        None
    } else {
        x.did.actors.first()
    };
    if !x.did.actors.is_empty() {
        let deadline = |t: &&(Mach, Timer)| t.1.kind == TimerKind::Deadline;
        for (party, timers) in timers(&x.s).filter(|(p, _)| one.is_none_or(|o| o == p)) {
            let armed = timers.iter().filter(deadline).map(|(m, t)| (party, *m, *t));
            x.did.deadlines.extend(armed);
        }
    }
    Ok((x.s, x.did))
}

impl<'m> Exec<'m> {
    pub fn new(model: &'m Model, s: State, label: Label) -> Self {
        let did = Did::default();
        Self {
            model,
            s,
            broken: None,
            label,
            did,
            stopped: false,
            struck: 0,
            then: VecDeque::new(),
            gives_up: false,
            tag: 0,
        }
    }
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

    pub fn acts(&mut self, party: Party) {
        self.did.actors.push(party);
    }

    fn run(&mut self, base: Base) {
        match base {
            Base::Nothing => {
                let all = self.model.crash.iter().filter(|p| **p != Party::S);
                self.did.actors = all.copied().collect();
            }
            Base::Deliver(i) => {
                let p = self.s.net.remove(i);
                match &*p {
                    Packet::Msg { to, .. } | Packet::Answer { to, .. } => self.acts(*to),
                    Packet::Source { w, .. }
                    | Packet::Destination { w, .. }
                    | Packet::Rebuild { w, .. } => self.acts(Party::W(*w)),
                    Packet::Ask { .. } => {}
                }
                self.deliver(&p);
            }
            Base::Fire(party, mach, timer) => {
                self.acts(party);
                if timer.kind == TimerKind::Resend {
                    self.s.left.lost &= !by(mach);
                }
                self.fire(party, mach, timer);
            }
            Base::CrashStore => self.crash(Party::S),
            Base::Step(w) => {
                self.acts(Party::W(w));
                self.step(w);
            }
            Base::Land(w, i) => {
                self.acts(Party::W(w));
                self.land_one(w, i, false);
            }
            Base::LandWrong(w, i) => {
                self.s.left.losses -= 1;
                self.land_one(w, i, true);
            }
            Base::Break(w, i) => {
                self.s.left.losses -= 1;
                self.edit(w, |x| x.pulls[i].ended = Some(GIVEN_UP));
            }
            Base::EndPull(w, i, stuck) => {
                self.acts(Party::W(w));
                self.end_pull(w, i, stuck);
            }
            Base::Start(c, dst) => self.start(c, dst),
            Base::Suspect(w) => {
                self.acts(Party::G);
                self.s.gateway.edit(|g| g.recoveries += 1);
                let target = worker_ref(w, self.s.life(Party::W(w)));
                self.tell_acceptor(acceptor::Event::Local(acceptor::Done::Recover { target }));
            }
            Base::ResendTokens(w) => {
                self.acts(Party::W(w));
                let (epoch, tokens) = (self.worker(w).emit_epoch, self.worker(w).unacked.clone());
                self.emit(w, epoch, tokens);
            }
        }
    }

    fn start(&mut self, c: u8, dst: u8) {
        self.acts(Party::C(c));
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

    pub fn deliver(&mut self, p: &Packet) {
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
                tag,
                request,
                given_up,
            } => {
                let reply = self.serve(*from, *life, request);
                if *given_up || self.s.life(*from) != *life {
                    return; // nobody waits for the answer
                }
                if self.model.atomic_reads && !self.travels(&reply) {
                    self.acts(*from);
                    self.tag = *tag;
                    return self.answer(*from, *mach, *op, reply);
                }
                self.s.push(Packet::Answer {
                    to: *from,
                    life: *life,
                    mach: *mach,
                    op: *op,
                    tag: *tag,
                    reply,
                });
            }
            Packet::Answer {
                to,
                life,
                mach,
                op,
                tag,
                reply,
            } if self.s.life(*to) == *life => {
                self.tag = *tag;
                self.answer(*to, *mach, *op, reply.clone());
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

    pub fn answer(&mut self, to: Party, mach: Mach, op: Op, reply: StoreReply) {
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

    pub fn arrive(&mut self, to: Party, from: Peer, msg: Msg, payload: Payload) {
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

    pub fn fire(&mut self, party: Party, mach: Mach, timer: Timer) {
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
        self.then.clear();
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
                    x.gave_up = MigrationEpoch(0);
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
                            tag,
                            ..
                        } => {
                            let (to, life, mach, op, tag) = (*from, *life, *mach, *op, *tag);
                            let reply = StoreReply::InDoubt;
                            self.s.push(Packet::Answer {
                                to,
                                life,
                                mach,
                                op,
                                tag,
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

    pub fn driver(&self, c: u8) -> u64 {
        self.s.coords[usize::from(c)].life * 16 + u64::from(c)
    }

    pub fn peer(&self, party: Party) -> Peer {
        match party {
            Party::W(w) => Peer::Worker(worker_ref(w, self.worker(w).life)),
            Party::C(c) => Peer::Coordinator(self.driver(c)),
            Party::G | Party::S => Peer::Gateway,
        }
    }

    /// What all machines ask of their executors alike; the rest is handed back.
    pub fn common<A>(&mut self, party: Party, mach: Mach, action: Action<A>) -> Option<A> {
        match action {
            Action::StoreRead { op } => self.ask(party, mach, op, Request::Read),
            Action::StoreCas { op, expect, next } => {
                self.ask(party, mach, op, Request::Cas { expect, next });
            }
            Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
            // The store is asked again at once: what is asked may take its time anyway.
            Action::SetTimer { timer, .. } if timer.kind == TimerKind::Retry => {
                self.then
                    .push_back(Then::Retry(party, mach, timer, self.tag));
            }
            Action::SetTimer { timer, .. } => self.timer(party, mach, timer, true),
            Action::ClearTimer(timer) => self.timer(party, mach, timer, false),
            Action::Report(report) => self.gives_up |= matches!(report, Report::GivingUp(_)),
            Action::Do(what) => return Some(what),
        }
        None
    }

    /// Whether a process goes on to its next local completion, or stops here.
    pub fn goes_on(&mut self) -> bool {
        let k = self.did.completions;
        self.did.completions += 1;
        let stops = self.label.stop == Some(k);
        self.stopped |= stops;
        !stops
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
            gave_up: MigrationEpoch(0),
        }
    }
}
