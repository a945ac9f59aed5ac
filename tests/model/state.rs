//! The state of the whole system, in parts that are shared between states until they change.

use std::cell::Cell;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use moonlivekv::id::{Incarnation, MigrationEpoch, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use moonlivekv::migrate::acceptor::{Acceptor, Durable};
use moonlivekv::migrate::coordinator::Coordinator;
use moonlivekv::migrate::destination::{self, Destination};
use moonlivekv::migrate::io::{Op, Payload, Peer, StoreReply, Timer};
use moonlivekv::migrate::msg::{Emission, Msg};
use moonlivekv::migrate::recovery::{self, Rebuilder};
use moonlivekv::migrate::source::{self, Source};
use moonlivekv::route::{Intent, Outcome, Revision, RouteRecord, Versioned};

pub const REQUEST: RequestId = RequestId([1; 16]);

/// A fast hash, good enough for fingerprints of some 10^7 states.
#[derive(Default, Clone, Copy)]
pub struct Fx(u64);

impl Hasher for Fx {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word) ^ (chunk.len() as u64) << 56);
        }
    }
    fn write_u8(&mut self, v: u8) {
        self.write_u64(u64::from(v));
    }
    fn write_u32(&mut self, v: u32) {
        self.write_u64(u64::from(v));
    }
    fn write_u64(&mut self, v: u64) {
        let x = (self.0.rotate_left(5) ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = x ^ (x >> 32);
    }
    fn write_usize(&mut self, v: usize) {
        self.write_u64(v as u64);
    }
    fn finish(&self) -> u64 {
        let x = self.0.wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^ (x >> 33)
    }
}

pub fn fingerprint(value: &impl Hash) -> u64 {
    let mut h = Fx::default();
    value.hash(&mut h);
    h.finish()
}

/// A part of the state, shared until it changes, with its hash once somebody asked for it.
#[derive(Debug)]
pub struct Part<T>(Rc<(Cell<u64>, T)>);

impl<T> Clone for Part<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<T: Hash + Clone> Part<T> {
    pub fn new(value: T) -> Self {
        Self(Rc::new((Cell::new(0), value)))
    }
    pub fn hash(&self) -> u64 {
        let (hash, value) = &*self.0;
        if hash.get() == 0 {
            hash.set(fingerprint(value) | 1);
        }
        hash.get()
    }
    /// Changes the value; copies it first if it is shared.
    pub fn edit<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        let (hash, value) = Rc::make_mut(&mut self.0);
        hash.set(0);
        f(value)
    }
}

impl<T: Hash + Clone> Hash for Part<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(Part::hash(self));
    }
}

impl<T> std::ops::Deref for Part<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Party {
    W(u8),
    C(u8),
    G,
    S,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mach {
    Src,
    Dst,
    Reb,
    Coord,
    Acc,
}

/// KV slots as sets of token positions: which are written, which are wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Slots {
    pub written: u16,
    pub wrong: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Running {
    pub epoch: OwnerEpoch,
    pub kv_len: u8,
    pub seal: u8,
    /// KV or control state is not what it should be.
    pub wrong: bool,
    pub held: Option<MigrationEpoch>,
    pub pinned: Option<MigrationEpoch>,
    pub grant: Option<MigrationEpoch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stage {
    pub epoch: MigrationEpoch,
    /// By replica.
    pub slots: [Slots; 2],
    /// Slots read by a hash since they were last written, by replica.
    pub hashed: [u16; 2],
    /// Slots that a hash under way reads.
    pub hashing: u16,
    pub attached: u8,
    /// Seal of the imported control state, and whether it is wrong.
    pub control: Option<(u8, bool)>,
    pub re_exported: bool,
    pub armed: bool,
}

/// A pull in flight: positions that still have to land.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pull {
    pub op: Op,
    pub epoch: MigrationEpoch,
    pub left: u16,
    pub ended: Option<destination::Pulled>,
}

/// A machine that is away while it acts.
pub type Slot<M> = Part<Option<M>>;

#[derive(Clone, Debug, Hash)]
pub struct Worker {
    pub life: u64,
    pub source: Slot<Source>,
    pub destination: Slot<Destination>,
    pub rebuilder: Slot<Rebuilder>,
    pub engine: Part<Engine>,
    pub timers: Vec<(Mach, Timer)>,
    /// The latest attempt that it has moved to abort.
    pub gave_up: MigrationEpoch,
}

impl std::ops::Deref for Worker {
    type Target = Engine;
    fn deref(&self) -> &Engine {
        &self.engine
    }
}

/// A worker's memory and token channel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Engine {
    pub run: Option<Running>,
    pub rebuilt: Option<Running>,
    pub stage: Option<Stage>,
    pub pulls: Vec<Pull>,
    /// Emitted and not acknowledged.
    pub unacked: Vec<Emission>,
    pub emit_epoch: OwnerEpoch,
    /// Attempts whose pages a lost writer may touch; they are never reused.
    pub quarantined: Vec<MigrationEpoch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Coord {
    pub life: u64,
    pub machine: Option<Coordinator>,
    pub started: bool,
    pub timers: Vec<(Mach, Timer)>,
    pub gave_up: MigrationEpoch,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gateway {
    pub life: u64,
    pub acceptor: Option<Acceptor>,
    pub durable: Durable,
    pub timers: Vec<(Mach, Timer)>,
    pub recoveries: u8,
}

/// What really happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Truth {
    pub owners: Vec<(OwnerEpoch, WorkerRef)>,
    pub intents: Vec<Intent>,
    pub decisions: Vec<(MigrationEpoch, Outcome)>,
    pub accepted: u8,
    pub accepted_epoch: OwnerEpoch,
    pub given_away: OwnerEpoch,
}

impl Truth {
    pub fn decision(&self, m: MigrationEpoch) -> Option<&Outcome> {
        self.decisions.iter().find(|(e, _)| *e == m).map(|(_, o)| o)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    Read,
    Cas {
        expect: Revision,
        next: Box<RouteRecord>,
    },
}

/// Something under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Packet {
    Msg {
        to: Party,
        from: Peer,
        msg: Msg,
        payload: Payload,
    },
    Ask {
        from: Party,
        life: u64,
        mach: Mach,
        op: Op,
        /// Which of the operations that a machine may have under way together this is: its number
        /// does not count in a state's hash.
        tag: u8,
        request: Request,
        given_up: bool,
    },
    Answer {
        to: Party,
        life: u64,
        mach: Mach,
        op: Op,
        tag: u8,
        reply: StoreReply,
    },
    /// A local completion that a stopped process has not seen yet.
    Source {
        w: u8,
        life: u64,
        done: source::Done,
    },
    Destination {
        w: u8,
        life: u64,
        done: destination::Done,
    },
    Rebuild {
        w: u8,
        life: u64,
        done: recovery::Done,
    },
}

/// What may still go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Budget {
    pub crashes: u8,
    pub pauses: u8,
    pub losses: u8,
    /// Deadlines that may fire while something else can happen.
    pub deadlines: u8,
    /// Whose messages were lost and not sent again yet (see [`lost_by`]): resends are worth while.
    pub lost: u8,
}

