//! The initiator's side of one connection: copies in its caller's thread, and a thread of its own
//! that gives grants back when the owner asks, whatever the caller is doing.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path as FsPath;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::sock::{Frame, Read, Reader, Sender};
use crate::mem::{ReadLease, RegionKey, RegionView, RemoteRegion};
use crate::transport::copier::{Reach, Reached, Sink};
use crate::transport::frame::{Header, Kind, Mapping, REQUEST_BYTES_MAX, VERSION, encode_pair};
use crate::transport::{Path, Refusal, Span, TransportError};

/// How soon the thread sees that its link is gone.
const TICK: Duration = Duration::from_millis(100);
/// Longest time from a frame's first byte to its last, in either direction.
const FRAME: Duration = Duration::from_secs(10);

/// A grant's mapping. The lock is held for each copy, so that giving back waits for it.
struct Held {
    key: RegionKey,
    epoch: u64,
    word: u64,
    ticket: u64,
    view: Mutex<Option<Arc<RegionView>>>,
}

#[derive(Default)]
struct State {
    held: Vec<Arc<Held>>,
    /// Regions mapped now, by their owner's name for them: grants of one region share a mapping.
    regions: Vec<(u64, Weak<RegionView>)>,
    words: Option<Arc<RegionView>>,
    answers: VecDeque<Header>,
    dead: Option<TransportError>,
}

struct Inner {
    sender: Sender,
    state: Mutex<State>,
    changed: Condvar,
    stop: AtomicBool,
}

/// What has been asked and not answered.
#[derive(Clone, Copy, PartialEq)]
enum Asked {
    Map(RegionKey, u64),
    Pull,
}

/// How `shm` gets at a peer's memory.
pub(super) struct ShmReach {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
    next_op: u64,
    asked: Option<(u64, Asked)>,
    /// Regions of ours that the peer has been offered, by name.
    offered: VecDeque<u64>,
    list: Vec<u8>,
}

/// As many as the owner keeps.
const OFFERS_MAX: usize = 16;

impl ShmReach {
    pub(super) fn connect(socket: &FsPath, deadline: Instant) -> Result<Self, TransportError> {
        if Instant::now() >= deadline {
            return Err(TransportError::DeadlineExceeded);
        }
        // Does not wait: a full backlog is an error (EAGAIN) for a nonblocking socket only, and a
        // listener's backlog drains within its accept tick.
        let stream = UnixStream::connect(socket).map_err(|e| TransportError::io("connect", &e))?;
        let ours = stream
            .try_clone()
            .map_err(|e| TransportError::io("dup", &e))?;
        let inner = Arc::new(Inner {
            sender: Sender::new(ours),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
        });
        let hello = Header {
            offset: VERSION,
            ..Header::new(Kind::Hello, 0)
        };
        let lost = |e: std::io::Error| TransportError::PeerLost {
            errno: e.raw_os_error().unwrap_or(0),
        };
        inner.sender.send(hello, &[], &[], deadline).map_err(lost)?;
        let mut reader = Reader::new();
        match reader.next(&stream, deadline, deadline) {
            Read::Frame(f) if f.header.kind == Kind::Welcome && f.header.offset == VERSION => {}
            Read::Frame(_) | Read::Broken(_) => {
                return Err(TransportError::Connection {
                    what: "the peer speaks another protocol",
                });
            }
            Read::Quiet => return Err(TransportError::DeadlineExceeded),
            Read::Closed => return Err(TransportError::PeerLost { errno: 0 }),
        }
        let for_thread = inner.clone();
        let thread = std::thread::Builder::new()
            .name("shm-link".into())
            .spawn(move || listen(&stream, reader, &for_thread))
            .map_err(|e| TransportError::io("clone", &e))?;
        Ok(Self {
            inner,
            thread: Some(thread),
            next_op: 1,
            asked: None,
            offered: VecDeque::new(),
            list: Vec::new(),
        })
    }

    /// Sends a request and remembers that its answer is due.
    fn ask(&mut self, header: Header, payload: &[u8], asked: Asked) -> Reached {
        let op = self.next_op;
        self.next_op += 1;
        self.asked = Some((op, asked));
        match self.inner.sender.send(
            Header { op, ..header },
            payload,
            &[],
            Instant::now() + FRAME,
        ) {
            Ok(()) => Reached::Waiting,
            Err(e) => self.lost(&e),
        }
    }

    /// Nothing can be sent any more: the link is dead from here on.
    fn lost(&self, e: &std::io::Error) -> Reached {
        let e = TransportError::PeerLost {
            errno: e.raw_os_error().unwrap_or(0),
        };
        self.inner.state.lock().dead.get_or_insert(e);
        Reached::Failed(e)
    }

    /// The answer to this question, if it was the last one asked and the answer has come.
    fn answer(&mut self, to: Asked) -> Option<Result<(), Refusal>> {
        let (op, _) = self.asked.filter(|(_, asked)| *asked == to)?;
        let mut state = self.inner.state.lock();
        while let Some(h) = state.answers.pop_front() {
            if h.op == op {
                self.asked = None;
                return Some(match h.kind {
                    Kind::Refused => Err(Refusal::from_code(h.code).unwrap_or(Refusal::BadRequest)),
                    _ => Ok(()),
                });
            }
        }
        None
    }

