//! Measurements: each figure beside its ceiling or control, taken in the same run, alternately.

mod ceiling;
mod digest;
mod fence;
mod p99;
mod plot;
pub mod progress;
mod quiet;
mod rig;
mod row;
mod stats;
mod store;
mod stream;
mod table;
mod transfer;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

pub use quiet::machine;
use row::Rows;

/// Measure this program on this machine, each figure beside its ceiling.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Debug, Clone, Subcommand)]
enum Which {
    /// How long a request stands still when it moves, beside a handoff of nothing.
    #[command(
        after_help = "Example:\n  moonlive bench fence --transport tcp --context 1024,65536 --migrations 200 --store embedded --plot fence.svg"
    )]
    Fence(fence::FenceArgs),
    /// Hash resident KV pages, beside BLAKE3 on contiguous memory.
    #[command(
        after_help = "Example:\n  moonlive bench digest --page 16,64 --threads 1 --plot digest.svg"
    )]
    Digest(digest::DigestArgs),
    /// Move blocks between two processes, beside a bare send loop and a bare copy.
    #[command(
        after_help = "Example:\n  moonlive bench transfer --transport tcp --size 64K,1M --plot transfer.svg"
    )]
    Transfer(transfer::TransferArgs),
    /// Move a decoding request's KV with every page hashed at both ends, beside what the CPUs allow.
    #[command(
        after_help = "Example:\n  moonlive bench stream --transport tcp,shm --rounds 7 --plot stream.svg"
    )]
    Stream(stream::StreamArgs),
    /// What a migration costs the requests beside it: their inter-token latency with and without one.
    #[command(
        after_help = "Example:\n  moonlive bench p99 --neighbours 3 --at-destination 1 --migrations 40 --plot p99.svg"
    )]
    P99(p99::P99Args),
    /// Compare-and-swap in memory, over sockets and on disk, beside a bare write and flush.
    #[command(after_help = "Example:\n  moonlive bench store --calls 2000 --plot store.svg")]
    Store(store::StoreArgs),
}

/// Where results go beside standard output.
#[derive(Debug, Clone, Args)]
struct Output {
    /// Draw a chart into this file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

impl Output {
    /// Draws, if a chart was asked for.
    fn draw(&self, figure: impl FnOnce() -> plot::Figure) -> anyhow::Result<()> {
        match &self.plot {
            Some(file) => plot::draw(&figure(), file),
            None => Ok(()),
        }
    }
}

/// Parses `200ms`, `2s`.
fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("{text:?} is not a duration: write 200ms or 2s");
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(d) => (d, 1),
        None => (text.strip_suffix('s').ok_or_else(bad)?, 1000),
    };
    let n: u64 = digits.parse().map_err(|_| bad())?;
    match n.checked_mul(unit) {
        Some(ms) if (1..=3_600_000).contains(&ms) => Ok(Duration::from_millis(ms)),
        _ => Err(bad()),
    }
}

/// Becomes the other process of a bench, if it was started as one; call it before anything else.
pub fn serve_if_asked() {
    moonlivekv::transport::measure::serve_if_asked();
}

/// Runs one bench.
pub fn run(args: BenchArgs, json: bool) -> anyhow::Result<()> {
    let mut rows = Rows::new(json);
    match &args.which {
        Which::Fence(a) => fence::run(a, &mut rows)?,
        Which::Digest(a) => digest::run(a, &mut rows)?,
        Which::Transfer(a) => transfer::run(a, &mut rows)?,
        Which::Stream(a) => stream::run(a, &mut rows)?,
        Which::P99(a) => p99::run(a, &mut rows)?,
        Which::Store(a) => store::run(a, &mut rows)?,
    }
    rows.table()
}
