//! Runs one machine: feeds it events, performs the actions that every machine knows, and hands the
//! rest to the executor of its kind.

use std::collections::VecDeque;

use super::clock::now_ns;
use crate::id::RequestId;
use crate::migrate::io::{Action, Event, Payload, Peer, Report, StoreReply, Timer};
use crate::migrate::msg::Msg;
use crate::route::{Revision, RouteRecord};

/// A protocol machine.
pub trait Machine {
    /// Work for its executor.
    type Do;
    /// What the executor answers.
    type Done;
    /// Takes an event; actions go to the end of `out`.
    fn handle(&mut self, now_ns: u64, event: Event<Self::Done>, out: &mut Vec<Action<Self::Do>>);
}

/// The record of each request, as a store that may not answer.
pub trait RouteStore: Send + Sync {
    /// A linearizable read.
    fn read(&self, request: RequestId) -> StoreReply;
    /// A compare-and-swap; a lost reply is [`StoreReply::InDoubt`].
    fn cas(&self, request: RequestId, expect: Revision, next: &RouteRecord) -> StoreReply;
}

/// What an executor of some kind of machine does; called under the request's lock.
pub trait Hands<M: Machine> {
    /// Work of this kind. What is done at once is answered by its event; what goes on elsewhere
    /// answers `None` and posts its event later.
    fn perform(&mut self, work: M::Do) -> Option<M::Done>;
    /// Sends; may fail silently, for messages may be lost.
    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload);
    /// Arms or moves a timer.
    fn set_timer(&mut self, timer: Timer, at_ns: u64);
    /// Disarms a timer.
    fn clear_timer(&mut self, timer: Timer);
    /// Tells the operator.
    fn report(&mut self, report: Report);
    /// The store.
    fn store(&self) -> &dyn RouteStore;
    /// Which request.
    fn request(&self) -> RequestId;
    /// Called before each access to the store; `write` tells a compare-and-swap from a read.
    fn before_store(&mut self, write: bool) {
        let _ = write;
    }
    /// Called after it, for measurements and injected faults.
    fn after_store(&mut self, write: bool, reply: &mut StoreReply) {
        let _ = (write, reply);
    }
}

/// Feeds `first` and everything that follows from it at once.
pub fn run<M: Machine, H: Hands<M>>(machine: &mut M, hands: &mut H, first: Event<M::Done>) {
    let mut queue = VecDeque::from([first]);
    let mut out = Vec::new();
    while let Some(event) = queue.pop_front() {
        machine.handle(now_ns(), event, &mut out);
        for action in out.drain(..) {
            if let Some(event) = perform(hands, action) {
                queue.push_back(event);
            }
        }
    }
}

fn perform<M: Machine, H: Hands<M>>(
    hands: &mut H,
    action: Action<M::Do>,
) -> Option<Event<M::Done>> {
    match action {
        Action::StoreRead { op } => {
            hands.before_store(false);
            let mut reply = hands.store().read(hands.request());
            hands.after_store(false, &mut reply);
            Some(Event::Store { op, reply })
        }
        Action::StoreCas { op, expect, next } => {
            hands.before_store(true);
            let mut reply = hands.store().cas(hands.request(), expect, &next);
            hands.after_store(true, &mut reply);
            Some(Event::Store { op, reply })
        }
        Action::Send { to, msg, payload } => {
            hands.send(&to, &msg, payload);
            None
        }
        Action::SetTimer { timer, at_ns } => {
            hands.set_timer(timer, at_ns);
            None
        }
        Action::ClearTimer(timer) => {
            hands.clear_timer(timer);
            None
        }
        Action::Report(report) => {
            hands.report(report);
            None
        }
        Action::Do(work) => hands.perform(work).map(Event::Local),
    }
}

macro_rules! machines {
    ($($room:ident :: $name:ident),*) => {$(
        impl Machine for crate::migrate::$room::$name {
            type Do = crate::migrate::$room::Do;
            type Done = crate::migrate::$room::Done;
            fn handle(
                &mut self,
                now_ns: u64,
                event: Event<Self::Done>,
                out: &mut Vec<Action<Self::Do>>,
            ) {
                Self::handle(self, now_ns, event, out);
            }
        }
    )*};
}

machines!(
    source::Source,
    destination::Destination,
    coordinator::Coordinator,
    acceptor::Acceptor,
    recovery::Rebuilder
);
