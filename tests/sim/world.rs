//! The world: processes, their clocks, the event queue, and the run of one seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::coords::Coord;
use super::cover::Coverage;
use super::data::Payloads;
use super::engine::Engine;
pub use super::event::Ev;
use super::event::Item;
use super::faults::Faults;
use super::gateway::Gateway;
use super::oracle::Oracle;
pub use super::party::{COORDS, Mach, Party, WORKERS};
use super::rng::{Rng, mix};
use super::store::{Reply, Store};
use super::truth::Truth;
use moonlivekv::id::{Incarnation, RequestId, WorkerId, WorkerRef};
use moonlivekv::migrate::destination::Destination;
use moonlivekv::migrate::io::{Op, Step, Timer};
use moonlivekv::migrate::limits::Limits;
use moonlivekv::migrate::recovery::Rebuilder;
use moonlivekv::migrate::source::Source;
use moonlivekv::migrate::{destination, recovery, source};
use moonlivekv::route::{RoutePhase, RouteRecord};

pub const US: u64 = 1_000;
pub const MS: u64 = 1_000_000;

/// One life of a process.
#[derive(Clone, Debug)]
pub struct Proc {
    pub up: bool,
    pub life: u64,
    pub paused_until: u64,
    clock_offset: u64,
    /// Sixteenths: a clock may run at half or twice the speed.
    clock_rate: u64,
    pub timers: Vec<(Mach, Timer, u64)>,
    pub asked: Vec<(Mach, Op)>,
}

/// A worker process.
pub struct Worker {
    pub engine: Engine,
    pub source: Option<Source>,
    pub destination: Destination,
    pub rebuilder: Rebuilder,
    pub emitter: Option<super::data::Emitter>,
    pub pulls: Vec<super::data::Pull>,
}

/// How a run is set up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    pub trace: bool,
    /// No faults at all.
    pub calm: bool,
}

/// How a run ended.
pub struct Outcome {
    pub violation: Option<String>,
    pub coverage: Coverage,
    pub faults: u64,
    pub commits: u32,
    pub aborts: u32,
    pub recoveries: u32,
    pub events: u64,
    pub trace: Vec<String>,
}

pub struct World {
    pub now: u64,
    pub rng: Rng,
    queue: BinaryHeap<Item>,
    pushed: u64,
    pub events: u64,
    timer_number: u64,
    pub procs: Vec<Proc>,
    pub workers: Vec<Worker>,
    pub coords: Vec<Coord>,
    pub gateway: Gateway,
    pub store: Store,
    pub truth: Truth,
    pub faults: Faults,
    pub payloads: Payloads,
    pub limits: Limits,
    pub replicas: usize,
    pub align: u32,
    /// The step of the attempt under way.
    pub step: Option<Step>,
    /// Source and destination of the latest intent.
    pub roles: Option<(usize, usize)>,
    pub healed: bool,
    tracing: bool,
    pub trace: Vec<String>,
}

pub const REQUEST: RequestId = RequestId([0x5a; 16]);

pub fn worker_ref(w: usize, life: u64) -> WorkerRef {
    let id = WorkerId::new(["w0", "w1", "w2"][w]).expect("a plain name");
    WorkerRef {
        id,
        incarnation: Incarnation(life),
    }
}

pub fn worker_index(w: &WorkerRef) -> usize {
    usize::from(w.id.as_str().as_bytes()[1] - b'0')
}

/// Evaluates its arguments only in a traced run.
macro_rules! note {
    ($world:expr, $($arg:tt)*) => {
        if $world.is_tracing() {
            let text = format!($($arg)*);
            $world.say(text);
        }
    };
}
pub(crate) use note;

