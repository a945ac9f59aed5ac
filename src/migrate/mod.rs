//! The migration protocol as sans-IO state machines.
//!
//! Four machines, each `fn handle(&mut self, now_ns, event, &mut Vec<Action>)`: [`source`],
//! [`destination`], [`coordinator`] and the token [`acceptor`]; [`recovery`] is the acceptor's
//! counterpart on the worker that rebuilds a request. They do no I/O and read no clock. The same
//! code runs in the daemons, in the simulator (`tests/sim.rs`) and in the model check
//! (`tests/model.rs`); what they promise stands in `CONTRACT.md`.
//!
//! The shape of it: PREPARE writes an intent into the route record; the record is then moved past
//! the intent exactly once, by the destination's commit, by anybody's abort, or by a recovery. All
//! three workers of that decision are in [`decide`].

#![deny(unsafe_code)]

pub mod acceptor;
pub mod codec;
pub mod coordinator;
pub mod decide;
pub mod destination;
pub mod io;
pub mod limits;
pub mod msg;
pub mod recovery;
pub mod shaper;
pub mod source;