impl Budget {
    /// How many mishaps may still come.
    pub fn number_of_mishaps(&self) -> u8 {
        self.crashes + self.pauses + self.losses + self.deadlines
    }
}

#[derive(Clone, Debug)]
pub struct State {
    pub workers: [Part<Worker>; 3],
    pub coords: [Part<Coord>; 2],
    pub gateway: Part<Gateway>,
    pub store: Part<Versioned>,
    pub truth: Part<Truth>,
    /// Sorted by hash.
    pub net: Vec<Part<Packet>>,
    pub left: Budget,
}

impl State {
    pub fn fingerprint(&self) -> u64 {
        let mut h = Fx::default();
        for w in &self.workers {
            h.write_u64(w.hash());
        }
        for c in &self.coords {
            h.write_u64(c.hash());
        }
        h.write_u64(self.gateway.hash());
        h.write_u64(self.store.hash());
        h.write_u64(self.truth.hash());
        h.write_u8(self.left.lost);
        for p in &self.net {
            h.write_u64(p.hash());
        }
        h.finish()
    }

    pub fn push(&mut self, packet: Packet) {
        let packet = Part::new(packet);
        let at = self.net.partition_point(|p| p.hash() < packet.hash());
        self.net.insert(at, packet);
    }

    pub fn life(&self, party: Party) -> u64 {
        match party {
            Party::W(w) => self.workers[usize::from(w)].life,
            Party::C(c) => self.coords[usize::from(c)].life,
            Party::G => self.gateway.life,
            Party::S => 0,
        }
    }
}

pub fn worker_ref(w: u8, life: u64) -> WorkerRef {
    let id = WorkerId::new(["a", "b", "c"][usize::from(w)]).expect("a plain name");
    WorkerRef {
        id,
        incarnation: Incarnation(life),
    }
}

pub fn worker_index(w: &WorkerRef) -> u8 {
    w.id.as_str().as_bytes()[0] - b'a'
}

/// The set of positions `from..to`.
pub fn span(from: u64, to: u64) -> u16 {
    ((1u32 << to) - (1u32 << from.min(to))) as u16
}

/// Who sends again when this message or its answer is lost: a set of one, as a bit.
pub fn lost_by(body: &moonlivekv::migrate::msg::Body) -> u8 {
    use moonlivekv::migrate::msg::Body;
    match body {
        Body::Offer(_) | Body::Push(_) | Body::Verified { .. } => by(Mach::Src),
        Body::Emit { .. } | Body::Accepted { .. } => TOKEN_CHANNEL,
        Body::Rebuild { .. } => by(Mach::Acc),
        Body::Outcome | Body::Fenced { .. } | Body::Cancel { .. } => 0,
        _ => by(Mach::Coord),
    }
}

/// The token channel of whichever worker.
pub const TOKEN_CHANNEL: u8 = 1 << 7;

pub fn by(mach: Mach) -> u8 {
    1 << mach as u8
}