impl World {
    fn new(seed: u64, config: Config) -> Self {
        let mut rng = Rng::new(seed);
        let prompt = rng.range(2, 10) as usize;
        let outputs = rng.range(6, 40) as usize;
        let oracle = Oracle::new(&mut rng, prompt, outputs);
        let limits = Limits {
            step_ns: 25 * MS,
            stream_ns: 60 * MS,
            fence_ns: 15 * MS,
            retry_ns: 2 * MS,
            resend_ns: 3 * MS,
            round_ns: rng.range(300 * US, 2 * MS),
            pull_ns: 10 * MS,
            offer_tokens: rng.range(2, 20) as u32,
            window: rng.range(1, 4) as u16,
            go_tokens: rng.range(1, 6) as u32,
            pull_retries: 2,
            resends: 3,
            stream_bytes_per_s: [0, 0, 4_000][rng.below(3) as usize],
            stream_burst_bytes: 8,
            verify_full: rng.chance(1, 3),
        };
        let mut procs = Vec::new();
        for _ in Party::all() {
            let clock_offset = [0, 10u64.pow(15), rng.below(10u64.pow(9))][rng.below(3) as usize];
            procs.push(Proc {
                up: true,
                life: 1,
                paused_until: 0,
                clock_offset,
                clock_rate: [16, 16, 16, 8, 32, 15][rng.below(6) as usize],
                timers: Vec::new(),
                asked: Vec::new(),
            });
        }
        let record = RouteRecord::admitted(REQUEST, worker_ref(0, 1));
        let workers = (0..WORKERS).map(|w| Worker::fresh(w, 1, &limits)).collect();
        let faults = Faults::new(&mut rng, config.calm);
        let mut world = Self {
            now: 1,
            queue: BinaryHeap::new(),
            pushed: 0,
            events: 0,
            timer_number: 0,
            procs,
            workers,
            coords: (0..COORDS).map(|_| Coord::default()).collect(),
            gateway: Gateway::new(worker_ref(0, 1), &limits),
            store: Store::new(record.clone()),
            truth: Truth::new(oracle, record),
            faults,
            payloads: Payloads::default(),
            replicas: rng.range(1, 3) as usize,
            align: [4, 8][rng.below(2) as usize],
            limits,
            step: None,
            roles: None,
            healed: false,
            tracing: config.trace,
            trace: Vec::new(),
            rng,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        for w in 0..WORKERS {
            self.start_worker(w);
        }
        self.admit();
        for c in 0..COORDS {
            self.start_coord(c);
        }
        self.at(20 * MS, Ev::Supervise { life: 1 });
        let first = self.rng.range(50 * US, 4 * MS);
        self.at(first, Ev::Script { c: 0 });
        if self.rng.chance(2, 5) {
            let second = self.rng.range(50 * US, 12 * MS);
            self.at(second, Ev::Script { c: 1 });
        }
        if self.rng.chance(1, 20) {
            let hangup = self.rng.range(MS, 30 * MS);
            self.at(hangup, Ev::Hangup);
        }
        let heal = self.rng.range(80 * MS, 160 * MS);
        self.at(heal, Ev::Heal);
    }

    pub fn is_tracing(&self) -> bool {
        self.tracing
    }

    pub fn say(&mut self, text: String) {
        let line = format!(
            "{:>12.3} ms {:<11} {text}",
            self.now as f64 / 1e6,
            match self.step {
                Some(step) => format!("{step:?}"),
                None => String::new(),
            }
        );
        self.trace.push(line);
    }

    /// Schedules an event, `after` ns from now.
    pub fn at(&mut self, after: u64, ev: Ev) {
        self.pushed += 1;
        self.queue
            .push(Item(Reverse((self.now + after, self.pushed)), ev));
    }

    /// The clock of a process.
    pub fn clock(&self, party: Party) -> u64 {
        let p = &self.procs[party.index()];
        p.clock_offset + self.now * p.clock_rate / 16
    }

    pub fn life(&self, party: Party) -> u64 {
        self.procs[party.index()].life
    }

    pub fn is_up(&self, party: Party) -> bool {
        self.procs[party.index()].up
    }

    pub fn set_timer(&mut self, at: Party, mach: Mach, timer: Timer, at_ns: u64) {
        self.clear_timer(at, mach, timer);
        self.timer_number += 1;
        let number = self.timer_number;
        let p = &mut self.procs[at.index()];
        p.timers.push((mach, timer, number));
        let due = at_ns
            .saturating_sub(p.clock_offset)
            .saturating_mul(16)
            .div_ceil(p.clock_rate);
        let life = p.life;
        let after = due.saturating_sub(self.now).max(1);
        self.at(
            after,
            Ev::Timer {
                at,
                life,
                mach,
                timer,
                number,
            },
        );
    }

    pub fn clear_timer(&mut self, at: Party, mach: Mach, timer: Timer) {
        let timers = &mut self.procs[at.index()].timers;
        timers.retain(|(m, t, _)| (*m, *t) != (mach, timer));
    }

    fn fire_timer(&mut self, at: Party, mach: Mach, timer: Timer, number: u64) {
        if !self.procs[at.index()]
            .timers
            .contains(&(mach, timer, number))
        {
            return;
        }
        self.clear_timer(at, mach, timer);
        note!(
            self,
            "{at:?} {mach:?} timer {:?} of {}",
            timer.kind,
            timer.epoch
        );
        match (at, mach) {
            (Party::W(w), Mach::Src) => self.tell_source(w, source::Event::Timer(timer)),
            (Party::W(w), Mach::Dst) => self.tell_destination(w, destination::Event::Timer(timer)),
            (Party::W(w), Mach::Reb) => self.tell_rebuilder(w, recovery::Event::Timer(timer)),
            (Party::C(c), _) => {
                self.tell_coord(c, moonlivekv::migrate::coordinator::Event::Timer(timer));
            }
            (Party::G, _) => {
                self.tell_acceptor(moonlivekv::migrate::acceptor::Event::Timer(timer));
            }
            _ => {}
        }
    }

    /// Kills a process; it comes back by itself, as another life.
    pub fn crash(&mut self, party: Party, back_after: u64) {
        if !self.is_up(party) {
            return;
        }
        note!(self, "CRASH {party:?}");
        let p = &mut self.procs[party.index()];
        p.up = false;
        p.paused_until = 0;
        p.timers.clear();
        p.asked.clear();
        match party {
            Party::G => self.gateway_crashed(),
            Party::W(w) => {
                // Its memory is gone with it.
                self.workers[w] = Worker::fresh(w, self.life(party), &self.limits.clone());
            }
            _ => {}
        }
        self.at(back_after, Ev::Restart { party });
    }

    fn restart(&mut self, party: Party) {
        if self.is_up(party) {
            return;
        }
        let p = &mut self.procs[party.index()];
        p.up = true;
        p.life += 1;
        note!(self, "RESTART {party:?}");
        match party {
            Party::W(w) => {
                self.workers[w] = Worker::fresh(w, self.life(party), &self.limits.clone());
                self.start_worker(w);
            }
            Party::C(c) => {
                self.start_coord(c);
                self.adopt(c);
            }
            Party::G => self.gateway_restarted(),
            Party::S => {}
        }
    }

    /// Stops a process for a while; what comes for it waits.
    pub fn pause(&mut self, party: Party, ns: u64) {
        if self.is_up(party) {
            note!(self, "PAUSE {party:?} for {:.3} ms", ns as f64 / 1e6);
            let until = self.now + ns;
            let p = &mut self.procs[party.index()];
            p.paused_until = p.paused_until.max(until);
        }
    }

    /// Whose event it is, and which life it was meant for (`None`: any).
    fn addressee(ev: &Ev) -> Option<(Party, Option<u64>)> {
        Some(match ev {
            Ev::Msg { to, .. } | Ev::Beat { to, .. } => (*to, None),
            Ev::Ask { .. } => (Party::S, None),
            Ev::Answer { to, life, .. } | Ev::AskTimeout { to, life, .. } => (*to, Some(*life)),
            Ev::Timer { at, life, .. } => (*at, Some(*life)),
            Ev::SrcOp { w, life, .. }
            | Ev::DstOp { w, life, .. }
            | Ev::RebOp { w, life, .. }
            | Ev::SrcTell { w, life, .. }
            | Ev::DstTell { w, life, .. }
            | Ev::PullEnd { w, life, .. }
            | Ev::StepBegin { w, life, .. }
            | Ev::StepEnd { w, life, .. }
            | Ev::ResendTokens { w, life }
            | Ev::BeatTick { w, life } => (Party::W(*w), Some(*life)),
            Ev::WatchTick { c, life } => (Party::C(*c), Some(*life)),
            Ev::Journal { life } | Ev::Supervise { life } => (Party::G, Some(*life)),
            Ev::Script { c } | Ev::CancelCoord { c } => (Party::C(*c), None),
            Ev::Suspect { .. } | Ev::Hangup => (Party::G, None),
            // A transfer in flight lands even while the process is stopped.
            Ev::Chunk { .. } => return None,
            Ev::Restart { .. } | Ev::Pause { .. } | Ev::Heal => return None,
        })
    }

    fn dispatch(&mut self, ev: Ev) {
        if let Some((party, life)) = Self::addressee(&ev) {
            let p = &self.procs[party.index()];
            if !p.up || life.is_some_and(|l| l != p.life) {
                return;
            }
            if p.paused_until > self.now {
                let wait = p.paused_until - self.now;
                return self.at(wait, ev);
            }
            self.strike(party);
            let p = &self.procs[party.index()];
            if !p.up {
                return;
            }
            if p.paused_until > self.now {
                let wait = p.paused_until - self.now;
                return self.at(wait, ev);
            }
        }
        match ev {
            Ev::Msg {
                to,
                from,
                msg,
                payload,
            } => self.arrive(to, from, msg, payload),
            Ev::Beat { to, worker, life } => self.on_beat(to, worker, life),
            Ev::Ask {
                from,
                life,
                mach,
                op,
                request,
            } => self.serve(from, life, mach, op, request),
            Ev::Answer {
                to,
                mach,
                op,
                reply,
                ..
            } => self.on_answer(to, mach, op, reply),
            Ev::AskTimeout { to, mach, op, .. } => self.on_answer(to, mach, op, Reply::InDoubt),
            Ev::Timer {
                at,
                mach,
                timer,
                number,
                ..
            } => self.fire_timer(at, mach, timer, number),
            Ev::SrcOp { w, what, .. } => self.end_source_op(w, what),
            Ev::DstOp { w, what, .. } => self.end_destination_op(w, what),
            Ev::RebOp { w, what, .. } => self.end_rebuild(w, what),
            Ev::SrcTell { w, done, .. } => self.tell_source(w, source::Event::Local(done)),
            Ev::DstTell { w, done, .. } => {
                self.tell_destination(w, destination::Event::Local(done));
            }
            Ev::Chunk {
                w,
                life,
                op,
                n,
                late,
            } => self.land_chunk(w, life, op, n, late),
            Ev::PullEnd { w, op, .. } => self.end_pull(w, op),
            Ev::StepBegin { w, owner_epoch, .. } => self.begin_step(w, owner_epoch),
            Ev::StepEnd { w, owner_epoch, .. } => self.end_step(w, owner_epoch),
            Ev::ResendTokens { w, .. } => self.resend_tokens(w),
            Ev::BeatTick { w, .. } => self.beat(w),
            Ev::WatchTick { c, .. } => self.watch(c),
            Ev::Journal { .. } => self.journal_one(),
            Ev::Supervise { .. } => self.supervise(),
            Ev::Restart { party } => self.restart(party),
            Ev::Pause { party, ns } => self.pause(party, ns),
            Ev::Script { c } => self.script(c),
            Ev::CancelCoord { c } => self.cancel_coord(c),
            Ev::Suspect { target } => self.suspect(target),
            Ev::Hangup => self.hang_up(),
            Ev::Heal => self.heal(),
        }
    }

    /// From here on nothing goes wrong any more.
    fn heal(&mut self) {
        note!(self, "HEAL");
        self.healed = true;
        for party in Party::all() {
            self.procs[party.index()].paused_until = 0;
            self.restart(party);
        }
        for c in 0..COORDS {
            self.adopt(c);
        }
        self.at(5 * MS, Ev::Script { c: 0 });
    }

    /// Whether nothing is left to do.
    fn is_quiet(&self) -> bool {
        self.healed
            && self.truth.record.phase == RoutePhase::Finished
            && self.workers.iter().all(Worker::is_quiet)
            && self.coords.iter().all(Coord::is_quiet)
            && self.gateway.is_quiet()
    }

    fn check_end(&mut self) {
        let quiet = self.is_quiet();
        let state: Vec<String> = self
            .workers
            .iter()
            .map(|w| {
                format!(
                    "{} pages, source {:?}, destination idle {}, rebuilder {:?}",
                    w.engine.in_use(),
                    w.source.as_ref().map(|s| (s.is_migrating(), s.is_fenced())),
                    w.destination.is_idle() || w.destination.is_launched(),
                    w.rebuilder
                )
            })
            .collect();
        let record = self.truth.record.clone();
        let coords: Vec<bool> = self.coords.iter().map(Coord::is_quiet).collect();
        let (accepted, total) = (self.truth.accepted, self.truth.oracle.outputs());
        let gateway = self.gateway.is_quiet();
        self.truth.check(13, quiet, || {
            format!(
                "not everything ended: {record:?}; {accepted} of {total} tokens; workers \
                 {state:?}; coordinators quiet {coords:?}; gateway quiet {gateway}"
            )
        });
        let (hung_up, seen) = (self.gateway.hung_up, self.gateway.client.len() as u64);
        self.truth.check(5, hung_up || seen == total, || {
            format!("the client has {seen} of {total} tokens")
        });
    }

    fn run(&mut self) {
        while let Some(Item(Reverse((time, _)), ev)) = self.queue.pop() {
            self.now = time;
            self.events += 1;
            self.dispatch(ev);
            if self.truth.violation.is_some() {
                return;
            }
            if self.healed && self.is_quiet() || self.now > 3_000 * MS {
                break;
            }
        }
        self.check_end();
    }
}

impl Worker {
    fn fresh(w: usize, life: u64, limits: &Limits) -> Self {
        let me = worker_ref(w, life);
        Self {
            engine: Engine::new(),
            source: None,
            destination: Destination::new(REQUEST, me.clone(), limits.clone()),
            rebuilder: Rebuilder::new(REQUEST, me, limits.clone()),
            emitter: None,
            pulls: Vec::new(),
        }
    }

    fn is_quiet(&self) -> bool {
        self.engine.in_use() == 0
            && self.engine.run.is_none()
            && self.engine.stage.is_none()
            && self.source.as_ref().is_none_or(|s| !s.is_migrating())
            && (self.destination.is_idle() || self.destination.is_launched())
            && self.pulls.is_empty()
    }
}

/// Runs one seed.
pub fn run(seed: u64, config: Config) -> Outcome {
    let mut world = World::new(mix(seed, 1), config);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run())).is_err();
    if unwound {
        world
            .truth
            .broken(0, || "the simulator itself panicked".into());
    }
    let violation = world
        .truth
        .violation
        .take()
        .map(|(n, what)| format!("invariant {n}: {what}"));
    Outcome {
        violation,
        coverage: world.faults.coverage,
        faults: world.faults.count,
        commits: world.truth.commits,
        aborts: world.truth.aborts,
        recoveries: world.truth.recoveries,
        events: world.events,
        trace: world.trace,
    }
}
