//! The sending half of a framed byte stream, without waiting: payloads go to the kernel straight from
//! leased memory.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::mem::ReadLease;
use crate::transport::frame::{Crc, HEADER_LEN, Header, Kind, crc32c};
use crate::transport::span::Cursor;
use crate::transport::tap::{Direction, Tap, TapPoint};
use crate::transport::{PIECE_MAX, Span};

/// Most runs in one system call.
const RUNS_MAX: usize = 128;

/// A payload on its way out.
struct Piece {
    header: [u8; HEADER_LEN],
    /// Bytes sent, header included.
    sent: usize,
    len: usize,
    from: Cursor,
    /// The payload lies in the scratch buffer, not in leased memory.
    detached: bool,
    not_before: Option<Instant>,
}

/// The sending half: small frames gathered in a buffer, then at most one piece.
pub(super) struct Tx {
    /// Frames to send, header and payload, before the piece.
    pub(super) out: Vec<u8>,
    out_sent: usize,
    piece: Option<Piece>,
    scratch: Vec<u8>,
}

/// How far a push got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pushed {
    /// Everything is with the kernel.
    All,
    /// The kernel takes no more now.
    Blocked,
    /// A tap holds the piece back until then.
    Held(Instant),
}

/// What a piece is about, besides its bytes.
pub(super) struct PieceOf<'a> {
    pub(super) op: u64,
    pub(super) epoch: u64,
    /// Offset of the piece in its request, bytes.
    pub(super) offset: u64,
    pub(super) spans: &'a [Span],
    pub(super) from: Cursor,
    pub(super) len: usize,
    pub(super) direction: Direction,
}

