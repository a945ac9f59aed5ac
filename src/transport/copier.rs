//! The link of paths that copy from memory to memory: what `local` and `shm` have in common.

use std::time::{Duration, Instant};

use crate::mem::{ReadLease, RemoteRegion, Why, WriteLease};
use crate::transport::ops::{Op, Ops};
use crate::transport::span::Cursor;
use crate::transport::tap::{Direction, Pace, Tap, TapPoint};
use crate::transport::{
    CancelOutcome, Completion, Link, Local, PIECE_MAX, Path, Refusal, Rejected, Span, Transfer,
    TransferId, TransportError,
};
use std::sync::Arc;

/// How one piece fared.
pub(super) enum Reached {
    /// All of it is where it belongs, and visible.
    Done,
    /// Its blocks are leased to somebody else.
    Busy,
    /// The peer has been asked and has not answered; call again with the same piece.
    Waiting,
    /// The transfer ends.
    Failed(TransportError),
}

/// How a path gets at a peer's memory.
pub(super) trait Reach: Send {
    const PATH: Path;
    /// Most bytes per piece.
    const PIECE: u64;

    /// Copies a piece of the peer's memory to `to`, after admission under its grant.
    fn read(&mut self, from: &RemoteRegion, piece: &[Span], to: &mut Sink<'_>) -> Reached;

    /// Copies a piece of ours into the peer's memory; from `aside` (packed) if given.
    fn write(
        &mut self,
        to: &RemoteRegion,
        piece: &[Span],
        from: &ReadLease,
        aside: Option<&[u8]>,
    ) -> Reached;

    /// Sleeps until something may have changed, `until` at the latest.
    fn doze(&mut self, until: Instant);

    /// Gives up a write that is [`Reached::Waiting`]; false if the peer may still read our memory.
    fn abandon(&mut self, until: Instant) -> bool;

    /// Why nothing can move any more.
    fn dead(&self) -> Option<TransportError>;
}

/// Where a piece lands.
pub(super) enum Sink<'a> {
    /// In the blocks of a get.
    Lease(&'a mut WriteLease),
    /// Packed, in a buffer.
    Aside(&'a mut Vec<u8>),
}

impl Sink<'_> {
    /// Has `fill` write the bytes of one span.
    pub(super) fn put(
        &mut self,
        s: &Span,
        fill: impl FnOnce(&mut [u8]) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        match self {
            Self::Lease(lease) => fill(lease.try_bytes_mut(s.local_off, s.len as usize)?),
            Self::Aside(out) => {
                let start = out.len();
                out.resize(start + s.len as usize, 0);
                fill(&mut out[start..])
            }
        }
    }
}

/// How long a piece waits for blocks that somebody else holds.
const LEASE_WAIT: Duration = Duration::from_millis(500);
/// How long a waiting link sleeps before it tries for a lease again: nobody wakes it.
const NAP: Duration = Duration::from_micros(50);
/// Bytes moved in one `poll`, so that a caller with other things to do gets to them.
const BUDGET: u64 = 4 << 20;
/// How long a put whose time is up waits for the peer to stop reading.
const GRACE: Duration = Duration::from_millis(250);

/// A link that copies.
pub(super) struct Copier<R: Reach> {
    reach: R,
    ops: Ops,
    tap: Option<Arc<dyn Tap>>,
    pace: Option<Arc<Pace>>,
    piece: Vec<Span>,
    aside: Vec<u8>,
    /// The transfer whose next piece lies aside for a tap, and when the tap lets it go.
    held: Option<(TransferId, Instant)>,
    /// The transfer whose blocks are busy, and since when.
    stuck: Option<(TransferId, Instant)>,
    /// The transfer whose piece the peer is reading.
    waiting: Option<TransferId>,
    /// The transfer whose next piece the pace has let through.
    paid: Option<TransferId>,
}

/// What a link waits for.
enum Next {
    /// Nothing: there is more to move.
    Now,
    At(Instant),
    Event,
}

impl<R: Reach> Copier<R> {
    pub(super) fn new(reach: R, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> Self {
        Self {
            reach,
            ops: Ops::new(R::PATH),
            tap,
            pace,
            piece: Vec::new(),
            aside: Vec::new(),
            held: None,
            stuck: None,
            waiting: None,
            paid: None,
        }
    }

    fn progress(&mut self) -> Next {
        let mut left = BUDGET;
        loop {
            if let Some(e) = self.reach.dead() {
                self.waiting = None;
                self.ops.end_all(e);
                return Next::Event;
            }
            let now = Instant::now();
            if self.ops.next_deadline().is_some_and(|d| now >= d) {
                if let Some(id) = self.waiting
                    && self.ops.get(id).is_some_and(|op| now >= op.deadline)
                {
                    self.stop(id, now + GRACE);
                }
                self.ops.expire(now);
            }
            let Some(id) = self.ops.next() else {
                return Next::Event;
            };
            if left == 0 {
                return Next::Now;
            }
            match self.step(id, now) {
                Ok((moved, None)) => left = left.saturating_sub(moved),
                Ok((_, Some(next))) => return next,
                Err(e) => {
                    self.waiting = None;
                    self.ops.end(id, Err(e));
                }
            }
        }
    }

    /// Moves a piece of `id`; gives the bytes moved and, if none can move now, what to wait for.
    fn step(
        &mut self,
        id: TransferId,
        now: Instant,
    ) -> Result<(u64, Option<Next>), TransportError> {
        let Some(op) = self.ops.get(id) else {
            return Ok((0, None));
        };
        let piece_max = if self.tap.is_some() {
            R::PIECE.min(PIECE_MAX as u64)
        } else {
            R::PIECE
        };
        let held = self.held.filter(|(other, _)| *other == id);
        if let Some((_, until)) = held
            && now < until
        {
            return Ok((0, Some(Next::At(until))));
        }
        self.piece.clear();
        let (next, len) = op
            .at
            .walk(&op.spans, (op.total - op.issued).min(piece_max), |s| {
                if self.piece.len() == crate::transport::frame::SPANS_MAX {
                    return false;
                }
                self.piece.push(s);
                true
            });
        if let Some(pace) = self.pace.as_ref().filter(|_| self.paid != Some(id)) {
            if let Err(again) = pace.take(len, now) {
                return Ok((0, Some(Next::At(again))));
            }
            self.paid = Some(id);
        }
        if let Some(tap) = self.tap.clone().filter(|_| held.is_none()) {
            return self.read_aside(id, len, now, tap.as_ref());
        }
        let reached = match &mut op.local {
            Local::GetInto(lease) if held.is_some() => land_aside(lease, &self.piece, &self.aside),
            Local::GetInto(lease) => {
                self.reach
                    .read(&op.remote, &self.piece, &mut Sink::Lease(lease))
            }
            Local::PutFrom(lease) => {
                let aside = held.map(|_| self.aside.as_slice());
                self.reach.write(&op.remote, &self.piece, lease, aside)
            }
        };
        self.arrived(id, reached, now, next, len)
    }

    /// Has the tap see a piece before it goes anywhere.
    fn read_aside(
        &mut self,
        id: TransferId,
        len: u64,
        now: Instant,
        tap: &dyn Tap,
    ) -> Result<(u64, Option<Next>), TransportError> {
        let Some(op) = self.ops.get(id) else {
            return Ok((0, None));
        };
        self.aside.clear();
        let (direction, reached) = match &op.local {
            Local::GetInto(_) => {
                let mut sink = Sink::Aside(&mut self.aside);
                (
                    Direction::Get,
                    self.reach.read(&op.remote, &self.piece, &mut sink),
                )
            }
            Local::PutFrom(lease) => {
                for s in &self.piece {
                    self.aside
                        .extend_from_slice(lease.bytes(s.local_off, s.len as usize));
                }
                (Direction::Put, Reached::Done)
            }
        };
        if !matches!(reached, Reached::Done) {
            return self.arrived(id, reached, now, Cursor::default(), 0);
        }
        let offset = self.piece.first().map_or(0, |s| match direction {
            Direction::Get => s.remote_off,
            Direction::Put => s.local_off,
        });
        let at = TapPoint {
            direction,
            epoch: op.remote.epoch,
            offset,
            len: len as usize,
        };
        tap.source_read(at, &mut self.aside);
        self.held = Some((id, now + tap.hold(at)));
        Ok((0, None))
    }

    fn arrived(
        &mut self,
        id: TransferId,
        reached: Reached,
        now: Instant,
        next: Cursor,
        len: u64,
    ) -> Result<(u64, Option<Next>), TransportError> {
        match reached {
            Reached::Busy => {
                let since = self
                    .stuck
                    .filter(|(other, _)| *other == id)
                    .map_or(now, |(_, t)| t);
                self.stuck = Some((id, since));
                if now < since + LEASE_WAIT {
                    return Ok((0, Some(Next::At(now + NAP))));
                }
                self.stuck = None;
                Err(Refusal::Busy.into())
            }
            Reached::Waiting => {
                self.waiting = Some(id);
                Ok((0, Some(Next::Event)))
            }
            Reached::Failed(e) => Err(e),
            Reached::Done => {
                (self.waiting, self.stuck, self.held, self.paid) = (None, None, None, None);
                if let Some(op) = self.ops.get(id) {
                    (op.at, op.issued, op.done) = (next, op.issued + len, op.done + len);
                    if op.done == op.total {
                        self.ops.end(id, Ok(()));
                    }
                }
                Ok((len, None))
            }
        }
    }

    /// Makes sure that the peer has stopped reading the memory of `id`; gives what had to be
    /// quarantined because it could not be shown.
    fn stop(&mut self, id: TransferId, until: Instant) -> u64 {
        if self.waiting != Some(id) {
            return 0;
        }
        self.waiting = None;
        if self.reach.abandon(until) {
            return 0;
        }
        match self.ops.get(id) {
            Some(Op {
                local: Local::PutFrom(lease),
                ..
            }) => lease
                .pool()
                .quarantine(lease.blocks(), Why::ReaderNotDrained)
                .unwrap_or(0),
            _ => 0,
        }
    }
}

/// Lands a piece that a tap has let go.
fn land_aside(lease: &mut WriteLease, piece: &[Span], aside: &[u8]) -> Reached {
    let mut from = aside;
    for s in piece {
        let (now, later) = from.split_at(s.len as usize);
        match lease.try_bytes_mut(s.local_off, now.len()) {
            Ok(to) => to.copy_from_slice(now),
            Err(e) => return Reached::Failed(e.into()),
        }
        from = later;
    }
    Reached::Done
}

impl<R: Reach> Link for Copier<R> {
    fn submit(&mut self, transfer: Transfer) -> Result<TransferId, Box<Rejected>> {
        match self.reach.dead() {
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
            let next = self.progress();
            if self.ops.has_ended() || self.ops.live() == 0 {
                return self.ops.take(out);
            }
            let now = Instant::now();
            if now >= deadline {
                return 0;
            }
            let until = self
                .ops
                .next_deadline()
                .map_or(deadline, |d| d.min(deadline));
            match next {
                Next::Now => {}
                Next::At(t) => std::thread::sleep(until.min(t).saturating_duration_since(now)),
                Next::Event => self.reach.doze(until),
            }
        }
    }

    fn cancel(&mut self, id: TransferId, deadline: Instant) -> CancelOutcome {
        // Copies of ours happen inside `poll` and `wait` only; the peer's may be under way.
        let bytes = self.stop(id, deadline);
        match (self.ops.end(id, Err(TransportError::Cancelled)), bytes) {
            (false, _) => CancelOutcome::NotInFlight,
            (true, 0) => CancelOutcome::Done,
            (true, bytes) => CancelOutcome::Quarantined { bytes },
        }
    }

    fn in_flight(&self) -> usize {
        self.ops.in_flight()
    }
}

impl<R: Reach> Drop for Copier<R> {
    fn drop(&mut self) {
        if let Some(id) = self.waiting {
            self.stop(id, Instant::now() + GRACE);
        }
    }
}
