//! A framed connection: two halves, and a send half that threads can share.

use super::error::{Doing, WireError};
use super::recv::{Frame, RecvHalf};
use super::send::SendHalf;
use super::sock::{Closer, Limits, Socket, Wait};
use parking_lot::Mutex;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// A connected socket that speaks frames.
#[derive(Debug)]
pub struct FramedConn {
    send: SendHalf,
    recv: RecvHalf,
}

impl FramedConn {
    /// Wraps a connected stream socket. On TCP, `TCP_NODELAY` is the caller's business:
    /// [`connect`](super::connect()) and [`Listener`](super::Listener) set it.
    pub fn from_fd(fd: OwnedFd, limits: Limits) -> Self {
        let socket = Socket::new(fd);
        Self {
            send: SendHalf::new(Arc::clone(&socket), limits),
            recv: RecvHalf::new(socket, limits),
        }
    }

    /// Two connected ends inside one process.
    pub fn pair(limits: Limits) -> Result<(Self, Self), WireError> {
        let (a, b) = UnixStream::pair().map_err(|e| WireError::Io {
            op: "socketpair",
            errno: e.raw_os_error().unwrap_or(0),
        })?;
        Ok((
            Self::from_fd(a.into(), limits),
            Self::from_fd(b.into(), limits),
        ))
    }

    /// See [`SendHalf::send`].
    pub fn send(
        &mut self,
        kind: u16,
        id: u64,
        payload: &[IoSlice<'_>],
        wait: Wait,
    ) -> Result<(), WireError> {
        self.send.send(kind, id, payload, wait)
    }

    /// See [`RecvHalf::recv`].
    pub fn recv(&mut self, wait: Wait) -> Result<Frame<'_>, WireError> {
        self.recv.recv(wait)
    }

    /// Two halves for two threads.
    pub fn split(self) -> (SendHalf, RecvHalf) {
        (self.send, self.recv)
    }

    /// Both halves, borrowed: answers can be sent while a received frame is still read.
    pub fn halves(&mut self) -> (&mut SendHalf, &mut RecvHalf) {
        (&mut self.send, &mut self.recv)
    }

    /// A handle that ends the connection from any thread.
    pub fn closer(&self) -> Closer {
        self.send.closer()
    }
}

/// A send half that threads share: frames never interleave, and waiting for another thread's
/// frame counts against the deadline.
#[derive(Debug, Clone)]
pub struct SharedSend(Arc<Mutex<SendHalf>>, Closer);

impl SharedSend {
    /// Shares a half.
    pub fn new(half: SendHalf) -> Self {
        let closer = half.closer();
        Self(Arc::new(Mutex::new(half)), closer)
    }

    /// See [`SendHalf::send`]. A time-out [`Doing::Lock`] sent nothing.
    pub fn send(
        &self,
        kind: u16,
        id: u64,
        payload: &[IoSlice<'_>],
        wait: Wait,
    ) -> Result<(), WireError> {
        let Some(mut half) = self.0.try_lock_until(wait.deadline) else {
            return Err(WireError::Timeout {
                doing: Doing::Lock,
                partial: false,
            });
        };
        half.send(kind, id, payload, wait)
    }

    /// A handle that ends the connection from any thread; takes no lock.
    pub fn closer(&self) -> Closer {
        self.1.clone()
    }
}
