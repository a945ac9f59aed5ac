//! The receiving half of a framed byte stream, without waiting: bulk payloads land straight in leased
//! memory, headers and small payloads in a buffer.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use crate::mem::WriteLease;
use crate::transport::Span;
use crate::transport::frame::{Crc, FrameError, HEADER_LEN, Header, SPAN_LEN, SPANS_MAX};
use crate::transport::span::Cursor;

/// Most runs of memory in one system call.
const RUNS_MAX: usize = 128;

/// Room for the largest payload that is not landed in place, with its header.
const BUF: usize = 64 << 10;

const _: () = assert!(BUF >= HEADER_LEN + SPANS_MAX * SPAN_LEN);

/// How a read went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filled {
    /// So many bytes came.
    Bytes(usize),
    /// Nothing is there now.
    Blocked,
    /// The peer closed its end.
    Closed,
}

/// Received bytes that have no place yet.
pub(super) struct Rx {
    buf: Box<[u8]>,
    lo: usize,
    hi: usize,
}

impl Rx {
    pub(super) fn new() -> Self {
        Self {
            buf: vec![0; BUF].into_boxed_slice(),
            lo: 0,
            hi: 0,
        }
    }

    pub(super) fn buffered(&self) -> usize {
        self.hi - self.lo
    }

    /// Takes the next header, once all of it is here.
    pub(super) fn header(&mut self) -> Result<Option<Header>, FrameError> {
        if self.buffered() < HEADER_LEN {
            return Ok(None);
        }
        let h = Header::decode(&self.buf[self.lo..self.hi])?;
        self.lo += HEADER_LEN;
        Ok(Some(h))
    }

    /// Takes `len` bytes once all of them are here.
    pub(super) fn take(&mut self, len: usize) -> Option<&[u8]> {
        debug_assert!(
            len <= BUF - HEADER_LEN,
            "more than the buffer can ever hold"
        );
        if self.buffered() < len {
            return None;
        }
        Some(self.take_some(len))
    }

    /// Takes up to `len` bytes of what is here.
    pub(super) fn take_some(&mut self, len: usize) -> &[u8] {
        let n = len.min(self.buffered());
        self.lo += n;
        &self.buf[self.lo - n..self.lo]
    }

    fn make_room(&mut self) {
        if self.lo == self.hi {
            (self.lo, self.hi) = (0, 0);
        } else if self.hi == BUF {
            self.buf.copy_within(self.lo..self.hi, 0);
            (self.lo, self.hi) = (0, self.hi - self.lo);
        }
    }

    fn tail(&mut self, most: usize) -> libc::iovec {
        let n = most.min(BUF - self.hi);
        libc::iovec {
            iov_base: self.buf[self.hi..].as_mut_ptr().cast(),
            iov_len: n,
        }
    }

    /// Reads what is there into the buffer.
    pub(super) fn fill(&mut self, fd: impl AsFd) -> io::Result<Filled> {
        self.make_room();
        let mut iov = [self.tail(BUF)];
        // SAFETY: the one range is the free tail of our own buffer, borrowed mutably here.
        let filled = unsafe { receive(fd, &mut iov) }?;
        if let Filled::Bytes(n) = filled {
            self.hi += n;
        }
        Ok(filled)
    }

    /// Reads into leased memory, up to `want` bytes from `at` on, and only behind all of those up to
    /// `extra` bytes into the buffer: the next header comes along without a system call of its own.
    /// Gives the bytes landed.
    fn land(
        &mut self,
        fd: impl AsFd,
        lease: &mut WriteLease,
        spans: &[Span],
        at: Cursor,
        want: usize,
        extra: usize,
    ) -> io::Result<Filled> {
        debug_assert_eq!(self.buffered(), 0, "earlier bytes go first");
        self.make_room();
        let mut iov = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        }; RUNS_MAX + 1];
        let mut runs = 0;
        let (_, room) = at.walk(spans, want as u64, |s| {
            if runs == RUNS_MAX {
                return false;
            }
            match lease.as_mut_ptr(s.local_off, s.len as usize) {
                Ok(p) => {
                    iov[runs] = libc::iovec {
                        iov_base: p.cast(),
                        iov_len: s.len as usize,
                    }
                }
                Err(_) => return false,
            }
            runs += 1;
            true
        });
        let room = room as usize;
        if room == 0 {
            return Err(io::Error::other("a span outside its lease"));
        }
        if room == want && extra > 0 {
            iov[runs] = self.tail(extra);
            runs += 1;
        }
        // SAFETY: each range but the last was checked to lie in blocks that `lease` holds alone; it
        // is borrowed mutably here, so no slice of it lives while the kernel writes, and the kernel
        // forms no reference, so ranges that overlap only overwrite. The last range is the free tail
        // of our buffer.
        let filled = unsafe { receive(fd, &mut iov[..runs]) }?;
        Ok(match filled {
            Filled::Bytes(n) => {
                let landed = n.min(room);
                self.hi += n - landed;
                Filled::Bytes(landed)
            }
            other => other,
        })
    }
}

