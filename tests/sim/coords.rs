//! The coordinators' executor, and what operators ask of them.

use super::store::Request;
use super::world::{
    Ev, MS, Mach, Party, REQUEST, US, WORKERS, World, note, worker_index, worker_ref,
};
use moonlivekv::migrate::coordinator::{Coordinator, Do, Done, Event};
use moonlivekv::migrate::io::{Action, Op};
use moonlivekv::route::{Cause, RoutePhase};

pub struct Coord {
    pub machine: Option<Coordinator>,
    /// The latest life heard of, by worker (0: none).
    pub lives: [u64; WORKERS],
    left: u32,
    watches: u32,
}

impl Default for Coord {
    fn default() -> Self {
        Self {
            machine: None,
            lives: [1; WORKERS],
            left: 4,
            watches: 0,
        }
    }
}

impl Coord {
    pub fn is_quiet(&self) -> bool {
        self.machine.is_none()
    }
}

impl World {
    /// The nonce of this life of a coordinator.
    pub fn driver(&self, c: usize) -> u64 {
        self.life(Party::C(c)) * 16 + c as u64
    }

    pub fn start_coord(&mut self, c: usize) {
        self.coords[c].machine = None;
        let life = self.life(Party::C(c));
        let soon = self.rng.range(1, MS);
        self.at(soon, Ev::WatchTick { c, life });
    }

    /// The operator's `watch`.
    pub fn watch(&mut self, c: usize) {
        self.coords[c].watches += 1;
        let op = Op {
            epoch: Default::default(),
            n: self.coords[c].watches,
        };
        self.ask(Party::C(c), Mach::Watch, op, Request::Read);
        let life = self.life(Party::C(c));
        let next = self.rng.range(300 * US, 1_500 * US);
        self.at(next, Ev::WatchTick { c, life });
    }

    /// Somebody asks coordinator `c` to move the request.
    pub fn script(&mut self, c: usize) {
        if self.truth.record.phase == RoutePhase::Finished || self.coords[c].left == 0 {
            return;
        }
        if self.coords[c].machine.is_some() {
            return self.at(2 * MS, Ev::Script { c });
        }
        let owner = worker_index(&self.truth.record.owner);
        let others: Vec<usize> = (0..WORKERS)
            .filter(|w| *w != owner && self.coords[c].lives[*w] > 0)
            .collect();
        if others.is_empty() {
            return self.at(2 * MS, Ev::Script { c });
        }
        let dst = others[self.rng.below(others.len() as u64) as usize];
        self.coords[c].left -= 1;
        if self.roles.is_none() || self.step.is_none() {
            self.roles = Some((owner, dst));
        }
        let dst = worker_ref(dst, self.coords[c].lives[dst]);
        note!(self, "C({c}) shall move the request to {dst}");
        let driver = self.driver(c);
        self.coords[c].machine = Some(Coordinator::new(REQUEST, driver, self.limits.clone()));
        if self.rng.chance(1, 15) && !self.healed {
            let after = self.rng.range(10 * US, 10 * MS);
            self.at(after, Ev::CancelCoord { c });
        }
        self.tell_coord(c, Event::Local(Done::Start { dst }));
    }

    /// A restarted coordinator looks for what it, or another one, left behind.
    pub fn adopt(&mut self, c: usize) {
        if self.coords[c].machine.is_none() && self.is_up(Party::C(c)) {
            let driver = self.driver(c);
            self.coords[c].machine = Some(Coordinator::new(REQUEST, driver, self.limits.clone()));
            self.tell_coord(c, Event::Local(Done::Adopt));
        }
    }

    pub fn cancel_coord(&mut self, c: usize) {
        self.tell_coord(
            c,
            Event::Local(Done::Cancel {
                cause: Cause::Cancelled,
            }),
        );
    }

    pub fn tell_coord(&mut self, c: usize, event: Event) {
        let Some(mut machine) = self.coords[c].machine.take() else {
            return;
        };
        let mut actions = Vec::new();
        let party = Party::C(c);
        machine.handle(self.clock(party), event, &mut actions);
        let over = machine.is_over();
        self.coords[c].machine = Some(machine);
        for action in actions {
            if !self.may_go_on(party) {
                return;
            }
            match action {
                Action::StoreRead { op } => self.ask(party, Mach::Coord, op, Request::Read),
                Action::StoreCas { op, expect, next } => {
                    self.ask(party, Mach::Coord, op, Request::Cas { expect, next });
                }
                Action::Send { to, msg, payload } => self.send(party, &to, msg, payload),
                Action::SetTimer { timer, at_ns } => {
                    self.set_timer(party, Mach::Coord, timer, at_ns);
                }
                Action::ClearTimer(timer) => self.clear_timer(party, Mach::Coord, timer),
                Action::Report(report) => self.report(party, report),
                Action::Do(Do::Finished(ended)) => {
                    note!(self, "C({c}) is done: {ended:?}");
                    let next = self.rng.range(10 * US, 4 * MS);
                    self.at(next, Ev::Script { c });
                }
            }
        }
        if over {
            self.coords[c].machine = None;
            self.procs[party.index()].timers.clear();
        }
    }
}
