//! `CONTRACT.md` names a test for each invariant, `docs/faults.md` one for each fault: every one of
//! them must exist and be a test.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// What stands between backticks in a line.
fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// A test's name: lower case words, at least three of them.
fn is_test_name(word: &str) -> bool {
    let part = |p: &str| {
        !p.is_empty()
            && p.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    word.split('_').count() >= 3 && word.split('_').all(part)
}

/// The functions under a folder that carry `#[test]`.
fn tests_under(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).expect("a folder of sources") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            tests_under(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = fs::read_to_string(&path).expect("a source file");
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if line == "#[test]" {
                    is_test = true;
                } else if let Some(rest) = line.strip_prefix("fn ") {
                    let name = rest.split(['(', '<']).next().unwrap_or_default();
                    if std::mem::take(&mut is_test) {
                        found.insert(name.to_owned());
                    }
                } else if !line.starts_with("#[") && !line.starts_with("//") {
                    is_test = false;
                }
            }
        }
    }
}

#[test]
fn every_test_that_the_contract_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for dir in ["src", "tests"] {
        tests_under(&root.join(dir), &mut tests);
    }
    assert!(tests.contains("every_test_that_the_contract_names_exists"));
    let contract = fs::read_to_string(root.join("CONTRACT.md")).expect("CONTRACT.md");
    let (mut rows, mut names) = (0, 0);
    for line in contract.lines() {
        for word in quoted(line) {
            if is_test_name(word) {
                names += 1;
                assert!(tests.contains(word), "no test is called {word}: {line}");
            }
            let is_file = word.ends_with(".rs") || word.ends_with(".md");
            if is_file && !word.contains(char::is_whitespace) {
                assert!(root.join(word).is_file(), "there is no {word}: {line}");
            }
        }
        // A row of the table: a number first, what pins it last.
        let mut cells = line.trim().trim_matches('|').split('|').map(str::trim);
        if cells
            .next()
            .is_some_and(|first| first.parse::<u32>().is_ok())
        {
            rows += 1;
            let pinned = cells.next_back().unwrap_or_default();
            assert!(
                quoted(pinned).any(|w| is_test_name(w) || w.ends_with(".rs")),
                "nothing pins this: {line}"
            );
        }
    }
    assert!(rows >= 18, "only {rows} invariants");
    assert!(names >= rows - 1, "only {names} tests named");
}

/// Some of these are made by macros or run by a `main` of their own, so any function will do.
#[test]
fn every_test_that_the_list_of_faults_names_exists() {
    fn read(dir: &Path, all: &mut String) {
        for entry in fs::read_dir(dir).expect("a folder of sources") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() {
                read(&path, all);
            } else if path.extension().is_some_and(|e| e == "rs") {
                all.push_str(&fs::read_to_string(&path).expect("a source file"));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    for dir in ["src", "tests"] {
        read(&root.join(dir), &mut sources);
    }
    let faults = fs::read_to_string(root.join("docs/faults.md")).expect("docs/faults.md");
    let rows = faults.lines().filter(|l| l.starts_with("| ")).skip(1);
    let mut named = 0;
    for line in rows.chain(faults.lines().filter(|l| l.starts_with("- "))) {
        let words: Vec<&str> = quoted(line).collect();
        for word in words.iter().filter(|w| is_test_name(w)) {
            named += 1;
            let there = sources.contains(&format!("fn {word}("));
            assert!(there, "no test is called {word}: {line}");
        }
        let pinned = |w: &&&str| is_test_name(w) || w.ends_with(".rs");
        assert!(
            words.iter().any(|w| pinned(&w)),
            "nothing tests this: {line}"
        );
    }
    assert!(named > 40, "only {named} tests named");
}
