//! The models: what is looked at from where on, and within which bounds.

use super::exec::apply;
use super::labels::{Label, labels};
use super::search::Stats;
use super::state::*;
use moonlivekv::id::OwnerEpoch;
use moonlivekv::migrate::acceptor::{Acceptor, Durable};
use moonlivekv::migrate::limits::Limits;
use moonlivekv::migrate::msg::Body;
use moonlivekv::route::{Outcome, Revision, RouteRecord, Versioned};

/// Tokens of a page.
pub const PAGE: u64 = 2;

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
    pub cancels: bool,
    /// Local completions at which a process may be stopped.
    pub stops: u8,
    pub recoveries: u8,
    pub false_suspicion: bool,
    pub rebuild_on: &'static [u8],
    /// Pulls land slot by slot.
    pub slow_pulls: bool,
    /// A pull may leave a writer behind that cannot be stopped.
    pub stuck: bool,
    /// Run undisturbed up to the first state in which this message is under way.
    pub begin: fn(&State) -> bool,
    /// Give up beyond this many states (0: never).
    pub most: u64,
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

fn base(name: &'static str) -> Model {
    Model {
        name,
        limits: limits(),
        budget: Budget {
            crashes: 2,
            pauses: 1,
            losses: 2,
            corruptions: 0,
            deadlines: 2,
            lost: false,
        },
        replicas: 1,
        prompt: 4,
        tokens: 2,
        starts: [&[1], &[]],
        crash: &[Party::W(0), Party::W(1), Party::C(0), Party::G, Party::S],
        cancels: false,
        stops: 8,
        recoveries: 0,
        false_suspicion: false,
        rebuild_on: &[],
        slow_pulls: false,
        stuck: false,
        begin: |_| true,
        most: 0,
    }
}

fn under_way(s: &State, is: fn(&Body) -> bool) -> bool {
    s.net
        .iter()
        .any(|p| matches!(&**p, Packet::Msg { msg, .. } if is(&msg.body)))
}

/// From GO to the end of the attempt.
pub fn fence(full: bool) -> Model {
    let mut m = base("fence");
    m.begin = |s| under_way(s, |b| matches!(b, Body::Go));
    if !full {
        m.budget = Budget {
            crashes: 1,
            pauses: 1,
            losses: 1,
            ..m.budget
        };
    }
    m
}

/// Two coordinators move the request to two workers, up to the fence.
pub fn rivals(full: bool) -> Model {
    let mut m = base("rivals");
    m.starts = [&[1], &[2]];
    m.crash = &[Party::W(0), Party::W(1), Party::C(0), Party::S];
    m.tokens = 1;
    if !full {
        m.budget = Budget {
            crashes: 1,
            pauses: 0,
            losses: 1,
            ..m.budget
        };
    }
    m
}

/// The gateway recovers a request whose owner it suspects, while it is being moved.
pub fn recovery(full: bool) -> Model {
    let mut m = base("recovery");
    m.begin = |s| under_way(s, |b| matches!(b, Body::Push(_)));
    m.recoveries = 2;
    m.false_suspicion = true;
    m.rebuild_on = &[1, 2];
    if !full {
        m.budget = Budget {
            crashes: 1,
            pauses: 0,
            losses: 1,
            ..m.budget
        };
        m.recoveries = 1;
    }
    m
}

/// Slots land one by one, pulls break off, writers get stuck, bytes are wrong; two replicas.
pub fn pages(full: bool) -> Model {
    let mut m = base("pages");
    m.begin = |s| under_way(s, |b| matches!(b, Body::Offer(_)));
    m.replicas = 2;
    m.slow_pulls = true;
    m.stuck = true;
    m.limits.window = 2;
    m.limits.offer_tokens = 2;
    m.budget.corruptions = 1;
    if !full {
        m.budget = Budget {
            crashes: 1,
            pauses: 0,
            losses: 1,
            ..m.budget
        };
    }
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
        let none = Budget {
            crashes: 0,
            pauses: 0,
            losses: 0,
            corruptions: 0,
            deadlines: 2,
            lost: false,
        };
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
        let mut x = super::exec::Exec {
            model: self,
            s,
            broken: None,
            stop_in: None,
            stopped: false,
        };
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
                matches!(
                    l,
                    Label::Deliver(_)
                        | Label::Start(..)
                        | Label::Land(..)
                        | Label::EndPull(_, _, false)
                )
            };
            let label = labels(self, &s)
                .into_iter()
                .find(calm)
                .expect("a way to the beginning");
            s = match apply(self, &s, label) {
                Ok(next) => next,
                Err(_) => panic!(
                    "{}: the way to the beginning breaks at {label:?}",
                    self.name
                ),
            };
        }
        s.left = self.budget;
        if let Ok(v) = std::env::var("B") {
            let v: Vec<u8> = v.split(',').map(|x| x.parse().unwrap()).collect();
            s.left.crashes = v[0];
            s.left.pauses = v[1];
            s.left.losses = v[2];
            s.left.deadlines = v[3];
            s.left.corruptions = v[4];
        }
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
            if u64::from(run.seal) != s.gateway.durable.tokens.len() as u64
                && !x.unacked.is_empty() == false
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
        match s.truth.decisions.first() {
            Some((_, Outcome::Committed(_))) => stats.committed += 1,
            Some((_, Outcome::Aborted { .. })) => stats.aborted += 1,
            Some((_, Outcome::Superseded)) => stats.superseded += 1,
            None => {}
        }
    }

    /// What a search must have seen, or it has looked at nothing.
    pub fn wanted(&self, stats: &Stats) -> Vec<(&'static str, u64)> {
        let mut all = vec![("commits", stats.committed), ("aborts", stats.aborted)];
        if self.recoveries > 0 {
            all.push(("is superseded", stats.superseded));
        }
        all
    }
}