    fn held(&self, of: &RemoteRegion) -> Option<Arc<Held>> {
        let state = self.inner.state.lock();
        state
            .held
            .iter()
            .find(|h| h.key == of.key && h.epoch == of.epoch)
            .cloned()
    }
}

/// Copies under a grant, unless it has been given back; true if it was good to the end.
fn copy(
    held: &Held,
    words: &RegionView,
    piece: &[Span],
    to: &mut Sink<'_>,
) -> Result<(), TransportError> {
    let view = held.view.lock();
    let Some(view) = view.as_ref() else {
        return Err(Refusal::StaleEpoch.into());
    };
    for s in piece {
        to.put(s, |bytes| {
            view.copy_to(s.remote_off, bytes)
                .map_err(|_| Refusal::OutOfRange.into())
        })?;
    }
    // The copies above happen before this look: a word that still names the grant means that the
    // owner had not taken the memory back when the last byte was read.
    fence(Ordering::SeqCst);
    if words.load_u64(held.word)? == held.ticket {
        Ok(())
    } else {
        Err(Refusal::StaleEpoch.into())
    }
}

impl Reach for ShmReach {
    const PATH: Path = Path::Shm;
    const PIECE: u64 = REQUEST_BYTES_MAX;

    fn read(&mut self, from: &RemoteRegion, piece: &[Span], to: &mut Sink<'_>) -> Reached {
        let this = Asked::Map(from.key, from.epoch);
        if let Some(held) = self.held(from) {
            self.asked = None;
            let words = self.inner.state.lock().words.clone();
            let Some(words) = words else {
                return Reached::Failed(Refusal::Unsupported.into());
            };
            return match copy(&held, &words, piece, to) {
                Ok(()) => Reached::Done,
                Err(e) => Reached::Failed(e),
            };
        }
        match self.answer(this) {
            Some(Err(why)) => return Reached::Failed(why.into()),
            // The mapping came and is gone again.
            Some(Ok(())) => return Reached::Failed(Refusal::StaleEpoch.into()),
            None if self.asked.is_some_and(|(_, asked)| asked == this) => return Reached::Waiting,
            None => {}
        }
        let mut header = Header::new(Kind::Map, 0);
        (header.key, header.epoch) = (from.key, from.epoch);
        self.ask(header, &[], this)
    }

    fn write(
        &mut self,
        to: &RemoteRegion,
        piece: &[Span],
        from: &ReadLease,
        _aside: Option<&[u8]>,
    ) -> Reached {
        match self.answer(Asked::Pull) {
            Some(Ok(())) => return Reached::Done,
            Some(Err(why)) => return Reached::Failed(why.into()),
            None if self.asked.is_some_and(|(_, asked)| asked == Asked::Pull) => {
                return Reached::Waiting;
            }
            None => {}
        }
        let pool = from.pool();
        let Some(fd) = pool.fd() else {
            let what = "a put over shm from private memory; make the pool on Region::memfd";
            return Reached::Failed(TransportError::Unsupported { what });
        };
        let region = pool.region_id().0;
        if !self.offered.contains(&region) {
            let header = Header {
                offset: pool.region_len(),
                ..Header::new(Kind::Offer, region)
            };
            if let Err(e) = self
                .inner
                .sender
                .send(header, &[], &[fd], Instant::now() + FRAME)
            {
                return self.lost(&e);
            }
            if self.offered.len() == OFFERS_MAX {
                self.offered.pop_front();
            }
            self.offered.push_back(region);
        }
        let mut list = std::mem::take(&mut self.list);
        list.clear();
        piece.iter().for_each(|s| encode_pair(s, &mut list));
        let mut header = Header {
            offset: region,
            count: piece.len() as u16,
            ..Header::new(Kind::Pull, 0)
        };
        (header.key, header.epoch) = (to.key, to.epoch);
        let reached = self.ask(header, &list, Asked::Pull);
        self.list = list;
        reached
    }

    fn doze(&mut self, until: Instant) {
        let mut state = self.inner.state.lock();
        if state.answers.is_empty() && state.dead.is_none() {
            self.inner.changed.wait_until(&mut state, until);
        }
    }

