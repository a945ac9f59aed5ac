//! Recovery of requests that nobody serves: their owner left, a recovery of theirs got stuck, or
//! their engine failed on them. The record is looked at, not what is remembered here, for a request
//! may have moved while nobody told.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::core::Core;
use super::hub::End;
use super::slot::Slot;
use crate::drive::RouteStore;
use crate::id::{RequestId, WorkerRef};
use crate::migrate::acceptor::Done;
use crate::migrate::io::{self, StoreReply};
use crate::route::RoutePhase;

/// How long a worker's link may be down before its requests are recovered elsewhere.
const GRACE: Duration = Duration::from_millis(300);
/// Recoveries of one request that may fail before it is given up.
const FAILURES: u32 = 8;

/// What is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Requests that nobody seems to serve, and since when.
    suspects: Mutex<HashMap<RequestId, Instant>>,
    /// Requests that their engine failed on.
    failed: Mutex<HashSet<RequestId>>,
}

impl Core {
    /// The engine that serves a request failed on it.
    pub(super) fn engine_failed(&self, request: RequestId) {
        self.watch.failed.lock().insert(request);
    }

    /// Looks at every request under way and recovers what nobody has served for a while. Blocks.
    pub(super) fn heal(self: &Arc<Self>) {
        let slots = self.all_slots();
        for slot in slots.iter().filter(|s| s.live.ended().is_none()) {
            // A slot that is busy is being served; it is looked at the next time.
            let Some(state) = slot.state.try_lock() else {
                continue;
            };
            let (recovering, failures) = (state.acceptor.is_recovering(), state.failures);
            drop(state);
            if !recovering {
                self.heal_one(slot, failures);
            }
        }
        let mut suspects = self.watch.suspects.lock();
        suspects.retain(|r, _| {
            slots
                .iter()
                .any(|s| s.request == *r && s.live.ended().is_none())
        });
    }

    fn heal_one(self: &Arc<Self>, slot: &Arc<Slot>, failures: u32) {
        let request = slot.request;
        let StoreReply::Value(found) = self.routes().read(request) else {
            return;
        };
        let record = found.record;
        if record.phase == RoutePhase::Finished {
            return;
        }
        self.workers.own(request, &record.owner);
        let failed = self.watch.failed.lock().contains(&request);
        let lost = !self.workers.is_linked(&record.owner);
        if !failed && !lost && record.phase == RoutePhase::Serving {
            self.watch.suspects.lock().remove(&request);
            return;
        }
        {
            let mut suspects = self.watch.suspects.lock();
            let since = suspects.entry(request).or_insert_with(Instant::now);
            if since.elapsed() < GRACE {
                return;
            }
            // A recovery that does not come to anything is tried again after as long.
            *since = Instant::now();
        }
        if failures >= FAILURES {
            tracing::error!(%request, failures, "given up: every recovery failed");
            slot.live.end(End::Failed);
            self.finished(request, End::Failed);
            return;
        }
        let elsewhere = self
            .workers
            .place(slot.model(), std::slice::from_ref(&record.owner));
        let Some(target) = elsewhere.or_else(|| self.workers.place(slot.model(), &[])) else {
            return;
        };
        self.watch.failed.lock().remove(&request);
        self.recover(slot, target);
    }

    /// Begins to move a request whose owner is believed dead. Blocks.
    pub(super) fn recover(self: &Arc<Self>, slot: &Arc<Slot>, target: WorkerRef) {
        self.metrics.recoveries.inc();
        self.tell(slot.request, "recovering", format!("to {target}"));
        self.post(slot, io::Event::Local(Done::Recover { target }));
    }
}
