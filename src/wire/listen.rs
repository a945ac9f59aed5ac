//! Listening. Loopback unless told otherwise; a stale socket file of a dead process is replaced, a
//! living one's is not.

use super::conn::FramedConn;
use super::connect::{family, stream_socket, unix_addr};
use super::endpoint::Endpoint;
use super::error::{Doing, WireError};
use super::sock::{Limits, poll_until};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::fs::{FileType, Mode, chmod, lstat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, accept_with, bind, connect as sys_connect, getsockname, listen,
    sockopt,
};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// How to listen.
#[derive(Debug, Clone, Copy)]
pub struct ListenOptions {
    /// Accept an address that other machines can reach. Frames are neither encrypted nor
    /// authenticated: only on a network that is trusted.
    pub allow_remote: bool,
    /// Connections the kernel holds before they are accepted.
    pub backlog: i32,
    /// Granted to each accepted connection.
    pub limits: Limits,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            allow_remote: false,
            backlog: 128,
            limits: Limits::default(),
        }
    }
}

/// Accepts framed connections. Dropping it removes its socket file.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
    wake: Arc<OwnedFd>,
    endpoint: Endpoint,
    limits: Limits,
}

/// Ends a [`Listener`]'s waits from any thread.
#[derive(Debug, Clone)]
pub struct ListenCloser(Arc<OwnedFd>);

impl ListenCloser {
    /// Each `accept`, running or later, answers [`WireError::ClosedHere`]. Idempotent.
    pub fn close(&self) {
        // Never read, so it stays readable: every waiter sees it.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl Listener {
    /// Binds and listens.
    pub fn bind(endpoint: &Endpoint, options: ListenOptions) -> Result<Self, WireError> {
        if !options.allow_remote && !endpoint.is_local() {
            return Err(WireError::NotLoopback {
                addr: endpoint.to_string(),
            });
        }
        let in_use = || WireError::InUse {
            endpoint: endpoint.to_string(),
        };
        let (fd, endpoint) = match endpoint {
            Endpoint::Tcp(addr) => {
                let fd = stream_socket(family(addr))?;
                sockopt::set_socket_reuseaddr(&fd, true)
                    .map_err(|e| WireError::io("setsockopt", e))?;
                if addr.is_ipv6() {
                    // One endpoint is one family: `[::]` must not take the IPv4 port too.
                    sockopt::set_ipv6_v6only(&fd, true)
                        .map_err(|e| WireError::io("setsockopt", e))?;
                }
                match bind(&fd, addr) {
                    Err(Errno::ADDRINUSE) => return Err(in_use()),
                    other => other.map_err(|e| WireError::io("bind", e))?,
                }
                let bound = getsockname(&fd).map_err(|e| WireError::io("getsockname", e))?;
                let bound =
                    SocketAddr::try_from(bound).map_err(|e| WireError::io("getsockname", e))?;
                (fd, Endpoint::Tcp(bound))
            }
            Endpoint::Unix(path) => {
                let addr = unix_addr(path)?;
                let fd = stream_socket(AddressFamily::UNIX)?;
                match bind(&fd, &addr) {
                    Err(Errno::ADDRINUSE) => {
                        let probe = stream_socket(AddressFamily::UNIX)?;
                        // What is no socket refuses too, and is not ours to remove.
                        let socket = lstat(path)
                            .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Socket);
                        match sys_connect(&probe, &addr) {
                            Err(Errno::CONNREFUSED) if socket => {}
                            _ => return Err(in_use()),
                        }
                        rustix::fs::unlink(path).map_err(|e| WireError::io("unlink", e))?;
                        bind(&fd, &addr).map_err(|e| WireError::io("bind", e))?;
                    }
                    other => other.map_err(|e| WireError::io("bind", e))?,
                }
                if !options.allow_remote {
                    chmod(path, Mode::RUSR | Mode::WUSR).map_err(|e| WireError::io("chmod", e))?;
                }
                (fd, endpoint.clone())
            }
        };
        listen(&fd, options.backlog).map_err(|e| match e {
            Errno::ADDRINUSE => in_use(),
            other => WireError::io("listen", other),
        })?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| WireError::io("eventfd", e))?;
        Ok(Self {
            fd,
            wake: Arc::new(wake),
            endpoint,
            limits: options.limits,
        })
    }

    /// Where it listens; a port chosen by the kernel is filled in.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The next connection, `TCP_NODELAY` set. A peer that vanished meanwhile is passed over.
    pub fn accept(&self, deadline: Instant) -> Result<FramedConn, WireError> {
        loop {
            let mut fds = [
                PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
            ];
            if !poll_until(&mut fds, deadline)? {
                return Err(WireError::Timeout {
                    doing: Doing::Accept,
                    partial: false,
                });
            }
            if !fds[1].revents().is_empty() {
                return Err(WireError::ClosedHere);
            }
            match accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) => {
                    if matches!(self.endpoint, Endpoint::Tcp(_)) {
                        sockopt::set_tcp_nodelay(&fd, true)
                            .map_err(|e| WireError::io("setsockopt", e))?;
                    }
                    return Ok(FramedConn::from_fd(fd, self.limits));
                }
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(e) => return Err(WireError::io("accept", e)),
            }
        }
    }

    /// A handle that ends this listener's waits from any thread.
    pub fn closer(&self) -> ListenCloser {
        ListenCloser(Arc::clone(&self.wake))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Endpoint::Unix(path) = &self.endpoint {
            let _ = rustix::fs::unlink(path);
        }
    }
}
