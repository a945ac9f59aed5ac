//! `bench transfer`: GB/s and latency of one-sided transfers by path and size, each beside what the
//! machine does with no protocol at all.
//!
//! What is measured and how is `moonlivekv::transport::measure`'s; this is its command line.

use std::time::Duration;

use clap::Args;
use moonlivekv::transport::measure;

use super::progress::Progress;
use super::row::{Row, Rows, round};
use super::{Output, plot};

#[derive(Debug, Clone, Args)]
pub struct TransferArgs {
    /// Only this path: tcp or shm.
    #[arg(long, value_name = "PATH", value_parser = ["tcp", "shm"])]
    transport: Option<String>,
    /// Block sizes; K and M are binary.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4K,64K,1M,16M",
        value_parser = size,
        value_name = "BYTES,..."
    )]
    size: Vec<u64>,
    /// Transfers in flight at a time.
    #[arg(long, default_value_t = 1, value_name = "N")]
    depth: usize,
    /// Alternating rounds of each case and its ceiling.
    #[arg(long, default_value_t = 7, value_name = "N")]
    rounds: usize,
    /// Length of half a round.
    #[arg(long, default_value = "200ms", value_parser = super::duration, value_name = "TIME")]
    round: Duration,
    #[command(flatten)]
    out: Output,
}

/// Parses `4K`, `64K`, `1M`; a power of two, so that the working set divides evenly.
fn size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size: write 4K, 64K or 1M, a power of two from 4K on");
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(d) => (d, 1 << 10),
        None => match text.strip_suffix(['M', 'm']) {
            Some(d) => (d, 1 << 20),
            None => (text, 1),
        },
    };
    let n: u64 = digits.parse().map_err(|_| bad())?;
    match n.checked_mul(unit) {
        Some(n) if n.is_power_of_two() && (4 << 10..=64 << 20).contains(&n) => Ok(n),
        _ => Err(bad()),
    }
}

/// A row of the library's as one of this program's.
pub fn row(r: &measure::Row, rounds: usize) -> Row {
    let mut parts = r.case.split('/');
    let mut part = || parts.next().unwrap_or("");
    let (path, op, bytes) = (part(), part(), part());
    let mut row = Row::rate("transfer", r.case.clone(), r.gbps, rounds as u64)
        .against(r.against.clone(), r.against_gbps, r.ratio)
        .with("path", path)
        .with("op", op)
        .with("depth", r.depth)
        .with("cpu_s_per_gb", round(r.cpu_s_per_gb))
        .with("against_p50_us", round(r.against_p50_us));
    if let Some(bytes) = bytes.strip_suffix("iB").and_then(|short| size(short).ok()) {
        row = row.with("bytes", bytes);
    }
    row.p50_us = Some(round(r.p50_us));
    row.p99_us = Some(round(r.p99_us));
    row.other_cpu = Some(round(r.other_cpu));
    row
}

/// Runs the bench.
pub fn run(args: &TransferArgs, rows: &mut Rows) -> anyhow::Result<()> {
    let paths = if args.transport.is_some() { 1 } else { 2 };
    let progress = Progress::start((args.size.len() * 2 * paths) as u64);
    progress.say("filling 256 MiB at both ends");
    let options = measure::Options {
        sizes: args.size.clone(),
        rounds: args.rounds.max(1),
        round: args.round,
        depth: args.depth.clamp(1, 64),
        filter: args
            .transport
            .as_ref()
            .map(|t| format!("{t}/"))
            .unwrap_or_default(),
        ..measure::Options::default()
    };
    let mut failed = Ok(());
    measure::run(&options, |r| {
        progress.say(r.case.clone());
        if failed.is_ok() {
            failed = rows.push(row(r, options.rounds));
        }
        progress.step();
    })?;
    failed?;
    drop(progress);
    args.out.draw(|| {
        plot::transfer(
            "Transfers by path and block size".into(),
            plot::note(&["256 MiB walked through at both ends, CRC-32C on for tcp"]),
            rows.all(),
        )
    })
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
        for bad in ["", "3K", "1G", "0", "1K", "128M", "K"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
