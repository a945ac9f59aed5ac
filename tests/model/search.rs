//! Depth-first search of all states, remembered by fingerprint.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};

use super::exec::{Exec, No, apply};
use super::labels::{Base, Label, labels, variants};
use super::models::Model;
use super::state::{Budget, State};

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
    /// The same, whatever may still go wrong.
    pub cores: u64,
    pub transitions: u64,
    pub ends: u64,
    pub deepest: usize,
    pub committed: u64,
    pub aborted: u64,
    pub superseded: u64,
    /// Runs with more than one attempt.
    pub again: u64,
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} states ({} without budgets), {} transitions, depth {}, {} ends ({} committed, {} aborted, {} superseded)",
            self.states,
            self.cores,
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
    /// There are more states than were to be looked at.
    TooMany,
    Broken(String),
}

struct Frame {
    state: State,
    labels: Vec<Label>,
    next: usize,
}

/// The states seen, by fingerprint, each with the budgets of mishaps that it was seen with.
///
/// What can go wrong with little left can go wrong with more: a state that was looked at with at
/// least as much left of everything is not looked at again.
#[derive(Default)]
struct Seen(HashMap<u64, u64, BuildHasherDefault<Same>>);

impl Seen {
    /// Whether the state is new with what is left.
    fn insert(&mut self, state: &State, left: &Budget) -> bool {
        let below = self.0.entry(state.fingerprint()).or_default();
        let fresh = *below & (1 << number(left)) == 0;
        if fresh {
            *below |= covered(left);
        }
        fresh
    }
}

/// A number for each combination of what is left, below 54.
fn number(b: &Budget) -> u8 {
    debug_assert!(b.crashes < 3 && b.pauses < 2 && b.losses < 3 && b.deadlines < 3);
    ((b.crashes * 2 + b.pauses) * 3 + b.losses) * 3 + b.deadlines
}

/// The combinations with no more of anything.
fn covered(b: &Budget) -> u64 {
    let mut all = 0;
    for crashes in 0..=b.crashes {
        for pauses in 0..=b.pauses {
            for losses in 0..=b.losses {
                for deadlines in 0..=b.deadlines {
                    let left = Budget {
                        crashes,
                        pauses,
                        losses,
                        deadlines,
                        ..*b
                    };
                    all |= 1 << number(&left);
                }
            }
        }
    }
    all
}

/// Looks at every state of the model, or gives up beyond `most`.
pub fn search(model: &Model, most: u64) -> Found {
    let mut seen = Seen::default();
    let mut stats = Stats::default();
    let first = model.first();
    // What is reached with no mishap at all will be looked at with everything left: it need not be
    // looked at with less on the way there.
    let all = first.left;
    let mut undisturbed = vec![first.clone()];
    let mut plain = Seen::default();
    plain.insert(&first, &all);
    while let Some(s) = undisturbed.pop() {
        for label in labels(model, &s) {
            if let Ok((next, _)) = apply(model, &s, label)
                && next.left.number_of_mishaps() == all.number_of_mishaps()
                && plain.insert(&next, &all)
                && (plain.0.len() as u64) < most
            {
                undisturbed.push(next);
            }
        }
    }
    seen.insert(&first, &all);
    let mut stack = vec![frame(model, first)];
    stack[0].labels.insert(0, Base::Nothing.into());
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
            Ok((next, did)) => {
                let more = variants(model, &top.state, label, &did);
                top.labels.extend(more);
                let disturbed = next.left.number_of_mishaps() < all.number_of_mishaps();
                if disturbed && plain.0.contains_key(&next.fingerprint())
                    || !seen.insert(&next, &next.left)
                {
                    continue;
                }
                stats.states += 1;
                if stats.states > most {
                    return Found::TooMany;
                }
                if stats.states.is_multiple_of(1_000_000) {
                    eprintln!(
                        "{}: {stats}, {} without budgets ...",
                        model.name,
                        seen.0.len()
                    );
                }
                let mut next = frame(model, next);
                if label.base == Base::Nothing {
                    next.labels.insert(0, Base::Nothing.into());
                }
                if !next.labels.iter().any(Label::moves_on) {
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
    }
    stats.cores = seen.0.len() as u64;
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