/// # Safety
/// Each range must be valid for writes by the kernel, and nobody may use it meanwhile.
unsafe fn receive(fd: impl AsFd, iov: &mut [libc::iovec]) -> io::Result<Filled> {
    loop {
        // SAFETY: all-zero is a valid `msghdr`: null pointers with zero lengths.
        let mut m: libc::msghdr = unsafe { std::mem::zeroed() };
        m.msg_iov = iov.as_mut_ptr();
        m.msg_iovlen = iov.len() as _;
        // SAFETY: `m` names `iov`, whose ranges the caller vouches for; the descriptor is borrowed.
        let n = unsafe { libc::recvmsg(fd.as_fd().as_raw_fd(), &mut m, libc::MSG_DONTWAIT) };
        if n > 0 {
            return Ok(Filled::Bytes(n as usize));
        }
        if n == 0 {
            return Ok(Filled::Closed);
        }
        let e = io::Error::last_os_error();
        match e.kind() {
            io::ErrorKind::WouldBlock => return Ok(Filled::Blocked),
            io::ErrorKind::Interrupted => {}
            _ => return Err(e),
        }
    }
}

/// A payload on its way in.
pub(super) struct Landing {
    from: Cursor,
    got: usize,
    len: usize,
    crc: Crc,
    expect: u32,
}

/// Where a landing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Landed {
    /// All of it came; `ok`: it matches its check (thrown-away payloads are not checked).
    Whole {
        /// Whether the check matched.
        ok: bool,
    },
    /// More has to come.
    Blocked,
    /// The peer closed its end first.
    Closed,
}

impl Landing {
    pub(super) fn new(header: &Header, from: Cursor) -> Self {
        Self {
            from,
            got: 0,
            len: header.len as usize,
            crc: Crc::new(),
            expect: header.payload_crc,
        }
    }

    /// Length of the payload, bytes.
    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }

    /// The place in the spans behind what has landed so far.
    pub(super) fn after(&self) -> Cursor {
        self.from
    }

    /// Goes on; into the lease, or nowhere. Bytes land only through the lease passed in, so what
    /// comes after a lease has ended cannot reach its memory.
    pub(super) fn step(
        &mut self,
        rx: &mut Rx,
        fd: impl AsFd,
        mut into: Option<(&mut WriteLease, &[Span])>,
        extra: usize,
    ) -> io::Result<Landed> {
        loop {
            let want = self.len - self.got;
            if want == 0 {
                let ok = into.is_none() || self.crc.value() == self.expect;
                return Ok(Landed::Whole { ok });
            }
            if rx.buffered() > 0 {
                let bytes = rx.take_some(want);
                self.got += bytes.len();
                if let Some((lease, spans)) = &mut into {
                    let mut from = bytes;
                    (self.from, _) = self.from.walk(spans, bytes.len() as u64, |s| {
                        let (now, later) = from.split_at(s.len as usize);
                        lease.bytes_mut(s.local_off, now.len()).copy_from_slice(now);
                        from = later;
                        true
                    });
                    self.crc.update(bytes);
                }
                continue;
            }
            let filled = match &mut into {
                None => rx.fill(&fd)?,
                Some((lease, spans)) => rx.land(&fd, lease, spans, self.from, want, extra)?,
            };
            match filled {
                Filled::Blocked => return Ok(Landed::Blocked),
                Filled::Closed => return Ok(Landed::Closed),
                Filled::Bytes(n) => {
                    if let Some((lease, spans)) = &mut into {
                        // Hashed now, while it is in the cache that the kernel copied it into.
                        let crc = &mut self.crc;
                        (self.from, _) = self.from.walk(spans, n as u64, |s| {
                            crc.update(lease.bytes(s.local_off, s.len as usize));
                            true
                        });
                        self.got += n;
                    }
                }
            }
        }
    }
}
