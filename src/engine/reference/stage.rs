//! A request on its way in: exclusive blocks that no step, prefix cache or other stage can reach.

use super::kvlog::PageLog;
use super::live::Live;
use crate::control_state::{Claim, ControlState, TokenHasher};
use crate::digest::TailHasher;
use crate::engine::adapter::{Armed, ImportSpec, Manifest, RebuildClass, StageState};
use crate::id::{MigrationEpoch, OwnerEpoch, RequestId};
use crate::mem::BlockId;
use std::ops::Range;

/// See the [module](self).
pub(crate) struct Stage {
    pub request: RequestId,
    pub epoch: MigrationEpoch,
    /// What it was made from; `None` for one rebuilt from the journal.
    pub spec: Option<ImportSpec>,
    pub state: StageState,
    /// Prompt and output imported so far.
    pub log: Vec<u32>,
    pub prompt_len: usize,
    /// Of the part of `log` that is prompt.
    pub prompt_hash: TokenHasher,
    /// Tokens there is room for.
    pub max_tokens: u64,
    pub table: Vec<BlockId>,
    /// Tokens that some write lease was given for: slots from here on hold nothing of this request.
    pub written: u64,
    /// Slots from `written` up to here are zero already.
    pub cleared: u64,
    /// Slots that were hashed and may not be written again.
    pub frozen: Ranges,
    /// Slots that a call hashes right now.
    pub hashing: Vec<Range<u64>>,
    pub pages: PageLog,
    pub tail: Option<Box<TailHasher>>,
    pub manifest: Option<Manifest>,
    /// What a practice import left to go on from.
    pub prepared: Option<Box<Prepared>>,
    pub loaded: Option<Box<Loaded>>,
    pub armed: Option<Armed>,
    /// What a rebuild can be trusted for.
    pub class: Option<RebuildClass>,
    /// The ownership under which it was activated; little else is kept of it from then on.
    pub activated: Option<OwnerEpoch>,
}

impl Stage {
    /// Still on its way in.
    pub(crate) fn is_pending(&self) -> bool {
        self.state != StageState::Active
    }
}

/// A request rebuilt ahead of its fence, from the control state of an earlier boundary and the
/// tokens that this stage had imported by then: the fence replays what came since.
pub(crate) struct Prepared {
    pub declared: ControlState,
    pub live: Box<Live>,
    pub allowed: bool,
}

/// A control state that was imported.
pub(crate) struct Loaded {
    /// What was imported, to recognize a repeat and to compare the replay with.
    pub bytes: Vec<u8>,
    pub declared: ControlState,
    pub owner_epoch: OwnerEpoch,
    pub claim: Claim,
    /// The state this engine holds: rebuilt by replay.
    pub live: Box<Live>,
    /// The grammar allowed every replayed token.
    pub allowed: bool,
}

/// A set of token positions as disjoint ranges, ascending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Adds a range.
    pub(crate) fn insert(&mut self, mut new: Range<u64>) {
        if new.is_empty() {
            return;
        }
        let from = self.0.partition_point(|r| r.end < new.start);
        let to = self.0.partition_point(|r| r.start <= new.end);
        if from < to {
            new.start = new.start.min(self.0[from].start);
            new.end = new.end.max(self.0[to - 1].end);
        }
        self.0.splice(from..to, [new]);
    }

    /// Takes a range out.
    pub(crate) fn remove(&mut self, gone: &Range<u64>) {
        if gone.is_empty() {
            return;
        }
        let cut = |r: &Range<u64>| {
            let before = r.start..r.end.min(gone.start);
            let after = r.start.max(gone.end)..r.end;
            [before, after].into_iter().filter(|r| !r.is_empty())
        };
        self.0 = self.0.iter().flat_map(cut).collect();
    }

    /// The parts of `range` that are not in the set, ascending.
    pub(crate) fn gaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = self.0.partition_point(|r| r.end <= range.start);
        let mut from = range.start;
        std::iter::from_fn(move || {
            while from < range.end {
                let gap = match self.0.get(at) {
                    Some(r) => from..r.start.min(range.end),
                    None => from..range.end,
                };
                from = self.0.get(at).map_or(range.end, |r| r.end);
                at += 1;
                if !gap.is_empty() {
                    return Some(gap);
                }
            }
            None
        })
    }

    /// The first position of `range` that is in the set.
    pub(crate) fn first_in(&self, range: &Range<u64>) -> Option<u64> {
        let at = self.0.partition_point(|r| r.end <= range.start);
        let r = self.0.get(at)?;
        (r.start < range.end && !range.is_empty()).then(|| r.start.max(range.start))
    }

    /// The first position of `range` that is not in the set.
    pub(crate) fn first_missing(&self, range: &Range<u64>) -> Option<u64> {
        self.gaps(range.clone()).next().map(|gap| gap.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_the_set_of_what_was_inserted() {
        let mut seed = 1u64;
        let mut draw = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1);
            (seed >> 33) % n
        };
        for _ in 0..300 {
            let mut ranges = Ranges::default();
            let mut set = [false; 40];
            for _ in 0..draw(8) {
                let from = draw(40);
                let to = from + draw(41 - from);
                let add = draw(4) > 0;
                if add {
                    ranges.insert(from..to);
                } else {
                    ranges.remove(&(from..to));
                }
                set[from as usize..to as usize].fill(add);
            }
            assert!(ranges.0.windows(2).all(|w| w[0].end < w[1].start));
            for _ in 0..40 {
                let from = draw(40);
                let to = from + draw(41 - from);
                let find = |want: bool| (from..to).find(|i| set[*i as usize] == want);
                assert_eq!(ranges.first_in(&(from..to)), find(true));
                assert_eq!(ranges.first_missing(&(from..to)), find(false));
                let out: Vec<u64> = ranges.gaps(from..to).flatten().collect();
                let want: Vec<u64> = (from..to).filter(|i| !set[*i as usize]).collect();
                assert_eq!(out, want);
            }
        }
    }
}
