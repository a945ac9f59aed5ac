//! Measurements: each figure beside its ceiling or control, taken in the same run, alternately.

mod ceiling;
mod digest;
mod plot;
mod progress;
mod quiet;
mod row;
mod stats;
mod table;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use row::Rows;

/// Measure this machine and this program on it, each figure beside its ceiling.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    which: Which,
}

#[derive(Debug, Clone, Subcommand)]
enum Which {
    /// Hash resident KV pages, beside BLAKE3 on contiguous memory.
    #[command(
        after_help = "Example:\n  moonlive bench digest --page 16,64 --threads 1 --plot digest.svg"
    )]
    Digest(digest::DigestArgs),
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

/// Runs one bench.
pub fn run(args: &BenchArgs, json: bool) -> anyhow::Result<()> {
    let mut rows = Rows::new(json);
    match &args.which {
        Which::Digest(a) => digest::run(a, &mut rows)?,
    }
    rows.table()
}
