//! `moonlive`: the daemons, their administration, the demonstration and the benches.

mod cli;
mod exit;

use clap::Parser;

fn main() -> std::process::ExitCode {
    let cli = cli::Cli::parse();
    let json = cli.json;
    match cli.run() {
        Ok(()) => exit::Code::Ok.into(),
        Err(error) => exit::report(&error, json),
    }
}
