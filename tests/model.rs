//! The protocol under an exhaustive model check: the same machines, every interleaving within the
//! stated bounds (see `CONTRACT.md`).
//!
//! `cargo test --release --test model -- --nocapture` prints the states visited. In the dev profile
//! smaller bounds are checked, which `MOONLIVE_MODEL=full` overrides.

#[path = "model/mod.rs"]
mod model;

use model::models::{self, Model};
use model::search::{Found, search};

fn full() -> bool {
    !cfg!(debug_assertions) || std::env::var("MOONLIVE_MODEL").is_ok_and(|v| v == "full")
}

fn check(model: Model) {
    let began = std::time::Instant::now();
    match search(&model) {
        Found::Nothing(stats) => {
            println!(
                "{}: {stats} in {:.1} s",
                model.name,
                began.elapsed().as_secs_f64()
            );
            for (what, n) in model.wanted(&stats) {
                assert!(n > 0, "{}: no run {what}", model.name);
            }
        }
        Found::Broken(trace) => panic!("{}:\n{trace}", model.name),
    }
}

#[test]
fn model_of_the_fence_and_the_decision() {
    check(models::fence(full()));
}

#[test]
fn model_of_rival_coordinators_before_the_fence() {
    check(models::rivals(full()));
}

#[test]
fn model_of_a_recovery_racing_a_migration() {
    check(models::recovery(full()));
}

#[test]
fn model_of_pages_readers_and_writers() {
    check(models::pages(full()));
}

/// The breaks that belong to the decision are found here, too, with a trace.
#[cfg(feature = "mutants")]
#[test]
fn mutants_are_caught_by_the_model_check() {
    use moonlivekv::route::mutants;
    let only = std::env::var("MOONLIVE_MUTANT").ok();
    let mut found = Vec::new();
    for name in mutants::ALL {
        if only.as_ref().is_some_and(|o| o != name) {
            continue;
        }
        mutants::choose(Some(name));
        for model in [
            models::fence(false),
            models::rivals(false),
            models::recovery(false),
            models::pages(false),
        ] {
            if let Found::Broken(trace) = search(&model) {
                println!("== {name}: found by {}\n{trace}", model.name);
                found.push(name);
                break;
            }
        }
        mutants::choose(None);
    }
    println!("found by the model check: {found:?}");
    assert!(
        only.is_some() || found.len() >= 14,
        "the model check finds only {found:?}"
    );
}
