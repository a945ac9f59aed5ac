//! A store in another process, reached over framed sockets.

use super::error::StoreError;
use super::lease::check_names;
use super::msg::{Answer, MAX_MESSAGE, Request};
use super::types::{
    Cas, CasOutcome, Change, LeaseOutcome, LeaseTerm, Listing, Versioned, WatchBatch, check_key,
    check_prefix, check_value,
};
use super::{MetaStore, Revision};
use crate::route::Writer;
use crate::wire::{Endpoint, FramedConn, Limits, Wait, WireError, connect};
use parking_lot::Mutex;
use std::io::IoSlice;
use std::time::{Duration, Instant};

/// How to reach a store.
#[derive(Debug, Clone, Copy)]
pub struct RemoteOptions {
    /// Connections kept open between calls. Each call uses one for itself.
    pub keep: usize,
    /// Spin before sleeping for the answer; see [`Wait::spin_ns`].
    pub spin_ns: u32,
}

impl Default for RemoteOptions {
    /// Four connections, no spin.
    fn default() -> Self {
        Self {
            keep: 4,
            spin_ns: 0,
        }
    }
}

/// A client of a [`StoreServer`](super::StoreServer). Any number of threads may call at once.
///
/// It connects when it must, again after a failure, and tells three endings apart: the request was
/// never wholly sent ([`StoreError::Unavailable`], after trying again until the deadline); it was
/// sent and the answer lost ([`StoreError::InDoubt`] for a compare-and-swap; what changes nothing is
/// asked again); or the store answered.
#[derive(Debug)]
pub struct RemoteStore {
    endpoint: Endpoint,
    options: RemoteOptions,
    idle: Mutex<Vec<Idle>>,
}

#[derive(Debug)]
struct Idle {
    conn: FramedConn,
    out: Writer,
    next_id: u64,
    used: Instant,
}

/// A connection kept beside another one is closed when it was not used for this long.
const SURPLUS: Duration = Duration::from_secs(2);
/// Pause between attempts to connect.
const BACKOFF: Duration = Duration::from_millis(5);

enum Failed {
    /// The store has not been given the request.
    NotAsked(WireError),
    /// It may have been carried out.
    AnswerLost(String),
}

impl RemoteStore {
    /// Names a store. Nothing is connected yet.
    pub fn new(endpoint: Endpoint, options: RemoteOptions) -> Self {
        Self {
            endpoint,
            options,
            idle: Mutex::new(Vec::new()),
        }
    }

