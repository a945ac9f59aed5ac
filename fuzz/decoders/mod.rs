//! The bodies of all fuzz targets, shared by the fuzzer's programs and by the replay of the corpus
//! in `tests/fuzz_corpus.rs`.

mod control_state;

/// One decoder under test.
pub struct Target {
    /// Its name: of the program, of the corpus' folder.
    pub name: &'static str,
    /// Decodes, checks what was accepted (by panic), and names the outcome.
    pub run: fn(&[u8]) -> &'static str,
    /// Every outcome there is.
    pub outcomes: &'static [&'static str],
    /// Inputs that are too large to commit.
    pub large: fn() -> Vec<Vec<u8>>,
}

/// All decoders.
pub const TARGETS: &[Target] = &[control_state::TARGET];

/// Runs one target; what a fuzzer's program calls.
#[allow(dead_code, reason = "the replay goes through TARGETS itself")]
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|t| t.name == name);
    (target.expect("a known target").run)(data);
}
