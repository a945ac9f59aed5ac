//! What one side measured of one migration attempt: named instants and counts, kept for a while so
//! that the coordinator can ask for them after the fact, off the critical path.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;

use crate::drive::now_ns;
use crate::id::{MigrationEpoch, RequestId};
use crate::rpc::v1;

/// Attempts remembered.
const KEEP: usize = 4096;

/// Names of instants, the same at both sides.
pub mod at {
    /// Source: the intent arrived.
    pub const PREPARE: &str = "prepare";
    /// Destination: room is reserved.
    pub const RESERVED: &str = "reserved";
    /// Destination: the first pull began.
    pub const STREAM: &str = "stream";
    /// Destination: the whole prompt is verified; what is left is what was decoded meanwhile.
    pub const STREAMED: &str = "streamed";
    /// Source: GO arrived.
    pub const GO: &str = "go";
    /// Source: the last step that wrote this request's KV was done. The pause begins.
    pub const LAST_STEP: &str = "last-step";
    /// Source: held at a step boundary.
    pub const HELD: &str = "held";
    /// Source: control state and remaining slots are gathered.
    pub const EXPORTED: &str = "exported";
    /// Source: the push left.
    pub const PUSHED: &str = "pushed";
    /// Destination: the remaining slots came ahead of the push, are in place and hashed.
    pub const EARLY: &str = "early";
    /// Destination: the push arrived.
    pub const ARRIVED: &str = "arrived";
    /// Destination: the remaining slots are in place.
    pub const LANDED: &str = "landed";
    /// Destination: the set digest over resident memory is known.
    pub const VERIFIED: &str = "verified";
    /// Destination: the control state is imported and exported again.
    pub const CONTROL: &str = "control";
    /// Destination: ready to run.
    pub const ARMED: &str = "armed";
    /// Destination: the store applied the commit.
    pub const COMMITTED: &str = "committed";
    /// Destination: the request may launch. The pause ends.
    pub const LAUNCH: &str = "launch";
    /// Either: the decision is known here.
    pub const DECIDED: &str = "decided";
    /// Either: everything is given back.
    pub const RELEASED: &str = "released";
}

#[derive(Debug, Default, Clone)]
struct Attempt {
    instants: Vec<(&'static str, u64)>,
    counts: Vec<(&'static str, u64)>,
    fired: Vec<(&'static str, String)>,
    transport: &'static str,
}

/// All recent attempts at this side.
#[derive(Debug, Default)]
pub struct Measures {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    attempts: HashMap<(RequestId, MigrationEpoch), Attempt>,
    order: VecDeque<(RequestId, MigrationEpoch)>,
}

impl Measures {
    fn with(&self, request: RequestId, epoch: MigrationEpoch, change: impl FnOnce(&mut Attempt)) {
        let mut inner = self.inner.lock();
        let key = (request, epoch);
        if !inner.attempts.contains_key(&key) {
            inner.order.push_back(key);
            if inner.order.len() > KEEP
                && let Some(old) = inner.order.pop_front()
            {
                inner.attempts.remove(&old);
            }
        }
        change(inner.attempts.entry(key).or_default());
    }

    /// Notes an instant, now; the first of a name stays.
    pub fn at(&self, request: RequestId, epoch: MigrationEpoch, name: &'static str) {
        self.at_ns(request, epoch, name, now_ns());
    }

    /// Notes an instant.
    pub fn at_ns(&self, request: RequestId, epoch: MigrationEpoch, name: &'static str, ns: u64) {
        self.with(request, epoch, |a| {
            if a.instants.iter().all(|(n, _)| *n != name) {
                a.instants.push((name, ns));
            }
        });
    }

    /// Nanoseconds between two instants of an attempt, if both were noted.
    pub fn between(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        from: &str,
        to: &str,
    ) -> Option<u64> {
        let inner = self.inner.lock();
        let attempt = inner.attempts.get(&(request, epoch))?;
        let at = |name: &str| {
            let found = attempt.instants.iter().find(|(n, _)| *n == name);
            found.map(|(_, ns)| *ns)
        };
        at(to)?.checked_sub(at(from)?)
    }

    /// Adds to a count.
    pub fn add(&self, request: RequestId, epoch: MigrationEpoch, name: &'static str, by: u64) {
        self.with(request, epoch, |a| {
            match a.counts.iter_mut().find(|(n, _)| *n == name) {
                Some((_, v)) => *v += by,
                None => a.counts.push((name, by)),
            }
        });
    }

    /// Notes that an injected fault fired.
    pub fn fired(
        &self,
        request: RequestId,
        epoch: MigrationEpoch,
        fault: &'static str,
        at: String,
    ) {
        self.with(request, epoch, |a| a.fired.push((fault, at)));
    }

    /// Notes the path that the bulk took.
    pub fn transport(&self, request: RequestId, epoch: MigrationEpoch, name: &'static str) {
        self.with(request, epoch, |a| a.transport = name);
    }

    /// What is known of an attempt.
    pub fn reply(&self, request: RequestId, epoch: MigrationEpoch) -> v1::MeasuredReply {
        let attempt = self.inner.lock().attempts.get(&(request, epoch)).cloned();
        let Some(a) = attempt else {
            return v1::MeasuredReply::default();
        };
        let instant = |(name, at_ns): (&str, u64)| v1::Instant {
            name: name.to_owned(),
            at_ns,
        };
        let count = |(name, value): (&str, u64)| v1::Count {
            name: name.to_owned(),
            value,
        };
        let fired = |(fault, at_step): (&str, String)| v1::Fired {
            fault: fault.to_owned(),
            at_step,
        };
        v1::MeasuredReply {
            known: true,
            instants: a.instants.into_iter().map(instant).collect(),
            counts: a.counts.into_iter().map(count).collect(),
            fired: a.fired.into_iter().map(fired).collect(),
            transport: a.transport.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_instant_of_a_name_stays_and_counts_add_up() {
        let (m, r, e) = (Measures::default(), RequestId([1; 16]), MigrationEpoch(2));
        m.at_ns(r, e, at::GO, 5);
        m.at_ns(r, e, at::GO, 9);
        m.add(r, e, "bytes", 3);
        m.add(r, e, "bytes", 4);
        let reply = m.reply(r, e);
        assert_eq!(reply.instants[0].at_ns, 5);
        assert_eq!(reply.counts[0].value, 7);
        m.at_ns(r, e, at::HELD, 25);
        assert_eq!(m.between(r, e, at::GO, at::HELD), Some(20));
        assert_eq!(m.between(r, e, at::GO, at::LAUNCH), None);
        assert!(!m.reply(r, MigrationEpoch(3)).known);
    }

    #[test]
    fn old_attempts_are_forgotten() {
        let m = Measures::default();
        for e in 0..=KEEP as u64 {
            m.at(RequestId([1; 16]), MigrationEpoch(e), at::GO);
        }
        assert!(!m.reply(RequestId([1; 16]), MigrationEpoch(0)).known);
        assert!(m.reply(RequestId([1; 16]), MigrationEpoch(1)).known);
    }
}
