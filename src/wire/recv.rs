//! The receiving half.

use super::error::{Doing, WireError};
use super::frame::{FrameHeader, HEADER_BYTES, RunningCrc, crc32c};
use super::sock::{Closer, Limits, Socket, Wait, poll_one, retry};
use rustix::event::PollFlags;
use rustix::net::{RecvFlags, recv};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

/// One frame, in the half's own buffer until the next call.
#[derive(Debug)]
pub struct Frame<'a> {
    /// As received, checked.
    pub header: FrameHeader,
    /// `header.len` bytes, checked.
    pub payload: &'a [u8],
}

/// Receives frames. One thread at a time (`&mut`).
#[derive(Debug)]
pub struct RecvHalf {
    pub(super) socket: Arc<Socket>,
    limits: Limits,
    /// Bytes `start..end` are received and not yet consumed. Grows to the longest frame seen, as
    /// its bytes arrive, and never past the limit; no allocation after that.
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// When the first byte of the frame under way was seen.
    begun: Option<Instant>,
    /// A frame whose header was handed out and whose payload is being read piece by piece.
    open: Option<Open>,
    broken: bool,
}

#[derive(Debug)]
struct Open {
    header: FrameHeader,
    left: usize,
    crc: RunningCrc,
}

impl RecvHalf {
    pub(super) fn new(socket: Arc<Socket>, limits: Limits) -> Self {
        let size = limits.read_ahead.max(HEADER_BYTES);
        Self {
            socket,
            limits,
            buf: vec![0; size],
            start: 0,
            end: 0,
            begun: None,
            open: None,
            broken: false,
        }
    }

