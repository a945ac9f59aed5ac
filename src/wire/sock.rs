//! One socket, its waits, and the handle that closes it from elsewhere.

use super::error::{Doing, WireError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long, and how, a call waits. The clock is monotonic.
#[derive(Debug, Clone, Copy)]
pub struct Wait {
    /// Nanoseconds to retry before sleeping in `poll(2)`, yielding the CPU between tries. 0 on
    /// machines with few cores: a spinning thread there delays the very peer it waits for.
    pub spin_ns: u32,
    /// The call returns a time-out after this.
    pub deadline: Instant,
}

impl Wait {
    /// Sleeps until the deadline.
    pub fn until(deadline: Instant) -> Self {
        Self {
            spin_ns: 0,
            deadline,
        }
    }

    /// Sleeps for at most that long.
    pub fn within(time: Duration) -> Self {
        Self::until(Instant::now() + time)
    }

    /// Spins first.
    #[must_use]
    pub fn spin(self, spin_ns: u32) -> Self {
        Self { spin_ns, ..self }
    }
}

/// What a connection grants its peer.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest payload of one frame, in bytes, both ways.
    pub max_frame: u32,
    /// A frame must be complete this long after its first byte: a peer cannot hold a thread and a
    /// buffer by dripping bytes.
    pub frame_timeout: Duration,
    /// Bytes asked of the kernel at once; frames up to this size cost one `recv(2)`.
    pub read_ahead: usize,
}

impl Default for Limits {
    /// 4 MiB, 10 s, 64 KiB.
    fn default() -> Self {
        Self {
            max_frame: 4 << 20,
            frame_timeout: Duration::from_secs(10),
            read_ahead: 64 << 10,
        }
    }
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) fd: OwnedFd,
    pub(super) closed_here: AtomicBool,
}

impl Socket {
    pub(super) fn new(fd: OwnedFd) -> Arc<Self> {
        Arc::new(Self {
            fd,
            closed_here: AtomicBool::new(false),
        })
    }

    pub(super) fn shutdown(&self) {
        // Fails only where the peer is gone already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    pub(super) fn closed_here(&self) -> bool {
        self.closed_here.load(Ordering::Acquire)
    }
}

/// Ends a connection from any thread: both halves return at once and stay unusable.
#[derive(Debug, Clone)]
pub struct Closer(pub(super) Arc<Socket>);

impl Closer {
    /// Shuts both directions down. Idempotent.
    pub fn close(&self) {
        self.0.closed_here.store(true, Ordering::Release);
        self.0.shutdown();
    }
}

/// Sleeps until one of `fds` is ready or the deadline passes (`false`).
pub(super) fn poll_until(fds: &mut [PollFd<'_>], deadline: Instant) -> Result<bool, WireError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs().min(86_400) as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(fds, Some(&timeout)) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(WireError::io("poll", e)),
        }
    }
}

pub(super) fn poll_one(
    fd: BorrowedFd<'_>,
    flags: PollFlags,
    deadline: Instant,
) -> Result<bool, WireError> {
    poll_until(&mut [PollFd::from_borrowed_fd(fd, flags)], deadline)
}

/// Runs `attempt` until it no longer answers `EAGAIN`: spins, then sleeps.
pub(super) fn retry<T>(
    socket: &Socket,
    doing: Doing,
    wait: Wait,
    mut attempt: impl FnMut() -> Result<T, Errno>,
) -> Result<Result<T, Errno>, WireError> {
    let mut spin_end = None;
    loop {
        match attempt() {
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {}
            done => return Ok(done),
        }
        if wait.spin_ns > 0 {
            let now = Instant::now();
            let end = *spin_end.get_or_insert(now + Duration::from_nanos(wait.spin_ns.into()));
            if now < end.min(wait.deadline) {
                std::thread::yield_now();
                continue;
            }
        }
        let flags = match doing {
            Doing::Send => PollFlags::OUT,
            _ => PollFlags::IN,
        };
        if !poll_one(socket.fd.as_fd(), flags, wait.deadline)? {
            return Err(WireError::Timeout {
                doing,
                partial: false,
            });
        }
    }
}