    /// Where the store is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn connect(&self, deadline: Instant) -> Result<Idle, WireError> {
        let limits = Limits {
            max_frame: MAX_MESSAGE,
            read_ahead: 16 << 10,
            ..Limits::default()
        };
        let conn = connect(&self.endpoint, limits, deadline)?;
        Ok(Idle {
            conn,
            out: Writer(Vec::with_capacity(4096)),
            next_id: 1,
            used: Instant::now(),
        })
    }

    /// A kept connection that is still fit. The store may have restarted since its last use: found
    /// out only by sending, that would leave the answer in doubt.
    fn keep_one(&self) -> Option<Idle> {
        loop {
            let mut idle = self.idle.lock().pop()?;
            if idle.conn.halves().1.is_quiet() {
                return Some(idle);
            }
        }
    }

    /// Closes what a burst of calls left open, but for the connection used last.
    fn close_surplus(&self, now: Instant) {
        let mut kept = self.idle.lock();
        // Taken from the end and put back there: the one used last is the last.
        let mut others = kept.len();
        kept.retain(|idle| {
            others = others.saturating_sub(1);
            others == 0 || now.saturating_duration_since(idle.used) < SURPLUS
        });
    }

    /// One request and its answer. Fails as `NotAsked` only if repeating is safe.
    fn call(&self, request: &Request<'_>, deadline: Instant) -> Result<Answer, Failed> {
        loop {
            let kept = self.keep_one();
            let fresh = kept.is_none();
            let mut idle = match kept {
                Some(idle) => idle,
                None => match self.connect(deadline) {
                    Ok(idle) => idle,
                    Err(e) if pause(deadline) => {
                        tracing::debug!(error = %e, endpoint = %self.endpoint, "store not reached");
                        continue;
                    }
                    Err(e) => return Err(Failed::NotAsked(e)),
                },
            };
            match self.exchange(&mut idle, request, deadline) {
                Ok(answer) => {
                    idle.used = Instant::now();
                    let mut kept = self.idle.lock();
                    if kept.len() < self.options.keep {
                        kept.push(idle);
                    }
                    return Ok(answer);
                }
                // A kept connection may have died long ago: that says nothing about the store now.
                Err(Failed::NotAsked(e)) => {
                    if Instant::now() >= deadline || (fresh && !pause(deadline)) {
                        return Err(Failed::NotAsked(e));
                    }
                }
                Err(lost) => return Err(lost),
            }
        }
    }

    fn exchange(
        &self,
        idle: &mut Idle,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<Answer, Failed> {
        idle.out.0.clear();
        request.encode(&mut idle.out);
        let id = idle.next_id;
        idle.next_id += 1;
        let (send, recv) = idle.conn.halves();
        // Rounded up: a wait that ends early would be a deadline of the store's own.
        let left = deadline.saturating_duration_since(Instant::now());
        let left = u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX);
        let wait = Wait::until(deadline);
        let parts = [IoSlice::new(&idle.out.0)];
        send.send_flags(request.kind(), left, id, &parts, wait)
            .map_err(Failed::NotAsked)?;
        // An answer that arrives just behind the deadline still settles the matter.
        let wait = Wait::until(deadline + Duration::from_millis(50)).spin(self.options.spin_ns);
        let frame = recv
            .recv(wait)
            .map_err(|e| Failed::AnswerLost(e.to_string()))?;
        if frame.header.id != id {
            return Err(Failed::AnswerLost(
                "an answer to another question came".to_owned(),
            ));
        }
        Answer::decode(frame.header.kind, frame.payload)
            .map_err(|e| Failed::AnswerLost(format!("the answer cannot be read: {e}")))
    }

    /// For requests that may be repeated: those that change nothing, and those of leases. A lost
    /// answer is asked for again until the deadline.
    fn ask(&self, request: &Request<'_>, deadline: Instant) -> Result<Answer, StoreError> {
        loop {
            let cause = match self.call(request, deadline) {
                Ok(Answer::Error(e)) => return Err(e),
                Ok(answer) => return Ok(answer),
                Err(Failed::AnswerLost(_)) if pause(deadline) => continue,
                Err(Failed::AnswerLost(cause)) => cause,
                Err(Failed::NotAsked(e)) => e.to_string(),
            };
            return Err(StoreError::Unavailable { cause });
        }
    }
}

/// Sleeps before the next attempt, if there is time for one.
fn pause(deadline: Instant) -> bool {
    let time = deadline.saturating_duration_since(Instant::now()) > BACKOFF;
    if time {
        std::thread::sleep(BACKOFF);
    }
    time
}

fn unexpected<T>(answer: &Answer) -> Result<T, StoreError> {
    Err(StoreError::Protocol {
        what: format!("answer of kind {:#x}", answer.kind()),
    })
}

