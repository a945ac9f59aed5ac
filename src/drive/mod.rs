//! What every daemon needs to execute the protocol's machines: links to its peers, timers, the
//! bytes that travel with messages, and the loop that feeds a machine and does what it asks for.
//!
//! A link begins with a hello that names both ends, each by its incarnation: a message meant for
//! one life of a worker is never handed to another. Each link has one thread that blocks in
//! `recv` and runs the handler itself, so a message costs no hop between threads; sending takes the
//! link's lock for one `writev`.

#![deny(unsafe_code)]

mod clock;
pub mod envelope;
mod hello;
mod link;
mod listen;
mod payloads;
mod phase;
mod runner;
mod store;
mod timers;
mod words;

pub use clock::{instant_at, now_ns, ns_of};
pub use hello::{Hello, HelloError, name};
pub use link::{Directory, Expect, Handler, Mesh, MeshError, MeshOptions};
pub use listen::{Listen, ListenError, Port, bind_kind};
pub use payloads::Payloads;
pub use phase::{Phase, step_name};
pub use runner::{Hands, Machine, RouteStore, run};
pub use store::Routes;
pub use timers::{Fire, Timers};
pub use words::{cause_word, outcome_words};

/// Frame kinds of the links. The payload of each is described where it is encoded.
pub mod kind {
    /// First frame of whoever connected: a [`super::Hello`].
    pub const HELLO: u16 = 1;
    /// The accepting side's answer: a [`super::Hello`] of its own.
    pub const WELCOME: u16 = 2;
    /// One message of the migration protocol, and its payload.
    pub const PROTOCOL: u16 = 3;
    /// Worker to gateway: a checkpoint for recovery.
    pub const CHECKPOINT: u16 = 4;
    /// Worker to gateway: a request that left the engine without a last token.
    pub const CLOSED: u16 = 5;
    /// Source to destination: a fence is near. A hint that may be lost.
    pub const BRACE: u16 = 7;
    /// Source to destination, in the fence: the last slots, ahead of the push that claims them, which
    /// follows within microseconds. May be lost like any frame; the push is then sent whole.
    pub const EARLY: u16 = 8;
    /// Worker to gateway: one byte, whether it gives its requests away and takes none.
    pub const DRAINING: u16 = 6;
}
