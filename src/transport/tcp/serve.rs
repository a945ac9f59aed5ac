//! The owner's side of one connection: a thread that reads requests and answers them in order.

use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{LEASE_HOLD, Shared};
use crate::mem::{BlockId, WriteLease};
use crate::transport::frame::{Header, Kind, VERSION, crc32c, decode_spans, receipt};
use crate::transport::registry::{Guard, lease_refusal};
use crate::transport::rx::{Filled, Landed, Landing, Rx};
use crate::transport::span::Cursor;
use crate::transport::tap::Direction;
use crate::transport::tx::{PieceOf, Pushed, Tx};
use crate::transport::wait::{Interest, Waiter};
use crate::transport::{Access, PIECE_MAX, Refusal, Span};

/// How long a request waits for blocks that somebody else holds: an engine writes a token's K and V
/// in microseconds, so this is plenty, also where threads wait long for a core.
const LEASE_WAIT: Duration = Duration::from_millis(500);
/// How soon an idle or blocked thread sees a stop or a closed epoch.
const TICK: Duration = Duration::from_millis(20);
/// How soon an idle thread sees a stop that no socket shutdown announced.
const IDLE_TICK: Duration = Duration::from_millis(500);
/// Longest time a put may hold its blocks, whatever its peer sends meanwhile.
const PUT_MAX: Duration = Duration::from_secs(30);
/// Answers up to this size are copied and sent together; larger ones go out from where they lie.
const SMALL: u64 = 16 << 10;

/// Why a connection ends. The peer sees a closed socket; the reason is for the log.
#[derive(Debug)]
struct Close(&'static str);

impl From<std::io::Error> for Close {
    fn from(_: std::io::Error) -> Self {
        Close("socket error")
    }
}

/// A put whose bytes are coming in.
struct Put {
    op: u64,
    // Dropped in this order: the blocks are free for readers before the revoker is told.
    lease: WriteLease,
    guard: Guard,
    total: u64,
    at: Cursor,
    got: u64,
    bad_check: bool,
    receipt: u32,
    give_up: Instant,
}

struct Connection<'a> {
    stream: &'a TcpStream,
    shared: &'a Shared,
    rx: Rx,
    tx: Tx,
    waiter: Waiter,
    put: Option<Put>,
    /// The spans of the put under way.
    put_spans: Vec<Span>,
    spans: Vec<Span>,
    piece: Vec<Span>,
    blocks: Vec<BlockId>,
}

/// Serves a connection until it ends.
pub(super) fn serve(stream: &TcpStream, shared: &Shared) {
    let mut c = Connection {
        stream,
        shared,
        rx: Rx::new(),
        tx: Tx::new(),
        waiter: Waiter::new(),
        put: None,
        put_spans: Vec::new(),
        spans: Vec::new(),
        piece: Vec::new(),
        blocks: Vec::new(),
    };
    if let Err(Close(why)) = c.run() {
        let peer = stream.peer_addr().ok();
        tracing::debug!(?peer, why, "tcp transport closed a connection");
    }
}

