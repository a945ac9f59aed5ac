//! Links: dialled or accepted, one reading thread each.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::hello::{Hello, HelloError, name};
use super::kind;
use crate::id::ErrorKind;
use crate::migrate::io::Peer;
use crate::wire::{
    self, Endpoint, FramedConn, Limits, ListenCloser, ListenOptions, Listener, RecvHalf,
    SharedSend, Wait, WireError,
};

/// How long connecting and the two hellos may take.
const DIAL: Duration = Duration::from_secs(2);
/// Spin for a frame that the one before it announced.
const EXPECTED_NS: u32 = 300_000;
/// How long a reading thread sleeps before it looks whether it should end.
const IDLE: Duration = Duration::from_secs(60);

/// Where peers can be dialled.
pub trait Directory: Send + Sync {
    /// The mesh listener of a peer, if known.
    fn endpoint(&self, peer: &Peer) -> Option<Endpoint>;
}

/// What a handler expects behind a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    /// Nothing in particular.
    Anything,
    /// The next frame within microseconds: going to sleep would take longer.
    Soon,
    /// A frame that is to find everything warm: until one comes, `times` at most, the handler's
    /// `idle` is called.
    Warm {
        /// Pause before each call.
        every: Duration,
        /// Most calls.
        times: u32,
    },
}

/// What a daemon does with what arrives. Called on the link's own thread; a call that blocks holds
/// up that link only.
pub trait Handler: Send + Sync {
    /// A link is up; `hello` is what the peer said of itself.
    fn joined(&self, hello: &Hello);
    /// A frame. Kinds the handler does not know are to be ignored: a newer peer may send them.
    fn frame(&self, from: &Peer, kind: u16, id: u64, payload: &[u8]);
    /// What comes behind a frame of this kind.
    fn expects(&self, _kind: u16) -> Expect {
        Expect::Anything
    }
    /// Nothing came for as long as [`Expect::Warm`] said.
    fn idle(&self, _from: &Peer) {}
    /// The last link to a peer is down.
    fn left(&self, peer: &Peer);
}

/// A message that could not be handed to the peer's socket. Nothing is promised about delivery
/// even without an error: the protocol's machines expect loss.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// Nobody knows where that peer listens.
    #[error("{peer} has no known address: it never joined or has left")]
    Unknown {
        /// The peer in words.
        peer: String,
    },
    /// The socket failed.
    #[error("link to {peer}: {source}")]
    Wire {
        /// The peer in words.
        peer: String,
        /// Why.
        source: WireError,
    },
    /// The other end is not who was meant.
    #[error("link to {peer}: {source}")]
    Hello {
        /// The peer in words.
        peer: String,
        /// Why.
        source: HelloError,
    },
    /// No thread could be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

impl MeshError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unknown { .. } => ErrorKind::PeerLost,
            Self::Wire { source, .. } => source.kind(),
            Self::Hello { source, .. } => source.kind(),
            Self::Thread(_) => ErrorKind::Retryable,
        }
    }
}

/// How a mesh listens.
#[derive(Debug, Clone)]
pub struct MeshOptions {
    /// Where to listen; more than one is fine (a unix socket and TCP).
    pub listen: Vec<Endpoint>,
    /// Accept addresses beyond loopback.
    pub allow_remote: bool,
    /// This daemon's other listeners, told in its hello.
    pub endpoints: Vec<(String, Endpoint)>,
    /// Nanoseconds to spin before sleeping in `recv`; 0 on machines with few cores.
    pub spin_ns: u32,
    /// A pause that somebody sees depends on how soon the reading threads get a CPU.
    pub urgent: bool,
}

struct Link {
    serial: u64,
    send: SharedSend,
}

struct Inner {
    me: Peer,
    hello: Mutex<Vec<(String, Endpoint)>>,
    handler: Arc<dyn Handler>,
    directory: Arc<dyn Directory>,
    links: Mutex<HashMap<Peer, Vec<Link>>>,
    /// One dial at a time for each peer, so that two senders do not open two links.
    dialling: Mutex<HashMap<Peer, Arc<Mutex<()>>>>,
    serial: AtomicU64,
    stopping: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
    limits: Limits,
    spin_ns: u32,
    urgent: bool,
}

/// All links of one daemon.
#[derive(Clone)]
pub struct Mesh {
    inner: Arc<Inner>,
    listen: Vec<Endpoint>,
    listeners: Arc<Mutex<Vec<ListenCloser>>>,
}