impl Tx {
    pub(super) fn new() -> Self {
        Self {
            out: Vec::with_capacity(64 << 10),
            out_sent: 0,
            piece: None,
            scratch: Vec::new(),
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.out.is_empty() && self.piece.is_none()
    }

    /// A piece is under way and still needs its lease.
    pub(super) fn needs_lease(&self) -> bool {
        self.piece.as_ref().is_some_and(|p| !p.detached)
    }

    pub(super) fn has_piece(&self) -> bool {
        self.piece.is_some()
    }

    /// Computes the check of a payload and makes it the piece to send. With a tap, the payload is
    /// copied aside for it, and the lease is not needed any more. Gives the check.
    pub(super) fn start_piece(
        &mut self,
        lease: &ReadLease,
        p: &PieceOf<'_>,
        tap: Option<&dyn Tap>,
    ) -> u32 {
        debug_assert!(self.piece.is_none() && p.len <= PIECE_MAX);
        let mut header = Header::new(Kind::Data, p.op);
        header.epoch = p.epoch;
        header.offset = p.offset;
        header.len = p.len as u32;
        let (mut detached, mut not_before) = (false, None);
        if let Some(tap) = tap {
            self.gather(lease, p.spans, p.from, 0, p.len);
            let mut offset = 0;
            p.from.walk(p.spans, 1, |s| {
                offset = if p.direction == Direction::Get {
                    s.remote_off
                } else {
                    s.local_off
                };
                true
            });
            let at = TapPoint {
                direction: p.direction,
                epoch: p.epoch,
                offset,
                len: p.len,
            };
            tap.source_read(at, &mut self.scratch[..p.len]);
            header.payload_crc = crc32c(&self.scratch[..p.len]);
            tap.wire(at, &mut self.scratch[..p.len]);
            let hold = tap.hold(at);
            not_before = (!hold.is_zero()).then(|| Instant::now() + hold);
            detached = true;
        } else {
            let mut crc = Crc::new();
            p.from.walk(p.spans, p.len as u64, |s| {
                crc.update(lease.bytes(s.local_off, s.len as usize));
                true
            });
            header.payload_crc = crc.value();
        }
        self.piece = Some(Piece {
            header: header.encode(),
            sent: 0,
            len: p.len,
            from: p.from,
            detached,
            not_before,
        });
        header.payload_crc
    }

    /// Appends a piece to the buffer of small frames, which needs no lease once this returns.
    pub(super) fn append_piece(&mut self, lease: &ReadLease, p: &PieceOf<'_>) {
        let start = self.out.len();
        self.out.resize(start + HEADER_LEN, 0);
        p.from.walk(p.spans, p.len as u64, |s| {
            self.out
                .extend_from_slice(lease.bytes(s.local_off, s.len as usize));
            true
        });
        let mut header = Header::new(Kind::Data, p.op);
        header.epoch = p.epoch;
        header.offset = p.offset;
        header.len = p.len as u32;
        header.payload_crc = crc32c(&self.out[start + HEADER_LEN..]);
        self.out[start..start + HEADER_LEN].copy_from_slice(&header.encode());
    }

    /// Copies what is left of the piece aside, so that its lease can end.
    pub(super) fn detach(&mut self, lease: &ReadLease, spans: &[Span]) {
        if let Some(mut p) = self.piece.take() {
            if !p.detached {
                let skip = p.sent.saturating_sub(HEADER_LEN);
                self.gather(lease, spans, p.from, skip, p.len);
                p.detached = true;
            }
            self.piece = Some(p);
        }
    }

    fn gather(&mut self, lease: &ReadLease, spans: &[Span], from: Cursor, skip: usize, len: usize) {
        self.scratch.resize(PIECE_MAX, 0);
        let mut to = skip;
        from.advance(spans, skip as u64)
            .walk(spans, (len - skip) as u64, |s| {
                let n = s.len as usize;
                self.scratch[to..to + n].copy_from_slice(lease.bytes(s.local_off, n));
                to += n;
                true
            });
    }

    /// Sends what the kernel takes. `source`: the lease and spans of the piece, unless it is detached.
    pub(super) fn push(
        &mut self,
        fd: impl AsFd,
        source: Option<(&ReadLease, &[Span])>,
    ) -> io::Result<Pushed> {
        loop {
            if self.idle() {
                return Ok(Pushed::All);
            }
            let mut iov = [IoSlice::new(&[]); RUNS_MAX];
            let mut runs = 0;
            // A piece that is half out goes on before anything else.
            let begun = self.piece.as_ref().is_some_and(|p| p.sent > 0);
            if !begun && self.out_sent < self.out.len() {
                iov[0] = IoSlice::new(&self.out[self.out_sent..]);
                runs = 1;
            }
            if let Some(p) = &self.piece {
                let held = p.not_before.filter(|&t| Instant::now() < t);
                if let Some(until) = held {
                    if runs == 0 {
                        return Ok(Pushed::Held(until));
                    }
                } else {
                    if p.sent < HEADER_LEN {
                        iov[runs] = IoSlice::new(&p.header[p.sent..]);
                        runs += 1;
                    }
                    let skip = p.sent.saturating_sub(HEADER_LEN);
                    match (p.detached, source) {
                        (false, Some((lease, spans))) => {
                            let at = p.from.advance(spans, skip as u64);
                            at.walk(spans, (p.len - skip) as u64, |s| {
                                if runs == RUNS_MAX {
                                    return false;
                                }
                                iov[runs] = IoSlice::new(lease.bytes(s.local_off, s.len as usize));
                                runs += 1;
                                true
                            });
                        }
                        _ => {
                            debug_assert!(p.detached, "a piece without its lease");
                            iov[runs] = IoSlice::new(&self.scratch[skip..p.len]);
                            runs += 1;
                        }
                    }
                }
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let none = &mut SendAncillaryBuffer::default();
            let mut n = match rustix::net::sendmsg(&fd, &iov[..runs], none, flags) {
                Ok(n) => n,
                Err(rustix::io::Errno::AGAIN) => return Ok(Pushed::Blocked),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            };
            let small = if begun {
                0
            } else {
                n.min(self.out.len() - self.out_sent)
            };
            self.out_sent += small;
            n -= small;
            if self.out_sent == self.out.len() {
                self.out.clear();
                self.out_sent = 0;
            }
            if let Some(p) = &mut self.piece {
                p.sent += n;
                if p.sent == HEADER_LEN + p.len {
                    self.piece = None;
                }
            }
        }
    }
}
