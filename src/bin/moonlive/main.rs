//! `moonlive`: the daemons, their administration, the demonstration and the benches.

mod admin;
#[allow(
    dead_code,
    unused_imports,
    reason = "charts and ceilings of the benches that are not built yet: p99, stream"
)]
mod bench;
mod children;
mod cli;
mod client;
mod cluster;
mod daemons;
mod demo;
mod exit;
#[allow(
    dead_code,
    unused_imports,
    clippy::write_with_newline,
    reason = "held by its tests; the demo does not write it yet"
)]
mod report;
mod soak;
mod up;

use clap::Parser;

fn main() -> std::process::ExitCode {
    bench::serve_if_asked();
    let cli = cli::Cli::parse();
    let json = cli.json;
    match cli.run() {
        Ok(()) => exit::Code::Ok.into(),
        Err(error) => exit::report(&error, json),
    }
}