    fn abandon(&mut self, until: Instant) -> bool {
        if self.asked.is_none_or(|(_, asked)| asked != Asked::Pull) {
            self.asked = None;
            return true;
        }
        loop {
            // A dead connection's owner has stopped: its thread reads only between two frames.
            if self.answer(Asked::Pull).is_some() || self.dead().is_some() {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            self.doze(until);
        }
    }

    fn dead(&self) -> Option<TransportError> {
        self.inner.state.lock().dead
    }
}

impl Drop for ShmReach {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        // Unmapped first, then said: the owner relies on it.
        let held = {
            let mut state = self.inner.state.lock();
            state.words = None;
            std::mem::take(&mut state.held)
        };
        held.iter().for_each(|h| drop(h.view.lock().take()));
        let soon = Instant::now() + Duration::from_millis(100);
        let _ = self
            .inner
            .sender
            .send(Header::new(Kind::Bye, 0), &[], &[], soon);
        self.inner.sender.shutdown();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The link's own thread: takes answers in, gives grants back.
fn listen(stream: &UnixStream, mut reader: Reader, inner: &Inner) {
    let end = loop {
        let now = Instant::now();
        match reader.next(stream, now + TICK, now + FRAME) {
            Read::Frame(f) => {
                if let Err(e) = take(f, inner) {
                    break e;
                }
            }
            Read::Quiet if !inner.stop.load(Ordering::Acquire) => {}
            Read::Quiet | Read::Closed => break TransportError::PeerLost { errno: 0 },
            Read::Broken(what) => break TransportError::Connection { what },
        }
    };
    inner.sender.shutdown();
    inner.state.lock().dead.get_or_insert(end);
    inner.changed.notify_all();
}

fn take(f: Frame, inner: &Inner) -> Result<(), TransportError> {
    let h = f.header;
    let broken = |what| Err(TransportError::Connection { what });
    match h.kind {
        Kind::Mapped => {
            let Ok(m) = Mapping::decode(&f.payload) else {
                return broken("a mapping that makes no sense");
            };
            let [region, words] = f.fds.as_slice() else {
                return broken("a mapping without descriptors");
            };
            let mut state = inner.state.lock();
            let mapped = state.regions.iter().find(|(id, _)| *id == m.region);
            let view = match mapped.and_then(|(_, view)| view.upgrade()) {
                Some(view) => view,
                None => {
                    let view = Arc::new(RegionView::map(region.as_fd(), m.region_len)?);
                    state
                        .regions
                        .retain(|(id, old)| *id != m.region && old.strong_count() > 0);
                    state.regions.push((m.region, Arc::downgrade(&view)));
                    view
                }
            };
            if state.words.is_none() {
                state.words = Some(Arc::new(RegionView::map(words.as_fd(), m.words_len)?));
            }
            state.held.push(Arc::new(Held {
                key: h.key,
                epoch: h.epoch,
                word: m.word,
                ticket: m.ticket,
                view: Mutex::new(Some(view)),
            }));
            state.answers.push_back(h);
        }
        Kind::Done | Kind::Refused => inner.state.lock().answers.push_back(h),
        Kind::Revoke => {
            let dead: Vec<_> = {
                let mut state = inner.state.lock();
                let (dead, alive) = state
                    .held
                    .drain(..)
                    .partition(|g| g.key == h.key && g.epoch <= h.epoch);
                state.held = alive;
                dead
            };
            // Waits for the copy under way, if there is one; unmaps with the last grant.
            dead.iter().for_each(|g| drop(g.view.lock().take()));
            let header = Header {
                key: h.key,
                epoch: h.epoch,
                ..Header::new(Kind::Revoked, 0)
            };
            let by = Instant::now() + FRAME;
            if inner.sender.send(header, &[], &[], by).is_err() {
                return Err(TransportError::PeerLost { errno: 0 });
            }
        }
        _ => return broken("a frame that only the other side may send"),
    }
    // More answers than requests can be outstanding: not a peer of ours.
    if inner.state.lock().answers.len() > 64 {
        return broken("answers to no question");
    }
    inner.changed.notify_all();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{Region, SharedWords};

    /// What a paused peer does when it comes back after its grant was quarantined: it finishes its
    /// copy, and must not call it good.
    #[test]
    fn a_copy_that_ends_after_its_grant_died_is_not_good() {
        let region = Region::memfd("test", 4096).unwrap();
        let words = SharedWords::new("test", 2).unwrap();
        words.store(1, 7);
        let view = RegionView::map(region.fd().unwrap(), 4096).unwrap();
        let held = Held {
            key: RegionKey::random().unwrap(),
            epoch: 1,
            word: 8,
            ticket: 7,
            view: Mutex::new(Some(Arc::new(view))),
        };
        let seen = RegionView::map(words.fd(), words.len()).unwrap();
        let piece = [Span {
            remote_off: 0,
            local_off: 0,
            len: 100,
        }];
        let mut aside = Vec::new();
        assert_eq!(
            copy(&held, &seen, &piece, &mut Sink::Aside(&mut aside)),
            Ok(())
        );
        for later in [0, 8] {
            words.store(1, later);
            let dead = copy(&held, &seen, &piece, &mut Sink::Aside(&mut aside));
            assert_eq!(dead, Err(Refusal::StaleEpoch.into()), "a word of {later}");
        }
        words.store(1, 7);
        *held.view.lock() = None;
        let given_back = copy(&held, &seen, &piece, &mut Sink::Aside(&mut aside));
        assert_eq!(given_back, Err(Refusal::StaleEpoch.into()));
    }
}
