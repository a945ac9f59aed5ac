//! `cargo bench --bench transfer [-- FILTER] [--depth N] [--rounds N]`: what the paths reach against
//! ceilings measured beside them, one JSON object a line. See `moonlivekv::transport::measure`.

use moonlivekv::transport::measure::{self, Options};

fn main() {
    measure::serve_if_asked();
    let mut options = Options::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let number = |args: &mut dyn Iterator<Item = String>| {
            args.next()
                .and_then(|v| v.parse().ok())
                .expect("a number follows")
        };
        match arg.as_str() {
            "--depth" => options.depth = number(&mut args),
            "--rounds" => options.rounds = number(&mut args),
            // Cargo adds it.
            "--bench" => {}
            filter => options.filter = filter.into(),
        }
    }
    let emit =
        |row: &measure::Row| println!("{}", serde_json::to_string(row).expect("plain numbers"));
    if let Err(e) = measure::run(&options, emit) {
        eprintln!("{e}");
        std::process::exit(1);
    }
}
