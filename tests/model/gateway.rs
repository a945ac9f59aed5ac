//! The store, the coordinators' executor and the gateway's, in miniature.

use super::exec::Exec;
use super::state::*;
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::io::{Payload, StoreReply};
use moonlivekv::migrate::msg::{Body, Emission};
use moonlivekv::migrate::{acceptor, coordinator};
use moonlivekv::route::{Outcome, Revision, RoutePhase, RouteRecord, Versioned};

impl Exec<'_> {
    pub fn serve(&mut self, from: Party, life: u64, request: &Request) -> StoreReply {
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
        match &event {
            acceptor::Event::Recv { msg, .. } if msg.body != Body::Outcome => self.tag = 1,
            acceptor::Event::Recv { .. } | acceptor::Event::Local(_) => self.tag = 2,
            _ => {}
        }
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
