//! The table in `docs/inject.md` is what happens: it covers every fault at every step, and runs of
//! the demonstration end as it says.

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

/// Runs the demonstration small and quick; its exit status must agree with its summary.
fn demo(extra: &[&str]) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_moonlive"))
        .args([
            "demo",
            "--json",
            "--size",
            "tiny",
            "--context",
            "96",
            "--output",
            "300",
        ])
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

fn ends_as_told(fault: &str, verify: &str) {
    let s = demo(&["--inject", fault, "--verify", verify, "--seed", "3"]);
    assert_eq!(s["fired"], true, "{s}");
    let step = s["at_step"].as_str().unwrap();
    let row = table()
        .into_iter()
        .find(|r| r.fault == fault && r.step == step && r.verify == verify)
        .unwrap_or_else(|| panic!("no row for {fault} at {step}"));
    assert_eq!(s["pass"], row.pass, "{s}");
    assert_eq!(s["migrated"], row.migrated, "{s}");
    assert!(row.causes.iter().any(|c| s["cause"] == c.as_str()), "{s}");
    assert_eq!(s["leaks"], serde_json::json!([]), "{s}");
}

#[test]
fn damage_on_the_way_ends_as_told() {
    ends_as_told("corrupt-wire", "resident");
    ends_as_told("corrupt-source-read", "resident");
    ends_as_told("corrupt-control", "resident");
}

#[test]
fn damage_after_the_verify_is_caught_by_a_full_verify_and_by_nothing_less() {
    ends_as_told("corrupt-resident-late", "full");
    ends_as_told("corrupt-resident-late", "resident");
}

#[test]
fn a_lost_reply_ends_as_told() {
    ends_as_told("drop-commit-reply", "resident");
}

#[test]
fn a_greedy_request_moves_as_a_sampled_one_does() {
    let s = demo(&["--greedy"]);
    assert_eq!(
        (&s["pass"], &s["migrated"], &s["cause"]),
        (&Value::Bool(true), &Value::Bool(true), &Value::from("none")),
        "{s}"
    );
}

#[test]
fn one_flipped_output_token_turns_pass_into_fail() {
    assert_eq!(demo(&[])["pass"], true);
    let s = demo(&["--flip-output-token", "200"]);
    assert_eq!(
        (&s["pass"], &s["identical"]),
        (&Value::Bool(false), &Value::Bool(false)),
        "{s}"
    );
}