impl Connection<'_> {
    fn run(&mut self) -> Result<(), Close> {
        let hello = self.header(Some(self.frame_deadline()))?;
        if hello.is_none_or(|h| h.kind != Kind::Hello || h.offset != VERSION || h.len != 0) {
            return Err(Close("it did not say hello in this version"));
        }
        let welcome = Header {
            offset: VERSION,
            ..Header::new(Kind::Welcome, 0)
        };
        self.tx.out.extend_from_slice(&welcome.encode());
        loop {
            // While a put is under way its next frame is owed; otherwise an idle peer is welcome.
            let deadline = self.put.is_some().then(|| self.frame_deadline());
            let Some(h) = self.header(deadline)? else {
                return Ok(());
            };
            match h.kind {
                Kind::Get => {
                    let refused = match self.request(&h)? {
                        Ok(total) => self.get(&h, total)?,
                        Err(refused) => Err(refused),
                    };
                    if let Err(why) = refused {
                        self.refuse(h.op, why);
                    }
                }
                Kind::Put => {
                    if self.put.is_some() {
                        return Err(Close("a put began before the last one ended"));
                    }
                    let admitted = match self.request(&h)? {
                        Ok(total) => self.admit_put(&h, total),
                        Err(refused) => Err(refused),
                    };
                    if let Err(why) = admitted {
                        self.refuse(h.op, why);
                    }
                }
                Kind::Data => self.data(&h)?,
                Kind::Abort if h.len == 0 => {
                    if self.put.as_ref().is_some_and(|p| p.op == h.op) {
                        self.put = None;
                        self.refuse(h.op, Refusal::Aborted);
                    }
                }
                _ => return Err(Close("a frame that only the other side may send")),
            }
        }
    }

    fn frame_deadline(&self) -> Instant {
        Instant::now() + self.shared.options.frame_deadline
    }

    fn refuse(&mut self, op: u64, why: Refusal) {
        self.tx
            .out
            .extend_from_slice(&Header::refused(op, why).encode());
    }

    /// The next header. `None`: the peer closed between frames. Sends what is gathered before it
    /// waits. Without a deadline, only a frame that has begun has one.
    fn header(&mut self, deadline: Option<Instant>) -> Result<Option<Header>, Close> {
        let mut deadline = deadline;
        loop {
            if let Some(h) = self.rx.header().map_err(|_| Close("a bad header"))? {
                return Ok(Some(h));
            }
            self.flush()?;
            match self.rx.fill(self.stream)? {
                Filled::Bytes(_) => {}
                Filled::Closed if self.rx.buffered() == 0 => return Ok(None),
                Filled::Closed => return Err(Close("it closed in the middle of a frame")),
                Filled::Blocked => {
                    if self.rx.buffered() > 0 && deadline.is_none() {
                        deadline = Some(self.frame_deadline());
                    }
                    self.wait_read(deadline)?;
                }
            }
        }
    }

    /// Waits for bytes; ends a put whose epoch was closed or whose time is up.
    fn wait_read(&mut self, deadline: Option<Instant>) -> Result<(), Close> {
        loop {
            if self.shared.stop.load(Ordering::Acquire) {
                return Err(Close("the transport stops"));
            }
            let now = Instant::now();
            if deadline.is_some_and(|d| now >= d) {
                return Err(Close("a frame took too long"));
            }
            self.check_put(now);
            let tick = now + if self.put.is_some() { TICK } else { IDLE_TICK };
            let until = deadline.map_or(tick, |d| d.min(tick));
            if self.waiter.wait(
                self.stream,
                Interest {
                    read: true,
                    write: false,
                },
                until,
            ) {
                return Ok(());
            }
        }
    }

    /// Drops a put that may not go on; what still comes for it is thrown away.
    fn check_put(&mut self, now: Instant) {
        let Some(p) = &self.put else { return };
        let why = if !p.guard.alive() {
            Refusal::StaleEpoch
        } else if now >= p.give_up {
            Refusal::Busy
        } else {
            return;
        };
        let op = p.op;
        self.put = None;
        self.refuse(op, why);
    }

    /// Reads the span list of a request into `spans`; gives its bytes, or what to answer instead.
    fn request(&mut self, h: &Header) -> Result<Result<u64, Refusal>, Close> {
        let deadline = Some(self.frame_deadline());
        let len = h.len as usize;
        if len > crate::transport::frame::SPANS_MAX * crate::transport::frame::SPAN_LEN {
            // Larger than any list: read past it, so that what follows is understood.
            self.discard(h)?;
            return Ok(Err(Refusal::TooLarge));
        }
        loop {
            if let Some(list) = self.rx.take(len) {
                if crc32c(list) != h.payload_crc {
                    return Ok(Err(Refusal::Integrity));
                }
                return Ok(decode_spans(list, h.count, &mut self.spans));
            }
            match self.rx.fill(self.stream)? {
                Filled::Bytes(_) => {}
                Filled::Closed => return Err(Close("it closed in the middle of a frame")),
                Filled::Blocked => self.wait_read(deadline)?,
            }
        }
    }

    fn discard(&mut self, h: &Header) -> Result<(), Close> {
        let deadline = Some(self.frame_deadline());
        let mut landing = Landing::new(h, Cursor::default());
        loop {
            match landing.step(&mut self.rx, self.stream, None, 0)? {
                Landed::Whole { .. } => return Ok(()),
                Landed::Blocked => self.wait_read(deadline)?,
                Landed::Closed => return Err(Close("it closed in the middle of a frame")),
            }
        }
    }

    /// Answers a get, piece by piece; each piece is admitted, leased and released by itself.
    fn get(&mut self, h: &Header, total: u64) -> Result<Result<(), Refusal>, Close> {
        let spans = std::mem::take(&mut self.spans);
        let (mut at, mut offset) = (Cursor::default(), 0);
        let mut answer = Ok(());
        while offset < total {
            let len = (total - offset).min(PIECE_MAX as u64);
            let guard = match self
                .shared
                .registry
                .enter(h.key, h.epoch, Access::RemoteRead)
            {
                Ok(guard) => guard,
                Err(refused) => {
                    answer = Err(refused);
                    break;
                }
            };
            self.piece.clear();
            let (next, _) = at.walk(&spans, len, |s| {
                self.piece.push(s);
                true
            });
            let registration = guard.registration();
            let lease = registration
                .blocks_of(&self.piece, &mut self.blocks)
                .and_then(|()| {
                    let until = Instant::now() + LEASE_WAIT;
                    registration
                        .pool
                        .read_until(&self.blocks, until)
                        .map_err(lease_refusal)
                });
            let lease = match lease {
                Ok(lease) => lease,
                Err(refused) => {
                    answer = Err(refused);
                    break;
                }
            };
            let piece = PieceOf {
                op: h.op,
                epoch: h.epoch,
                offset,
                spans: &spans,
                from: at,
                len: len as usize,
                direction: Direction::Get,
            };
            let tap = self.shared.options.tap.as_deref();
            if total <= SMALL && tap.is_none() {
                self.tx.append_piece(&lease, &piece);
                if self.tx.out.len() as u64 >= 2 * SMALL {
                    drop((lease, guard));
                    self.flush()?;
                }
            } else {
                self.tx.start_piece(&lease, &piece, tap);
                let mut held = Some((lease, guard));
                if !self.tx.needs_lease() {
                    held = None;
                }
                // First with the lease, for as long as that may take ...
                let give_back = Instant::now() + LEASE_HOLD;
                while let Some((lease, _)) = &held {
                    match self.tx.push(self.stream, Some((lease, &spans)))? {
                        Pushed::Blocked if Instant::now() < give_back => {
                            let interest = Interest {
                                read: false,
                                write: true,
                            };
                            self.waiter.wait(self.stream, interest, give_back);
                        }
                        Pushed::All => held = None,
                        _ => {
                            self.tx.detach(lease, &spans);
                            held = None;
                        }
                    }
                }
                // ... then without it.
                self.flush()?;
            }
            at = next;
            offset += len;
        }
        self.spans = spans;
        Ok(answer)
    }

    /// Sends everything gathered and the piece, which needs no lease any more.
    fn flush(&mut self) -> Result<(), Close> {
        let deadline = self.frame_deadline();
        loop {
            let until = match self.tx.push(self.stream, None)? {
                Pushed::All => return Ok(()),
                Pushed::Blocked => deadline,
                // A tap's delay is not the peer's fault: it does not count.
                Pushed::Held(t) => {
                    let tick = Instant::now() + TICK;
                    std::thread::sleep(t.min(tick).saturating_duration_since(Instant::now()));
                    if self.shared.stop.load(Ordering::Acquire) {
                        return Err(Close("the transport stops"));
                    }
                    continue;
                }
            };
            let now = Instant::now();
            if now >= until {
                return Err(Close("it does not read its answers"));
            }
            if self.shared.stop.load(Ordering::Acquire) {
                return Err(Close("the transport stops"));
            }
            self.check_put(now);
            let tick = until.min(now + TICK);
            self.waiter.wait(
                self.stream,
                Interest {
                    read: false,
                    write: true,
                },
                tick,
            );
        }
    }

    fn admit_put(&mut self, h: &Header, total: u64) -> Result<(), Refusal> {
        let guard = self
            .shared
            .registry
            .enter(h.key, h.epoch, Access::RemoteWrite)?;
        let registration = guard.registration();
        registration.blocks_of(&self.spans, &mut self.blocks)?;
        let until = Instant::now() + LEASE_WAIT;
        let lease = registration
            .pool
            .write_until(&self.blocks, until)
            .map_err(lease_refusal)?;
        std::mem::swap(&mut self.spans, &mut self.put_spans);
        let give_up = Instant::now() + PUT_MAX;
        self.put = Some(Put {
            op: h.op,
            lease,
            guard,
            total,
            at: Cursor::default(),
            got: 0,
            bad_check: false,
            receipt: 0,
            give_up,
        });
        Ok(())
    }

    /// Lands a piece of the put under way, or throws it away.
    fn data(&mut self, h: &Header) -> Result<(), Close> {
        let mine =
            |p: &Put| p.op == h.op && p.got == h.offset && p.got + u64::from(h.len) <= p.total;
        match &self.put {
            Some(p) if h.len == 0 || (p.op == h.op && !mine(p)) => {
                return Err(Close("a put's data out of order"));
            }
            _ => {}
        }
        let deadline = Some(self.frame_deadline());
        let mut landing = Landing::new(h, self.put.as_ref().map_or(Cursor::default(), |p| p.at));
        let mut whole_in_place = true;
        let ok = loop {
            self.check_put(Instant::now());
            let into = match &mut self.put {
                Some(p) if p.op == h.op => Some((&mut p.lease, self.put_spans.as_slice())),
                _ => {
                    whole_in_place = false;
                    None
                }
            };
            match landing.step(
                &mut self.rx,
                self.stream,
                into,
                crate::transport::frame::HEADER_LEN,
            )? {
                Landed::Whole { ok } => break ok,
                Landed::Blocked => self.wait_read(deadline)?,
                Landed::Closed => return Err(Close("it closed in the middle of a frame")),
            }
        };
        if let Some(p) = self.put.as_mut().filter(|p| p.op == h.op && whole_in_place) {
            p.bad_check |= !ok;
            p.receipt = receipt(p.receipt, h.payload_crc);
            p.at = p.at.advance(&self.put_spans, u64::from(h.len));
            p.got += u64::from(h.len);
            if p.got == p.total {
                let (bad, receipt) = (p.bad_check, p.receipt);
                // The lease ends before the answer is sent: done means that a reader can get in.
                self.put = None;
                if bad {
                    self.refuse(h.op, Refusal::Integrity);
                } else {
                    let done = Header {
                        offset: u64::from(receipt),
                        ..Header::new(Kind::Done, h.op)
                    };
                    self.tx.out.extend_from_slice(&done.encode());
                }
            }
        }
        Ok(())
    }
}
