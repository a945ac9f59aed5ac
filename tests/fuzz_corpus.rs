//! Replays the committed fuzz corpus through the fuzz targets' own bodies, on stable, so that every
//! decoder meets every kind of bad input in each run of the tests.

#[path = "../fuzz/decoders/mod.rs"]
mod decoders;
#[path = "fuzz_corpus/mutate.rs"]
mod mutate;

use decoders::{TARGETS, Target};
use mutate::{Dice, mutate};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

fn corpus(target: &Target) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/corpus")
        .join(target.name);
    let mut files: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|f| f.unwrap().path())
        .collect();
    files.sort();
    files
}

/// The outcome that a kept input's name claims; a fuzzer's own finds are named by their hash.
fn claimed(name: &str) -> Option<&str> {
    name.split('.').next().filter(|n| n.len() < 40)
}

#[test]
fn the_corpus_reaches_every_outcome_of_every_decoder() {
    for target in TARGETS {
        let mut reached = BTreeSet::new();
        let files = corpus(target).into_iter().map(|file| {
            let name = file.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(file).unwrap())
        });
        for (name, bytes) in files.chain((target.seeds)()) {
            let outcome = (target.run)(&bytes);
            if let Some(claimed) = claimed(&name) {
                assert_eq!(outcome, claimed, "{}: {name}", target.name);
            }
            reached.insert(outcome);
        }
        let outcomes: BTreeSet<&str> = target.outcomes.iter().copied().collect();
        assert!(outcomes.contains("accept"), "{}", target.name);
        assert_eq!(reached, outcomes, "{}", target.name);
    }
}

/// What code makes stands in the corpus too, so that a fuzzer starts from it. To write it anew:
/// `WRITE_FUZZ_CORPUS=1 cargo test --test fuzz_corpus small_seeds`.
#[test]
fn small_seeds_are_committed_as_they_are_made() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let write = std::env::var_os("WRITE_FUZZ_CORPUS").is_some();
    for target in TARGETS {
        let seeds = (target.seeds)();
        for (name, bytes) in seeds.into_iter().filter(|(_, b)| b.len() <= 64 << 10) {
            let file = root.join(target.name).join(&name);
            if write {
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(&file, &bytes).unwrap();
            }
            let committed = fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            assert!(committed == bytes, "{} is out of date", file.display());
        }
    }
}

#[test]
fn every_cut_of_an_accepted_input_is_refused_or_means_what_it_says() {
    for target in TARGETS {
        for file in corpus(target) {
            let bytes = fs::read(file).unwrap();
            if bytes.len() > 4096 {
                continue;
            }
            // `run` panics where an accepted input does not mean its bytes.
            for len in 0..bytes.len() {
                (target.run)(&bytes[..len]);
            }
        }
    }
}

/// Most that the process may take beyond what it had, in bytes: inputs are 64 KiB at most.
const MOST_MEMORY: u64 = 256 << 20;

/// Highest resident memory of this process so far, in bytes; 0 where the system does not say.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// 500 changed inputs a target; more for so many seconds each with `MUTATE_SECONDS=s`, of one target
/// with `MUTATE_ONLY=name`, from another beginning with `MUTATE_SEED=n`. No coverage guides it, so it
/// stands beside the fuzzer and not for it.
#[test]
fn changed_inputs_are_refused_or_mean_what_they_say_in_bounded_memory() {
    let number = |name| std::env::var(name).ok().and_then(|t| t.parse().ok());
    let seconds: Option<u64> = number("MUTATE_SECONDS");
    let only = std::env::var("MUTATE_ONLY").ok();
    let mut dice = Dice(number("MUTATE_SEED").unwrap_or(1));
    let before = peak_memory();
    for target in TARGETS {
        if only.as_ref().is_some_and(|o| o != target.name) {
            continue;
        }
        let kept: Vec<Vec<u8>> = corpus(target)
            .iter()
            .map(|f| fs::read(f).unwrap())
            .collect();
        let (began, mut runs, mut slowest) = (Instant::now(), 0u64, Duration::ZERO);
        let more = |runs| match seconds {
            None => runs < 500,
            Some(s) => began.elapsed() < Duration::from_secs(s),
        };
        while more(runs) {
            let pick = |dice: &mut Dice| &kept[dice.below(kept.len())];
            let (input, other) = (pick(&mut dice), pick(&mut dice));
            let input = mutate(input, other, &mut dice);
            let at = Instant::now();
            if std::panic::catch_unwind(|| (target.run)(&input)).is_err() {
                panic!("{}: {}", target.name, hex(&input));
            }
            let took = at.elapsed();
            if took > slowest {
                slowest = took;
            }
            let grown = peak_memory().saturating_sub(before);
            assert!(
                grown < MOST_MEMORY,
                "{}: {grown} bytes: {}",
                target.name,
                hex(&input)
            );
            runs += 1;
        }
        if seconds.is_some() {
            println!(
                "{}: {runs} inputs in {:.0} s, slowest {slowest:?}, {} MiB more than at first",
                target.name,
                began.elapsed().as_secs_f64(),
                peak_memory().saturating_sub(before) >> 20
            );
        }
    }
}

#[test]
fn every_target_has_its_program_and_its_corpus() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let names: BTreeSet<String> = TARGETS.iter().map(|t| t.name.to_owned()).collect();
    assert_eq!(names.len(), TARGETS.len(), "a name is used twice");
    for name in &names {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")));
        let program = fs::read_to_string(root.join(format!("fuzz_targets/{name}.rs"))).unwrap();
        assert!(program.contains(&format!("decoders::run(\"{name}\", data)")));
    }
    let folders: BTreeSet<String> = fs::read_dir(root.join("corpus"))
        .unwrap()
        .map(|f| f.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        folders, names,
        "a corpus without a target, or a target without one"
    );
}
