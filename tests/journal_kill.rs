//! The journal's process killed while it appends: every token it had returned for is there again.
//!
//! The child process is this very test program, started with a role in its environment.

use moonlivekv::id::{Incarnation, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use moonlivekv::journal::{Journal, JournalOptions, TokenRef};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const DIR: &str = "MOONLIVE_TEST_JOURNAL";

fn options() -> JournalOptions {
    JournalOptions {
        window: Duration::from_millis(2),
        max_append: 4 << 10,
        segment_bytes: 64 << 10,
        ..Default::default()
    }
}

fn request() -> RequestId {
    RequestId([5; 16])
}

fn worker() -> WorkerRef {
    WorkerRef {
        id: WorkerId::new("w").unwrap(),
        incarnation: Incarnation(1),
    }
}

fn text(seq: u64) -> Vec<u8> {
    format!("token {seq} {}", "x".repeat((seq % 90) as usize)).into_bytes()
}

/// Appends until it is killed, and tells what it was told; does nothing in a plain test run.
#[test]
fn child_process() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let journal = Journal::open(Path::new(&dir), options()).unwrap();
    let epoch = match journal.status(request()).unwrap() {
        Some(status) => OwnerEpoch(status.floor.epoch.0 + 1),
        None => OwnerEpoch(1),
    };
    let tail = journal.raise_floor(request(), epoch, &worker()).unwrap();
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nfloor {} 0", epoch.0).unwrap();
    for seq in tail.status.journaled + 1.. {
        let text = text(seq);
        let token = TokenRef {
            token: seq as u32,
            text: &text,
            finish: None,
        };
        journal.append(request(), epoch, seq, &[token]).unwrap();
        journal.delivered(request(), seq.saturating_sub(3)).unwrap();
        writeln!(out, "\ntold {} {seq}", epoch.0).unwrap();
    }
}

#[test]
fn a_journal_killed_at_any_time_keeps_every_token_it_returned_for() {
    let temp = tempfile::tempdir().unwrap();
    let mut told = 0;
    for round in 1..=12u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process", "--nocapture"])
            .env(DIR, temp.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let goal = told + 40 + round * 37;
        for line in &mut lines {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            if let ["floor" | "told", epoch, seq] = words[..] {
                assert_eq!(epoch, round.to_string(), "a floor was lost");
                told = told.max(seq.parse().unwrap());
            }
            if told >= goal {
                break;
            }
        }
        assert!(told >= goal, "the child ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        // What it wrote before it died, it had been told too.
        for line in lines {
            let line = line.unwrap();
            if let Some(seq) = line.strip_prefix(&format!("told {round} ")) {
                told = told.max(seq.parse().unwrap_or(0));
            }
        }
        let journal = Journal::open(temp.path(), options()).unwrap();
        let status = journal.status(request()).unwrap().unwrap();
        assert!(
            status.journaled == told || status.journaled == told + 1,
            "{} of {told}",
            status.journaled
        );
        assert_eq!(status.floor.epoch, OwnerEpoch(round));
        assert!(status.delivered <= status.journaled);
        for (entry, seq) in journal
            .read(request(), 1, u64::MAX)
            .unwrap()
            .iter()
            .zip(1..)
        {
            assert_eq!(
                (entry.seq, entry.token, &entry.text),
                (seq, seq as u32, &text(seq))
            );
        }
    }
}
