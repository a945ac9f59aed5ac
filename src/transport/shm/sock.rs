//! Frames and file descriptors over a unix socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::transport::frame::{HEADER_LEN, Header, PAYLOAD_MAX, crc32c};
use crate::transport::wait::{Interest, Waiter};

/// Descriptors that may come with one frame.
const FDS_MAX: usize = 2;

/// A frame and what came with it.
pub(super) struct Frame {
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

/// What reading brought.
pub(super) enum Read {
    Frame(Frame),
    /// Nothing within the tick.
    Quiet,
    /// The peer closed, cleanly or not.
    Closed,
    /// Not our protocol, or a frame that took too long.
    Broken(&'static str),
}

/// The reading half.
pub(super) struct Reader {
    buf: Vec<u8>,
    fds: VecDeque<OwnedFd>,
    waiter: Waiter,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self {
            buf: Vec::new(),
            fds: VecDeque::new(),
            waiter: Waiter::new(),
        }
    }

    /// The next frame. Waits until `tick` for its first byte; a frame that has begun must end by
    /// `frame_by`.
    pub(super) fn next(&mut self, stream: &UnixStream, tick: Instant, frame_by: Instant) -> Read {
        loop {
            if self.buf.len() >= HEADER_LEN {
                let Ok(header) = Header::decode(&self.buf) else {
                    return Read::Broken("a bad header");
                };
                let end = HEADER_LEN + header.len as usize;
                if self.buf.len() >= end {
                    let payload = self.buf[HEADER_LEN..end].to_vec();
                    self.buf.drain(..end);
                    if crc32c(&payload) != header.payload_crc {
                        return Read::Broken("a payload does not match its check");
                    }
                    // They were sent with this frame's bytes, so they are here by now.
                    let fds = self.fds.drain(..).collect();
                    return Read::Frame(Frame {
                        header,
                        payload,
                        fds,
                    });
                }
            }
            match self.fill(stream) {
                Ok(Some(0)) if self.buf.is_empty() => return Read::Closed,
                Ok(Some(0)) => return Read::Broken("closed in the middle of a frame"),
                Ok(Some(_)) => {}
                Ok(None) => {
                    let until = if self.buf.is_empty() { tick } else { frame_by };
                    if !self.waiter.wait(
                        stream,
                        Interest {
                            read: true,
                            write: false,
                        },
                        until,
                    ) {
                        let begun = !self.buf.is_empty();
                        return if begun {
                            Read::Broken("a frame took too long")
                        } else {
                            Read::Quiet
                        };
                    }
                }
                Err(_) => return Read::Closed,
            }
        }
    }

    /// Reads what is there, but not past the frame under way, so that descriptors stay with the
    /// frame they came with. `None`: nothing.
    fn fill(&mut self, stream: &UnixStream) -> io::Result<Option<usize>> {
        let end = match Header::decode(&self.buf) {
            Ok(h) => HEADER_LEN + h.len.min(PAYLOAD_MAX) as usize,
            Err(_) => HEADER_LEN,
        };
        let start = self.buf.len();
        self.buf.resize(end.max(start + 1), 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let iov = &mut [IoSliceMut::new(&mut self.buf[start..])];
        let got = rustix::net::recvmsg(stream, iov, &mut control, flags);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        // More than any frame carries: a peer that fills our table gets them closed.
        self.fds.truncate(FDS_MAX);
        let n = got.as_ref().map_or(0, |m| m.bytes);
        self.buf.truncate(start + n);
        match got {
            Ok(m) => Ok(Some(m.bytes)),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

/// The sending half, for any thread; frames do not mix.
pub(super) struct Sender {
    stream: UnixStream,
    one_at_a_time: Mutex<Waiter>,
}

impl Sender {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            one_at_a_time: Mutex::new(Waiter::new()),
        }
    }

    /// Sends a frame whole, or fails; after a failure the connection is of no more use.
    pub(super) fn send(
        &self,
        mut header: Header,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        by: Instant,
    ) -> io::Result<()> {
        header.len = payload.len() as u32;
        header.payload_crc = crc32c(payload);
        let head = header.encode();
        let mut waiter = self.one_at_a_time.lock();
        let mut sent = 0;
        while sent < HEADER_LEN + payload.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if sent == 0 && !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::Error::other("too many descriptors"));
            }
            let iov = [
                IoSlice::new(&head[sent.min(HEADER_LEN)..]),
                IoSlice::new(&payload[sent.saturating_sub(HEADER_LEN)..]),
            ];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::sendmsg(&self.stream, &iov, &mut control, flags) {
                Ok(n) => sent += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => {
                    if !waiter.wait(
                        &self.stream,
                        Interest {
                            read: false,
                            write: true,
                        },
                        by,
                    ) {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    pub(super) fn shutdown(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::frame::Kind;
    use std::os::fd::AsFd;
    use std::time::Duration;

    #[test]
    fn descriptors_arrive_with_the_frame_they_were_sent_with() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (sender, by) = (Sender::new(a), Instant::now() + Duration::from_secs(10));
        sender
            .send(Header::new(Kind::Map, 1), b"no descriptor", &[], by)
            .unwrap();
        sender
            .send(
                Header::new(Kind::Mapped, 2),
                b"two",
                &[file.as_fd(), file.as_fd()],
                by,
            )
            .unwrap();
        sender
            .send(Header::new(Kind::Map, 3), b"", &[], by)
            .unwrap();
        let mut reader = Reader::new();
        for (op, payload, fds) in [
            (1, b"no descriptor".as_slice(), 0),
            (2, b"two", 2),
            (3, b"", 0),
        ] {
            let Read::Frame(f) = reader.next(&b, by, by) else {
                panic!()
            };
            assert_eq!(
                (f.header.op, f.payload.as_slice(), f.fds.len()),
                (op, payload, fds)
            );
        }
        let soon = Instant::now() + Duration::from_millis(10);
        assert!(matches!(reader.next(&b, soon, by), Read::Quiet));
        drop(sender);
        assert!(matches!(reader.next(&b, by, by), Read::Closed));
    }

    #[test]
    fn half_a_frame_does_not_wait_for_ever() {
        use std::io::Write;
        let (mut a, b) = UnixStream::pair().unwrap();
        a.write_all(&Header::new(Kind::Map, 1).encode()[..10])
            .unwrap();
        let by = Instant::now() + Duration::from_millis(30);
        assert!(matches!(
            Reader::new().next(&b, by, by),
            Read::Broken("a frame took too long")
        ));
    }
}
