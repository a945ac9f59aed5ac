//! The protocol under a seeded deterministic simulator (see `CONTRACT.md`).
//!
//! `MOONLIVE_SIM_SEEDS=n` runs seeds `0..n`; `MOONLIVE_SIM_SEED=s` replays one with its trace.

#[path = "sim/mod.rs"]
mod sim;

use sim::cover::{Cell, Fault, Role};
use sim::{Config, Coverage, run};

use moonlivekv::migrate::io::Step;

fn env(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|v| v.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn replay(seed: u64) -> String {
    let traced = run(
        seed,
        Config {
            trace: true,
            calm: false,
        },
    );
    let tail = traced.trace.len().saturating_sub(400);
    format!(
        "{}\nseed {seed}: {}\nreplay: MOONLIVE_SIM_SEED={seed} cargo test --test sim replay",
        traced.trace[tail..].join("\n"),
        traced.violation.unwrap_or_else(|| "clean".into())
    )
}

#[test]
fn replay_one_seed() {
    if let Some(seed) = env("MOONLIVE_SIM_SEED") {
        let text = replay(seed);
        println!("{text}");
        assert!(
            run(seed, Config::default()).violation.is_none(),
            "seed {seed}"
        );
    }
}

#[test]
fn every_seed_keeps_every_invariant() {
    let seeds = env("MOONLIVE_SIM_SEEDS").unwrap_or(5_000);
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get() as u64);
    let results: Vec<_> = std::thread::scope(|scope| {
        let work = |t: u64| {
            let mut coverage = Coverage::default();
            let (mut faults, mut commits, mut aborts, mut recoveries) = (0, 0u64, 0u64, 0u64);
            let (mut events, mut failed) = (0, None);
            for seed in (t..seeds).step_by(threads as usize) {
                let outcome = run(seed, Config::default());
                coverage.add(&outcome.coverage);
                faults += outcome.faults;
                commits += u64::from(outcome.commits);
                aborts += u64::from(outcome.aborts);
                recoveries += u64::from(outcome.recoveries);
                events += outcome.events;
                if outcome.violation.is_some() {
                    failed = Some(seed);
                    break;
                }
            }
            (
                coverage, faults, commits, aborts, recoveries, events, failed,
            )
        };
        let running: Vec<_> = (0..threads).map(|t| scope.spawn(move || work(t))).collect();
        running
            .into_iter()
            .map(|r| r.join().expect("a simulator thread panicked"))
            .collect()
    });
    let mut coverage = Coverage::default();
    let (mut faults, mut commits, mut aborts, mut recoveries, mut events) = (0, 0, 0, 0, 0);
    for (c, f, co, ab, re, ev, failed) in results {
        if let Some(seed) = failed {
            panic!("{}", replay(seed));
        }
        coverage.add(&c);
        faults += f;
        commits += co;
        aborts += ab;
        recoveries += re;
        events += ev;
    }
    let (cell, least) = coverage.least();
    println!("{}", coverage.table());
    println!(
        "{seeds} seeds clean: {:.2} faults a seed, {commits} commits, {aborts} aborts, \
         {recoveries} recoveries, {events} events; least hit cell {cell:?}: {least}",
        faults as f64 / seeds as f64
    );
    for cell in Cell::all().filter(|c| c.impossible().is_some()) {
        let hits = coverage.hits[cell.index()];
        // Only a late write of an earlier attempt, by whoever is the destination now.
        assert!(
            hits < 5 + seeds / 1_000,
            "{cell:?} is possible: {hits} hits"
        );
    }
    assert!(
        faults >= 3 * seeds,
        "too few faults: {faults} in {seeds} seeds"
    );
    assert!(
        least >= seeds / 1_000,
        "{cell:?} was hit {least} times only"
    );
}

#[test]
fn only_these_cells_of_the_matrix_are_impossible() {
    let listed: Vec<_> = Cell::all()
        .filter_map(|c| c.impossible().map(|why| (c.step, c.fault, c.role, why)))
        .collect();
    for (step, fault, role, why) in &listed {
        println!("{step:?} {fault:?} {role:?}: {why}");
    }
    let cells: Vec<_> = listed.iter().map(|(s, f, r, _)| (*s, *f, *r)).collect();
    assert_eq!(
        cells,
        [
            (Step::Prepare, Fault::LostReply, Role::Destination),
            (Step::Resume, Fault::LostReply, Role::Destination),
        ]
    );
}

/// Each one-expression break of the protocol is found. (`cargo test --features mutants`)
#[cfg(feature = "mutants")]
#[test]
fn every_mutant_is_caught_within_ten_thousand_seeds() {
    use moonlivekv::route::mutants;
    let only = std::env::var("MOONLIVE_MUTANT").ok();
    let mut missed = Vec::new();
    for name in mutants::ALL {
        if only.as_ref().is_some_and(|o| o != name) {
            continue;
        }
        mutants::choose(Some(name));
        let found = (0..10_000).find(|seed| run(*seed, Config::default()).violation.is_some());
        match found {
            Some(seed) => {
                let text = replay(seed);
                let lines: Vec<&str> = text.lines().collect();
                let tail = lines
                    .len()
                    .saturating_sub(if only.is_some() { 400 } else { 12 });
                println!(
                    "== {name}: found by seed {seed}\n{}",
                    lines[tail..].join("\n")
                );
            }
            None => missed.push(name),
        }
        mutants::choose(None);
    }
    assert!(missed.is_empty(), "the simulator does not find {missed:?}");
}
