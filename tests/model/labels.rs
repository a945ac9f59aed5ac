//! What can happen next in a state.

use super::models::Model;
use super::state::Mach;
use super::state::{Packet, Party, State, worker_index};
use moonlivekv::migrate::acceptor::Acceptor;
use moonlivekv::migrate::io::{Peer, Timer, TimerKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// Packet `i` arrives, and what follows from it locally happens at once.
    Deliver(usize),
    /// The same, but the process is stopped at its `k`-th local completion.
    DeliverStopped(usize, u8),
    /// Packet `i` never arrives.
    Lose(usize),
    /// Packet `i` arrives and will arrive again.
    Duplicate(usize),
    /// The asker of request `i` gives up; the request may still be served.
    GiveUp(usize),
    Fire(Party, Mach, Timer),
    /// A process dies and comes back as another life.
    Crash(Party),
    /// The running request on a worker numbers its next token.
    Step(u8),
    /// A slot of pull number `i` of a worker lands.
    Land(u8, usize),
    /// The last slot of that pull that lands is wrong.
    LandWrong(u8, usize),
    /// The pull breaks off.
    Break(u8, usize),
    /// An abandoned pull ends: quietly, or with a writer that cannot be stopped.
    EndPull(u8, usize, bool),
    /// A coordinator is asked to move the request to a worker.
    Start(u8, u8),
    Cancel(u8),
    /// The owner is suspected; this worker shall rebuild the request.
    Suspect(u8),
    /// The token channel of a worker sends its unacknowledged tokens again.
    ResendTokens(u8),
}

pub fn party_of(peer: &Peer) -> Party {
    match peer {
        Peer::Worker(w) => Party::W(worker_index(w)),
        Peer::Coordinator(driver) => Party::C((driver % 16) as u8),
        Peer::Gateway => Party::G,
    }
}

