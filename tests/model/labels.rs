//! What can happen next in a state.
//!
//! Mishaps are attached to what a process does, not scattered over time: a message is lost,
//! doubled or left in doubt where it is sent, a deadline fires and a process dies or stops right
//! after it acted. Between two acts of a process nothing can tell *when* that happened (what it
//! sends may be delayed as long as one likes), so no behaviour is lost and the number of states
//! falls by orders of magnitude.

use super::models::Model;
use super::state::{Mach, Packet, Party, State, TOKEN_CHANNEL, by, worker_index};
use moonlivekv::migrate::acceptor::Acceptor;
use moonlivekv::migrate::io::{Peer, Timer, TimerKind};
use moonlivekv::route::RoutePhase;

/// What happens, and what goes wrong with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    pub base: Base,
    /// The acting process stops before its `k`-th local completion.
    pub stop: Option<u8>,
    /// Then this deadline of the acting process fires.
    pub fire: Option<(Party, Mach, Timer)>,
    /// What is lost, doubled or left in doubt of that: at most two.
    pub mishaps: [Option<Mishap>; 2],
    /// Then the process dies and comes back as another life.
    pub crash: Option<Party>,
}

/// By the number of the message or request among those that the step sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mishap {
    Lose(u8),
    Double(u8),
    /// The asker gives up; the request is still served, some time.
    Doubt(u8),
    /// The request is lost, and the asker gives up.
    LoseRequest(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// Nothing: for a crash before anything happened.
    Nothing,
    /// Packet `i` arrives, and what follows from it locally happens at once.
    Deliver(usize),
    Fire(Party, Mach, Timer),
    /// The store dies: requests under way are lost, all that was written stays.
    CrashStore,
    /// The running request on a worker numbers its next token.
    Step(u8),
    /// A slot of pull number `i` of a worker lands.
    Land(u8, usize),
    /// It lands wrong.
    LandWrong(u8, usize),
    /// The pull breaks off.
    Break(u8, usize),
    /// A pull that has ended is reported: quietly, or with a writer that cannot be stopped.
    EndPull(u8, usize, bool),
    /// A coordinator is asked to move the request to a worker.
    Start(u8, u8),
    /// The owner is suspected; this worker shall rebuild the request.
    Suspect(u8),
    /// The token channel of a worker sends its unacknowledged tokens again.
    ResendTokens(u8),
}

impl From<Base> for Label {
    fn from(base: Base) -> Self {
        Label {
            base,
            stop: None,
            fire: None,
            mishaps: [None; 2],
            crash: None,
        }
    }
}

impl Label {
    pub fn is_plain(&self) -> bool {
        *self == Label::from(self.base)
    }

    /// Whether this is more than bad luck or somebody's wish: a run may not end while it is there.
    pub fn moves_on(&self) -> bool {
        !matches!(
            self.base,
            Base::Nothing | Base::CrashStore | Base::Start(..) | Base::Suspect(_) | Base::Step(_)
        )
    }
}

pub fn party_of(peer: &Peer) -> Party {
    match peer {
        Peer::Worker(w) => Party::W(worker_index(w)),
        Peer::Coordinator(driver) => Party::C((driver % 16) as u8),
        Peer::Gateway => Party::G,
    }
}

/// What can happen next, without its mishaps.
pub fn labels(model: &Model, s: &State) -> Vec<Label> {
    let mut all: Vec<Base> = Vec::new();
    let mut deadlines = Vec::new();
    let mut before: Option<&Packet> = None;
    for (i, p) in s.net.iter().enumerate() {
        if before != Some(p) {
            all.push(Base::Deliver(i));
        }
        before = Some(p);
    }
    for w in 0..3 {
        worker_labels(model, s, w, &mut all);
    }
    for c in 0..2u8 {
        let coord = &s.coords[usize::from(c)];
        if !coord.started && coord.machine.is_none() {
            all.extend(
                model.starts[usize::from(c)]
                    .iter()
                    .map(|dst| Base::Start(c, *dst)),
            );
        }
    }
    for (party, timers) in timers(s) {
        for (mach, timer) in timers {
            let fire = Base::Fire(party, *mach, *timer);
            match timer.kind {
                TimerKind::Deadline => deadlines.push(fire),
                // A resend says nothing new unless something was lost.
                TimerKind::Resend if s.left.lost & by(*mach) == 0 => {}
                TimerKind::Round if !model.rounds || !has_news(s, party) => {}
                _ => all.push(fire),
            }
        }
    }
    if s.gateway.recoveries < model.recoveries
        && !s
            .gateway
            .acceptor
            .as_ref()
            .is_some_and(Acceptor::is_recovering)
    {
        let record = &s.store.record;
        let owner = worker_index(&record.owner);
        let dead = s.workers[usize::from(owner)].life != record.owner.incarnation.0;
        // The first suspicion may be false.
        if dead || record.phase == RoutePhase::Recovering || s.gateway.recoveries == 0 {
            let able = model.rebuild_on.iter().filter(|w| **w != owner || dead);
            all.extend(able.map(|w| Base::Suspect(*w)));
        }
    }
    let mut all: Vec<Label> = all.into_iter().map(Label::from).collect();
    if !all.iter().any(Label::moves_on) {
        all.extend(deadlines.into_iter().map(Label::from));
    }
    let asked = s.net.iter().any(|p| matches!(**p, Packet::Ask { .. }));
    if s.left.crashes > 0 && asked && model.crash.contains(&Party::S) {
        all.push(Base::CrashStore.into());
    }
    all
}

