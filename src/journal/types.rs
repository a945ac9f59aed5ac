//! What goes in and comes out of a journal.

use super::memory::{Entry, Request};
use crate::id::{OwnerEpoch, WorkerRef};
use std::time::Duration;

/// How a journal is kept.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// A flush is begun this long after the one before, if there is anything to flush: the tokens
    /// of so long a time may be lost with the power. Zero: only `Journal::maintain` flushes.
    pub window: Duration,
    /// Longest append, in bytes of log; at least 4 KiB. 1 MiB is some 80,000 tokens.
    pub max_append: usize,
    /// Bytes of one segment; at least four of the longest appends.
    pub segment_bytes: u64,
    /// Bytes of live requests' tokens and texts that may be held.
    pub max_bytes: u64,
}

impl Default for JournalOptions {
    /// 50 ms, 1 MiB, 16 MiB, 1 GiB.
    fn default() -> Self {
        Self {
            window: Duration::from_millis(50),
            max_append: 1 << 20,
            segment_bytes: 16 << 20,
            max_bytes: 1 << 30,
        }
    }
}

impl JournalOptions {
    /// What is possible of what was asked for.
    pub(super) fn sound(mut self) -> Self {
        self.max_append = self.max_append.clamp(4 << 10, 64 << 20);
        let least = 4 * self.max_append as u64;
        self.segment_bytes = self.segment_bytes.max(least).next_multiple_of(4096);
        self
    }

    /// Bytes of tokens per record where a request is restated.
    pub(super) fn restate_chunk(&self) -> usize {
        self.max_append / 4
    }
}

/// What an append did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// J: tokens `1..=through` are journaled.
    pub through: u64,
    /// How many of the tokens given were new; the others were there, and equal.
    pub fresh: usize,
}

/// The floor of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Floor {
    /// The lowest epoch accepted.
    pub epoch: OwnerEpoch,
    /// Whose it is.
    pub owner: WorkerRef,
}

/// Where a request stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Who may append.
    pub floor: Floor,
    /// J.
    pub journaled: u64,
    /// D.
    pub delivered: u64,
    /// The last token says that the stream ends.
    pub finished: bool,
}

/// What a raised floor returns, in the same step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tail {
    /// Where the request stands.
    pub status: Status,
    /// Tokens `D + 1 ..= J`.
    pub undelivered: Vec<Entry>,
}

/// Counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JournalStats {
    /// Requests held.
    pub requests: u64,
    /// Bytes of their tokens and texts.
    pub bytes: u64,
    /// Segments on disk.
    pub segments: u64,
    /// Flushes so far.
    pub flushes: u64,
    /// Records written so far.
    pub records: u64,
    /// Requests restated so far, to let old segments go.
    pub restated: u64,
}

impl Status {
    pub(super) fn of(request: &Request) -> Self {
        Self {
            floor: Floor {
                epoch: request.floor,
                owner: request.owner.clone(),
            },
            journaled: request.journaled(),
            delivered: request.delivered,
            finished: request.finished(),
        }
    }
}
