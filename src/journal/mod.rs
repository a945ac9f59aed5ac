//! The journal of accepted tokens: log J of each request, its floor epoch, its cursors, and what a
//! recovery reads back.
//!
//! Per request the journal keeps the *floor* (the lowest owner epoch that may append, and its
//! owner), the log *J* (every token accepted, contiguous from 1) and the cursor *D* (delivered to
//! the client; D <= J). It refuses, under one lock at the moment of the mutation, what would break
//! them: an epoch below the floor, an epoch above it before the floor was raised, a gap, a second
//! and different token for a number.
//!
//! # What survives
//! * **A crash of the process**: everything a call returned for. Each append is written to the
//!   operating system before it returns, and the gateway delivers only after that.
//! * **A power loss**: floors always ([`Journal::raise_floor`] flushes before it returns). Tokens
//!   up to the last flush; one is begun every [`JournalOptions::window`], so at most the tokens of
//!   one window and one flush are lost. A token costs no flush of its own.
//! * **D** is written along with the next tokens: after a crash it may be older than it was, never
//!   newer. Clients drop by number what they have already.
//!
//! A failed write or flush poisons the journal: it refuses everything until its process restarts.

#![deny(unsafe_code)]

mod api;
mod error;
mod inner;
mod memory;
mod record;
mod types;
mod upkeep;

pub use api::Journal;
pub use error::{JournalError, Refusal};
pub use memory::{Entry, TokenRef};
pub use record::{ReplayError, replay_records};
pub use types::{Appended, Floor, JournalOptions, JournalStats, Status, Tail};

#[cfg(test)]
mod tests;
