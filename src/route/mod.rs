//! The route record: the one decision point of a migration. Pure types and transitions.
//!
//! A request has one [`RouteRecord`] in the metadata store, written only by compare-and-swap on the
//! store's [`Revision`]. A migration is an [`Intent`] in it; whoever first moves the record past the
//! intent decides that migration for ever ([`RouteRecord::verdict`] says how).

#![deny(unsafe_code)]

pub mod codec;
pub mod mutants;
mod record;

pub use codec::{DecodeError, Reader, Writer};
pub(crate) use record::same_worker;
pub use record::{
    Cause, ControlSeal, Decision, FenceCertificate, Intent, Origin, Outcome, Party, Refused,
    RouteOp, RoutePhase, RouteRecord, Verdict,
};

use crate::id::RequestId;

/// The store's version of one key: larger after every write of it. Compared by the CAS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Revision(pub u64);

/// A record together with the store revision it was read at or written with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Versioned {
    /// What a compare-and-swap on this value must expect.
    pub revision: Revision,
    /// The value.
    pub record: RouteRecord,
}

/// Prefix of the keys of all route records.
pub const KEY_PREFIX: &str = "route/";

/// The store key of a request's route record: `route/<32 hex digits>`.
pub fn key(request: RequestId) -> String {
    format!("{KEY_PREFIX}{request}")
}

/// The request a route key names, or `None` if it is no route key.
pub fn request_of_key(key: &str) -> Option<RequestId> {
    key.strip_prefix(KEY_PREFIX)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_their_request_and_nothing_else() {
        let id = RequestId([7; 16]);
        assert_eq!(request_of_key(&key(id)), Some(id));
        assert_eq!(request_of_key("route/zz"), None);
        assert_eq!(request_of_key("lease/07"), None);
    }
}
