//! Serves a store over framed sockets. One thread a connection, which itself commits what its
//! client asks for: no hop between threads stands in the way of a compare-and-swap.

use super::error::StoreError;
use super::msg::{Answer, MAX_MESSAGE, PAGE_BYTES, Request};
use super::types::{Listing, WatchBatch};
use super::{MetaStore, Revision};
use crate::route::Writer;
use crate::wire::{
    Closer, Endpoint, FramedConn, Limits, ListenCloser, ListenOptions, Listener, RecvHalf, Wait,
    WireError,
};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Asked before each answer is sent, with the request's kind; `false` drops the answer and closes
/// the connection, as a crash at that point would.
pub type ReplyFilter = Arc<dyn Fn(u16) -> bool + Send + Sync>;

/// How to serve.
#[derive(Clone)]
pub struct ServerOptions {
    /// Where to accept from; see [`ListenOptions::allow_remote`].
    pub allow_remote: bool,
    /// Connections served at once; further ones are closed on arrival.
    pub max_connections: usize,
    /// A connection without requests is closed after this.
    pub idle: Duration,
    /// No request is let wait longer than this, whatever it asks for.
    pub max_wait: Duration,
    /// Spin before sleeping for the next request; see [`Wait::spin_ns`].
    pub spin_ns: u32,
    /// For fault injection: loses answers.
    pub reply_filter: Option<ReplyFilter>,
}

impl Default for ServerOptions {
    /// Local, 256 connections, 10 minutes idle, 30 s at most, no spin.
    fn default() -> Self {
        Self {
            allow_remote: false,
            max_connections: 256,
            idle: Duration::from_secs(600),
            max_wait: Duration::from_secs(30),
            spin_ns: 0,
            reply_filter: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("max_connections", &self.max_connections)
            .finish_non_exhaustive()
    }
}

struct Shared {
    store: Arc<dyn MetaStore>,
    options: ServerOptions,
    open: Mutex<HashMap<u64, Closer>>,
    stopping: AtomicBool,
    refused: AtomicU64,
}

/// A running server. Dropping it closes all connections and waits for their threads.
pub struct StoreServer {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    closer: ListenCloser,
    acceptor: Option<JoinHandle<()>>,
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreServer")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl StoreServer {
    /// Listens and serves until dropped.
    pub fn start(
        store: Arc<dyn MetaStore>,
        endpoint: &Endpoint,
        options: ServerOptions,
    ) -> Result<Self, WireError> {
        let limits = Limits {
            max_frame: MAX_MESSAGE,
            read_ahead: 16 << 10,
            ..Limits::default()
        };
        let listen = ListenOptions {
            allow_remote: options.allow_remote,
            limits,
            ..Default::default()
        };
        let listener = Listener::bind(endpoint, listen)?;
        let (endpoint, closer) = (listener.endpoint().clone(), listener.closer());
        let shared = Arc::new(Shared {
            store,
            options,
            open: Mutex::new(HashMap::new()),
            stopping: AtomicBool::new(false),
            refused: AtomicU64::new(0),
        });
        let acceptor = std::thread::Builder::new()
            .name("store-accept".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || accept(&shared, &listener)
            })
            .map_err(|e| WireError::Io {
                op: "clone",
                errno: e.raw_os_error().unwrap_or(0),
            })?;
        Ok(Self {
            shared,
            endpoint,
            closer,
            acceptor: Some(acceptor),
        })
    }

    /// Where clients connect.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Connections served now.
    pub fn connections(&self) -> usize {
        self.shared.open.lock().len()
    }

