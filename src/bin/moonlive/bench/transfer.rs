//! `bench transfer`: GB/s and latency of one-sided transfers by path and size, each beside what the
//! machine does with no protocol at all.
//!
//! The ceilings: for `tcp` a raw acknowledged send loop between two processes with no header and no
//! check; for `shm` a copy out of another process's mapping; for `local` a copy. All over 256 MiB
//! on both sides, in rounds that alternate with ours.

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use moonlivekv::transport::Path;

use super::ceiling::{Loop, Memcpy, RawTcp, SharedCopy};
use super::paths::{Driver, Op, Served, Shape};
use super::peer::Peer;
use super::progress::Progress;
use super::quiet::Quiet;
use super::row::{Row, Rows, round};
use super::stats::{Paired, Summary};
use super::{Output, plot, table};

#[derive(Debug, Clone, Args)]
pub struct TransferArgs {
    /// Paths to measure.
    #[arg(
        long = "transport",
        value_delimiter = ',',
        default_value = "tcp,shm,local",
        value_name = "PATH,..."
    )]
    paths: Vec<crate::cli::TransportKind>,
    /// Block sizes; K and M are binary.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4K,64K,1M,16M",
        value_parser = size,
        value_name = "BYTES,..."
    )]
    size: Vec<usize>,
    /// Transfers in flight for throughput; latencies are always of one at a time.
    #[arg(long, default_value_t = 4, value_name = "N")]
    depth: usize,
    /// Alternating rounds of each case and its ceiling.
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: u32,
    /// Length of a round.
    #[arg(long, default_value = "150ms", value_parser = crate::cli::duration, value_name = "TIME")]
    round: Duration,
    #[command(flatten)]
    out: Output,
}

/// Parses `4K`, `64K`, `1M`; a power of two, so that the working set divides evenly.
fn size(text: &str) -> Result<usize, String> {
    let bad = || format!("{text:?} is not a size: write 4K, 64K or 1M, a power of two");
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(d) => (d, 1 << 10),
        None => match text.strip_suffix(['M', 'm']) {
            Some(d) => (d, 1 << 20),
            None => (text, 1),
        },
    };
    let n: usize = digits.parse().map_err(|_| bad())?;
    match n.checked_mul(unit) {
        Some(n) if n.is_power_of_two() && (64..=64 << 20).contains(&n) => Ok(n),
        _ => Err(bad()),
    }
}

/// The ceiling of a path.
enum Ceiling {
    Raw(RawTcp),
    Shared(SharedCopy),
    Memcpy(Memcpy),
}

impl Ceiling {
    fn of(path: Path, peer: &mut Peer) -> anyhow::Result<Self> {
        Ok(match path {
            Path::Tcp => Self::Raw(RawTcp::connect(peer.raw_sink()?)?),
            Path::Shm => Self::Shared(SharedCopy::new(peer.pid(), peer.shared()?)?),
            Path::Local => Self::Memcpy(Memcpy::new()?),
        })
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Raw(_) => "raw acked send loop",
            Self::Shared(_) => "copy from shared memory",
            Self::Memcpy(_) => "copy",
        }
    }

    fn run(&mut self, size: usize, time: Duration) -> anyhow::Result<Loop> {
        match self {
            Self::Raw(c) => c.run(size, time),
            Self::Shared(c) => c.run(size, time),
            Self::Memcpy(c) => c.run(size, time),
        }
    }
}

/// The cases of one path: name behind the path, shape.
fn shapes(args: &TransferArgs) -> Vec<(String, Shape)> {
    let mut out = Vec::new();
    for size in &args.size {
        for op in [Op::Get, Op::Put] {
            let name = format!("{}/{}", op.name(), table::bytes(*size as u64));
            let shape = |spans| Shape {
                op,
                size: *size,
                spans,
                depth: args.depth.clamp(1, 64),
            };
            out.push((name.clone(), shape(1)));
            if *size <= 64 << 10 {
                out.push((format!("{name}/batch64"), shape(64)));
            }
        }
    }
    out
}

/// Runs the bench.
pub fn run(args: &TransferArgs, rows: &mut Rows) -> anyhow::Result<()> {
    let cases = shapes(args);
    let progress = Progress::start((cases.len() * args.paths.len()) as u64);
    for kind in &args.paths {
        let path = kind.path();
        let mut peer = Peer::start()?;
        let mut ceiling = Ceiling::of(path, &mut peer)?;
        // Blocks as large as the shape's spans: one served working set for each.
        let mut blocks: Vec<u64> = cases.iter().map(|c| c.1.block()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        for block in blocks {
            let here;
            let grants = match path {
                Path::Local => {
                    here = Served::start(path, block)?;
                    here.grants()
                }
                _ => peer.serve(path, block)?,
            };
            let mut driver = Driver::connect(path, grants, block)?;
            for (name, shape) in cases.iter().filter(|c| c.1.block() == block) {
                let name = format!("{path}/{name}");
                progress.say(name.clone());
                let row = case(args, &name, *shape, &mut driver, &mut ceiling, &peer)
                    .with_context(|| format!("case {name}"))?;
                rows.push(row.with("path", path.name()))?;
                progress.step();
            }
        }
    }
    drop(progress);
    args.out.draw(|| {
        plot::transfer(
            "Transfers by path and block size".into(),
            plot::note(&["256 MiB on both sides, integrity check on for tcp"]),
            rows.all(),
        )
    })
}

fn case(
    args: &TransferArgs,
    name: &str,
    shape: Shape,
    driver: &mut Driver,
    ceiling: &mut Ceiling,
    peer: &Peer,
) -> anyhow::Result<Row> {
    let single = Shape { depth: 1, ..shape };
    // Each once unmeasured: connections, page tables, first touch.
    driver.run(shape, args.round / 4)?;
    ceiling.run(shape.size, args.round / 4)?;
    let mut paired = Paired::default();
    let (mut each, mut floor) = (Vec::new(), Vec::new());
    let mut quiet = Quiet::start(&[peer.pid()]);
    for _ in 0..args.rounds.max(1) {
        let raw = ceiling.run(shape.size, args.round)?;
        paired.push(driver.run(shape, args.round)?.gbps(), raw.gbps());
        each.extend(driver.run(single, args.round / 2)?.each);
        floor.extend(raw.each);
    }
    quiet.stop();
    let (each, floor) = (Summary::of(each), Summary::of(floor));
    let mut row = Row::rate("transfer", name, paired.ours(), paired.n())
        .against(ceiling.name(), paired.ceiling(), paired.ratio())
        .quiet(&quiet)
        .with("op", shape.op.name())
        .with("bytes", shape.size)
        .with("spans", shape.spans)
        .with("depth", shape.depth)
        .with("against_p50_us", round(floor.p50 / 1e3));
    row.p50_us = Some(round(each.p50 / 1e3));
    row.p99_us = Some(round(each.p99 / 1e3));
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_written_and_odd_ones_are_refused() {
        assert_eq!(
            (size("4K"), size("1M"), size("65536")),
            (Ok(4096), Ok(1 << 20), Ok(65536))
        );
        for bad in ["", "3K", "1G", "0", "128M", "K"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
