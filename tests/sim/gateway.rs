//! The gateway's executor: journal, client, and the supervisor that suspects owners.

use std::collections::VecDeque;

use super::data::Data;
use super::store::Request;
use super::truth::Truth;
use super::world::{
    Ev, MS, Mach, Party, REQUEST, US, WORKERS, World, note, worker_index, worker_ref,
};
use moonlivekv::id::{OwnerEpoch, WorkerRef};
use moonlivekv::migrate::acceptor::{Acceptor, Do, Done, Durable, Event};
use moonlivekv::migrate::io::{Action, Op};
use moonlivekv::migrate::limits::Limits;
use moonlivekv::migrate::msg::Emission;
use moonlivekv::route::RoutePhase;

enum Write {
    Tokens(Op, OwnerEpoch, Vec<Emission>),
    Floor(Op, OwnerEpoch, WorkerRef),
}

pub struct Gateway {
    pub acceptor: Option<Acceptor>,
    durable: Durable,
    durable_epochs: Vec<OwnerEpoch>,
    pending: VecDeque<Write>,
    pub client: Vec<u32>,
    pub beats: [(u64, u64); WORKERS],
    pub hung_up: bool,
    closed: bool,
}

impl Gateway {
    pub fn new(owner: WorkerRef, limits: &Limits) -> Self {
        Self {
            acceptor: Some(Acceptor::admitted(REQUEST, owner.clone(), limits.clone())),
            durable: Durable {
                floor: OwnerEpoch(1),
                owner,
                tokens: Vec::new(),
            },
            durable_epochs: Vec::new(),
            pending: VecDeque::new(),
            client: Vec::new(),
            beats: [(1, 1); WORKERS],
            hung_up: false,
            closed: false,
        }
    }

    pub fn is_quiet(&self) -> bool {
        self.closed && self.acceptor.as_ref().is_some_and(|a| !a.is_recovering())
    }
}

impl World {
    /// A write of the record took place.
    pub fn on_write(&mut self, next: &moonlivekv::route::RouteRecord, by: Option<&WorkerRef>) {
        self.truth.on_write(next, by);
        if let Some(intent) = &next.intent {
            self.roles = Some((worker_index(&intent.src), worker_index(&intent.dst)));
        }
    }

    pub fn tell_acceptor(&mut self, event: Event) {
        let Some(mut machine) = self.gateway.acceptor.take() else {
            return;
        };
        let mut actions = Vec::new();
        machine.handle(self.clock(Party::G), event, &mut actions);
        let (journaled, delivered) = (machine.journaled(), machine.delivered());
        let durable = self.gateway.durable.tokens.len() as u64;
        self.truth
            .check(5, delivered <= journaled && journaled <= durable, || {
                format!("D {delivered}, J {journaled}, {durable} tokens survive a crash")
            });
        self.gateway.acceptor = Some(machine);
        for action in actions {
            if !self.may_go_on(Party::G) {
                return;
            }
            self.do_acceptor(action);
        }
    }

    fn do_acceptor(&mut self, action: Action<Do>) {
        let party = Party::G;
        match action {
            Action::StoreRead { op } => self.ask(party, Mach::Acc, op, Request::Read),
            Action::StoreCas { op, expect, next } => {
                self.ask(party, Mach::Acc, op, Request::Cas { expect, next });
            }
            Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
            Action::SetTimer { timer, at_ns } => self.set_timer(party, Mach::Acc, timer, at_ns),
            Action::ClearTimer(timer) => self.clear_timer(party, Mach::Acc, timer),
            Action::Report(report) => self.report(party, report),
            Action::Do(Do::Append {
                op,
                owner_epoch,
                tokens,
            }) => {
                for t in &tokens {
                    self.truth.on_accept(owner_epoch, t.seq, t.token);
                }
                note!(
                    self,
                    "accepts {} tokens of epoch {owner_epoch}",
                    tokens.len()
                );
                self.journal(Write::Tokens(op, owner_epoch, tokens));
            }
            Action::Do(Do::RaiseFloor { op, floor, owner }) => {
                note!(self, "floor {floor} of {owner}");
                self.journal(Write::Floor(op, floor, owner));
            }
            Action::Do(Do::Deliver { through }) => {
                let durable = self.gateway.durable.tokens.len() as u64;
                self.truth.check(5, through <= durable, || {
                    format!("delivered {through}, only {durable} survive a crash")
                });
                let from = self.gateway.client.len();
                let new = self.gateway.durable.tokens.iter().skip(from);
                let new: Vec<u32> = new
                    .take((through as usize).saturating_sub(from))
                    .map(|t| t.token)
                    .collect();
                self.gateway.client.extend(new);
                self.tell_acceptor(Event::Local(Done::Delivered { through }));
            }
            Action::Do(Do::BuildImage { op, through }) => {
                let durable = &self.gateway.durable;
                let tokens: Vec<u32> = durable
                    .tokens
                    .iter()
                    .take(through as usize)
                    .map(|t| t.token)
                    .collect();
                let floor_is_durable = durable.floor >= self.truth.record.owner_epoch;
                let has = tokens.len() as u64;
                if self.truth.record.phase == RoutePhase::Recovering {
                    self.truth.given_away = self.truth.record.owner_epoch;
                    self.truth.check(12, floor_is_durable, || {
                        "J given away below the floor".into()
                    });
                }
                self.truth.check(12, has == through, || {
                    format!("J is {through}, journaled {has}")
                });
                let payload = self.payloads.put(Data::Image { tokens });
                self.tell_acceptor(Event::Local(Done::ImageBuilt { op, payload }));
            }
            Action::Do(Do::Alarm { seq, from }) => {
                self.truth
                    .broken(5, || format!("{from} sent another token {seq}"));
            }
            Action::Do(Do::Closed) => self.gateway.closed = true,
            Action::Do(Do::Recovered { .. }) => {}
        }
    }

