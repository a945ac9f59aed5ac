//! One-sided transfers on registered regions, over three paths behind one pair of traits.
//!
//! An *owner* registers a [`BlockPool`] with a [`Transport`] and hands the resulting
//! [`RemoteRegion`] to a peer over some control channel. The peer connects, gets a [`Link`], and
//! submits [`Transfer`]s that name local memory by a lease and remote memory by that grant.
//!
//! # Promises
//! - **Pull.** KV pools are registered [`Access::RemoteRead`]; bulk moves by `get`. A `put` reaches
//!   [`Access::RemoteWrite`] staging only. On no path does another process hold a writable mapping
//!   of our memory: over `shm` a put is carried out by the target, which reads the initiator's
//!   memory.
//! - **Completed is applied and visible.** An `Ok` outcome of a get means that every byte lies in the
//!   destination blocks and passed the path's check; of a put, that the target has written them
//!   and dropped its own lease, so that a reader there sees them.
//! - **A lease belongs to its transfer** from `submit` until the completion gives it back. Landing
//!   goes through that lease, so bytes that arrive later have nowhere to go: they are read off the
//!   connection and thrown away. Dropping a link ends its transfers and leaves their memory alone.
//! - **Cancel** is about the initiator's memory, and takes effect before the call returns. **Revoke**
//!   is about the owner's: when it says [`Revoked::Done`], no peer reads or writes under that grant
//!   any more; otherwise the blocks are quarantined and counted.
//! - **Epochs.** A grant names an epoch. Moving on ([`Transport::renew`]) kills all older grants;
//!   the epoch is checked again for each piece (at most 1 MiB), not only at admission.
//! - **Nothing moves behind the caller's back.** A link makes progress inside `poll`, `wait` and
//!   `cancel` only, in the caller's thread; owners serve from threads of their own, which sleep when
//!   idle. Waiting spins for microseconds, then sleeps in the kernel; every wait has a deadline.
//! - **The path is named** in each completion. No path falls back to another.
//!
//! Integrity: `tcp` checks each header and each piece with CRC-32C. `local` and `shm` have no wire;
//! what they copy is judged by the caller's digests alone, as is a source that read wrong bytes.

pub mod conformance;
mod copier;
mod error;
pub mod frame;
mod local;
pub mod measure;
mod ops;
mod registry;
mod rx;
mod shm;
mod span;
mod tap;
pub mod tcp;
mod tx;
mod types;
mod wait;

use std::sync::Arc;
use std::time::Instant;

pub use error::{Refusal, TransportError};
pub use local::LocalTransport;
pub use shm::{ShmOptions, ShmTransport};
pub use tap::{Direction, Pace, Tap, TapPoint};
pub use tcp::{TcpOptions, TcpTransport};
pub use types::{
    Access, CancelOutcome, Completion, Endpoint, EndpointError, Local, Path, Rejected, Revoked,
    Scope, Span, Transfer, TransferId,
};

use crate::mem::{BlockId, BlockPool, RegionKey, RemoteRegion};

/// Most bytes that travel under one payload check, and between two looks at an epoch.
pub const PIECE_MAX: usize = 256 << 10;

/// The owner's side of a path, and the way to connect to a peer's.
pub trait Transport: Send + Sync {
    /// Which path this is.
    fn path(&self) -> Path;

    /// Where peers connect to.
    fn endpoint(&self) -> Endpoint;

    /// Lets peers that present the returned key reach `scope` of a pool. A pool may be registered any
    /// number of times; register once per migration, so that revoking one leaves the others.
    fn register(
        &self,
        pool: &Arc<BlockPool>,
        access: Access,
        scope: Scope<'_>,
    ) -> Result<RemoteRegion, TransportError>;

    /// Adds blocks to the scope of a registration made with [`Scope::Blocks`].
    fn extend(&self, key: RegionKey, blocks: &[BlockId]) -> Result<(), TransportError>;

    /// Moves a registration to its next epoch. Grants of older epochs are refused from now on; returns
    /// once the work admitted under them has drained, or has not by `deadline`.
    fn renew(
        &self,
        key: RegionKey,
        deadline: Instant,
    ) -> Result<(RemoteRegion, Revoked), TransportError>;

    /// Ends a registration, as [`Transport::renew`] without a next epoch.
    fn revoke(&self, key: RegionKey, deadline: Instant) -> Result<Revoked, TransportError>;

    /// Connects to a peer's endpoint of the same path.
    fn connect(&self, to: &Endpoint, deadline: Instant) -> Result<Box<dyn Link>, TransportError>;
}

/// The initiator's side of one connection. Driven by one thread.
pub trait Link: Send {
    /// Queues a transfer; refused, it comes back untouched. Nothing moves before `poll` or `wait`.
    fn submit(&mut self, transfer: Transfer) -> Result<TransferId, Box<Rejected>>;

    /// Makes what progress it can without waiting; fills `out` from its start and says how many.
    fn poll(&mut self, out: &mut [Completion]) -> usize;

    /// As `poll`, waiting until there is at least one completion, nothing is in flight, or `deadline`.
    fn wait(&mut self, out: &mut [Completion], deadline: Instant) -> usize;

    /// Ends a transfer: its local memory is no longer touched when this returns
    /// [`CancelOutcome::Done`]; where a peer cannot be shown to have stopped by `deadline`, its blocks
    /// are quarantined. A completion still comes (`Cancelled`), and with it the lease.
    fn cancel(&mut self, id: TransferId, deadline: Instant) -> CancelOutcome;

    /// Transfers submitted and not yet completed through `poll` or `wait`.
    fn in_flight(&self) -> usize;
}
