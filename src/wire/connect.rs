//! Connecting, against a deadline.

use super::conn::FramedConn;
use super::endpoint::{Endpoint, EndpointError};
use super::error::{Doing, WireError};
use super::sock::{Limits, poll_one};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as sys_connect, socket_with,
    sockopt,
};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Connects. Refused and unreachable peers answer at once; a silent one ends at the deadline.
pub fn connect(
    endpoint: &Endpoint,
    limits: Limits,
    deadline: Instant,
) -> Result<FramedConn, WireError> {
    let fd = match endpoint {
        Endpoint::Tcp(addr) => {
            let fd = stream_socket(family(addr))?;
            finish(&fd, sys_connect(&fd, addr), deadline)?;
            sockopt::set_tcp_nodelay(&fd, true).map_err(|e| WireError::io("setsockopt", e))?;
            fd
        }
        Endpoint::Unix(path) => {
            let addr = unix_addr(path)?;
            loop {
                let fd = stream_socket(AddressFamily::UNIX)?;
                match sys_connect(&fd, &addr) {
                    // A full backlog answers EAGAIN on a unix socket and cannot be polled for.
                    Err(Errno::AGAIN) if Instant::now() < deadline => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(Errno::AGAIN) => {
                        return Err(WireError::Timeout {
                            doing: Doing::Connect,
                            partial: false,
                        });
                    }
                    other => {
                        finish(&fd, other, deadline)?;
                        break fd;
                    }
                }
            }
        }
    };
    Ok(FramedConn::from_fd(fd, limits))
}

pub(super) fn unix_addr(path: &std::path::Path) -> Result<SocketAddrUnix, WireError> {
    SocketAddrUnix::new(path).map_err(|_| {
        EndpointError::Path {
            len: path.as_os_str().as_encoded_bytes().len(),
        }
        .into()
    })
}

pub(super) fn family(addr: &SocketAddr) -> AddressFamily {
    if addr.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    }
}

pub(super) fn stream_socket(family: AddressFamily) -> Result<OwnedFd, WireError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::STREAM, flags, None).map_err(|e| WireError::io("socket", e))
}

fn finish(fd: &OwnedFd, begun: Result<(), Errno>, deadline: Instant) -> Result<(), WireError> {
    match begun {
        Ok(()) => Ok(()),
        Err(Errno::INPROGRESS | Errno::INTR) => {
            if !poll_one(fd.as_fd(), PollFlags::OUT, deadline)? {
                return Err(WireError::Timeout {
                    doing: Doing::Connect,
                    partial: false,
                });
            }
            match sockopt::socket_error(fd) {
                Ok(Ok(())) => Ok(()),
                Ok(Err(e)) | Err(e) => Err(WireError::Io {
                    op: "connect",
                    errno: e.raw_os_error(),
                }),
            }
        }
        Err(e) => Err(WireError::Io {
            op: "connect",
            errno: e.raw_os_error(),
        }),
    }
}
