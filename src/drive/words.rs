//! The stable words that reports and scripts use.

use crate::route::{Cause, Outcome};

/// A cause as the stable word that reports and scripts use.
pub fn cause_word(cause: Cause) -> &'static str {
    match cause {
        Cause::Cancelled => "cancelled",
        Cause::Timeout => "timeout",
        Cause::SourceRefused => "source-refused",
        Cause::DestinationRefused => "destination-refused",
        Cause::NoSpace => "no-space",
        Cause::PageMismatch => "page-mismatch",
        Cause::SetMismatch => "set-mismatch",
        Cause::ControlMismatch => "control-mismatch",
        Cause::SealDirty => "seal-dirty",
        Cause::RequestEnded => "request-ended",
        Cause::TransportFailed => "transport-failed",
        Cause::ProfileMismatch => "profile-mismatch",
        Cause::PeerLost => "peer-lost",
        Cause::Draining => "draining",
        Cause::Engine => "engine",
    }
}

/// An outcome as a stable word, and its cause where it has one.
pub fn outcome_words(outcome: &Outcome) -> (&'static str, &'static str) {
    match outcome {
        Outcome::Committed(_) => ("committed", ""),
        Outcome::Aborted { cause, .. } => ("aborted", cause_word(*cause)),
        Outcome::Superseded => ("superseded", ""),
    }
}
