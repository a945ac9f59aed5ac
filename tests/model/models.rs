//! The models: what is looked at from where on, and within which bounds.

use super::exec::{Exec, apply};
use super::labels::{Base, Label, labels};
use super::search::Stats;
use super::state::*;
use moonlivekv::id::{MigrationEpoch, OwnerEpoch};
use moonlivekv::migrate::acceptor::{Acceptor, Durable};
use moonlivekv::migrate::limits::Limits;
use moonlivekv::migrate::msg::Body;
use moonlivekv::route::{Outcome, Revision, RouteRecord, Versioned};

/// Tokens of a page.
pub const PAGE: u64 = 2;

/// What is common to all models: three workers (the owner, the destination, a spare), two
/// coordinators, the gateway with its acceptor and journal, the store; messages and store requests
/// take any time and overtake each other; any of the parties in `crash` may die and come back.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: &'static str,
    pub limits: Limits,
    pub budget: Budget,
    pub replicas: u16,
    /// Prompt tokens.
    pub prompt: u8,
    /// Output tokens that are decoded at most.
    pub tokens: u8,
    /// Whom each coordinator may be asked to move the request to.
    pub starts: [&'static [u8]; 2],
    /// Who may crash.
    pub crash: &'static [Party],
    /// Local completions at which a process may be stopped.
    pub stops: u8,
    pub recoveries: u8,
    pub rebuild_on: &'static [u8],
    /// The source goes on sealing and offering what it decoded.
    pub rounds: bool,
    /// The answer to a read, to a refused write and to an abort comes as the store serves the
    /// request, and a read is served as it is asked: it then tells the newest that it could tell.
    /// Without this an answer may be as old as you like when it comes.
    pub atomic_reads: bool,
    /// A worker hears at once which tokens were accepted, or never.
    pub atomic_acks: bool,
    /// No coordinator ever says GO.
    pub no_go: bool,
    /// Pulls land slot by slot, may break off, and may bring wrong bytes (each counts as a loss).
    pub slow_pulls: bool,
    /// A pull may leave a writer behind that cannot be stopped.
    pub stuck: bool,
    /// Run undisturbed up to the first state of which this holds.
    pub begin: fn(&State) -> bool,
}

fn limits() -> Limits {
    Limits {
        offer_tokens: 16,
        window: 1,
        go_tokens: 2,
        pull_retries: 1,
        resends: 1,
        stream_bytes_per_s: 0,
        ..Limits::default()
    }
}

/// Crashes, pauses, losses (or doubled messages, or store requests in doubt), deadlines that come
/// early.
fn budget(crashes: u8, pauses: u8, losses: u8, deadlines: u8) -> Budget {
    Budget {
        crashes,
        pauses,
        losses,
        deadlines,
        lost: 0,
    }
}

fn base(name: &'static str, budget: Budget) -> Model {
    Model {
        name,
        limits: limits(),
        budget,
        replicas: 1,
        prompt: 4,
        tokens: 2,
        starts: [&[1], &[]],
        crash: &[Party::W(0), Party::W(1), Party::C(0), Party::G, Party::S],
        stops: 8,
        recoveries: 0,
        rebuild_on: &[],
        rounds: false,
        atomic_reads: true,
        atomic_acks: true,
        no_go: false,
        slow_pulls: false,
        stuck: false,
        begin: |_| true,
    }
}

fn under_way(s: &State, is: fn(&Body) -> bool) -> bool {
    s.net
        .iter()
        .any(|p| matches!(&**p, Packet::Msg { msg, .. } if is(&msg.body)))
}

/// From GO to the end of the attempt: hold, push, verify, arm, commit or abort, launch or unfence.
/// 2 sealed pages and a tail; 2 crashes, 1 pause, 2 losses. Deadlines come when nothing else can
/// happen.
pub fn fence(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 2, 0)
    } else {
        budget(1, 1, 1, 0)
    };
    Model {
        begin: |s| under_way(s, |b| matches!(b, Body::Go)),
        ..base("fence", left)
    }
}

