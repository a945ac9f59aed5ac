//! Framed TCP, IPv4 and IPv6: each header and each piece of payload checked with CRC-32C, payloads
//! landed by the kernel straight in their blocks (one copy on each side, and the hash runs over bytes
//! that are in cache anyway).
//!
//! One blocking thread serves each connection. It holds the lease of a piece only while the kernel
//! takes the piece: when a slow peer makes it wait longer than [`LEASE_HOLD`], the rest is copied
//! aside and the lease ends, so a slow reader never keeps the engine from its blocks.
//!
//! Any fault of framing closes the connection; a fault of one request is answered by a refusal and
//! the rest goes on. Every wait has a bound: an idle connection may stay, one that has begun a frame
//! must finish it within [`TcpOptions::frame_deadline`].

mod link;
mod serve;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use link::TcpLink;

use crate::mem::{BlockId, BlockPool, RegionKey, RemoteRegion};
use crate::transport::registry::{Registry, settle};
use crate::transport::tap::{Pace, Tap};
use crate::transport::wait::{Interest, Waiter};
use crate::transport::{Access, Endpoint, Link, Path, Revoked, Scope, Transport, TransportError};

/// Longest time that the lease of a piece is held for a peer that does not read.
pub const LEASE_HOLD: Duration = Duration::from_micros(250);

/// How a TCP transport listens.
#[derive(Clone)]
pub struct TcpOptions {
    /// Where; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Needed to listen anywhere else than on loopback.
    pub expose: bool,
    /// Connections served at a time; more are closed at once.
    pub connections_max: usize,
    /// Longest time a frame may take from its first byte to its last, in either direction.
    pub frame_deadline: Duration,
    /// Faults to inject into what this side sends.
    pub tap: Option<Arc<dyn Tap>>,
    /// Rate limit for the links this transport makes.
    pub pace: Option<Arc<Pace>>,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            expose: false,
            connections_max: 256,
            frame_deadline: Duration::from_secs(10),
            tap: None,
            pace: None,
        }
    }
}

/// What the serving threads share.
struct Shared {
    registry: Registry,
    options: TcpOptions,
    stop: AtomicBool,
    serving: AtomicUsize,
    /// One per connection, to wake its thread by shutting the socket down.
    sockets: Mutex<Vec<(u64, TcpStream)>>,
}

