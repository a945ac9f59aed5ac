use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Which way the bytes at a [`Tap`] are going.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Out of a registered region.
    Get,
    /// Into one.
    Put,
}

/// One piece about to leave, as a [`Tap`] sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TapPoint {
    /// Get or put.
    pub direction: Direction,
    /// The epoch it travels under.
    pub epoch: u64,
    /// Offset of the piece's first byte in the region it is read from, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: usize,
}

/// Faults to inject where a payload is read and sent: the owner's serving side for a get over `tcp`,
/// the initiator for puts over `tcp` and for everything over `local` and `shm`, where the initiator
/// does the reading. Absent in production; a path without a tap does not copy for one.
pub trait Tap: Send + Sync {
    /// Changes bytes as if the source had read them wrong: above the wire check, which then agrees
    /// with them. Only a digest of the resident bytes can tell.
    fn source_read(&self, at: TapPoint, bytes: &mut [u8]) {
        let _ = (at, bytes);
    }

    /// Changes bytes after their check was computed: the wire check must tell. Not called on paths
    /// that have no wire.
    fn wire(&self, at: TapPoint, bytes: &mut [u8]) {
        let _ = (at, bytes);
    }

    /// How long to hold the piece back; no lease is held meanwhile. A slow link returns `len / rate`;
    /// a late write returns more than its epoch has left.
    fn hold(&self, at: TapPoint) -> Duration {
        let _ = at;
        Duration::ZERO
    }
}

/// Bounds the rate at which links ask for or send bulk, so that a migration leaves its neighbours
/// room. Share one among all links that should share a budget; change the rate at any time.
#[derive(Debug)]
pub struct Pace {
    bytes_per_s: AtomicU64,
    /// When the bytes let through so far will have been paid for.
    paid: Mutex<Option<Instant>>,
}

/// How much may go at once after a pause.
const BURST: Duration = Duration::from_millis(2);

impl Pace {
    /// `bytes_per_s` = `u64::MAX` does not limit; 0 lets nothing through.
    pub fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s: AtomicU64::new(bytes_per_s),
            paid: Mutex::new(None),
        }
    }

    /// Changes the rate; holds from the next request on.
    pub fn set(&self, bytes_per_s: u64) {
        self.bytes_per_s.store(bytes_per_s, Ordering::Relaxed);
        // What was let through under the old rate is not owed under the new one.
        *self.paid.lock() = None;
    }

    /// The rate, bytes per second.
    pub fn get(&self) -> u64 {
        self.bytes_per_s.load(Ordering::Relaxed)
    }

    /// Takes `bytes` from the budget, or says when to ask again.
    pub fn take(&self, bytes: u64, now: Instant) -> Result<(), Instant> {
        let rate = self.get();
        if rate == u64::MAX {
            return Ok(());
        }
        if rate == 0 {
            return Err(now + Duration::from_millis(20));
        }
        let mut paid = self.paid.lock();
        // Unused time is worth at most a burst.
        let from = paid.map_or(now, |p| p.max(now.checked_sub(BURST).unwrap_or(p)));
        if from > now {
            return Err(from);
        }
        *paid = Some(from + Duration::from_secs_f64(bytes as f64 / rate as f64));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_lets_its_rate_through_and_no_more() {
        let pace = Pace::new(1_000_000);
        let t0 = Instant::now();
        let (mut now, mut sent) = (t0, 0u64);
        while now < t0 + Duration::from_secs(2) {
            match pace.take(1000, now) {
                Ok(()) => sent += 1000,
                Err(again) => now = again,
            }
        }
        assert!((1_990_000..=2_010_000).contains(&sent), "{sent}");
        // A pause buys a burst, not the whole pause.
        now += Duration::from_secs(10);
        let mut burst = 0;
        while pace.take(1000, now).is_ok() {
            burst += 1000;
        }
        assert!(burst <= 4000, "{burst}");
    }

    #[test]
    fn a_pace_can_stop_and_start() {
        let pace = Pace::new(0);
        let now = Instant::now();
        assert!(pace.take(1, now).is_err());
        pace.set(u64::MAX);
        assert!((0..100).all(|_| pace.take(u64::MAX / 2, now).is_ok()));
    }
}
