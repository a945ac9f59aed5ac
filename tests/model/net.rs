//! What is under way between the processes, what is lost of it, and what arrives at once.

use super::exec::{Exec, Then};
use super::labels::{Mishap, party_of};
use super::state::*;
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::destination::Destination;
use moonlivekv::migrate::io::{Op, Payload, Peer, StoreReply};
use moonlivekv::migrate::msg::{Body, Emission, Msg};
use moonlivekv::route::{Cause, Decision, Outcome};

impl Exec<'_> {
    pub fn ask(&mut self, from: Party, mach: Mach, op: Op, request: Request) {
        let life = self.s.life(from);
        let tag = match mach {
            Mach::Acc | Mach::Reb => self.tag,
            _ => 0,
        };
        if request == Request::Read && self.model.atomic_reads {
            let reply = self.serve(from, life, &request);
            return self
                .then
                .push_back(Then::Answer(from, mach, op, reply, tag));
        }
        let k = self.did.asked;
        self.did.asked += 1;
        let doubt = self.strikes(Mishap::Doubt(k));
        let lost = self.strikes(Mishap::LoseRequest(k));
        if doubt || lost {
            let reply = StoreReply::InDoubt;
            self.s.push(Packet::Answer {
                to: from,
                life,
                mach,
                op,
                tag,
                reply,
            });
        }
        // A read that nobody waits for does nothing.
        if !(lost || (doubt && request == Request::Read)) {
            self.s.push(Packet::Ask {
                from,
                life,
                mach,
                op,
                tag,
                request,
                given_up: doubt,
            });
        }
    }

    /// Whether this mishap is part of the step; counts it.
    fn strikes(&mut self, mishap: Mishap) -> bool {
        let strikes = self.label.mishaps.contains(&Some(mishap));
        self.struck += usize::from(strikes);
        strikes
    }

    pub fn send(&mut self, from: Party, to: &Peer, mut msg: Msg, payload: Payload) {
        let k = self.did.sent;
        self.did.sent += 1;
        if matches!(msg.body, Body::Refuse { .. } | Body::Cancel { .. })
            && std::mem::take(&mut self.gives_up)
        {
            let epoch = msg.epoch;
            match from {
                Party::W(w) => self.edit_worker(w, |x| x.gave_up = epoch),
                Party::C(c) => self.s.coords[usize::from(c)].edit(|x| x.gave_up = epoch),
                _ => {}
            }
        }
        let (mut from, to) = (self.peer(from), party_of(to));
        if to != Party::G && plain_notice(&mut msg.body) {
            from = Peer::Gateway; // who gave it makes no difference to the machines
        }
        if self.strikes(Mishap::Lose(k)) {
            self.s.left.lost |= lost_by(&msg.body);
            return;
        }
        let doubled = self.strikes(Mishap::Double(k));
        if let (true, Party::W(w), Body::Accepted { .. }) = (self.model.atomic_acks, to, &msg.body)
        {
            self.then.push_back(Then::Ack(w, msg.clone()));
            if !doubled {
                return;
            }
        } else if doubled {
            let (from, msg) = (from.clone(), msg.clone());
            self.s.push(Packet::Msg {
                to,
                from,
                msg,
                payload,
            });
        }
        let packet = Packet::Msg {
            to,
            from,
            msg,
            payload,
        };
        // A second notice of a decision says nothing that the first one does not.
        let notice = matches!(&packet, Packet::Msg { to, msg, .. }
            if *to != Party::G && msg.body == Body::Outcome);
        if !(notice && self.s.net.iter().any(|p| **p == packet)) {
            self.s.push(packet);
        }
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
            self.send(Party::W(w), &Peer::Gateway, msg, Payload::NONE);
        }
    }

    /// Whether an answer takes its time. Reads do not; neither do conflicts and aborts, which tell
    /// no more than a read at that moment would.
    pub fn travels(&self, reply: &StoreReply) -> bool {
        let record = &self.s.store.record;
        let aborted = |last: &Decision| {
            last.migration_epoch == record.migration_epoch
                && record.intent.is_none()
                && matches!(last.outcome, Outcome::Aborted { .. })
        };
        matches!(reply, StoreReply::Applied(_)) && !record.last.as_ref().is_some_and(aborted)
    }

    /// Does what follows at once from what was done.
    pub fn what_follows(&mut self) {
        let mut rounds = 0;
        while let Some(then) = self.then.pop_front() {
            rounds += 1;
            if rounds > 100 {
                return self.check(13, false, || "a step that never ends".into());
            }
            match then {
                Then::Answer(party, mach, op, reply, tag) => {
                    self.tag = tag;
                    self.answer(party, mach, op, reply);
                }
                Then::Retry(party, mach, timer, tag) => {
                    self.tag = tag;
                    self.fire(party, mach, timer);
                }
                Then::Ack(w, msg) => {
                    self.did.actors.push(Party::W(w));
                    self.arrive(Party::W(w), Peer::Gateway, msg, Payload::NONE);
                }
            }
        }
    }

    /// A destination that has launched hears of decisions at once: it changes nothing there.
    pub fn notices(&mut self) {
        if !self.model.atomic_reads {
            return;
        }
        for w in 0..3 {
            let x = self.worker(w);
            let deaf = x.destination.as_ref().is_some_and(Destination::is_launched)
                && x.source.as_ref().is_none_or(|m| !m.is_migrating());
            let heard = |p: &Packet| {
                matches!(p, Packet::Msg { to, msg, .. }
                if *to == Party::W(w) && msg.body == Body::Outcome)
            };
            while let Some(i) = self.s.net.iter().position(|p| deaf && heard(p)) {
                let p = self.s.net.remove(i);
                self.deliver(&p);
                self.what_follows();
            }
        }
    }

    /// Drops messages that nobody will ever look at: it makes no difference when they arrive.
    pub fn prune(&mut self) {
        let s = &self.s;
        let inert = |p: &Packet| {
            let Packet::Msg { to, msg, .. } = p else {
                return false;
            };
            match (*to, &msg.body) {
                // It moves to abort already, and nothing but the record can end that.
                (Party::W(w), Body::Refuse { .. })
                    if s.workers[usize::from(w)].gave_up == msg.epoch =>
                {
                    true
                }
                (Party::C(c), Body::Refuse { .. })
                    if s.coords[usize::from(c)].gave_up == msg.epoch =>
                {
                    true
                }
                (Party::C(c), body) => {
                    let coord = &s.coords[usize::from(c)];
                    let comes_back = s.left.crashes > 0 && self.model.crash.contains(to);
                    let waits = coord.machine.is_some() || (!coord.started && comes_back);
                    let told = matches!(body, Body::Progress { .. })
                        && (self.model.no_go || !self.model.rounds);
                    (!waits && !comes_back) || told
                }
                (Party::W(w), Body::Accepted { owner_epoch, .. }) => {
                    s.workers[usize::from(w)].emit_epoch != *owner_epoch
                }
                (Party::W(w), Body::Fenced { .. }) => s.workers[usize::from(w)].source.is_none(),
                (
                    Party::W(_),
                    Body::Prepare { .. } | Body::Reserve { .. } | Body::Rebuild { .. },
                ) => false,
                (Party::W(w), _) => {
                    let x = &s.workers[usize::from(w)];
                    let begins = |p: &Packet| {
                        matches!(p, Packet::Msg { to: t, msg: m, .. }
                            if t == to
                                && m.epoch == msg.epoch
                                && matches!(m.body, Body::Prepare { .. } | Body::Reserve { .. }))
                    };
                    s.truth.decision(msg.epoch).is_some()
                        && x.source.as_ref().is_none_or(|m| !m.is_migrating())
                        && x.destination
                            .as_ref()
                            .is_some_and(|d| d.is_idle() || d.is_launched())
                        && !s.net.iter().any(|p| begins(p))
                }
                _ => false,
            }
        };
        if s.net.iter().any(|p| inert(p)) {
            let net = s.net.iter().filter(|p| !inert(p)).cloned().collect();
            self.s.net = net;
        }
    }
}

/// Whether this is a notice whose sender and cause no machine looks at; makes those all the same.
fn plain_notice(body: &mut Body) -> bool {
    match body {
        Body::Outcome => true,
        Body::Refuse { .. } | Body::Cancel { .. } => {
            *body = Body::Refuse {
                cause: Cause::Cancelled,
            };
            true
        }
        _ => false,
    }
}
