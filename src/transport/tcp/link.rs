//! The initiator's side of one connection, driven by its caller.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::transport::frame::{
    HEADER_LEN, Header, Kind, REQUEST_BYTES_MAX, SPANS_MAX, VERSION, crc32c, encode_span, receipt,
};
use crate::transport::ops::Ops;
use crate::transport::rx::{Filled, Landed, Landing, Rx};
use crate::transport::span::Cursor;
use crate::transport::tap::{Direction, Pace, Tap};
use crate::transport::tx::{PieceOf, Pushed, Tx};
use crate::transport::wait::{Interest, Waiter};
use crate::transport::{
    CancelOutcome, Completion, Link, Local, PIECE_MAX, Path, Refusal, Rejected, Transfer,
    TransferId, TransportError,
};

/// Bytes asked for and not yet here, or sent and not yet applied. More does not help (what is in
/// flight should fit the caches between the two ends), less leaves the wire idle between requests.
const WINDOW: u64 = 2 << 20;
/// Requests unanswered at a time.
const REQUESTS_MAX: usize = 256;
/// Answers smaller than this come several to a read.
const SMALL: u64 = 16 << 10;

/// A request that the peer has not answered in full. Answers come in the order of requests.
struct Request {
    /// Its number on the wire.
    op: u64,
    id: TransferId,
    epoch: u64,
    /// Where its bytes begin in the transfer, and how many they are.
    at: Cursor,
    offset: u64,
    len: u64,
    /// Bytes landed, or handed to the kernel.
    moved: u64,
    put: bool,
    /// Of the bytes of a put, see [`receipt`].
    receipt: u32,
}

/// One connection to a [`TcpTransport`](super::TcpTransport).
pub struct TcpLink {
    stream: TcpStream,
    rx: Rx,
    tx: Tx,
    waiter: Waiter,
    ops: Ops,
    requests: VecDeque<Request>,
    /// Sum of what `requests` have still to move.
    window: u64,
    /// The answer being landed, and what of it is for the front request.
    landing: Option<Landing>,
    /// Which request (its number) the piece in `tx` belongs to.
    sending: Option<u64>,
    next_op: u64,
    dead: Option<TransportError>,
    tap: Option<Arc<dyn Tap>>,
    pace: Option<Arc<Pace>>,
    /// When a pace or tap lets the next bytes go.
    not_before: Option<Instant>,
    blocked: bool,
}