/// The same with a deadline that comes early: somebody gives up while the others go on. 2 crashes,
/// 1 pause, 1 loss, 1 early deadline.
pub fn deadlines(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 1, 1)
    } else {
        budget(0, 1, 0, 1)
    };
    Model {
        name: "deadlines",
        budget: left,
        ..fence(full)
    }
}

/// The same with answers of the store and acknowledgements of tokens that come late: a party acts
/// on what the record said some time ago. 2 crashes, 1 pause, 2 losses.
pub fn stale(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 2, 0)
    } else {
        budget(1, 0, 0, 0)
    };
    Model {
        atomic_reads: false,
        atomic_acks: false,
        ..Model {
            name: "stale answers",
            budget: left,
            ..fence(full)
        }
    }
}

/// Two coordinators move the request to two workers, one attempt after the other, up to the fence
/// (which `fence` begins with). Nothing is streamed. 2 crashes, 1 pause, 1 loss.
pub fn rivals(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 1, 0)
    } else {
        budget(1, 0, 0, 0)
    };
    Model {
        starts: [&[1], &[2]],
        no_go: true,
        prompt: 0,
        tokens: 1,
        crash: &[Party::W(0), Party::W(1), Party::C(0), Party::S],
        ..base("rivals", left)
    }
}

/// The gateway suspects the owner, rightly or not, and recovers the request twice, while it is being
/// moved: the race begins with the push. 2 crashes, 1 pause, 1 loss.
pub fn recovery(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 1, 0)
    } else {
        budget(1, 0, 0, 0)
    };
    Model {
        begin: |s| under_way(s, |b| matches!(b, Body::Push(_))),
        recoveries: 2,
        rebuild_on: &[1, 2],
        ..base("recovery", left)
    }
}

/// The same race with a deadline that comes early, so that an abort takes part in it. 2 crashes,
/// 1 pause, 1 early deadline.
pub fn late(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 0, 1)
    } else {
        budget(0, 0, 0, 1)
    };
    Model {
        name: "recovery and abort",
        budget: left,
        ..recovery(full)
    }
}

/// STREAM and the fence with two replicas: slots land one by one, pulls break off, writers get
/// stuck, bytes are wrong; the source decodes on. 2 crashes, 1 pause, 1 loss.
pub fn pages(full: bool) -> Model {
    let left = if full {
        budget(2, 1, 1, 0)
    } else {
        budget(0, 0, 1, 0)
    };
    let mut m = Model {
        begin: |s| under_way(s, |b| matches!(b, Body::Offer(_))),
        replicas: 2,
        prompt: 5,
        tokens: 1,
        slow_pulls: true,
        rounds: true,
        stuck: true,
        ..base("pages", left)
    };
    m.limits.window = 2;
    m.limits.offer_tokens = 2;
    m
}

