//! The copy shaper: a token bucket that bounds how much STREAM may hurt the workers' neighbours.

/// A token bucket over bytes. Rate 0: unbounded.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Shaper {
    bytes_per_s: u64,
    burst: u64,
    /// Bytes that may go now; below zero after a transfer larger than the bucket.
    level: i64,
    filled_at_ns: u64,
}

impl Shaper {
    /// A full bucket.
    pub fn new(bytes_per_s: u64, burst: u64, now_ns: u64) -> Self {
        let burst = burst.clamp(1, i64::MAX as u64 / 4);
        Self {
            bytes_per_s,
            burst,
            level: burst as i64,
            filled_at_ns: now_ns,
        }
    }

    /// Changes the rate from now on; what was saved or owed stays.
    pub fn set_rate(&mut self, bytes_per_s: u64, now_ns: u64) {
        self.fill(now_ns);
        self.bytes_per_s = bytes_per_s;
        self.filled_at_ns = now_ns;
    }

    /// Takes `bytes` and says `Ok`, or says when to ask again. A transfer larger than the bucket
    /// goes when the bucket is full and leaves a debt, so the long-run rate holds for any size.
    pub fn take(&mut self, bytes: u64, now_ns: u64) -> Result<(), u64> {
        if self.bytes_per_s == 0 {
            return Ok(());
        }
        self.fill(now_ns);
        let need = bytes.min(self.burst) as i64;
        if self.level >= need {
            self.level -= bytes.min(i64::MAX as u64 / 4) as i64;
            return Ok(());
        }
        let missing = (need - self.level) as u128;
        let wait = (missing * 1_000_000_000).div_ceil(u128::from(self.bytes_per_s));
        Err(now_ns.saturating_add(wait.min(u128::from(u64::MAX)) as u64))
    }

    fn fill(&mut self, now_ns: u64) {
        let elapsed = now_ns.saturating_sub(self.filled_at_ns);
        let gained = u128::from(elapsed) * u128::from(self.bytes_per_s) / 1_000_000_000;
        if gained == 0 {
            return; // keep the remainder of the elapsed time
        }
        let room = (self.burst as i64 - self.level) as u128;
        self.level += gained.min(room) as i64;
        self.filled_at_ns = now_ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drives a shaper as fast as it allows and returns the bytes that went in `seconds`.
    fn run(rate: u64, burst: u64, piece: u64, seconds: u64) -> u64 {
        let mut shaper = Shaper::new(rate, burst, 0);
        let (mut now, mut sent) = (0, 0);
        while now < seconds * 1_000_000_000 {
            match shaper.take(piece, now) {
                Ok(()) => sent += piece,
                Err(at) => {
                    assert!(at > now, "asked to wait for no time");
                    now = at;
                }
            }
        }
        sent
    }

    #[test]
    fn the_long_run_rate_holds_for_small_and_for_oversized_pieces() {
        for piece in [1, 4096, 1_000_000, 5_000_000] {
            let (rate, burst, seconds) = (10_000_000, 1_000_000, 20);
            let sent = run(rate, burst, piece, seconds);
            let most = rate * seconds + burst + piece;
            assert!(sent <= most, "piece {piece}: {sent} > {most}");
            assert!(
                sent * 100 >= rate * seconds * 95,
                "piece {piece}: only {sent}"
            );
        }
    }

    #[test]
    fn an_unbounded_shaper_never_waits() {
        let mut shaper = Shaper::new(0, 1, 0);
        assert!((0..1000).all(|_| shaper.take(u64::MAX, 0).is_ok()));
    }

    #[test]
    fn a_clock_that_steps_back_grants_nothing() {
        let mut shaper = Shaper::new(1000, 1000, 1_000_000_000);
        assert!(shaper.take(1000, 1_000_000_000).is_ok());
        assert!(shaper.take(1000, 0).is_err());
    }
}
