//! Depth-first search of all states, remembered by fingerprint.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use super::exec::{Exec, No, apply};
use super::labels::{Label, labels, moves_on};
use super::models::Model;
use super::state::State;

/// Fingerprints are hashes already.
#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn write(&mut self, _: &[u8]) {}
    fn write_u64(&mut self, v: u64) {
        self.0 = v;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub states: u64,
    pub transitions: u64,
    pub ends: u64,
    pub deepest: usize,
    pub committed: u64,
    pub aborted: u64,
    pub superseded: u64,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} states, {} transitions, depth {}, {} ends ({} committed, {} aborted, {} superseded)",
            self.states,
            self.transitions,
            self.deepest,
            self.ends,
            self.committed,
            self.aborted,
            self.superseded
        )
    }
}

pub enum Found {
    Nothing(Stats),
    Broken(String),
}

struct Frame {
    state: State,
    labels: Vec<Label>,
    next: usize,
}

pub fn search(model: &Model) -> Found {
    let mut seen: HashSet<u64, BuildHasherDefault<Same>> = HashSet::default();
    let mut stats = Stats::default();
    let first = model.first();
    seen.insert(first.fingerprint());
    let mut stack = vec![frame(model, first)];
    while let Some(top) = stack.last_mut() {
        let Some(&label) = top.labels.get(top.next) else {
            stack.pop();
            continue;
        };
        top.next += 1;
        stats.transitions += 1;
        match apply(model, &top.state, label) {
            Err(No::Moot) => {}
            Err(No::Broken(what)) => return Found::Broken(trace(&stack, &what)),
            Ok(next) => {
                if !seen.insert(next.fingerprint()) {
                    continue;
                }
                if stats.states % 500_000 == 499_999 {
                    eprintln!("{}: {stats} ...", model.name);
                }
                let next = frame(model, next);
                if !next.labels.iter().any(|l| moves_on(*l)) {
                    stats.ends += 1;
                    model.count(&next.state, &mut stats);
                    if let Err(what) = model.check_end(&next.state) {
                        stack.push(next);
                        return Found::Broken(trace(&stack, &what));
                    }
                }
                stack.push(next);
                stats.deepest = stats.deepest.max(stack.len());
            }
        }
        stats.states = seen.len() as u64;
        if model.most > 0 && stats.states > model.most {
            return Found::Broken(format!("more than {} states", model.most));
        }
    }
    Found::Nothing(stats)
}

fn frame(model: &Model, state: State) -> Frame {
    let labels = labels(model, &state);
    Frame {
        state,
        labels,
        next: 0,
    }
}

fn trace(stack: &[Frame], what: &str) -> String {
    let mut text = String::new();
    for f in stack {
        if let Some(label) = f.next.checked_sub(1).and_then(|i| f.labels.get(i)) {
            text += &Exec::describe(&f.state, *label);
            text.push('\n');
        }
    }
    text + what
}
