//! The owner's side of one connection: hands out mappings, takes them back, carries out puts.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Shared;
use super::sock::{Frame, Read, Reader, Sender};
use crate::mem::{BlockId, RegionKey, RegionView};
use crate::transport::frame::{Header, Kind, Mapping, VERSION, decode_pairs};
use crate::transport::registry::lease_refusal;
use crate::transport::wait::{Interest, Waiter};
use crate::transport::{Access, Refusal, Span};

/// How soon a thread with nothing to do sees a stop.
const TICK: Duration = Duration::from_millis(100);
/// Longest time from a frame's first byte to its last, in either direction.
const FRAME: Duration = Duration::from_secs(10);
/// How long a put waits for blocks that somebody else holds.
const LEASE_WAIT: Duration = Duration::from_millis(500);
/// Regions a peer may have on offer.
const OFFERS_MAX: usize = 16;

/// A connected process, or one that is gone and not yet known to be dead.
pub(super) struct Peer {
    sender: Sender,
    /// Grants whose memory it may be reading: key and epoch.
    holds: Mutex<Vec<(RegionKey, u64)>>,
    pidfd: Option<OwnedFd>,
    same_process: bool,
}

impl Peer {
    /// True if it may read under an epoch of `key` up to `last`.
    pub(super) fn holds(&self, key: RegionKey, last: u64) -> bool {
        self.holds
            .lock()
            .iter()
            .any(|(k, e)| *k == key && *e <= last)
    }

    pub(super) fn ask_back(&self, key: RegionKey, last: u64, deadline: Instant) {
        let header = Header {
            key,
            epoch: last,
            ..Header::new(Kind::Revoke, 0)
        };
        // A peer that cannot be told will not acknowledge: the caller's deadline decides.
        let _ = self.sender.send(header, &[], &[], deadline);
    }

    pub(super) fn shutdown(&self) {
        self.sender.shutdown();
    }
}

/// Starts to serve a connection, if it may be served.
pub(super) fn start(stream: UnixStream, shared: &Arc<Shared>) -> std::io::Result<()> {
    let credentials = rustix::net::sockopt::socket_peercred(&stream)?;
    let us = rustix::process::geteuid();
    if credentials.uid != us && !credentials.uid.is_root() {
        return Err(std::io::ErrorKind::PermissionDenied.into());
    }
    let flags = rustix::process::PidfdFlags::empty();
    let peer = Arc::new(Peer {
        sender: Sender::new(stream.try_clone()?),
        holds: Mutex::new(Vec::new()),
        pidfd: rustix::process::pidfd_open(credentials.pid, flags).ok(),
        same_process: credentials.pid == rustix::process::getpid(),
    });
    {
        let mut peers = shared.peers.lock();
        if peers.len() >= shared.options.connections_max {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        peers.push(peer.clone());
    }
    let (for_thread, its_peer) = (shared.clone(), peer.clone());
    let spawned = std::thread::Builder::new()
        .name("shm-serve".into())
        .spawn(move || {
            let mut c = Connection {
                stream,
                shared: &for_thread,
                peer: &its_peer,
                reader: Reader::new(),
                offers: Vec::new(),
                pairs: Vec::new(),
                blocks: Vec::new(),
            };
            let said_bye = c.run();
            drop(c);
            its_peer.shutdown();
            if !said_bye {
                await_death(&its_peer, &for_thread);
            }
            forget(&its_peer, &for_thread);
        });
    if spawned.is_err() {
        forget(&peer, shared);
    }
    spawned.map(drop)
}

fn forget(peer: &Arc<Peer>, shared: &Shared) {
    let mut peers = shared.peers.lock();
    peers.retain(|p| !Arc::ptr_eq(p, peer));
    shared.let_go.notify_all();
}

/// A peer that left without a goodbye may still read what it has mapped, until its process is dead.
fn await_death(peer: &Peer, shared: &Shared) {
    if peer.same_process {
        return;
    }
    let mut waiter = Waiter::new();
    while !shared.stop.load(Ordering::Acquire) && !peer.holds.lock().is_empty() {
        match &peer.pidfd {
            Some(pidfd) => {
                let until = Instant::now() + TICK;
                if waiter.wait(
                    pidfd,
                    Interest {
                        read: true,
                        write: false,
                    },
                    until,
                ) {
                    return;
                }
            }
            // Nothing can tell that it died: what it holds stays held.
            None => std::thread::sleep(TICK),
        }
    }
}

struct Connection<'a> {
    stream: UnixStream,
    shared: &'a Shared,
    peer: &'a Peer,
    reader: Reader,
    /// Memory that the peer lets us read, oldest first.
    offers: Vec<(u64, RegionView)>,
    pairs: Vec<Span>,
    blocks: Vec<BlockId>,
}

