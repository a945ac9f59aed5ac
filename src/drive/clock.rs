//! The clock that the machines are given.

use std::time::{Duration, Instant};

/// Nanoseconds of `CLOCK_MONOTONIC`: comparable between the processes of one machine.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Monotonic time is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// An instant of the machines' clock as the standard library's.
pub fn instant_at(at_ns: u64) -> Instant {
    let (now, instant) = (now_ns(), Instant::now());
    if at_ns >= now {
        instant + Duration::from_nanos(at_ns - now)
    } else {
        instant
            .checked_sub(Duration::from_nanos(now - at_ns))
            .unwrap_or(instant)
    }
}

/// The standard library's instant on the machines' clock.
pub fn ns_of(instant: Instant) -> u64 {
    let (now, here) = (now_ns(), Instant::now());
    if instant >= here {
        now.saturating_add(nanos(instant - here))
    } else {
        now.saturating_sub(nanos(here - instant))
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_clocks_are_the_kernels_monotonic_one() {
        let at = Instant::now() - Duration::from_millis(20);
        let back = instant_at(ns_of(at));
        let off = if back > at { back - at } else { at - back };
        assert!(off < Duration::from_millis(1), "{off:?}");
    }
}
