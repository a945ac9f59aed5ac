//! Two processes of one machine: the owner's memfd, mapped read-only by the peer, and one `memcpy` of
//! the peer's from that mapping into its own blocks.
//!
//! A unix socket carries control only. The peer asks for a grant's mapping ([`Kind::Map`]) and gets
//! the region's descriptor with `SCM_RIGHTS`; the region's seals allow nothing but reading. A put is
//! done by the target: the initiator offers a memfd of its own, the target reads from it into its
//! staging. So on this path too, nobody but its owner ever writes a process's memory.
//!
//! # Taking a grant back
//! The owner first changes the grant's word in memory that every peer has mapped, so that a copy under
//! way is thrown away when it ends; then it asks each peer that mapped the region under the grant to
//! let go, and waits for the acknowledgement, which a thread of the link gives once no copy is under
//! way, whatever its caller is doing. A peer that closes without a goodbye is believed gone when its
//! pidfd says that it died. If neither comes by the deadline, the blocks are quarantined.
//!
//! A peer is trusted to be of our making, as its user id must be ours: within one process's mapping,
//! scope and epoch are its own link's to keep.

mod link;
mod serve;
mod sock;

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::mem::{BlockId, BlockPool, RegionKey, RemoteRegion, SharedWords};
use crate::transport::copier::Copier;
use crate::transport::registry::{Registration, Registry, settle};
use crate::transport::tap::{Pace, Tap};
use crate::transport::wait::{Interest, Waiter};
use crate::transport::{Access, Endpoint, Link, Path, Revoked, Scope, Transport, TransportError};

use serve::Peer;

/// How a shared-memory transport listens.
#[derive(Clone)]
pub struct ShmOptions {
    /// Path of the socket; made with mode 0600 and removed on drop.
    pub socket: PathBuf,
    /// Peers served at a time; more are closed at once.
    pub connections_max: usize,
    /// Faults to inject into what this side's links copy. A put's bytes are read by the target, so
    /// a tap can hold them back but not change them.
    pub tap: Option<Arc<dyn Tap>>,
    /// Rate limit for the links this transport makes.
    pub pace: Option<Arc<Pace>>,
}

impl ShmOptions {
    /// At `socket`, everything else as usual.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            connections_max: 256,
            tap: None,
            pace: None,
        }
    }
}

/// Grants alive at a time, each with a word of its own.
const WORDS: usize = 4096;

struct Shared {
    registry: Registry,
    options: ShmOptions,
    words: SharedWords,
    /// Which word belongs to which registration, and what it holds.
    tickets: Mutex<Vec<Option<(RegionKey, u64)>>>,
    next_ticket: AtomicU64,
    peers: Mutex<Vec<Arc<Peer>>>,
    /// Signalled, under `peers`, when a peer lets go of something or is gone.
    let_go: Condvar,
    stop: AtomicBool,
}

impl Shared {
    /// Gives a registration's live epoch its word.
    fn new_ticket(&self, key: RegionKey) -> Result<(), TransportError> {
        let mut tickets = self.tickets.lock();
        let place = tickets
            .iter()
            .position(|t| t.as_ref().is_some_and(|(k, _)| *k == key));
        let place = place.or_else(|| tickets.iter().position(Option::is_none));
        let at = place.ok_or(TransportError::Unsupported {
            what: "more than 4096 grants; revoke some",
        })?;
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        tickets[at] = Some((key, ticket));
        self.words.store(at, ticket);
        Ok(())
    }

    fn drop_ticket(&self, key: RegionKey) {
        let mut tickets = self.tickets.lock();
        for (at, t) in tickets.iter_mut().enumerate() {
            if t.as_ref().is_some_and(|(k, _)| *k == key) {
                self.words.store(at, 0);
                *t = None;
            }
        }
    }

    /// The word of a grant: its place and what it holds.
    fn ticket(&self, key: RegionKey) -> Option<(usize, u64)> {
        let tickets = self.tickets.lock();
        tickets.iter().enumerate().find_map(|(at, t)| {
            let (k, ticket) = t.as_ref()?;
            (*k == key).then_some((at, *ticket))
        })
    }

    /// Asks every peer to let go of the epochs of `key` up to `last`, and waits for them.
    fn recall(&self, key: RegionKey, last: u64, deadline: Instant) -> bool {
        let mut peers = self.peers.lock();
        for p in peers.iter().filter(|p| p.holds(key, last)) {
            p.ask_back(key, last, deadline);
        }
        loop {
            if !peers.iter().any(|p| p.holds(key, last)) {
                return true;
            }
            if self.let_go.wait_until(&mut peers, deadline).timed_out() {
                return !peers.iter().any(|p| p.holds(key, last));
            }
        }
    }
}

