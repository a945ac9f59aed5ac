//! MoonLiveKV moves the KV cache of LLM requests between GPUs, hosts and SSDs, and live-migrates a
//! request *while it is being decoded*, verified before it commits: the destination re-hashes every
//! KV page in its own memory and matches a digest of the decode-control state before the route
//! flips. Bit-exact resume, or the source goes on and nothing is lost.
//!
//! The rooms of the house, and which may use which, are listed in `ARCHITECTURE.md`; the test
//! `tests/house.rs` holds the arrows. Pure rooms ([`page`], [`digest`], [`control_state`],
//! [`route`], [`migrate`]) do no I/O and read no clock: events and a clock value go in, actions
//! come out. The same state machines run in the daemons, in the simulator and in the model checker.

pub mod id;

pub mod control_state;
pub mod digest;
pub mod migrate;
pub mod page;
pub mod route;

pub mod engine;
pub mod journal;
pub mod mem;
pub mod metastore;
pub mod transport;
pub mod wal;
pub mod wire;

#[cfg(feature = "program")]
pub mod drive;
#[cfg(feature = "program")]
pub mod gateway;
#[cfg(feature = "program")]
pub mod node;
#[cfg(feature = "program")]
pub mod rpc;

pub mod capi;
