//! The protocol under an exhaustive model check: the same machines, every interleaving within the
//! bounds that each model states (`tests/model/models.rs`). See `CONTRACT.md`.
//!
//! `cargo test --release --test model -- --nocapture --test-threads 1` searches the full bounds and
//! prints the states visited. The dev profile searches smaller ones in under a minute;
//! `MOONLIVE_MODEL=full` and `=small` choose by hand.
//!
//! A search is depth-first and remembers states by a 64-bit fingerprint. What makes it small, and why
//! nothing is lost by it:
//! - operation numbers, causes of aborts and senders of notices do not count in a state: no machine
//!   decides by them;
//! - a mishap strikes where it is caused (`labels.rs`): a message is lost as it is sent, a process
//!   dies right after it acted;
//! - a state that was looked at with as much left to go wrong is not looked at again (`search.rs`);
//! - messages that their receiver can only ignore from now on are dropped (`net.rs`).
//!
//! What the models do *not* cover is said where they bound it: in `Model` and at each model.

#[path = "model/mod.rs"]
mod model;

use model::models::{self, Model};
use model::search::{Found, search};

fn full() -> bool {
    match std::env::var("MOONLIVE_MODEL").as_deref() {
        Ok("full") => true,
        Ok("small") => false,
        _ => !cfg!(debug_assertions),
    }
}

fn check(model: Model) {
    let began = std::time::Instant::now();
    match search(&model, u64::MAX) {
        Found::Nothing(stats) => {
            println!(
                "{}: {:?}: {stats} in {:.1} s",
                model.name,
                model.budget,
                began.elapsed().as_secs_f64()
            );
            for (what, n) in model.wanted(&stats) {
                assert!(n > 0, "{}: no run {what}", model.name);
            }
        }
        Found::TooMany => unreachable!("no limit was set"),
        Found::Broken(trace) => panic!("{}:\n{trace}", model.name),
    }
}

#[test]
fn model_of_the_fence_and_the_decision() {
    check(models::fence(full()));
}

#[test]
fn model_of_deadlines_in_the_fence() {
    check(models::deadlines(full()));
}

#[test]
fn model_of_stale_answers_in_the_fence() {
    check(models::stale(full()));
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
fn model_of_a_recovery_racing_an_abort() {
    check(models::late(full()));
}

#[test]
fn model_of_pages_readers_and_writers() {
    check(models::pages(full()));
}

/// The breaks of the decision, of verification and of the acceptor are found here, too, each by the
/// smallest model that shows it, with the path of steps. (The simulator finds all of them.)
#[cfg(feature = "mutants")]
#[test]
fn mutants_are_caught_by_the_model_check() {
    use moonlivekv::route::mutants;
    type Small = fn(bool) -> Model;
    let caught: &[(&str, Small)] = &[
        ("unfence-on-timer", models::deadlines),
        ("unfence-on-unchanged-record", models::fence),
        ("disarm-on-word", models::deadlines),
        ("lost-reply-is-failure", models::fence),
        ("abort-leaves-revision", models::fence),
        ("arm-before-verify", models::fence),
        ("replica-skipped", models::pages),
        ("verify-before-write-ends", models::pages),
        ("accepts-lower-epoch", models::recovery),
        ("recovery-without-floor", models::recovery),
        ("tail-tokens-not-re-emitted", models::fence),
        ("seal-off-by-one", models::fence),
        ("source-freed-before-decision", models::fence),
        ("double-resume", models::fence),
    ];
    let mut missed = Vec::new();
    for (name, model) in caught {
        assert!(mutants::ALL.contains(name), "{name}");
        mutants::choose(Some(name));
        let model = model(false);
        match search(&model, 300_000) {
            Found::Broken(trace) => println!("== {name}: found by {}\n{trace}", model.name),
            Found::Nothing(stats) => missed.push((name, stats.states)),
            // A break may make the states endless.
            Found::TooMany => missed.push((name, 300_000)),
        }
        mutants::choose(None);
    }
    assert!(
        missed.is_empty(),
        "the model check does not find {missed:?}"
    );
}