/// Everything that can happen next, the harmless things first.
pub fn labels(model: &Model, s: &State) -> Vec<Label> {
    let mut all = Vec::new();
    // Deadlines: as often as the budget says while something else can happen, always at rest.
    let mut deadlines = Vec::new();
    let mut before = None;
    for (i, p) in s.net.iter().enumerate() {
        if before == Some(p.hash()) {
            continue; // a second copy of the same packet
        }
        before = Some(p.hash());
        all.push(Label::Deliver(i));
        let local = matches!(
            **p,
            Packet::Source { .. } | Packet::Destination { .. } | Packet::Rebuild { .. }
        );
        if s.left.pauses > 0 && !local && may_stop(p) {
            all.extend((0..model.stops).map(|k| Label::DeliverStopped(i, k)));
        }
        if s.left.losses > 0 && !local {
            match **p {
                Packet::Ask { given_up, .. } => {
                    if !given_up {
                        all.push(Label::GiveUp(i));
                    }
                }
                // Its loss is what comes of giving up, then being served.
                Packet::Answer { .. } => {}
                _ => all.extend([Label::Lose(i), Label::Duplicate(i)]),
            }
        }
    }
    for w in 0..3 {
        let worker = &s.workers[usize::from(w)];
        for (mach, timer) in &worker.timers {
            if may_fire(model, s, timer) && (timer.kind != TimerKind::Round || has_news(s, w)) {
                fire(
                    Label::Fire(Party::W(w), *mach, *timer),
                    &mut all,
                    &mut deadlines,
                );
            }
        }
        if let Some(run) = &worker.run
            && run.held.is_none()
            && run.seal < model.tokens
        {
            all.push(Label::Step(w));
        }
        for (i, pull) in worker.pulls.iter().enumerate() {
            if pull.ended.is_some() {
                all.push(Label::EndPull(w, i, false));
                if model.stuck
                    && matches!(pull.ended, Some(e) if e == super::exec::GIVEN_UP)
                    && pull.left != 0
                {
                    all.push(Label::EndPull(w, i, true));
                }
                continue;
            }
            all.push(Label::Land(w, i));
            if s.left.corruptions > 0 {
                all.push(Label::LandWrong(w, i));
            }
            if s.left.losses > 0 {
                all.push(Label::Break(w, i));
            }
        }
        let channel_broke = s.left.lost || s.gateway.life > 1;
        let under_way = s.net.iter().any(|p| {
            matches!(&**p, Packet::Msg { to: Party::G, from, .. } if party_of(from) == Party::W(w))
        });
        if channel_broke && !under_way && !worker.unacked.is_empty() {
            all.push(Label::ResendTokens(w));
        }
    }
    for c in 0..2u8 {
        let coord = &s.coords[usize::from(c)];
        for (mach, timer) in &coord.timers {
            if may_fire(model, s, timer) {
                fire(
                    Label::Fire(Party::C(c), *mach, *timer),
                    &mut all,
                    &mut deadlines,
                );
            }
        }
        if !coord.started && coord.machine.is_none() {
            all.extend(
                model.starts[usize::from(c)]
                    .iter()
                    .map(|dst| Label::Start(c, *dst)),
            );
        }
        if model.cancels && coord.machine.is_some() && coord.life == 1 {
            all.push(Label::Cancel(c));
        }
    }
    for (mach, timer) in &s.gateway.timers {
        if may_fire(model, s, timer) {
            fire(
                Label::Fire(Party::G, *mach, *timer),
                &mut all,
                &mut deadlines,
            );
        }
    }
    if s.gateway.recoveries < model.recoveries
        && !s
            .gateway
            .acceptor
            .as_ref()
            .is_some_and(Acceptor::is_recovering)
    {
        let owner = worker_index(&s.store.record.owner);
        let dead = s.workers[usize::from(owner)].life != s.store.record.owner.incarnation.0;
        let stalled = s.store.record.phase == moonlivekv::route::RoutePhase::Recovering;
        if dead || stalled || model.false_suspicion {
            all.extend(
                model
                    .rebuild_on
                    .iter()
                    .filter(|w| **w != owner || dead)
                    .map(|w| Label::Suspect(*w)),
            );
        }
    }
    let at_rest = !all.iter().any(|l| moves_on(*l));
    all.extend(
        deadlines
            .into_iter()
            .filter(|_| at_rest || s.left.deadlines > 0),
    );
    if s.left.crashes > 0 {
        all.extend(model.crash.iter().map(|p| Label::Crash(*p)));
    }
    all
}

/// Where a stop between two local completions can make a difference: at the workers.
fn may_stop(p: &Packet) -> bool {
    match p {
        Packet::Msg { to, .. } | Packet::Answer { to, .. } => matches!(to, Party::W(_)),
        _ => false,
    }
}

/// A resend says nothing new unless something was lost; a duplicate covers a spurious one.
fn may_fire(model: &Model, s: &State, timer: &Timer) -> bool {
    match timer.kind {
        TimerKind::Resend => s.left.lost || s.left.crashes < model.budget.crashes,
        _ => true,
    }
}

/// The source decoded on since it last sealed.
fn has_news(s: &State, w: u8) -> bool {
    let worker = &s.workers[usize::from(w)];
    match (&worker.run, &*worker.source) {
        (Some(run), Some(source)) => source
            .progress()
            .is_some_and(|(sealed, _)| u64::from(run.kv_len) > sealed),
        _ => true,
    }
}

/// Whether a label is more than bad luck or somebody's wish: a run may not end while it is there.
pub fn moves_on(label: Label) -> bool {
    !matches!(
        label,
        Label::Crash(_) | Label::Start(..) | Label::Cancel(_) | Label::Suspect(_) | Label::Step(_)
    )
}

fn fire(label: Label, all: &mut Vec<Label>, deadlines: &mut Vec<Label>) {
    match label {
        Label::Fire(
            _,
            _,
            Timer {
                kind: TimerKind::Deadline,
                ..
            },
        ) => deadlines.push(label),
        _ => all.push(label),
    }
}