/// The `tcp` transport. Dropping it closes the listener and every connection it serves.
pub struct TcpTransport {
    shared: Arc<Shared>,
    addr: SocketAddr,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl TcpTransport {
    /// Starts to listen.
    pub fn bind(options: TcpOptions) -> Result<Self, TransportError> {
        if !options.listen.ip().is_loopback() && !options.expose {
            return Err(TransportError::BadEndpoint {
                what: "listening beyond loopback must be asked for (`expose`)",
            });
        }
        let listener =
            TcpListener::bind(options.listen).map_err(|e| TransportError::io("bind", &e))?;
        listener
            .set_nonblocking(true)
            .map_err(|e| TransportError::io("fcntl", &e))?;
        let addr = listener
            .local_addr()
            .map_err(|e| TransportError::io("getsockname", &e))?;
        let shared = Arc::new(Shared {
            registry: Registry::default(),
            options,
            stop: AtomicBool::new(false),
            serving: AtomicUsize::new(0),
            sockets: Mutex::new(Vec::new()),
        });
        let for_thread = shared.clone();
        let acceptor = std::thread::Builder::new()
            .name("tcp-accept".into())
            .spawn(move || accept(&listener, &for_thread))
            .map_err(|e| TransportError::io("clone", &e))?;
        Ok(Self {
            shared,
            addr,
            acceptor: Some(acceptor),
        })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Connections served now.
    pub fn connections(&self) -> usize {
        self.shared.serving.load(Ordering::Relaxed)
    }
}

/// Nobody waits for the acceptor's clock: a stop is seen within this.
const ACCEPT_TICK: Duration = Duration::from_millis(100);

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    let mut waiter = Waiter::new();
    let mut next = 0u64;
    while !shared.stop.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => {
                next += 1;
                // Too many, or no thread to be had: closing is the answer the peer gets.
                let _ = serve_in_thread(stream, next, shared);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                let interest = Interest {
                    read: true,
                    write: false,
                };
                waiter.wait(listener, interest, Instant::now() + ACCEPT_TICK);
            }
            // Out of descriptors, or a connection that died in the queue: go on, but not in a spin.
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn serve_in_thread(stream: TcpStream, id: u64, shared: &Arc<Shared>) -> std::io::Result<()> {
    if shared.serving.load(Ordering::Relaxed) >= shared.options.connections_max {
        return Ok(());
    }
    prepare(&stream)?;
    shared.sockets.lock().push((id, stream.try_clone()?));
    shared.serving.fetch_add(1, Ordering::Relaxed);
    let for_thread = shared.clone();
    let spawned = std::thread::Builder::new()
        .name("tcp-serve".into())
        .spawn(move || {
            serve::serve(&stream, &for_thread);
            let _ = stream.shutdown(std::net::Shutdown::Both);
            for_thread.sockets.lock().retain(|(other, _)| *other != id);
            for_thread.serving.fetch_sub(1, Ordering::Release);
        });
    if spawned.is_err() {
        shared.sockets.lock().retain(|(other, _)| *other != id);
        shared.serving.fetch_sub(1, Ordering::Release);
    }
    spawned.map(drop)
}

/// What the kernel should hold of what a side sends: all that a link has in flight, with the
/// kernel's own overhead, so that a piece goes out in one call and its lease ends at once.
const SEND_BUFFER: usize = 2 << 20;

/// Options of both sides' sockets.
fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    static ALLOWED: LazyLock<bool> = LazyLock::new(|| {
        let most = std::fs::read_to_string("/proc/sys/net/core/wmem_max");
        most.is_ok_and(|m| m.trim().parse().is_ok_and(|m: usize| m >= SEND_BUFFER))
    });
    stream.set_nodelay(true)?;
    // Asking for more than allowed would give less than the kernel's own tuning reaches.
    if *ALLOWED {
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(stream, SEND_BUFFER);
    }
    Ok(())
}

impl Transport for TcpTransport {
    fn path(&self) -> Path {
        Path::Tcp
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::Tcp(self.addr)
    }

    fn register(
        &self,
        pool: &Arc<BlockPool>,
        access: Access,
        scope: Scope<'_>,
    ) -> Result<RemoteRegion, TransportError> {
        Ok(self.shared.registry.register(pool, access, scope)?.0)
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
        let next = r.close_epoch(false);
        Ok((next, settle(r.wait_drained(deadline), &r)?))
    }

    fn revoke(&self, key: RegionKey, deadline: Instant) -> Result<Revoked, TransportError> {
        let r = self
            .shared
            .registry
            .find(key)
            .ok_or(TransportError::UnknownKey)?;
        r.close_epoch(true);
        let revoked = settle(r.wait_drained(deadline), &r);
        self.shared.registry.remove(key);
        revoked
    }

    fn connect(&self, to: &Endpoint, deadline: Instant) -> Result<Box<dyn Link>, TransportError> {
        let Endpoint::Tcp(addr) = to else {
            return Err(TransportError::BadEndpoint {
                what: "a tcp transport connects to tcp:ADDRESS:PORT",
            });
        };
        let options = &self.shared.options;
        Ok(Box::new(TcpLink::connect(
            *addr,
            deadline,
            options.tap.clone(),
            options.pace.clone(),
        )?))
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for (_, socket) in self.shared.sockets.lock().iter() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        // A connection accepted between the two steps above.
        for (_, socket) in self.shared.sockets.lock().iter() {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        // Serving threads end on the next look at their socket; they own all they use, so nobody
        // needs to wait for them longer than it takes to see that leases have ended.
        let until = Instant::now() + Duration::from_secs(2);
        while self.shared.serving.load(Ordering::Acquire) > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
