//! The coordinator: writes the intent, drives the two workers up to GO, then only watches.
//!
//! Nothing it says is evidence to anybody, so several may run and any may die.

mod machine;

pub use machine::Coordinator;

use super::io;
use crate::id::{MigrationEpoch, WorkerRef};
use crate::route::{Cause, Refused};

/// What the coordinator is told.
pub type Event = io::Event<Done>;
/// What the coordinator wants done.
pub type Action = io::Action<Do>;

/// Work for the coordinator's executor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Do {
    /// This migration is over; the machine wants nothing more.
    Finished(Ended),
}

/// What the coordinator's executor tells.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Done {
    /// Move the request to this life of a worker.
    Start {
        /// Where to.
        dst: WorkerRef,
    },
    /// After a restart: see to the intent found in the record, whoever wrote it.
    Adopt,
    /// Give this migration up.
    Cancel {
        /// Why.
        cause: Cause,
    },
}

/// How a migration ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Ended {
    /// The destination owns the request.
    Committed {
        /// The attempt.
        epoch: MigrationEpoch,
    },
    /// The source went on.
    Aborted {
        /// The attempt.
        epoch: MigrationEpoch,
        /// Why, if the record still says.
        cause: Option<Cause>,
    },
    /// A recovery or the end of the stream overtook it.
    Superseded {
        /// The attempt.
        epoch: MigrationEpoch,
    },
    /// It never began.
    Refused(Refused),
    /// There is no such request.
    NoSuchRequest,
    /// Adopt found nothing to see to.
    Nothing,
}