impl TcpLink {
    /// Connects and says hello.
    pub fn connect(
        to: SocketAddr,
        deadline: Instant,
        tap: Option<Arc<dyn Tap>>,
        pace: Option<Arc<Pace>>,
    ) -> Result<Self, TransportError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TransportError::DeadlineExceeded);
        }
        let stream = TcpStream::connect_timeout(&to, left).map_err(|e| match e.kind() {
            std::io::ErrorKind::TimedOut => TransportError::DeadlineExceeded,
            _ => TransportError::io("connect", &e),
        })?;
        stream
            .set_nodelay(true)
            .map_err(|e| TransportError::io("setsockopt", &e))?;
        let mut link = Self {
            stream,
            rx: Rx::new(),
            tx: Tx::new(),
            waiter: Waiter::new(),
            ops: Ops::new(Path::Tcp),
            requests: VecDeque::new(),
            window: 0,
            landing: None,
            sending: None,
            next_op: 1,
            dead: None,
            tap,
            pace,
            not_before: None,
            blocked: false,
        };
        let hello = Header {
            offset: VERSION,
            ..Header::new(Kind::Hello, 0)
        };
        link.tx.out.extend_from_slice(&hello.encode());
        link.welcome(deadline)?;
        Ok(link)
    }

    fn welcome(&mut self, deadline: Instant) -> Result<(), TransportError> {
        let lost = |e: std::io::Error| TransportError::PeerLost {
            errno: e.raw_os_error().unwrap_or(0),
        };
        loop {
            let pushed = self.tx.push(&self.stream, None).map_err(lost)?;
            match self.rx.header() {
                Ok(Some(h)) if h.kind == Kind::Welcome && h.offset == VERSION && h.len == 0 => {
                    return Ok(());
                }
                Ok(None) => {}
                _ => {
                    return Err(TransportError::Connection {
                        what: "the peer speaks another protocol",
                    });
                }
            }
            match self.rx.fill(&self.stream).map_err(lost)? {
                Filled::Bytes(_) => continue,
                Filled::Closed => return Err(TransportError::PeerLost { errno: 0 }),
                Filled::Blocked => {}
            }
            let write = pushed == Pushed::Blocked;
            if !self
                .waiter
                .wait(&self.stream, Interest { read: true, write }, deadline)
            {
                return Err(TransportError::DeadlineExceeded);
            }
        }
    }

    /// Moves whatever can move now, both ways.
    fn progress(&mut self) {
        if self.dead.is_none()
            && let Err(e) = self.receive().and_then(|()| self.send())
        {
            self.die(e);
        }
        self.expire(Instant::now());
    }

    fn die(&mut self, e: TransportError) {
        self.dead = Some(e);
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.requests.clear();
        self.window = 0;
        self.landing = None;
        self.ops.end_all(e);
    }

    fn expire(&mut self, now: Instant) {
        let (tx, sending, requests) = (&mut self.tx, self.sending, &self.requests);
        self.ops.expire_after(now, |op| {
            detach(tx, sending, requests, op.id, &op.local, &op.spans)
        });
    }

    /// Ends a transfer; a piece of it that is half on the wire goes on from a copy.
    fn end(&mut self, id: TransferId, outcome: Result<(), TransportError>) -> bool {
        if let Some(op) = self.ops.get(id) {
            detach(
                &mut self.tx,
                self.sending,
                &self.requests,
                id,
                &op.local,
                &op.spans,
            );
        }
        self.ops.end(id, outcome)
    }

    fn send(&mut self) -> Result<(), TransportError> {
        let lost = |e: std::io::Error| TransportError::PeerLost {
            errno: e.raw_os_error().unwrap_or(0),
        };
        self.blocked = false;
        self.not_before = None;
        loop {
            // A put's data follow its request: no other request may come between.
            if !self.tx.has_piece() && !self.next_piece() {
                while self.tx.out.len() < SMALL as usize && self.next_request() {}
                self.next_piece();
            }
            if self.tx.idle() {
                return Ok(());
            }
            let id = self
                .sending
                .and_then(|op| self.requests.iter().find(|r| r.op == op))
                .map(|r| r.id);
            let source = match id.and_then(|id| self.ops.get(id)) {
                Some(op) => match &op.local {
                    Local::PutFrom(lease) => Some((lease, op.spans.as_slice())),
                    Local::GetInto(_) => None,
                },
                None => None,
            };
            match self.tx.push(&self.stream, source).map_err(lost)? {
                Pushed::All => {}
                Pushed::Blocked => {
                    self.blocked = true;
                    return Ok(());
                }
                Pushed::Held(t) => {
                    self.not_before = Some(t);
                    return Ok(());
                }
            }
        }
    }

    /// Starts the next piece of the put whose request went last. False if there is none.
    fn next_piece(&mut self) -> bool {
        let Some(r) = self
            .requests
            .back_mut()
            .filter(|r| r.put && r.moved < r.len)
        else {
            return false;
        };
        let Some(op) = self.ops.get(r.id) else {
            // It ended: the peer is told that no more comes.
            r.moved = r.len;
            self.tx
                .out
                .extend_from_slice(&Header::new(Kind::Abort, r.op).encode());
            return true;
        };
        let Local::PutFrom(lease) = &op.local else {
            return false;
        };
        let len = (r.len - r.moved).min(PIECE_MAX as u64) as usize;
        let piece = PieceOf {
            op: r.op,
            epoch: r.epoch,
            offset: r.moved,
            spans: &op.spans,
            from: r.at,
            len,
            direction: Direction::Put,
        };
        let check = self.tx.start_piece(lease, &piece, self.tap.as_deref());
        r.receipt = receipt(r.receipt, check);
        self.sending = Some(r.op);
        r.at = r.at.advance(&op.spans, len as u64);
        r.moved += len as u64;
        true
    }

    /// Queues the request for the next part of the oldest transfer. False if there is none, or if the
    /// window or the pace says no.
    fn next_request(&mut self) -> bool {
        if self
            .requests
            .back()
            .is_some_and(|r| r.put && r.moved < r.len)
        {
            return false;
        }
        let Some(id) = self.ops.next() else {
            return false;
        };
        if self.requests.len() >= REQUESTS_MAX {
            return false;
        }
        let window = self.window;
        let Some(op) = self.ops.get(id) else {
            return false;
        };
        let wanted = (op.total - op.issued).min(REQUEST_BYTES_MAX);
        if window > 0 && window + wanted > WINDOW {
            return false;
        }
        if let Some(Err(again)) = self.pace.as_ref().map(|p| p.take(wanted, Instant::now())) {
            self.not_before = Some(again);
            return false;
        }
        let put = matches!(op.local, Local::PutFrom(_));
        let out = &mut self.tx.out;
        let head = out.len();
        out.resize(head + HEADER_LEN, 0);
        let mut count = 0u16;
        let (next, len) = op.at.walk(&op.spans, wanted, |s| {
            if usize::from(count) == SPANS_MAX {
                return false;
            }
            encode_span(s.remote_off, s.len as u32, out);
            count += 1;
            true
        });
        let mut header = Header::new(if put { Kind::Put } else { Kind::Get }, self.next_op);
        header.key = op.remote.key;
        header.epoch = op.remote.epoch;
        header.count = count;
        header.len = (out.len() - head - HEADER_LEN) as u32;
        header.payload_crc = crc32c(&out[head + HEADER_LEN..]);
        out[head..head + HEADER_LEN].copy_from_slice(&header.encode());
        self.requests.push_back(Request {
            op: self.next_op,
            id,
            epoch: op.remote.epoch,
            at: op.at,
            offset: op.issued,
            len,
            moved: 0,
            put,
            receipt: 0,
        });
        (op.at, op.issued) = (next, op.issued + len);
        self.next_op += 1;
        self.window += len;
        true
    }

    fn receive(&mut self) -> Result<(), TransportError> {
        let lost = |e: std::io::Error| TransportError::PeerLost {
            errno: e.raw_os_error().unwrap_or(0),
        };
        loop {
            if self.landing.is_some() {
                if !self.land().map_err(lost)? {
                    return Ok(());
                }
                continue;
            }
            match self.rx.header() {
                Ok(Some(h)) => self.answer(&h)?,
                Ok(None) => match self.rx.fill(&self.stream).map_err(lost)? {
                    Filled::Bytes(_) => {}
                    Filled::Blocked => return Ok(()),
                    Filled::Closed => return Err(TransportError::PeerLost { errno: 0 }),
                },
                Err(_) => {
                    return Err(TransportError::Connection {
                        what: "a header failed its check",
                    });
                }
            }
        }
    }

    /// Takes a header in. Whatever does not fit the oldest unanswered request breaks the connection.
    fn answer(&mut self, h: &Header) -> Result<(), TransportError> {
        let broken = |what| Err(TransportError::Connection { what });
        let Some(r) = self.requests.front_mut().filter(|r| r.op == h.op) else {
            return broken("an answer to no question");
        };
        match h.kind {
            Kind::Data if !r.put => {
                let fits = h.offset == r.moved && u64::from(h.len) <= r.len - r.moved && h.len > 0;
                if !fits {
                    return broken("data out of order");
                }
                self.landing = Some(Landing::new(h, r.at));
                if h.epoch != r.epoch {
                    // A reply under another epoch than asked for is not landed.
                    let id = r.id;
                    self.end(id, Err(Refusal::StaleEpoch.into()));
                }
                Ok(())
            }
            Kind::Done if r.put && r.moved == r.len => {
                let (id, len) = (r.id, r.len);
                let in_part = self.tx.has_piece() && self.sending == Some(h.op);
                if in_part || h.offset != u64::from(r.receipt) {
                    return broken("an acknowledgement of other bytes than were sent");
                }
                self.finish_front();
                self.credit(id, len);
                Ok(())
            }
            Kind::Refused => {
                let id = r.id;
                let why = Refusal::from_code(h.code).unwrap_or(Refusal::BadRequest);
                // Detached first: it looks the request up.
                self.end(id, Err(why.into()));
                self.finish_front();
                Ok(())
            }
            _ => broken("a frame that does not belong here"),
        }
    }

    fn finish_front(&mut self) {
        if let Some(r) = self.requests.pop_front() {
            self.window -= r.len;
        }
    }

    /// So many bytes of a transfer are done.
    fn credit(&mut self, id: TransferId, bytes: u64) {
        if let Some(op) = self.ops.get(id) {
            op.done += bytes;
            if op.done == op.total {
                self.ops.end(id, Ok(()));
            }
        }
    }

    /// Goes on landing; true when the piece is whole.
    fn land(&mut self) -> std::io::Result<bool> {
        let (Some(landing), Some(r)) = (&mut self.landing, self.requests.front_mut()) else {
            return Ok(true);
        };
        // What comes right behind: the header of the next large piece, or many small answers.
        let extra = if r.len < SMALL {
            usize::MAX
        } else {
            HEADER_LEN
        };
        let into = match self.ops.get(r.id) {
            Some(op) => match &mut op.local {
                Local::GetInto(lease) => Some((lease, op.spans.as_slice())),
                Local::PutFrom(_) => None,
            },
            None => None,
        };
        let landed_for_caller = into.is_some();
        match landing.step(&mut self.rx, &self.stream, into, extra)? {
            Landed::Blocked => Ok(false),
            Landed::Closed => Err(std::io::Error::from_raw_os_error(libc::ECONNRESET)),
            Landed::Whole { ok } => {
                let (id, offset, len) = (r.id, r.offset + r.moved, landing.len());
                r.moved += len;
                r.at = landing.after();
                let whole = r.moved == r.len;
                self.landing = None;
                if whole {
                    self.finish_front();
                }
                if !ok {
                    let e = TransportError::Integrity {
                        offset,
                        len: len as u32,
                    };
                    self.end(id, Err(e));
                } else if landed_for_caller {
                    self.credit(id, len);
                }
                Ok(true)
            }
        }
    }
}

