//! What can happen in the world, and the order in which it does.

use std::cmp::Reverse;

use super::store::{Reply, Request};
use super::world::{Mach, Party};
use moonlivekv::migrate::io::{Op, Payload, Peer, Timer};
use moonlivekv::migrate::msg::Msg;
use moonlivekv::migrate::{destination, recovery, source};

#[derive(Clone, Debug)]
pub enum Ev {
    Msg {
        to: Party,
        from: Peer,
        msg: Msg,
        payload: Payload,
    },
    Beat {
        to: Party,
        worker: usize,
        life: u64,
    },
    Ask {
        from: Party,
        life: u64,
        mach: Mach,
        op: Op,
        request: Request,
    },
    Answer {
        to: Party,
        life: u64,
        mach: Mach,
        op: Op,
        reply: Reply,
    },
    AskTimeout {
        to: Party,
        life: u64,
        mach: Mach,
        op: Op,
    },
    Timer {
        at: Party,
        life: u64,
        mach: Mach,
        timer: Timer,
        number: u64,
    },
    SrcOp {
        w: usize,
        life: u64,
        what: source::Do,
    },
    DstOp {
        w: usize,
        life: u64,
        what: destination::Do,
    },
    RebOp {
        w: usize,
        life: u64,
        what: recovery::Do,
    },
    SrcTell {
        w: usize,
        life: u64,
        done: source::Done,
    },
    DstTell {
        w: usize,
        life: u64,
        done: destination::Done,
    },
    Chunk {
        w: usize,
        life: u64,
        op: Op,
        n: usize,
        late: Option<(usize, u32)>,
    },
    PullEnd {
        w: usize,
        life: u64,
        op: Op,
    },
    StepBegin {
        w: usize,
        life: u64,
        owner_epoch: u64,
    },
    StepEnd {
        w: usize,
        life: u64,
        owner_epoch: u64,
    },
    ResendTokens {
        w: usize,
        life: u64,
    },
    BeatTick {
        w: usize,
        life: u64,
    },
    WatchTick {
        c: usize,
        life: u64,
    },
    Journal {
        life: u64,
    },
    Supervise {
        life: u64,
    },
    Restart {
        party: Party,
    },
    Pause {
        party: Party,
        ns: u64,
    },
    Script {
        c: usize,
    },
    CancelCoord {
        c: usize,
    },
    Suspect {
        target: usize,
    },
    Hangup,
    Heal,
}

/// An event with its time and number; the earliest is the greatest.
pub struct Item(pub Reverse<(u64, u64)>, pub Ev);

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl Eq for Item {}
impl PartialOrd for Item {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Item {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.cmp(&other.0)
    }
}
