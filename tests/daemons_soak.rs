//! A short soak on real processes: streams equal to an oracle's, everything given back. The long one
//! is `moonlive soak`.

use std::process::Command;

use serde_json::Value;

#[test]
fn a_short_soak_under_faults_leaves_every_stream_whole_and_nothing_held() {
    let out = Command::new(env!("CARGO_BIN_EXE_moonlive"))
        .args(["soak", "--migrations", "24", "--seed", "5", "--json"])
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    let last = text
        .lines()
        .last()
        .unwrap_or_else(|| panic!("no summary: {errors}"));
    let s: Value = serde_json::from_str(last).unwrap();
    assert_eq!(s["pass"], true, "{s:#}\n{errors}");
    assert!(s["migrations"].as_u64() >= Some(24), "{s:#}");
    assert!(s["committed"].as_u64() > Some(0), "{s:#}");
    let fired = s["faults_fired"].as_object().unwrap();
    assert!(!fired.is_empty(), "no fault fired: {s:#}");
    assert!(s["requests"].as_u64() >= Some(3), "{s:#}");
}