impl Connection<'_> {
    /// Serves until the connection ends; true if the peer has unmapped everything.
    fn run(&mut self) -> bool {
        let mut greeted = false;
        let connected = Instant::now();
        loop {
            let now = Instant::now();
            match self.reader.next(&self.stream, now + TICK, now + FRAME) {
                Read::Frame(f) if !greeted => {
                    if f.header.kind != Kind::Hello || f.header.offset != VERSION {
                        return true;
                    }
                    greeted = true;
                    let welcome = Header {
                        offset: VERSION,
                        ..Header::new(Kind::Welcome, 0)
                    };
                    if !self.answer(welcome, &[]) {
                        return false;
                    }
                }
                Read::Frame(f) if f.header.kind == Kind::Bye => {
                    self.peer.holds.lock().clear();
                    return true;
                }
                Read::Frame(f) => {
                    if !self.serve(f) {
                        return false;
                    }
                }
                Read::Quiet => {
                    let silent = !greeted && connected.elapsed() > FRAME;
                    if silent || self.shared.stop.load(Ordering::Acquire) {
                        return false;
                    }
                }
                Read::Closed => return false,
                Read::Broken(why) => {
                    tracing::debug!(why, "shm transport closed a connection");
                    return false;
                }
            }
        }
    }

    fn answer(&self, header: Header, payload: &[u8]) -> bool {
        self.peer
            .sender
            .send(header, payload, &[], Instant::now() + FRAME)
            .is_ok()
    }

    /// One request; false ends the connection.
    fn serve(&mut self, f: Frame) -> bool {
        let h = f.header;
        match h.kind {
            Kind::Map => match self.map(&h) {
                Ok(sent) => sent,
                Err(why) => self.answer(Header::refused(h.op, why), &[]),
            },
            Kind::Offer => match f
                .fds
                .first()
                .map(|fd| RegionView::map(fd.as_fd(), h.offset))
            {
                Some(Ok(view)) => {
                    self.offers.retain(|(id, _)| *id != h.op);
                    if self.offers.len() == OFFERS_MAX {
                        self.offers.remove(0);
                    }
                    self.offers.push((h.op, view));
                    true
                }
                // Refused when it is used.
                _ => true,
            },
            Kind::Pull => {
                let header = match self.pull(&h, &f.payload) {
                    Ok(()) => Header::new(Kind::Done, h.op),
                    Err(why) => Header::refused(h.op, why),
                };
                self.answer(header, &[])
            }
            Kind::Revoked => {
                {
                    // Under the lock that a revoker waits on, so that it does not miss this.
                    let _peers = self.shared.peers.lock();
                    self.peer
                        .holds
                        .lock()
                        .retain(|(k, e)| *k != h.key || *e > h.epoch);
                    self.shared.let_go.notify_all();
                }
                true
            }
            _ => false,
        }
    }

    /// Hands out the mapping behind a grant.
    fn map(&self, h: &Header) -> Result<bool, Refusal> {
        // Held until the answer is sent: a revoker waits for that, and then finds the holder.
        let guard = self
            .shared
            .registry
            .enter(h.key, h.epoch, Access::RemoteRead)?;
        let pool = &guard.registration().pool;
        let region_fd = pool.fd().ok_or(Refusal::Unsupported)?;
        let (at, ticket) = self.shared.ticket(h.key).ok_or(Refusal::StaleEpoch)?;
        let mapping = Mapping {
            region: pool.region_id().0,
            region_len: pool.region_len(),
            words_len: self.shared.words.len(),
            word: at as u64 * 8,
            ticket,
        };
        // Looked at after the ticket was read: a ticket of a later epoch is not handed out.
        guard.alive().then_some(()).ok_or(Refusal::StaleEpoch)?;
        {
            let mut holds = self.peer.holds.lock();
            if !holds.contains(&(h.key, h.epoch)) {
                holds.push((h.key, h.epoch));
            }
        }
        let mut header = Header::new(Kind::Mapped, h.op);
        (header.key, header.epoch) = (h.key, h.epoch);
        let fds = [region_fd, self.shared.words.fd()];
        Ok(self
            .peer
            .sender
            .send(header, &mapping.encode(), &fds, Instant::now() + FRAME)
            .is_ok())
    }

    /// Reads offered memory into our own.
    fn pull(&mut self, h: &Header, list: &[u8]) -> Result<(), Refusal> {
        let guard = self
            .shared
            .registry
            .enter(h.key, h.epoch, Access::RemoteWrite)?;
        decode_pairs(list, h.count, &mut self.pairs)?;
        let registration = guard.registration();
        registration.blocks_of(&self.pairs, &mut self.blocks)?;
        let (_, offer) = self
            .offers
            .iter()
            .find(|(id, _)| *id == h.offset)
            .ok_or(Refusal::Unsupported)?;
        let until = Instant::now() + LEASE_WAIT;
        let mut lease = registration
            .pool
            .write_until(&self.blocks, until)
            .map_err(lease_refusal)?;
        for s in &self.pairs {
            let to = lease
                .try_bytes_mut(s.remote_off, s.len as usize)
                .map_err(|_| Refusal::OutOfRange)?;
            offer
                .copy_to(s.local_off, to)
                .map_err(|_| Refusal::OutOfRange)?;
        }
        // The lease ends before the answer is sent: done means that a reader can get in.
        drop(lease);
        Ok(())
    }
}