impl Mesh {
    /// Listens, and starts a thread for each listener.
    pub fn start(
        me: Peer,
        options: MeshOptions,
        handler: Arc<dyn Handler>,
        directory: Arc<dyn Directory>,
    ) -> Result<Self, MeshError> {
        let limits = Limits {
            max_frame: 16 << 20,
            ..Limits::default()
        };
        let inner = Arc::new(Inner {
            me,
            hello: Mutex::new(options.endpoints),
            handler,
            directory,
            links: Mutex::default(),
            dialling: Mutex::default(),
            serial: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            threads: Mutex::default(),
            limits,
            spin_ns: options.spin_ns,
            urgent: options.urgent,
        });
        let (mut bound, mut closers) = (Vec::new(), Vec::new());
        for endpoint in &options.listen {
            let listen = ListenOptions {
                allow_remote: options.allow_remote,
                limits,
                ..ListenOptions::default()
            };
            let listener = Listener::bind(endpoint, listen).map_err(|source| MeshError::Wire {
                peer: endpoint.to_string(),
                source,
            })?;
            bound.push(listener.endpoint().clone());
            closers.push(listener.closer());
            let accepting = Arc::clone(&inner);
            inner.spawn("mesh-accept", move || accepting.accept(&listener))?;
        }
        inner
            .hello
            .lock()
            .extend(bound.first().map(|e| ("mesh".to_owned(), e.clone())));
        Ok(Self {
            inner,
            listen: bound,
            listeners: Arc::new(Mutex::new(closers)),
        })
    }

