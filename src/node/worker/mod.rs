//! A worker: an engine, and the executors of the machines of its requests.

mod brace;
mod core;
mod corrupt;
mod daemon;
mod destination;
pub mod dump;
mod early;
mod late;
mod leave;
pub mod null;
mod pull;
mod rebuild;
mod service;
mod sink;
mod slot;
mod source;

pub use core::{Core, TimerKey};
pub use daemon::{Config, Running, StartError, start};
pub use early::{Frame as AheadFrame, read as read_ahead};
pub use service::{Listening, Service, open_fds};
pub use sink::Sink;
pub use slot::{Role, Slot, State};
