//! The engine's contract across a process border: [`EngineService`] serves any
//! [`EngineAdapter`](crate::engine::adapter::EngineAdapter) over gRPC, [`RemoteEngine`] is one that
//! asks such a service. The messages are in `proto/moonlive/engine/v1/adapter.proto`, so an engine
//! written in another language can be the server.
//!
//! Digests, control state and every check stay inside the engine. What crosses are ids, digests,
//! control bytes, and KV slots in a packed form: transports of this process work on a *mirror* of
//! the slots ([`RemoteEngine`] says how), so KV is copied once more than with an engine in the same
//! process. This is the way to attach an engine, not the fast one.

mod client;
mod fault;
mod mirror;
mod reread;
mod server;
mod slots;
#[cfg(test)]
mod tests;
mod wire;

pub use client::{ConnectError, RemoteEngine};
pub use reread::{Carried, RereadError, reread};
pub use server::EngineService;

/// The generated messages, client and server of `proto/moonlive/engine/v1`.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("moonlive.engine.v1");
}

/// Most bytes of KV in one message.
const MAX_SLOT_BYTES: u64 = 1 << 20;

/// Most tokens of a log in one message; a caller that gets so many asks for more.
const MAX_TOKENS: usize = 1 << 18;
