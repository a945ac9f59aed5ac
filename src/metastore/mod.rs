//! The metadata store: linearizable compare-and-swap over small records.
//!
//! This is where every decision of the protocol falls: a route record moves by one
//! compare-and-swap, and whoever moves it first has decided. So the promises are few and hard:
//!
//! * **Linearizable.** A read sees every change acknowledged before the read began. Nothing that
//!   has not been made durable is ever shown, not even in a conflict.
//! * **Acknowledged means durable** (as the store's [`Durability`] says), and a change that was not
//!   acknowledged is there whole or not at all.
//! * **Revisions** are global, rise with every change, and one that was ever shown is never given
//!   to another change, across crashes. So a compare-and-swap cannot suffer ABA.
//! * **Doubt has a name.** [`StoreError::InDoubt`] says that the outcome is unknown, and only a read
//!   settles it; every other error says that nothing was changed. A time-out is never evidence.
//! * **Leases buy liveness only**: [`MetaStore::lease_acquire`] elects who *drives*; no right to
//!   change anything follows from it.
//!
//! [`EmbeddedStore`] is one writer over an append log, hosted in one process; [`RemoteStore`]
//! reaches it over framed sockets ([`StoreServer`]); [`conformance`] is the one suite that each
//! implementation passes. The trait asks nothing that an etcd cluster cannot give
//! (`mod_revision` compare in a transaction, `get` linearizable, `watch` from a revision, leases;
//! the idempotency key is a second record in the same transaction).

#![deny(unsafe_code)]

mod awake;
pub mod conformance;
mod embedded;
mod error;
mod lease;
mod logged;
pub mod measure;
pub mod msg;
mod options;
mod remote;
mod served;
mod server;
mod state;
mod types;

pub use crate::route::Revision;
pub use embedded::EmbeddedStore;
pub use error::StoreError;
pub use logged::{ReplayError, replay_records};
pub use options::{Durability, EmbeddedOptions, Hook, Step, StoreStats};
pub use remote::{RemoteOptions, RemoteStore};
pub use server::{ReplyFilter, ServerOptions, StoreServer};
pub use types::{
    Cas, CasOutcome, Change, Event, LeaseOutcome, LeaseTerm, Listing, MAX_KEY, MAX_VALUE, OpId,
    Versioned, WatchBatch, check_key, check_prefix, check_value,
};

use std::time::{Duration, Instant};

/// A linearizable store of small records. All calls block, at most until about `deadline`; a write
/// already handed to the disk is waited for.
pub trait MetaStore: Send + Sync {
    /// The record under `key`, or `None`.
    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Versioned>, StoreError>;

    /// Changes one record if it is still at the revision the caller has seen. Removing what is
    /// absent changes nothing and reads as a conflict with nothing.
    ///
    /// A retry with the same [`OpId`] after a lost reply returns the original outcome, as long as
    /// the store remembers it (the last some thousand changes); later it is judged anew, which is
    /// safe, because the expected revision has passed, but reads as a conflict.
    fn cas(&self, cas: &Cas<'_>, deadline: Instant) -> Result<CasOutcome, StoreError>;

    /// All records whose key starts with `prefix`, in key order, as of one revision or later ones:
    /// an entry may be newer than the listing's revision, never older. Watching from that revision
    /// closes the gap.
    fn list(&self, prefix: &str, deadline: Instant) -> Result<Listing, StoreError>;

    /// The changes under `prefix` with revisions above `after`, in order; waits for the first until
    /// `deadline` and returns an empty batch then. A watcher holds no queue in the store: one who
    /// falls behind the bounded history gets [`WatchBatch::Resync`] and lists again.
    fn watch(
        &self,
        prefix: &str,
        after: Revision,
        deadline: Instant,
    ) -> Result<WatchBatch, StoreError>;

    /// Takes the lease `name` for `holder`, or says who holds it. The store's own monotonic clock
    /// judges `ttl`. Each new term has a higher [`LeaseTerm`], across crashes. For liveness only.
    fn lease_acquire(
        &self,
        name: &str,
        holder: &str,
        ttl: Duration,
        deadline: Instant,
    ) -> Result<LeaseOutcome, StoreError>;

    /// Prolongs a term by its `ttl`; `false` if it has ended.
    fn lease_renew(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        deadline: Instant,
    ) -> Result<bool, StoreError>;

    /// Ends a term early, so that another holder need not wait; a term already over is no error.
    fn lease_release(
        &self,
        name: &str,
        holder: &str,
        term: LeaseTerm,
        deadline: Instant,
    ) -> Result<(), StoreError>;

    /// The record under `key` is about to be changed by somebody: keeps what the store writes to
    /// from dozing off, until the record has changed or `deadline`, a fraction of a second at most.
    /// Changes nothing and promises nothing; a store that need not be kept awake returns at once.
    fn keep_awake(&self, key: &str, deadline: Instant) -> Result<(), StoreError> {
        let _ = (key, deadline);
        Ok(())
    }

    /// Gives up what is kept ready and was not needed for a while; asked for every second or so.
    fn tidy(&self) {}
}

#[cfg(test)]
mod tests;
