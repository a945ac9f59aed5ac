//! The table in `docs/inject.md` is what happens: it covers every fault at every step, and runs of
//! the demonstration end as it says. `tools/inject-sweep` reads the same table and runs many more.

use std::collections::BTreeSet;
use std::process::Command;

use moonlivekv::node::faults::{Fault, step_name};
use serde_json::Value;

struct Row {
    fault: String,
    verify: String,
    step: String,
    pass: bool,
    migrated: bool,
    causes: Vec<String>,
}

fn table() -> Vec<Row> {
    let text = include_str!("../docs/inject.md");
    let rows = text
        .lines()
        .filter(|l| l.starts_with("| ") && !l.starts_with("| fault"));
    rows.map(|line| {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [fault, verify, step, pass, migrated, causes] = cells[..] else {
            panic!("a row of the table has other than six cells: {line}");
        };
        Row {
            fault: fault.into(),
            verify: verify.into(),
            step: step.into(),
            pass: pass.parse().unwrap(),
            migrated: migrated.parse().unwrap(),
            causes: causes.split(", ").map(str::to_owned).collect(),
        }
    })
    .collect()
}

#[test]
fn the_table_has_every_fault_at_every_step_it_can_fire_at() {
    let rows: BTreeSet<(String, String)> = table().into_iter().map(|r| (r.fault, r.step)).collect();
    let all: BTreeSet<(String, String)> = Fault::ALL
        .into_iter()
        .flat_map(|f| {
            f.steps()
                .iter()
                .map(move |s| (f.name().to_owned(), step_name(*s).to_owned()))
        })
        .collect();
    assert_eq!(rows, all);
}

/// Runs the demonstration with a small model; its exit status must agree with its summary.
fn demo(extra: &[&str]) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_moonlive"))
        .args(["demo", "--json", "--size", "tiny", "--context", "96"])
        .args(extra)
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let last = text.lines().last().unwrap_or_else(|| {
        panic!(
            "no summary; standard error: {}",
            String::from_utf8_lossy(&out.stderr)
        )
    });
    let summary: Value = serde_json::from_str(last).unwrap();
    assert_eq!(summary["pass"], out.status.success(), "{summary}");
    summary
}

/// One run; the stream lasts some six seconds, so that a fault can be noticed and made good.
fn ends_as_told(fault: Fault, verify: &str, seed: u64) {
    let (name, seed_text) = (fault.name(), seed.to_string());
    let mut flags = vec!["--inject", name, "--verify", verify, "--seed", &seed_text];
    flags.extend(["--output", "1600", "--pace", "4ms"]);
    let s = demo(&flags);
    assert_eq!(s["fired"], true, "{s}");
    assert_eq!(s["at_step"], step_name(fault.step_of(seed)), "{s}");
    holds_to_the_table(&s, fault, verify);
}

/// The end of a run in which the fault fired.
fn holds_to_the_table(s: &Value, fault: Fault, verify: &str) {
    let name = fault.name();
    let step = s["at_step"].as_str().unwrap();
    let row = table()
        .into_iter()
        .find(|r| r.fault == name && r.step == step && r.verify == verify)
        .unwrap_or_else(|| panic!("no row for {name} at {step}"));
    assert_eq!(s["pass"], row.pass, "{s}");
    assert_eq!(s["migrated"], row.migrated, "{s}");
    assert!(row.causes.iter().any(|c| s["cause"] == c.as_str()), "{s}");
    assert_eq!(s["leaks"], serde_json::json!([]), "{s}");
}

/// Slots go ahead only where the hold waited for a step, so the engine is not paced; a run in which
/// none was left to go must end well all the same, and another one is made.
fn ahead_ends_as_told(fault: Fault) {
    for seed in 0..4u64 {
        let seed_text = seed.to_string();
        let s = demo(&[
            "--inject",
            fault.name(),
            "--seed",
            &seed_text,
            "--output",
            "900",
        ]);
        assert_eq!(s["identical"], true, "{s}");
        if s["fired"] == true {
            holds_to_the_table(&s, fault, "resident");
            return;
        }
        assert_eq!(s["leaks"], serde_json::json!([]), "{s}");
    }
    panic!("{} never fired", fault.name());
}

#[test]
fn damage_on_the_way_ends_as_told() {
    ends_as_told(Fault::CorruptWire, "resident", 3);
    ends_as_told(Fault::CorruptSourceRead, "resident", 3);
    ends_as_told(Fault::CorruptControl, "resident", 3);
}

#[test]
fn damage_before_the_verify_ends_as_told() {
    ends_as_told(Fault::CorruptResidentEarly, "resident", 3);
}

#[test]
fn damage_after_the_verify_is_caught_by_a_full_verify_and_by_nothing_less() {
    ends_as_told(Fault::CorruptResidentLate, "full", 3);
    ends_as_told(Fault::CorruptResidentLate, "resident", 3);
}

#[test]
fn what_comes_late_or_from_an_earlier_attempt_ends_as_told() {
    for seed in 0..3 {
        ends_as_told(Fault::StaleEpoch, "resident", seed);
    }
    ends_as_told(Fault::LateWrite, "resident", 3);
}

#[test]
fn a_source_that_dies_ends_as_told() {
    // Two of its six steps, one before and one after the fence.
    let at = |step: &str| (0..12).find(|s| step_name(Fault::KillSource.step_of(*s)) == step);
    ends_as_told(Fault::KillSource, "resident", at("STREAM").unwrap());
    ends_as_told(Fault::KillSource, "resident", at("RESUME").unwrap());
}

#[test]
fn a_destination_that_dies_ends_as_told() {
    let at = |step: &str| (0..14).find(|s| step_name(Fault::KillDestination.step_of(*s)) == step);
    ends_as_told(Fault::KillDestination, "resident", at("ARM").unwrap());
    ends_as_told(Fault::KillDestination, "resident", at("COMMIT").unwrap());
}

#[test]
fn a_coordinator_that_dies_or_stops_ends_as_told() {
    let at = |step: &str| (0..8).find(|s| step_name(Fault::KillCoordinator.step_of(*s)) == step);
    ends_as_told(Fault::KillCoordinator, "resident", at("STREAM").unwrap());
    ends_as_told(Fault::KillCoordinator, "resident", at("FENCE").unwrap());
    ends_as_told(Fault::PauseCoordinator, "resident", at("PREPARE").unwrap());
}

#[test]
fn a_lost_reply_and_a_slow_link_end_as_told() {
    ends_as_told(Fault::DropCommitReply, "resident", 3);
    ends_as_told(Fault::SlowLink, "resident", 3);
}

#[test]
fn slots_ahead_of_the_push_that_are_lost_damaged_or_of_another_attempt_end_as_told() {
    ahead_ends_as_told(Fault::LoseAhead);
    ahead_ends_as_told(Fault::CorruptAhead);
    ahead_ends_as_told(Fault::StaleAhead);
}

#[test]
fn a_request_that_draws_nothing_migrates_like_one_that_samples() {
    let s = demo(&["--output", "600", "--pace", "2ms", "--greedy"]);
    assert_eq!(
        (&s["pass"], &s["migrated"], &s["cause"]),
        (&true.into(), &true.into(), &"none".into()),
        "{s}"
    );
}

#[test]
fn one_flipped_output_token_turns_pass_into_fail() {
    assert_eq!(demo(&["--output", "300"])["pass"], true);
    let s = demo(&["--output", "300", "--flip-output-token", "200"]);
    assert_eq!(
        (&s["pass"], &s["identical"]),
        (&Value::Bool(false), &Value::Bool(false)),
        "{s}"
    );
}