    fn journal(&mut self, write: Write) {
        self.gateway.pending.push_back(write);
        if self.gateway.pending.len() == 1 {
            self.schedule_journal();
        }
    }

    fn schedule_journal(&mut self) {
        let life = self.life(Party::G);
        let takes = self.rng.spread(5 * US, 100 * US);
        self.at(takes, Ev::Journal { life });
    }

    fn make_durable(&mut self) -> Option<Event> {
        let gateway = &mut self.gateway;
        Some(Event::Local(match gateway.pending.pop_front()? {
            Write::Tokens(op, epoch, tokens) => {
                gateway.durable_epochs.extend(tokens.iter().map(|_| epoch));
                gateway.durable.tokens.extend(tokens);
                Done::Appended {
                    op,
                    through: gateway.durable.tokens.len() as u64,
                }
            }
            Write::Floor(op, floor, owner) => {
                gateway.durable.floor = floor;
                gateway.durable.owner = owner;
                Done::FloorRaised { op }
            }
        }))
    }

    /// The oldest journal write is durable.
    pub fn journal_one(&mut self) {
        if let Some(event) = self.make_durable() {
            if !self.gateway.pending.is_empty() {
                self.schedule_journal();
            }
            self.tell_acceptor(event);
        }
    }

    pub fn gateway_crashed(&mut self) {
        // Writes under way may or may not have made it, in order.
        while !self.gateway.pending.is_empty() && self.rng.chance(1, 2) {
            self.make_durable();
        }
        self.gateway.pending.clear();
        self.gateway.acceptor = None;
        let Truth {
            accepted,
            accepted_epoch,
            ..
        } = &mut self.truth;
        *accepted = self.gateway.durable.tokens.len() as u64;
        *accepted_epoch = self
            .gateway
            .durable_epochs
            .last()
            .copied()
            .unwrap_or_default();
    }

    pub fn gateway_restarted(&mut self) {
        let durable = self.gateway.durable.clone();
        self.gateway.acceptor = Some(Acceptor::restored(REQUEST, durable, self.limits.clone()));
        self.gateway.beats = std::array::from_fn(|w| (self.life(Party::W(w)), self.now));
        let through = self.gateway.durable.tokens.len() as u64;
        self.do_acceptor(Action::Do(Do::Deliver { through }));
        let life = self.life(Party::G);
        self.at(5 * MS, Ev::Supervise { life });
    }

    /// Looks whether the owner seems to live, and whether something was left unfinished.
    pub fn supervise(&mut self) {
        let life = self.life(Party::G);
        self.at(4 * MS, Ev::Supervise { life });
        let Some(acceptor) = &self.gateway.acceptor else {
            return;
        };
        let record = &self.store.at.record;
        if acceptor.is_ended() || self.gateway.hung_up {
            return self.tell_acceptor(Event::Local(Done::Hangup));
        }
        if acceptor.is_recovering() || record.phase == RoutePhase::Finished {
            return;
        }
        let fresh = |w: usize| self.now - self.gateway.beats[w].1 < 12 * MS;
        let owner = worker_index(&record.owner);
        let lives = fresh(owner) && self.gateway.beats[owner].0 == record.owner.incarnation.0;
        if lives && record.phase == RoutePhase::Serving {
            return;
        }
        let able: Vec<usize> = (0..WORKERS).filter(|w| fresh(*w)).collect();
        if !able.is_empty() {
            let target = able[self.rng.below(able.len() as u64) as usize];
            self.suspect(target);
        }
    }

    /// The owner is believed dead: `target` shall have the request.
    pub fn suspect(&mut self, target: usize) {
        let life = self.gateway.beats[target].0;
        let target = worker_ref(target, life);
        note!(self, "the owner is suspected; {target} shall rebuild");
        self.tell_acceptor(Event::Local(Done::Recover { target }));
    }

    pub fn hang_up(&mut self) {
        self.gateway.hung_up = true;
        self.tell_acceptor(Event::Local(Done::Hangup));
    }
}
