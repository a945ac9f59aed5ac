//! The network between processes.

use super::cover::{Fault, Role};
use super::world::{Ev, MS, Party, REQUEST, US, World, note, worker_index, worker_ref};
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::io::{Payload, Peer};
use moonlivekv::migrate::msg::{Body, Msg};
use moonlivekv::migrate::{acceptor, coordinator, destination, recovery, source};

impl World {
    /// When a message between these parties arrives: never, once or twice.
    pub fn travel(&mut self, parties: &[Party]) -> Vec<u64> {
        self.travel_of(parties, true)
    }

    /// The same for messages beside the protocol (`background` false).
    pub fn travel_of(&mut self, parties: &[Party], background: bool) -> Vec<u64> {
        let base = self.rng.spread(10 * US, 200 * US);
        if self.fault_of(Fault::Drop, parties, background) {
            return Vec::new();
        }
        // A flipped bit on the wire fails the frame's check: the message is lost. Workers have better
        // things to corrupt (a pull, a fence), so their planned corruption rarely strikes here.
        let is_worker = |p: &&Party| matches!(p, Party::W(_));
        let others: Vec<Party> = parties.iter().filter(|p| !is_worker(p)).copied().collect();
        let workers: Vec<Party> = parties.iter().filter(is_worker).copied().collect();
        if !others.is_empty() && self.fault_of(Fault::Corrupt, &others, background) {
            return Vec::new();
        }
        let spare = workers.iter().any(|w| self.role(*w) == Role::Spare);
        if !workers.is_empty()
            && self.rng.chance(1, if spare { 1 } else { 12 })
            && self.fault_of(Fault::Corrupt, &workers, background)
        {
            return Vec::new();
        }
        if self.fault_of(Fault::Delay, parties, background) {
            return vec![base + self.rng.spread(2 * MS, 60 * MS)];
        }
        if self.fault_of(Fault::Reorder, parties, background) {
            return vec![base + self.rng.spread(200 * US, 3 * MS)];
        }
        if self.fault_of(Fault::Duplicate, parties, background) {
            return vec![base, base + self.rng.spread(10 * US, 60 * MS)];
        }
        vec![base]
    }

    pub fn party_of(&self, peer: &Peer) -> Option<Party> {
        match peer {
            Peer::Worker(w) => Some(Party::W(worker_index(w))),
            Peer::Coordinator(driver) => Some(Party::C((driver % 16) as usize)),
            Peer::Gateway => Some(Party::G),
        }
    }

    pub fn peer(&self, party: Party) -> Peer {
        match party {
            Party::W(w) => Peer::Worker(worker_ref(w, self.life(party))),
            Party::C(c) => Peer::Coordinator(self.driver(c)),
            Party::G | Party::S => Peer::Gateway,
        }
    }

    pub fn send(&mut self, from: Party, to: &Peer, msg: Msg, payload: Payload) {
        let Some(to) = self.party_of(to) else { return };
        let peer = self.peer(from);
        for after in self.travel(&[from, to]) {
            let (from, msg) = (peer.clone(), msg.clone());
            self.at(
                after,
                Ev::Msg {
                    to,
                    from,
                    msg,
                    payload,
                },
            );
        }
    }

    /// A message reaches a process (whatever life of it is there).
    pub fn arrive(&mut self, to: Party, from: Peer, msg: Msg, payload: Payload) {
        note!(self, "{to:?} <- {from:?} {} {:?}", msg.epoch, msg.body);
        match to {
            Party::W(w) => match &msg.body {
                Body::Reserve { intent } => {
                    // If this worker still runs the request, it does not own it any more.
                    self.hint_source(w, intent.owner_epoch);
                    self.tell_destination(w, destination::Event::Recv { from, msg, payload });
                }
                Body::Offer(_) | Body::Push(_) => {
                    self.tell_destination(w, destination::Event::Recv { from, msg, payload });
                }
                Body::Prepare { .. } | Body::Ready { .. } | Body::Verified { .. } | Body::Go => {
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                Body::Rebuild { owner_epoch, .. } => {
                    self.hint_source(w, *owner_epoch);
                    self.tell_rebuilder(w, recovery::Event::Recv { from, msg, payload });
                }
                Body::Accepted {
                    owner_epoch,
                    through,
                } => {
                    if let Some(e) = &mut self.workers[w].emitter
                        && e.owner_epoch == *owner_epoch
                    {
                        e.acked(*through);
                    }
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                Body::Fenced { floor } => {
                    if self.workers[w].source.is_none()
                        && self.workers[w]
                            .emitter
                            .as_ref()
                            .is_some_and(|e| e.owner_epoch < *floor)
                    {
                        self.workers[w].emitter = None;
                    }
                    self.tell_source(w, source::Event::Recv { from, msg, payload });
                }
                // Cancel, Refuse, Outcome: for whichever part this worker plays in that attempt.
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

    fn hint_source(&mut self, w: usize, floor: OwnerEpoch) {
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

    /// A worker tells everybody that it lives.
    pub fn beat(&mut self, w: usize) {
        let life = self.life(Party::W(w));
        for to in [Party::C(0), Party::C(1), Party::G] {
            for after in self.travel_of(&[Party::W(w), to], false) {
                self.at(
                    after,
                    Ev::Beat {
                        to,
                        worker: w,
                        life,
                    },
                );
            }
        }
        let next = self.rng.range(300 * US, 900 * US);
        self.at(next, Ev::BeatTick { w, life });
    }

    pub fn on_beat(&mut self, to: Party, worker: usize, life: u64) {
        match to {
            Party::G => self.gateway.beats[worker] = (life, self.now),
            Party::C(c) => {
                let known = &mut self.coords[c].lives[worker];
                *known = (*known).max(life);
            }
            _ => {}
        }
    }
}