    /// Connections turned away for want of room.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.closer.close();
        if let Some(acceptor) = self.acceptor.take() {
            // Only a panic of the acceptor's makes this an error, and it was reported then.
            let _ = acceptor.join();
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &Listener) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    let mut next = 0u64;
    while !shared.stopping.load(Ordering::Acquire) {
        let conn = match listener.accept(Instant::now() + Duration::from_secs(60)) {
            Ok(conn) => conn,
            Err(WireError::Timeout { .. }) => continue,
            Err(WireError::ClosedHere) => break,
            Err(e) => {
                // Out of file descriptors or memory: both pass.
                tracing::warn!(error = %e, "store cannot accept");
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        threads.retain(|thread| !thread.is_finished());
        next += 1;
        {
            let mut open = shared.open.lock();
            if open.len() >= shared.options.max_connections {
                shared.refused.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            open.insert(next, conn.closer());
        }
        let spawned = std::thread::Builder::new()
            .name("store-conn".to_owned())
            .spawn({
                let (shared, id) = (Arc::clone(shared), next);
                move || {
                    serve(&shared, conn);
                    shared.open.lock().remove(&id);
                }
            });
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                shared.open.lock().remove(&next);
                shared.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(error = %e, "store cannot start a thread");
            }
        }
    }
    for closer in shared.open.lock().values() {
        closer.close();
    }
    for thread in threads {
        let _ = thread.join();
    }
}

fn serve(shared: &Shared, conn: FramedConn) {
    crate::wire::ask_for_short_slices();
    let (mut send, mut recv) = conn.split();
    let mut out = Writer(Vec::with_capacity(4096));
    loop {
        let wait = Wait::within(shared.options.idle).spin(shared.options.spin_ns);
        let frame = match recv.recv(wait) {
            Ok(frame) => frame,
            Err(e) => {
                if matches!(
                    e,
                    WireError::Corrupt(_) | WireError::Payload { .. } | WireError::TooSlow { .. }
                ) {
                    tracing::warn!(error = %e, "store drops a connection");
                }
                return;
            }
        };
        let (kind, id) = (frame.header.kind, frame.header.id);
        let allowed = Duration::from_millis(frame.header.flags.into()).min(shared.options.max_wait);
        let deadline = Instant::now() + allowed;
        let answer = match Request::decode(kind, frame.payload) {
            Ok(Request::Watch { prefix, after }) => {
                let prefix = prefix.to_owned();
                match watch(shared, &recv, &prefix, after, deadline) {
                    Some(answer) => answer,
                    None => return,
                }
            }
            Ok(request) => answer(&*shared.store, &request, deadline),
            Err(e) => Answer::Error(StoreError::Protocol {
                what: e.to_string(),
            }),
        };
        if shared
            .options
            .reply_filter
            .as_ref()
            .is_some_and(|filter| !filter(kind))
        {
            send.closer().close();
            return;
        }
        out.0.clear();
        answer.encode(&mut out);
        // The answer gets time of its own: a deadline that the work has used up must not turn a
        // known outcome into an unknown one.
        let wait = Wait::within(Duration::from_secs(5));
        if send
            .send(answer.kind(), id, &[IoSlice::new(&out.0)], wait)
            .is_err()
        {
            return;
        }
    }
}

/// How often a waiting watch looks whether anybody still waits for it.
const LOOK_UP: Duration = Duration::from_millis(200);

/// Waits for changes; `None` once the client has gone or the server stops.
fn watch(
    shared: &Shared,
    recv: &RecvHalf,
    prefix: &str,
    after: Revision,
    deadline: Instant,
) -> Option<Answer> {
    let mut seen = after;
    loop {
        let until = deadline.min(Instant::now() + LOOK_UP);
        match shared.store.watch(prefix, seen, until) {
            Ok(WatchBatch::Events { events, upto })
                if events.is_empty() && Instant::now() < deadline =>
            {
                seen = upto;
            }
            Ok(batch) => return Some(Answer::Watch(batch)),
            Err(e) => return Some(Answer::Error(e)),
        }
        if shared.stopping.load(Ordering::Acquire) || !recv.is_quiet() {
            return None;
        }
    }
}

fn answer(store: &dyn MetaStore, request: &Request<'_>, deadline: Instant) -> Answer {
    let answer = match *request {
        Request::Get { key } => store.get(key, deadline).map(Answer::Record),
        Request::Cas(cas) => store.cas(&cas, deadline).map(Answer::Cas),
        Request::List { prefix, after } => store
            .list(prefix, deadline)
            .map(|listing| page(listing, after)),
        Request::Watch { prefix, after } => store.watch(prefix, after, deadline).map(Answer::Watch),
        Request::Acquire { name, holder, ttl } => store
            .lease_acquire(name, holder, ttl, deadline)
            .map(Answer::Lease),
        Request::Renew { name, holder, term } => store
            .lease_renew(name, holder, term, deadline)
            .map(Answer::Renewed),
        Request::Release { name, holder, term } => store
            .lease_release(name, holder, term, deadline)
            .map(|()| Answer::Released),
        Request::KeepAwake { key } => store.keep_awake(key, deadline).map(|()| Answer::KeptAwake),
    };
    answer.unwrap_or_else(Answer::Error)
}

/// The part of a listing behind `after` that fits one message.
fn page(mut listing: Listing, after: Option<&str>) -> Answer {
    if let Some(after) = after {
        let seen = listing
            .entries
            .partition_point(|(key, _)| key.as_str() <= after);
        listing.entries.drain(..seen);
    }
    let mut bytes = 0;
    let fits = listing.entries.iter().take_while(|(key, record)| {
        let fits = bytes <= PAGE_BYTES;
        bytes += key.len() + record.value.len() + 16;
        fits
    });
    let n = fits.count();
    let more = n < listing.entries.len();
    listing.entries.truncate(n);
    Answer::Page {
        page: listing,
        more,
    }
}