fn worker_labels(model: &Model, s: &State, w: u8, all: &mut Vec<Base>) {
    let worker = &s.workers[usize::from(w)];
    if let Some(run) = &worker.run
        && run.held.is_none()
        && run.seal < model.tokens
    {
        all.push(Base::Step(w));
    }
    for (i, pull) in worker.pulls.iter().enumerate() {
        if let Some(outcome) = pull.ended {
            all.push(Base::EndPull(w, i, false));
            if model.stuck && outcome == super::exec::GIVEN_UP && pull.left != 0 {
                all.push(Base::EndPull(w, i, true));
            }
            continue;
        }
        all.push(Base::Land(w, i));
        if s.left.losses > 0 && model.slow_pulls {
            all.extend([Base::LandWrong(w, i), Base::Break(w, i)]);
        }
    }
    // The token channel waits for what is under way to the gateway, inside it, and back, and for
    // the look at the record that a refusal makes its worker take.
    let under_way = s.net.iter().any(|p| match &**p {
        Packet::Msg { to, from, msg, .. } => {
            (*to == Party::G && party_of(from) == Party::W(w))
                || (*to == Party::W(w) && *from == Peer::Gateway && msg.epoch.0 == 0)
        }
        Packet::Ask { from, .. } => *from == Party::G || *from == Party::W(w),
        Packet::Answer { to, .. } => *to == Party::G || *to == Party::W(w),
        _ => false,
    });
    let broke = s.left.lost & TOKEN_CHANNEL != 0 || s.gateway.life > 1;
    if !worker.unacked.is_empty() && !under_way && broke {
        all.push(Base::ResendTokens(w));
    }
}

/// All armed timers.
pub fn timers(s: &State) -> impl Iterator<Item = (Party, &Vec<(Mach, Timer)>)> {
    let workers = (0..3).map(|w| (Party::W(w), &s.workers[usize::from(w)].timers));
    let coords = (0..2).map(|c| (Party::C(c), &s.coords[usize::from(c)].timers));
    workers.chain(coords).chain([(Party::G, &s.gateway.timers)])
}

/// The source decoded on since it last sealed.
fn has_news(s: &State, party: Party) -> bool {
    let Party::W(w) = party else { return true };
    let worker = &s.workers[usize::from(w)];
    match (&worker.run, &*worker.source) {
        (Some(run), Some(source)) => source
            .progress()
            .is_some_and(|(sealed, _)| u64::from(run.kv_len) > sealed),
        _ => true,
    }
}

/// What may go wrong with a label that led somewhere: its variants.
pub fn variants(model: &Model, before: &State, label: Label, did: &super::exec::Did) -> Vec<Label> {
    let left = &before.left;
    let mut all = Vec::new();
    if label.is_plain() && left.pauses > 0 {
        let stops = 0..did.completions.min(model.stops);
        all.extend(stops.map(|k| Label {
            stop: Some(k),
            ..label
        }));
    }
    let calm = label.mishaps == [None; 2] && label.crash.is_none();
    if calm && label.fire.is_none() && left.deadlines > 0 {
        all.extend(did.deadlines.iter().map(|fire| Label {
            fire: Some(*fire),
            ..label
        }));
    }
    // Mishaps come in order, so that each set of them is met once.
    let free = label.mishaps.iter().position(Option::is_none);
    if let Some(i) = free.filter(|i| usize::from(left.losses) > *i) {
        let lose = (0..did.sent).flat_map(|k| [Mishap::Lose(k), Mishap::Double(k)]);
        let doubt = (0..did.asked).flat_map(|k| [Mishap::Doubt(k), Mishap::LoseRequest(k)]);
        for mishap in lose.chain(doubt).map(Some) {
            if i == 0 || label.mishaps[i - 1] < mishap {
                let mut next = label;
                next.mishaps[i] = mishap;
                all.push(next);
            }
        }
    }
    if calm && left.crashes > 0 {
        let able = did.actors.iter().filter(|p| model.crash.contains(p));
        for (i, party) in able.enumerate() {
            if !did.actors[..i].contains(party) {
                all.push(Label {
                    crash: Some(*party),
                    ..label
                });
            }
        }
    }
    all
}
