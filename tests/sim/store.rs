//! The store: one record, linearizable, durable; requests and replies may be lost.

use super::cover::Fault;
use super::world::{Ev, MS, Mach, Party, US, World, note, worker_ref};
use moonlivekv::migrate::io::{Op, StoreReply};
use moonlivekv::migrate::{acceptor, coordinator, destination, recovery, source};
use moonlivekv::route::{Revision, RouteRecord, Versioned};

#[derive(Clone, Debug)]
pub enum Request {
    Read,
    Cas {
        expect: Revision,
        next: Box<RouteRecord>,
    },
}

pub type Reply = StoreReply;

pub struct Store {
    pub at: Versioned,
}

impl Store {
    pub fn new(record: RouteRecord) -> Self {
        Self {
            at: Versioned {
                revision: Revision(1),
                record,
            },
        }
    }
}

/// A client gives up waiting after this long; the operation is in doubt then.
const PATIENCE: u64 = 4 * MS;

impl World {
    /// A party asks the store.
    pub fn ask(&mut self, from: Party, mach: Mach, op: Op, request: Request) {
        let life = self.life(from);
        self.procs[from.index()].asked.push((mach, op));
        self.at(
            PATIENCE,
            Ev::AskTimeout {
                to: from,
                life,
                mach,
                op,
            },
        );
        for after in self.travel_of(&[from, Party::S], mach != Mach::Watch) {
            let request = request.clone();
            self.at(
                after,
                Ev::Ask {
                    from,
                    life,
                    mach,
                    op,
                    request,
                },
            );
        }
    }

    /// The store serves a request.
    pub fn serve(&mut self, from: Party, life: u64, mach: Mach, op: Op, request: Request) {
        let is_write = matches!(request, Request::Cas { .. });
        let reply = match request {
            Request::Read => Reply::Value(self.store.at.clone()),
            Request::Cas { expect, next } => {
                if self.store.at.revision == expect {
                    self.store.at = Versioned {
                        revision: Revision(expect.0 + 1),
                        record: (*next).clone(),
                    };
                    note!(self, "STORE {from:?} wrote {next:?}");
                    let by = match from {
                        Party::W(w) => Some(worker_ref(w, life)),
                        _ => None,
                    };
                    self.on_write(&next, by.as_ref());
                    Reply::Applied(self.store.at.revision)
                } else {
                    Reply::Conflict(Some(self.store.at.clone()))
                }
            }
        };
        if is_write {
            if self.fault(Fault::LostReply, &[from]) {
                return;
            }
            if self.fault(Fault::LostReply, &[Party::S]) {
                // The store dies between the write and the reply.
                let back = self.rng.spread(MS, 10 * MS);
                return self.crash(Party::S, back);
            }
        }
        let disk = self.rng.range(20 * US, 150 * US);
        for after in self.travel_of(&[Party::S, from], mach != Mach::Watch) {
            let reply = reply.clone();
            self.at(
                disk + after,
                Ev::Answer {
                    to: from,
                    life,
                    mach,
                    op,
                    reply,
                },
            );
        }
    }

    /// An answer (or the end of patience) reaches the asker; only the first one counts.
    pub fn on_answer(&mut self, to: Party, mach: Mach, op: Op, reply: Reply) {
        let asked = &mut self.procs[to.index()].asked;
        let Some(i) = asked.iter().position(|a| *a == (mach, op)) else {
            return;
        };
        asked.swap_remove(i);
        if mach != Mach::Watch {
            note!(
                self,
                "{to:?} {mach:?} store answers {op:?}: {}",
                brief(&reply)
            );
        }
        match (to, mach) {
            (Party::W(w), Mach::Src) => self.tell_source(w, source::Event::Store { op, reply }),
            (Party::W(w), Mach::Dst) => {
                self.tell_destination(w, destination::Event::Store { op, reply });
            }
            (Party::W(w), Mach::Reb) => {
                self.tell_rebuilder(w, recovery::Event::Store { op, reply })
            }
            (Party::C(c), Mach::Coord) => {
                self.tell_coord(c, coordinator::Event::Store { op, reply });
            }
            (Party::G, _) => self.tell_acceptor(acceptor::Event::Store { op, reply }),
            _ => {}
        }
    }
}

fn brief(reply: &Reply) -> String {
    match reply {
        Reply::Value(v) => format!("value at {} {:?}", v.revision.0, v.record.intent),
        Reply::Conflict(Some(v)) => format!("conflict, at {} now", v.revision.0),
        other => format!("{other:?}"),
    }
}
