//! What this machine can do at best, measured beside our own figures and by the plainest code.
//!
//! They are written to match the C program that the project's older figures came from: 256 MiB on
//! both sides so that no cache helps, blocking sockets, one thread a side.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use moonlivekv::mem::{Region, RegionView};

use super::stats::Summary;

/// Bytes on each side of a transfer: far more than the caches hold.
pub const WORKING_SET: usize = 256 << 20;
/// A raw connection that says nothing for this long is broken.
const STUCK: Duration = Duration::from_secs(20);

/// What a timed loop gave.
#[derive(Debug, Clone, Default)]
pub struct Loop {
    /// Bytes moved.
    pub bytes: u64,
    /// Wall time.
    pub wall: Duration,
    /// Time of each operation, nanoseconds.
    pub each: Vec<u64>,
}

impl Loop {
    /// GB/s, 1e9 bytes a second.
    pub fn gbps(&self) -> f64 {
        self.bytes as f64 / self.wall.as_secs_f64().max(1e-9) / 1e9
    }

    /// Summary of the single operations.
    pub fn summary(&self) -> Summary {
        Summary::of(self.each.clone())
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
    let mut last = began;
    loop {
        step(offset)?;
        let now = Instant::now();
        out.each.push((now - last).as_nanos() as u64);
        last = now;
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

/// A plain copy inside this process by one thread.
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

    /// Copies blocks of `size` for `time`.
    pub fn run(&mut self, size: usize, time: Duration) -> anyhow::Result<Loop> {
        let (from, to) = (self.from.as_slice(), self.to.as_mut_slice());
        timed(size, WORKING_SET, time, |at| {
            to[at..at + size].copy_from_slice(&from[at..at + size]);
            Ok(())
        })
    }

    /// The same by `threads` threads, each on its share; the rate of all together, GB/s.
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

/// Copies out of another process's shared memory: what any path between two processes of a machine
/// costs at the least.
pub struct SharedCopy {
    view: RegionView,
    to: Region,
}

impl SharedCopy {
    /// Maps the peer's memory read-only.
    pub fn new(pid: u32, fd: i32) -> anyhow::Result<Self> {
        use std::os::fd::AsFd;
        let path = format!("/proc/{pid}/fd/{fd}");
        let file = std::fs::File::open(&path).with_context(|| format!("cannot open {path}"))?;
        Ok(Self {
            view: RegionView::map(file.as_fd(), WORKING_SET as u64)?,
            to: filled(WORKING_SET)?,
        })
    }

    /// Copies blocks of `size` for `time`.
    pub fn run(&mut self, size: usize, time: Duration) -> anyhow::Result<Loop> {
        let to = self.to.as_mut_slice();
        timed(size, WORKING_SET, time, |at| {
            Ok(self.view.copy_to(at as u64, &mut to[at..at + size])?)
        })
    }
}

/// A raw acknowledged send loop: a block out, eight bytes back, over loopback TCP between two
/// processes. No header, no check.
pub struct RawTcp {
    stream: TcpStream,
    from: Region,
}

impl RawTcp {
    /// Connects to a [`RawSink`].
    pub fn connect(port: u16) -> anyhow::Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(STUCK))?;
        stream.set_write_timeout(Some(STUCK))?;
        Ok(Self {
            stream,
            from: filled(WORKING_SET)?,
        })
    }

    /// Sends blocks of `size` for `time`.
    pub fn run(&mut self, size: usize, time: Duration) -> anyhow::Result<Loop> {
        let (stream, from) = (&mut self.stream, self.from.as_slice());
        let mut ack = [0u8; 8];
        stream.write_all(&(size as u64).to_le_bytes())?;
        let out = timed(size, WORKING_SET, time, |at| {
            stream.write_all(&from[at..at + size])?;
            stream.read_exact(&mut ack)?;
            Ok(())
        })?;
        // A block that starts with the mark of the end.
        let mut end = END.to_vec();
        end.resize(size, 0);
        stream.write_all(&end)?;
        stream.read_exact(&mut ack)?;
        Ok(out)
    }
}

/// Sixteen bytes at the start of a block that end a run; filled memory does not hold them.
const END: [u8; 16] = *b"\0\0end of the run";

/// The other side of [`RawTcp`].
pub struct RawSink {
    listener: TcpListener,
}

impl RawSink {
    /// Listens on a port of the kernel's choice.
    pub fn bind() -> anyhow::Result<(Self, u16)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        Ok((Self { listener }, port))
    }

    /// Serves one connection until it closes.
    pub fn serve(self) -> anyhow::Result<()> {
        let (mut stream, _) = self.listener.accept()?;
        stream.set_nodelay(true)?;
        let mut to = filled(WORKING_SET)?;
        let to = to.as_mut_slice();
        loop {
            let mut word = [0u8; 8];
            match stream.read_exact(&mut word) {
                Ok(()) => {}
                Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(e) => return Err(e.into()),
            }
            let size = u64::from_le_bytes(word) as usize;
            anyhow::ensure!(
                (16..=WORKING_SET).contains(&size),
                "a block of {size} bytes"
            );
            let mut at = 0;
            loop {
                stream.read_exact(&mut to[at..at + size])?;
                let ended = to[at..at + 16] == END;
                stream.write_all(&word)?;
                if ended {
                    break;
                }
                at += size;
                if at + size > WORKING_SET {
                    at = 0;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_raw_loop_runs_in_several_sizes_on_one_connection_and_ends() {
        let (sink, port) = RawSink::bind().unwrap();
        let serving = std::thread::spawn(move || sink.serve());
        let mut raw = RawTcp::connect(port).unwrap();
        for size in [4096, 65536] {
            let got = raw.run(size, Duration::from_millis(20)).unwrap();
            assert_eq!(got.bytes, size as u64 * got.each.len() as u64);
            assert!(got.gbps() > 0.0);
        }
        drop(raw);
        serving.join().unwrap().unwrap();
    }

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