/// Copies aside what is left of a piece of `id`, so that its lease can end.
fn detach(
    tx: &mut Tx,
    sending: Option<u64>,
    requests: &VecDeque<Request>,
    id: TransferId,
    local: &Local,
    spans: &[crate::transport::Span],
) {
    if let Local::PutFrom(lease) = local
        && tx.needs_lease()
        && requests.iter().any(|r| Some(r.op) == sending && r.id == id)
    {
        tx.detach(lease, spans);
    }
}

/// A wait looks up at least this often, whatever else it waits for.
const LOOK_UP: Duration = Duration::from_secs(1);

impl Link for TcpLink {
    fn submit(&mut self, transfer: Transfer) -> Result<TransferId, Box<Rejected>> {
        match self.dead {
            Some(error) => Err(Box::new(Rejected { error, transfer })),
            None => self.ops.submit(transfer),
        }
    }

    fn poll(&mut self, out: &mut [Completion]) -> usize {
        self.progress();
        self.ops.take(out)
    }

    fn wait(&mut self, out: &mut [Completion], deadline: Instant) -> usize {
        loop {
            self.progress();
            if self.ops.has_ended() || self.ops.live() == 0 {
                return self.ops.take(out);
            }
            let now = Instant::now();
            if now >= deadline {
                return 0;
            }
            let mut until = deadline.min(now + LOOK_UP);
            for t in [self.ops.next_deadline(), self.not_before]
                .into_iter()
                .flatten()
            {
                until = until.min(t);
            }
            let interest = Interest {
                read: true,
                write: self.blocked,
            };
            self.waiter.wait(&self.stream, interest, until);
        }
    }

    fn cancel(&mut self, id: TransferId, _deadline: Instant) -> CancelOutcome {
        // Memory is read and written inside `poll` and `wait` only; what a put has half on the wire
        // goes on from a copy, and what a get still receives is thrown away.
        if self.end(id, Err(TransportError::Cancelled)) {
            CancelOutcome::Done
        } else {
            CancelOutcome::NotInFlight
        }
    }

    fn in_flight(&self) -> usize {
        self.ops.in_flight()
    }
}
