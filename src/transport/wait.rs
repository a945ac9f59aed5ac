//! Waiting that adapts: a spin of some microseconds where waits have been that short lately, else
//! straight to sleep in the kernel. Two cores must not be burnt by polling.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// What to wait for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Interest {
    pub(super) read: bool,
    pub(super) write: bool,
}

/// How a waiter has fared lately. One per connection and side.
#[derive(Debug)]
pub(super) struct Waiter {
    spin: Duration,
}

/// Longest spin. A sleeper must be woken by the sender, which in a virtual machine costs the sender
/// an exit of several microseconds, for each of the many short waits within one transfer: a spin of
/// this length takes less CPU time per byte over both processes than sleeping does (1 MiB puts between
/// two processes on 2 cores: 0.32 against 0.63 s per GB) and halves the time of a 64 KiB transfer.
const SPIN_MAX: Duration = Duration::from_micros(50);
const SPIN_MIN: Duration = Duration::from_micros(1);

impl Waiter {
    pub(super) fn new() -> Self {
        Self { spin: SPIN_MIN }
    }

    /// Waits until `fd` is ready, broken or closed, or `until` has passed; true for the former.
    pub(super) fn wait(&mut self, fd: impl AsFd, interest: Interest, until: Instant) -> bool {
        let start = Instant::now();
        let spin_until = until.min(start + self.spin);
        let mut now = start;
        while now < spin_until {
            if ready(&fd, interest, Duration::ZERO) {
                self.learn(now - start);
                return true;
            }
            std::hint::spin_loop();
            now = Instant::now();
        }
        let left = until.saturating_duration_since(now);
        let ready = ready(&fd, interest, left);
        self.learn(start.elapsed());
        ready
    }

    /// Short waits make the next spin longer, long ones shorter: a spin that would not have been
    /// enough is time taken from whoever we wait for.
    fn learn(&mut self, waited: Duration) {
        self.spin = if waited <= SPIN_MAX {
            (self.spin * 2).min(SPIN_MAX)
        } else {
            (self.spin / 2).max(SPIN_MIN)
        };
    }
}

fn ready(fd: &impl AsFd, interest: Interest, timeout: Duration) -> bool {
    let mut flags = PollFlags::empty();
    flags.set(PollFlags::IN, interest.read);
    flags.set(PollFlags::OUT, interest.write);
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    });
    // An interrupted or refused poll counts as ready: the read or write that follows tells.
    rustix::event::poll(&mut [PollFd::new(fd, flags)], Some(&timeout)).map_or(true, |n| n > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    const READ: Interest = Interest {
        read: true,
        write: false,
    };

    #[test]
    fn waits_end_when_ready_and_at_the_deadline() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut w = Waiter::new();
        let t0 = Instant::now();
        assert!(!w.wait(&a, READ, t0 + Duration::from_millis(30)));
        assert!(t0.elapsed() >= Duration::from_millis(29));
        b.write_all(b"x").unwrap();
        assert!(w.wait(&a, READ, Instant::now() + Duration::from_secs(10)));
        drop(b);
        assert!(
            w.wait(&a, READ, Instant::now() + Duration::from_secs(10)),
            "closed is ready"
        );
    }

    #[test]
    fn long_waits_stop_the_spinning() {
        let (a, _b) = UnixStream::pair().unwrap();
        let mut w = Waiter { spin: SPIN_MAX };
        for _ in 0..8 {
            w.wait(&a, READ, Instant::now() + Duration::from_millis(1));
        }
        assert_eq!(w.spin, SPIN_MIN);
    }
}