impl MetaStore for RemoteStore {
    fn tidy(&self) {
        self.close_surplus(Instant::now());
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Versioned>, StoreError> {
        check_key(key)?;
        match self.ask(&Request::Get { key }, deadline)? {
            Answer::Record(record) => Ok(record),
            other => unexpected(&other),
        }
    }

    fn cas(&self, cas: &Cas<'_>, deadline: Instant) -> Result<CasOutcome, StoreError> {
        check_key(cas.key)?;
        if let Change::Put(value) = cas.change {
            check_value(value)?;
        }
        match self.call(&Request::Cas(*cas), deadline) {
            Ok(Answer::Cas(outcome)) => Ok(outcome),
            Ok(Answer::Error(e)) => Err(e),
            // An answer came, but not one that says what became of the change.
            Ok(other) => Err(StoreError::InDoubt {
                cause: format!("the store answered with kind {:#x}", other.kind()),
            }),
            Err(Failed::NotAsked(e)) => Err(StoreError::Unavailable {
                cause: e.to_string(),
            }),
            Err(Failed::AnswerLost(cause)) => Err(StoreError::InDoubt { cause }),
        }
    }

    fn list(&self, prefix: &str, deadline: Instant) -> Result<Listing, StoreError> {
        check_prefix(prefix)?;
        let mut whole: Option<Listing> = None;
        loop {
            let after = whole
                .as_ref()
                .and_then(|w| w.entries.last())
                .map(|(key, _)| key.as_str());
            let (page, more) = match self.ask(&Request::List { prefix, after }, deadline)? {
                Answer::Page { page, more } => (page, more),
                other => return unexpected(&other),
            };
            let stuck = more && page.entries.is_empty();
            match &mut whole {
                // The first page's revision stands: what changed since is seen by watching from it.
                Some(whole) => whole.entries.extend(page.entries),
                None => whole = Some(page),
            }
            match whole.take() {
                Some(done) if !more => return Ok(done),
                _ if stuck => {
                    return Err(StoreError::Protocol {
                        what: "an empty page of more".to_owned(),
                    });
                }
                going => whole = going,
            }
        }
    }

    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        deadline: Instant,
    ) -> Result<WatchBatch, StoreError> {
        check_prefix(prefix)?;
        match self.ask(&Request::Watch { prefix, after }, deadline)? {
            Answer::Watch(batch) => Ok(batch),
            other => unexpected(&other),
        }
    }

    fn lease_acquire(
        &self,
        name: &str,
        holder: &str,
        ttl: Duration,
        deadline: Instant,
    ) -> Result<LeaseOutcome, StoreError> {
        check_names(name, holder)?;
        match self.ask(&Request::Acquire { name, holder, ttl }, deadline)? {
            Answer::Lease(outcome) => Ok(outcome),
            other => unexpected(&other),
        }
    }

    fn lease_renew(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        check_names(name, holder)?;
        match self.ask(&Request::Renew { name, holder, term }, deadline)? {
            Answer::Renewed(renewed) => Ok(renewed),
            other => unexpected(&other),
        }
    }

    fn lease_release(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        deadline: Instant,
    ) -> Result<(), StoreError> {
        check_names(name, holder)?;
        match self.ask(&Request::Release { name, holder, term }, deadline)? {
            Answer::Released => Ok(()),
            other => unexpected(&other),
        }
    }

    fn keep_awake(&self, key: &str, deadline: Instant) -> Result<(), StoreError> {
        check_key(key)?;
        match self.ask(&Request::KeepAwake { key }, deadline)? {
            Answer::KeptAwake => Ok(()),
            other => unexpected(&other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metastore::{EmbeddedOptions, EmbeddedStore, ServerOptions, StoreServer};
    use std::sync::Arc;

    #[test]
    fn connections_that_a_burst_left_open_are_closed_but_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(dir.path().join("s"), EmbeddedOptions::default()).unwrap();
        let at = Endpoint::unix(dir.path().join("store.sock")).unwrap();
        let server = StoreServer::start(Arc::new(store), &at, ServerOptions::default()).unwrap();
        let remote = RemoteStore::new(server.endpoint().clone(), RemoteOptions::default());
        let soon = || Instant::now() + Duration::from_secs(20);
        let open: Vec<Idle> = (0..3).map(|_| remote.connect(soon()).unwrap()).collect();
        remote.idle.lock().extend(open);
        remote.get("a", soon()).unwrap();
        remote.tidy();
        assert_eq!(remote.idle.lock().len(), 3, "some are in use still");
        remote.close_surplus(Instant::now() + SURPLUS);
        assert_eq!(remote.idle.lock().len(), 1);
        remote.get("a", soon()).unwrap();
        remote.close_surplus(Instant::now() + SURPLUS);
        assert_eq!(remote.idle.lock().len(), 1);
    }
}
