//! What this machine can do at best, measured beside our own figures and by the plainest code.
//!
//! Ceilings of transfers are measured by `moonlivekv::transport::measure`, beside the transfers.

use std::time::{Duration, Instant};

use moonlivekv::mem::Region;

/// Bytes on each side of a transfer: far more than the caches hold.
pub const WORKING_SET: usize = 256 << 20;

/// What a timed loop gave.
#[derive(Debug, Clone, Default)]
pub struct Loop {
    /// Bytes moved.
    pub bytes: u64,
    /// Wall time.
    pub wall: Duration,
}

impl Loop {
    /// GB/s, 1e9 bytes a second.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.wall.as_secs_f64().max(1e-9) / 1e9
    }
}

/// Runs `step(offset)` over a working set in steps of `size` for about `time`.
pub fn timed(
    size: usize,
    set: usize,
    time: Duration,
    mut step: impl FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<Loop> {
    let began = Instant::now();
    let mut out = Loop::default();
    let mut offset = 0;
    loop {
        step(offset)?;
        let now = Instant::now();
        out.bytes += size as u64;
        out.wall = now - began;
        if out.wall >= time {
            return Ok(out);
        }
        offset += size;
        if offset + size > set {
            offset = 0;
        }
    }
}

/// Memory as the peers' programs use it: huge pages where the kernel gives them, all present.
pub fn filled(bytes: usize) -> anyhow::Result<Region> {
    let mut region = Region::anonymous(bytes as u64)?;
    fill(region.as_mut_slice(), 1);
    Ok(region)
}

/// Bytes that neither compress nor repeat.
pub fn fill(out: &mut [u8], seed: u64) {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in out.chunks_mut(8) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
}

/// A plain copy inside this process.
pub struct Memcpy {
    from: Region,
    to: Region,
}

impl Memcpy {
    /// Allocates both sides.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            from: filled(WORKING_SET)?,
            to: filled(WORKING_SET)?,
        })
    }

    /// Copies blocks of `size` for `time`, each thread on its share; the rate of all together, GB/s.
    pub fn run_threads(
        &mut self,
        threads: usize,
        size: usize,
        time: Duration,
    ) -> anyhow::Result<f64> {
        let share = WORKING_SET / threads.max(1);
        let (from, to) = (self.from.as_slice(), self.to.as_mut_slice());
        let loops: Vec<anyhow::Result<Loop>> = std::thread::scope(|s| {
            let running: Vec<_> = from
                .chunks_exact(share)
                .zip(to.chunks_exact_mut(share))
                .map(|(from, to)| {
                    s.spawn(move || {
                        timed(size, share, time, |at| {
                            to[at..at + size].copy_from_slice(&from[at..at + size]);
                            Ok(())
                        })
                    })
                })
                .collect();
            running
                .into_iter()
                .map(|t| {
                    t.join()
                        .unwrap_or_else(|_| anyhow::bail!("a copying thread ended early"))
                })
                .collect()
        });
        let mut sum = 0.0;
        for one in loops {
            sum += one?.gbps();
        }
        Ok(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timed_loop_wraps_inside_its_working_set() {
        let mut seen = Vec::new();
        let got = timed(3, 10, Duration::from_micros(1), |at| {
            seen.push(at);
            std::thread::sleep(Duration::from_micros(2));
            Ok(())
        });
        assert_eq!(got.unwrap().bytes, 3);
        let mut n = 0;
        let _ = timed(3, 10, Duration::from_secs(1), |at| {
            seen.push(at);
            n += 1;
            anyhow::ensure!(n < 5, "enough");
            Ok(())
        });
        assert_eq!(seen, [0, 0, 3, 6, 0, 3]);
    }
}