    /// Where it listens.
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.listen
    }

    /// Who this is.
    pub fn me(&self) -> &Peer {
        &self.inner.me
    }

    /// Makes sure that a link to `peer` is up, so that the fence need not dial.
    pub fn open(&self, peer: &Peer) -> Result<(), MeshError> {
        self.inner.link(peer).map(drop)
    }

    /// Dials an address whose owner is not known yet; returns what it said of itself.
    pub fn open_at(&self, endpoint: &Endpoint) -> Result<Hello, MeshError> {
        self.inner.dial(endpoint, None)
    }

    /// Whether there is a link to `peer`.
    pub fn linked(&self, peer: &Peer) -> bool {
        self.inner.links.lock().contains_key(peer)
    }

    /// Peers with a link.
    pub fn peers(&self) -> Vec<Peer> {
        self.inner.links.lock().keys().cloned().collect()
    }

    /// Sends one frame, dialling first where there is no link.
    pub fn send(
        &self,
        to: &Peer,
        kind: u16,
        id: u64,
        parts: &[IoSlice<'_>],
        deadline: Instant,
    ) -> Result<(), MeshError> {
        let (serial, send) = self.inner.link(to)?;
        let sent = send.send(kind, id, parts, Wait::until(deadline));
        sent.map_err(|source| {
            if !matches!(
                source,
                WireError::PayloadTooLong { .. } | WireError::Timeout { partial: false, .. }
            ) {
                send.closer().close();
                self.inner.unlink(to, serial);
            }
            MeshError::Wire {
                peer: name(to),
                source,
            }
        })
    }

    /// Closes every link and waits for the threads.
    pub fn stop(&self) {
        self.inner.stopping.store(true, Ordering::SeqCst);
        for closer in self.listeners.lock().drain(..) {
            closer.close();
        }
        for link in self.inner.links.lock().values().flatten() {
            link.send.closer().close();
        }
        let threads: Vec<_> = self.inner.threads.lock().drain(..).collect();
        let me = std::thread::current().id();
        for thread in threads.into_iter().filter(|t| t.thread().id() != me) {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn spawn(&self, what: &str, body: impl FnOnce() + Send + 'static) -> Result<(), MeshError> {
        let thread = std::thread::Builder::new()
            .name(what.to_owned())
            .spawn(body)
            .map_err(MeshError::Thread)?;
        let mut threads = self.threads.lock();
        threads.retain(|t| !t.is_finished());
        threads.push(thread);
        Ok(())
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn accept(self: &Arc<Self>, listener: &Listener) {
        while !self.stopping() {
            match listener.accept(Instant::now() + IDLE) {
                Ok(conn) => {
                    let inner = Arc::clone(self);
                    let started = self.spawn("mesh-link", move || {
                        if let Err(error) = inner.welcome(conn) {
                            tracing::debug!(%error, "a peer was not welcome");
                        }
                    });
                    if let Err(error) = started {
                        tracing::warn!(%error, "a peer was turned away");
                    }
                }
                Err(WireError::Timeout { .. }) => {}
                Err(WireError::ClosedHere) => return,
                Err(error) => {
                    tracing::warn!(%error, "accepting failed");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }

    /// The accepting side's hello, then the reading loop.
    fn welcome(self: &Arc<Self>, mut conn: FramedConn) -> Result<(), MeshError> {
        let somebody = || "somebody".to_owned();
        let wire = |source| MeshError::Wire {
            peer: somebody(),
            source,
        };
        let wait = Wait::within(DIAL);
        let hello = {
            let frame = conn.recv(wait).map_err(wire)?;
            if frame.header.kind != kind::HELLO {
                return Ok(());
            }
            Hello::decode(frame.payload)
                .map_err(HelloError::from)
                .and_then(|h| h.check_for(&self.me).map(|()| h))
                .map_err(|source| MeshError::Hello {
                    peer: somebody(),
                    source,
                })?
        };
        let answer = self.my_hello(Some(hello.from.clone()));
        conn.send(kind::WELCOME, 0, &[IoSlice::new(&answer)], wait)
            .map_err(wire)?;
        let (serial, recv) = self.adopt(&hello.from, conn);
        self.handler.joined(&hello);
        self.read(&hello.from, serial, recv);
        Ok(())
    }

    fn my_hello(&self, to: Option<Peer>) -> Vec<u8> {
        Hello {
            from: self.me.clone(),
            to,
            endpoints: self.hello.lock().clone(),
        }
        .encode()
    }

    fn dial(self: &Arc<Self>, at: &Endpoint, to: Option<&Peer>) -> Result<Hello, MeshError> {
        let whom = || to.map_or_else(|| at.to_string(), name);
        let wire = |source| MeshError::Wire {
            peer: whom(),
            source,
        };
        let wait = Wait::within(DIAL);
        let mut conn = wire::connect(at, self.limits, wait.deadline).map_err(wire)?;
        let mine = self.my_hello(to.cloned());
        conn.send(kind::HELLO, 0, &[IoSlice::new(&mine)], wait)
            .map_err(wire)?;
        let hello = {
            let frame = conn.recv(wait).map_err(wire)?;
            Hello::decode(frame.payload)
                .map_err(HelloError::from)
                .and_then(|h| h.check_for(&self.me).map(|()| h))
                .map_err(|source| MeshError::Hello {
                    peer: whom(),
                    source,
                })?
        };
        if let Some(to) = to.filter(|to| **to != hello.from) {
            let source = HelloError::NotMe {
                wanted: name(to),
                here: name(&hello.from),
            };
            return Err(MeshError::Hello {
                peer: whom(),
                source,
            });
        }
        let (serial, recv) = self.adopt(&hello.from, conn);
        self.handler.joined(&hello);
        let (inner, peer) = (Arc::clone(self), hello.from.clone());
        self.spawn("mesh-link", move || inner.read(&peer, serial, recv))?;
        Ok(hello)
    }

    fn adopt(&self, peer: &Peer, conn: FramedConn) -> (u64, RecvHalf) {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed) + 1;
        let (send, recv) = conn.split();
        let send = SharedSend::new(send);
        let closer = send.closer();
        self.links
            .lock()
            .entry(peer.clone())
            .or_default()
            .push(Link { serial, send });
        // After the insertion: `stop` either finds the link there or is seen here.
        if self.stopping() {
            closer.close();
        }
        (serial, recv)
    }

    fn unlink(&self, peer: &Peer, serial: u64) -> bool {
        let mut links = self.links.lock();
        let Some(of_peer) = links.get_mut(peer) else {
            return false;
        };
        let before = of_peer.len();
        of_peer.retain(|l| l.serial != serial);
        let gone = before != of_peer.len();
        if of_peer.is_empty() {
            links.remove(peer);
            return gone;
        }
        false
    }

    fn read(&self, peer: &Peer, serial: u64, mut recv: RecvHalf) {
        if self.urgent {
            crate::wire::ask_for_short_slices();
        }
        let mut expect = Expect::Anything;
        while !self.stopping() {
            let wait = match expect {
                Expect::Anything => Wait::within(IDLE).spin(self.spin_ns),
                Expect::Soon => Wait::within(IDLE).spin(self.spin_ns.max(EXPECTED_NS)),
                Expect::Warm { every, .. } => Wait::within(every),
            };
            match recv.recv(wait) {
                Ok(frame) => {
                    let (header, payload) = (frame.header, frame.payload);
                    self.handler.frame(peer, header.kind, header.id, payload);
                    expect = self.handler.expects(header.kind);
                }
                Err(WireError::Timeout { .. }) => {
                    expect = match expect {
                        Expect::Warm { every, times } if times > 0 => {
                            self.handler.idle(peer);
                            Expect::Warm {
                                every,
                                times: times - 1,
                            }
                        }
                        _ => Expect::Anything,
                    }
                }
                // Frame borders are intact; a message was lost, and machines expect that.
                Err(error @ WireError::Payload { .. }) => {
                    tracing::warn!(peer = name(peer), %error, "a message was dropped");
                }
                Err(error) => {
                    tracing::debug!(peer = name(peer), %error, "link down");
                    break;
                }
            }
        }
        let last = {
            let mut links = self.links.lock();
            match links.get_mut(peer) {
                None => true,
                Some(of_peer) => {
                    of_peer.retain(|l| l.serial != serial);
                    let last = of_peer.is_empty();
                    if last {
                        links.remove(peer);
                    }
                    last
                }
            }
        };
        if last && !self.stopping() {
            self.handler.left(peer);
        }
    }

    /// The newest link to a peer, dialled where there is none.
    fn link(self: &Arc<Self>, peer: &Peer) -> Result<(u64, SharedSend), MeshError> {
        let newest = || {
            let links = self.links.lock();
            links
                .get(peer)
                .and_then(|l| l.last())
                .map(|l| (l.serial, l.send.clone()))
        };
        if let Some(link) = newest() {
            return Ok(link);
        }
        let turn = Arc::clone(self.dialling.lock().entry(peer.clone()).or_default());
        let _turn = turn.lock();
        if let Some(link) = newest() {
            return Ok(link);
        }
        let unknown = || MeshError::Unknown { peer: name(peer) };
        let at = self.directory.endpoint(peer).ok_or_else(unknown)?;
        self.dial(&at, Some(peer))?;
        newest().ok_or_else(unknown)
    }
}
