//! Leadership: a lease in the store says who drives. It buys liveness only; two leaders at once do
//! no harm, for neither decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::core::Core;
use crate::metastore::{LeaseOutcome, LeaseTerm};
use crate::migrate::coordinator::Done;
use crate::node::options::Options;

const LEASE: &str = "lease/coordinator";
/// A leader that says nothing for this long is followed by another.
const TTL: Duration = Duration::from_millis(900);
const RENEW: Duration = Duration::from_millis(200);
const ANSWER: Duration = Duration::from_secs(1);

/// Takes and keeps the lease until `stop`; at the start of each term sees to what a leader before
/// left undecided.
pub fn lead(core: &Arc<Core>, stop: &AtomicBool) {
    let store = Arc::clone(core.routes.meta());
    let holder = format!("{}/{:016x}", core.id, core.nonce);
    let mut term: Option<LeaseTerm> = None;
    while !stop.load(Ordering::SeqCst) {
        let deadline = Instant::now() + ANSWER;
        term = match term {
            Some(t) => match store.lease_renew(LEASE, &holder, t, deadline) {
                Ok(true) => Some(t),
                Ok(false) => None,
                // Nothing is known; a leader without a lease does no harm, so it goes on.
                Err(_) => Some(t),
            },
            None => match store.lease_acquire(LEASE, &holder, TTL, deadline) {
                Ok(LeaseOutcome::Granted { term }) => {
                    core.term.store(term.0, Ordering::SeqCst);
                    core.leader.store(true, Ordering::SeqCst);
                    core.set_leader_id(&holder);
                    tracing::info!(term = term.0, "leading");
                    adopt(core);
                    Some(term)
                }
                Ok(LeaseOutcome::Held { by, .. }) => {
                    core.set_leader_id(&by);
                    None
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot ask for the lease");
                    None
                }
            },
        };
        core.leader.store(term.is_some(), Ordering::SeqCst);
        store.tidy();
        std::thread::sleep(RENEW);
    }
    if let Some(term) = term {
        let _ = store.lease_release(LEASE, &holder, term, Instant::now() + ANSWER);
    }
    core.leader.store(false, Ordering::SeqCst);
}

/// Every undecided intent gets a machine that sees to its end.
fn adopt(core: &Arc<Core>) {
    let records = match core.routes.all() {
        Ok(records) => records,
        Err(error) => {
            tracing::warn!(%error, "cannot look for what an earlier leader left");
            return;
        }
    };
    for found in records.into_iter().filter(|v| v.record.intent.is_some()) {
        let request = found.record.request;
        match core.start(request, Options::default(), Done::Adopt) {
            Ok(_) => tracing::info!(%request, "sees to a migration that was left undecided"),
            Err(error) => tracing::debug!(%request, %error, "not adopted"),
        }
    }
}
