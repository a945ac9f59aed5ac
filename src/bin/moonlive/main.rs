//! `moonlive`: the daemons, their administration, the demonstration and the benches.

mod admin;
mod bench;
mod children;
mod cli;
mod client;
mod cluster;
mod daemons;
mod demo;
mod exit;
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