/// The `shm` transport. Dropping it closes the socket and every connection; mappings that peers hold
/// stay valid memory for them, and empty of meaning.
pub struct ShmTransport {
    shared: Arc<Shared>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl ShmTransport {
    /// Starts to listen. A socket file that nobody listens on any more is replaced.
    pub fn bind(options: ShmOptions) -> Result<Self, TransportError> {
        let listener = match UnixListener::bind(&options.socket) {
            Err(e) if e.kind() == std::io::ErrorKind::AddrInUse => {
                if UnixStream::connect(&options.socket).is_ok() {
                    return Err(TransportError::BadEndpoint {
                        what: "another process listens on this socket",
                    });
                }
                let _ = std::fs::remove_file(&options.socket);
                UnixListener::bind(&options.socket)
            }
            other => other,
        }
        .map_err(|e| TransportError::io("bind", &e))?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&options.socket, mode)
            .map_err(|e| TransportError::io("chmod", &e))?;
        listener
            .set_nonblocking(true)
            .map_err(|e| TransportError::io("fcntl", &e))?;
        let shared = Arc::new(Shared {
            registry: Registry::default(),
            options,
            words: SharedWords::new("moonlive-grants", WORDS)?,
            tickets: Mutex::new(vec![None; WORDS]),
            next_ticket: AtomicU64::new(1),
            peers: Mutex::new(Vec::new()),
            let_go: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let for_thread = shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("shm-accept".into())
            .spawn(move || accept(&listener, &for_thread))
            .map_err(|e| TransportError::io("clone", &e))?;
        Ok(Self {
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// Peers connected, or gone without a goodbye and not yet known to be dead.
    pub fn peers(&self) -> usize {
        self.shared.peers.lock().len()
    }

    fn close(
        &self,
        r: &Arc<Registration>,
        for_ever: bool,
        deadline: Instant,
    ) -> Result<(RemoteRegion, Revoked), TransportError> {
        let next = r.close_epoch(for_ever);
        if for_ever {
            self.shared.drop_ticket(r.key);
        } else {
            self.shared.new_ticket(r.key)?;
        }
        // In this order: a mapping is sent while work is counted, so the call to give it back comes
        // behind it.
        let drained = r.wait_drained(deadline);
        let drained = self.shared.recall(r.key, next.epoch - 1, deadline) && drained;
        Ok((next, settle(drained, r)?))
    }
}

/// Nobody waits for the acceptor's clock: a stop is seen within this.
const ACCEPT_TICK: Duration = Duration::from_millis(100);

fn accept(listener: &UnixListener, shared: &Arc<Shared>) {
    let mut waiter = Waiter::new();
    while !shared.stop.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => {
                // Too many, a stranger, or no thread to be had: closing is the answer.
                let _ = serve::start(stream, shared);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                let interest = Interest {
                    read: true,
                    write: false,
                };
                waiter.wait(listener, interest, Instant::now() + ACCEPT_TICK);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

impl Transport for ShmTransport {
    fn path(&self) -> Path {
        Path::Shm
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::Shm(self.shared.options.socket.clone())
    }

    fn register(
        &self,
        pool: &Arc<BlockPool>,
        access: Access,
        scope: Scope<'_>,
    ) -> Result<RemoteRegion, TransportError> {
        if access == Access::RemoteRead && pool.fd().is_none() {
            return Err(TransportError::Unsupported {
                what: "reading private memory over shm; make the pool on Region::memfd",
            });
        }
        let (remote, r) = self.shared.registry.register(pool, access, scope)?;
        if let Err(e) = self.shared.new_ticket(r.key) {
            self.shared.registry.remove(r.key);
            return Err(e);
        }
        Ok(remote)
    }

    fn extend(&self, key: RegionKey, blocks: &[BlockId]) -> Result<(), TransportError> {
        self.shared
            .registry
            .find(key)
            .ok_or(TransportError::UnknownKey)?
            .extend(blocks)
    }

    fn renew(
        &self,
        key: RegionKey,
        deadline: Instant,
    ) -> Result<(RemoteRegion, Revoked), TransportError> {
        let r = self
            .shared
            .registry
            .find(key)
            .ok_or(TransportError::UnknownKey)?;
        self.close(&r, false, deadline)
    }

    fn revoke(&self, key: RegionKey, deadline: Instant) -> Result<Revoked, TransportError> {
        let r = self
            .shared
            .registry
            .find(key)
            .ok_or(TransportError::UnknownKey)?;
        let closed = self.close(&r, true, deadline);
        self.shared.registry.remove(key);
        Ok(closed?.1)
    }

    fn connect(&self, to: &Endpoint, deadline: Instant) -> Result<Box<dyn Link>, TransportError> {
        let Endpoint::Shm(path) = to else {
            return Err(TransportError::BadEndpoint {
                what: "a shm transport connects to shm:/SOCKET",
            });
        };
        let reach = link::ShmReach::connect(path, deadline)?;
        let options = &self.shared.options;
        Ok(Box::new(Copier::new(
            reach,
            options.tap.clone(),
            options.pace.clone(),
        )))
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        let _ = std::fs::remove_file(&self.shared.options.socket);
        // Serving threads see the stop, or their socket's end, and go; they own all they use.
        let until = Instant::now() + Duration::from_secs(2);
        let mut peers = self.shared.peers.lock();
        peers.iter().for_each(|p| p.shutdown());
        while !peers.is_empty() && !self.shared.let_go.wait_until(&mut peers, until).timed_out() {}
    }
}