impl Model {
    /// The admitted request, or the state that an undisturbed run reaches at `begin`.
    pub fn first(&self) -> State {
        let owner = worker_ref(0, 1);
        let record = RouteRecord::admitted(REQUEST, owner.clone());
        let durable = Durable {
            floor: OwnerEpoch(1),
            owner: owner.clone(),
            tokens: Vec::new(),
        };
        let worker = |w| Part::new(Worker::fresh(w, 1, self.limits.clone()));
        let coord = Coord {
            life: 1,
            machine: None,
            started: false,
            timers: Vec::new(),
            gave_up: MigrationEpoch(0),
        };
        let gateway = Gateway {
            life: 1,
            acceptor: Some(Acceptor::admitted(
                REQUEST,
                owner.clone(),
                self.limits.clone(),
            )),
            durable,
            timers: Vec::new(),
            recoveries: 0,
        };
        let truth = Truth {
            owners: vec![(OwnerEpoch(1), owner)],
            ..Truth::default()
        };
        let none = budget(0, 0, 0, 0);
        let mut s = State {
            workers: [worker(0), worker(1), worker(2)],
            coords: [Part::new(coord.clone()), Part::new(coord)],
            gateway: Part::new(gateway),
            store: Part::new(Versioned {
                revision: Revision(1),
                record,
            }),
            truth: Part::new(truth),
            net: Vec::new(),
            left: none,
        };
        let way = Model {
            rounds: true,
            ..self.clone()
        };
        let mut x = Exec::new(&way, s, Base::Nothing.into());
        let run = Running {
            epoch: OwnerEpoch(1),
            kv_len: self.prompt,
            seal: 1,
            wrong: false,
            held: None,
            pinned: None,
            grant: None,
        };
        x.run_request(0, run, vec![super::source::token(1, false)], 0);
        s = x.s;
        while !(self.begin)(&s) {
            let calm = |l: &Label| {
                use Base::{Deliver, EndPull, Land, Start};
                matches!(
                    l.base,
                    Deliver(_) | Start(..) | Land(..) | EndPull(_, _, false)
                )
            };
            let label = labels(&way, &s)
                .into_iter()
                .find(calm)
                .expect("a way to the beginning");
            s = match apply(&way, &s, label) {
                Ok((next, _)) => next,
                Err(_) => panic!(
                    "{}: the way to the beginning breaks at {label:?}",
                    self.name
                ),
            };
        }
        s.left = self.budget;
        s
    }

    /// A run that can go no further: is everything released, and does somebody serve?
    pub fn check_end(&self, s: &State) -> Result<(), String> {
        let owner = worker_index(&s.store.record.owner);
        for (w, x) in s.workers.iter().enumerate() {
            let idle = x
                .destination
                .as_ref()
                .is_some_and(|d| d.is_idle() || d.is_launched());
            if x.stage.is_some() || !x.pulls.is_empty() || !idle {
                return Err(format!(
                    "invariant 13: worker {w} still holds a stage: {x:?}"
                ));
            }
            if x.source
                .as_ref()
                .is_some_and(|s| s.is_migrating() || s.is_fenced())
            {
                return Err(format!(
                    "invariant 13: worker {w} is still migrating: {x:?}"
                ));
            }
            if x.run
                .as_ref()
                .is_some_and(|r| r.grant.is_some() || r.held.is_some())
            {
                return Err(format!(
                    "invariant 13: worker {w} is still fenced or readable"
                ));
            }
        }
        let lives = s.workers[usize::from(owner)].life == s.store.record.owner.incarnation.0;
        if lives && s.store.record.phase == moonlivekv::route::RoutePhase::Serving {
            let x = &s.workers[usize::from(owner)];
            let Some(run) = &x.run else {
                return Err(format!("invariant 13: the owner does not run: {x:?}"));
            };
            if run.epoch != s.store.record.owner_epoch {
                return Err("invariant 1: the owner runs under another epoch".into());
            }
            if u64::from(run.seal) != s.gateway.durable.tokens.len() as u64 && x.unacked.is_empty()
            {
                return Err(format!(
                    "invariant 5: tokens were lost: {run:?} {:?}",
                    s.gateway
                ));
            }
        }
        Ok(())
    }

    pub fn count(&self, s: &State, stats: &mut Stats) {
        stats.again += u64::from(s.truth.decisions.len() > 1);
        match s.truth.decisions.first() {
            Some((_, Outcome::Committed(_))) => stats.committed += 1,
            Some((_, Outcome::Aborted { .. })) => stats.aborted += 1,
            Some((_, Outcome::Superseded)) => stats.superseded += 1,
            None => {}
        }
    }

    /// What a search must have seen, or it has looked at nothing.
    pub fn wanted(&self, stats: &Stats) -> Vec<(&'static str, u64)> {
        let mut all = vec![("aborts", stats.aborted)];
        if self.no_go {
            all.push(("decides two attempts", stats.again));
        } else {
            all.push(("commits", stats.committed));
        }
        if self.recoveries > 0 {
            all.push(("is superseded", stats.superseded));
        }
        all
    }
}