    /// The next frame, whole, in a buffer that is reused by the next call.
    ///
    /// After [`WireError::Timeout`] and [`WireError::Payload`] the half goes on; after any other
    /// error it is unusable.
    pub fn recv(&mut self, wait: Wait) -> Result<Frame<'_>, WireError> {
        let header = self.header(wait)?;
        let total = HEADER_BYTES + header.len as usize;
        while self.end - self.start < total {
            self.fill(total, wait)?;
        }
        let at = self.start + HEADER_BYTES;
        self.start += total;
        self.begun = None;
        let payload = &self.buf[at..at + header.len as usize];
        if crc32c(payload) != header.payload_crc {
            return Err(WireError::Payload { header });
        }
        Ok(Frame { header, payload })
    }

    /// The next frame's header; its payload is then read by [`payload_into`](Self::payload_into),
    /// without passing through this half's buffer. What a caller leaves unread is skipped by the
    /// next call.
    pub fn recv_header(&mut self, wait: Wait) -> Result<FrameHeader, WireError> {
        let header = self.header(wait)?;
        self.start += HEADER_BYTES;
        self.open = Some(Open {
            header,
            left: header.len as usize,
            crc: RunningCrc::new(),
        });
        if header.len == 0 {
            self.finish_open()?;
        }
        Ok(header)
    }

    /// Fills `out` with the next payload bytes of the frame begun by
    /// [`recv_header`](Self::recv_header). The checksum is judged by the call that takes the last
    /// byte: until then nothing read may be believed. Asking for more than the frame holds is
    /// [`WireError::PayloadTooLong`]; nothing is read then.
    pub fn payload_into(&mut self, out: &mut [u8], wait: Wait) -> Result<(), WireError> {
        let left = self.open.as_ref().map_or(0, |open| open.left);
        if out.len() > left {
            return Err(WireError::PayloadTooLong {
                len: out.len(),
                max: left as u32,
            });
        }
        let mut done = 0;
        while done < out.len() {
            let buffered = (self.end - self.start).min(out.len() - done);
            let got = if buffered > 0 {
                out[done..done + buffered]
                    .copy_from_slice(&self.buf[self.start..self.start + buffered]);
                self.start += buffered;
                buffered
            } else {
                let wait = self.frame_wait(wait);
                match read(&self.socket, &mut out[done..], wait) {
                    Ok(0) => return self.fail(WireError::Closed { mid_frame: true }),
                    Ok(n) => n,
                    // Bytes already handed out cannot be handed out again: a caller that retried
                    // after a time-out would tear the payload.
                    Err(e) => return self.fail(self.judge(e, done > 0)),
                }
            };
            if let Some(open) = &mut self.open {
                open.crc.update(&out[done..done + got]);
                open.left -= got;
            }
            done += got;
        }
        self.finish_open()
    }

    /// Payload bytes of the open frame not yet read.
    pub fn payload_left(&self) -> usize {
        self.open.as_ref().map_or(0, |open| open.left)
    }

    /// Bytes of a next frame were received already: `poll(2)` on the socket would not show them.
    pub fn has_buffered(&self) -> bool {
        self.end > self.start
    }

    /// True if nothing has arrived and the peer has not closed: a kept connection on which no
    /// answer is due is fit for use only then.
    pub fn is_quiet(&self) -> bool {
        let flags = PollFlags::IN | PollFlags::RDHUP;
        !self.broken
            && !self.has_buffered()
            && matches!(
                poll_one(self.socket.fd.as_fd(), flags, Instant::now()),
                Ok(false)
            )
    }

    /// Bytes of the reusable buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.buf.len()
    }

    /// A handle that ends the connection from any thread.
    pub fn closer(&self) -> Closer {
        Closer(Arc::clone(&self.socket))
    }

    fn finish_open(&mut self) -> Result<(), WireError> {
        match &self.open {
            Some(open) if open.left == 0 => {
                let header = open.header;
                let sound = open.crc.finish() == header.payload_crc;
                self.open = None;
                self.begun = None;
                if sound {
                    Ok(())
                } else {
                    Err(WireError::Payload { header })
                }
            }
            _ => Ok(()),
        }
    }

    fn skip_open(&mut self, wait: Wait) -> Result<(), WireError> {
        let mut scratch = [0u8; 4096];
        while let Some(open) = &self.open {
            let take = open.left.min(scratch.len());
            match self.payload_into(&mut scratch[..take], wait) {
                // Nobody looks at skipped bytes.
                Ok(()) | Err(WireError::Payload { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Reads until a header is there and believed; does not consume it.
    fn header(&mut self, wait: Wait) -> Result<FrameHeader, WireError> {
        if self.broken {
            return Err(if self.socket.closed_here() {
                WireError::ClosedHere
            } else {
                WireError::Broken
            });
        }
        self.skip_open(wait)?;
        while self.end - self.start < HEADER_BYTES {
            self.fill(HEADER_BYTES, wait)?;
        }
        let mut bytes = [0u8; HEADER_BYTES];
        bytes.copy_from_slice(&self.buf[self.start..self.start + HEADER_BYTES]);
        let header = match FrameHeader::decode(&bytes) {
            Ok(header) => header,
            Err(e) => return self.fail(WireError::Corrupt(e)),
        };
        if header.len > self.limits.max_frame {
            let max = self.limits.max_frame;
            return self.fail(WireError::FrameTooLong {
                len: header.len,
                max,
            });
        }
        if self.begun.is_none() {
            self.begun = Some(Instant::now());
        }
        Ok(header)
    }

    /// One read into the buffer, which is made to hold `total` bytes from `start`, but only grows
    /// as bytes arrive: an announced length alone allocates nothing.
    fn fill(&mut self, total: usize, wait: Wait) -> Result<(), WireError> {
        let have = self.end - self.start;
        if have == 0 {
            (self.start, self.end) = (0, 0);
        } else if self.start + total > self.buf.len() {
            self.buf.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, have);
        }
        if self.end == self.buf.len() {
            let size = (self.buf.len() * 2).min(total.max(self.buf.len() + 1));
            self.buf.resize(size, 0);
        }
        if have > 0 && self.begun.is_none() {
            self.begun = Some(Instant::now());
        }
        let wait = self.frame_wait(wait);
        match read(&self.socket, &mut self.buf[self.end..], wait) {
            Ok(0) => self.fail(WireError::Closed {
                mid_frame: have > 0,
            }),
            Ok(n) => {
                self.end += n;
                Ok(())
            }
            Err(WireError::Timeout { doing, .. }) if !self.too_slow() => Err(WireError::Timeout {
                doing,
                partial: have > 0,
            }),
            Err(e) => self.fail(self.judge(e, false)),
        }
    }

    /// The caller's wait, cut short where the frame under way runs out of its own time.
    fn frame_wait(&self, wait: Wait) -> Wait {
        match self.begun {
            Some(begun) => Wait {
                deadline: wait.deadline.min(begun + self.limits.frame_timeout),
                ..wait
            },
            None => wait,
        }
    }

    fn too_slow(&self) -> bool {
        self.begun
            .is_some_and(|begun| begun.elapsed() >= self.limits.frame_timeout)
    }

    fn judge(&self, e: WireError, partial: bool) -> WireError {
        match e {
            WireError::Timeout { .. } if self.too_slow() => WireError::TooSlow {
                allowed: self.limits.frame_timeout,
            },
            WireError::Timeout { doing, .. } => WireError::Timeout { doing, partial },
            WireError::Closed { .. } => WireError::Closed {
                mid_frame: self.begun.is_some(),
            },
            other => other,
        }
    }

    fn fail<T>(&mut self, e: WireError) -> Result<T, WireError> {
        self.broken = true;
        self.socket.shutdown();
        Err(if self.socket.closed_here() {
            WireError::ClosedHere
        } else {
            e
        })
    }
}

fn read(socket: &Socket, out: &mut [u8], wait: Wait) -> Result<usize, WireError> {
    retry(socket, Doing::Recv, wait, || {
        recv(socket.fd.as_fd(), &mut *out, RecvFlags::DONTWAIT).map(|(n, _)| n)
    })?
    .map_err(|e| WireError::io("recv", e))
}
