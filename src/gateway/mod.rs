//! The gateway: accepts tokens and streams them to clients.

pub mod answer;
mod core;
mod daemon;
mod heal;
pub mod http;
pub mod hub;
pub mod image;
mod inbox;
mod journal;
pub mod listen;
pub mod log;
pub mod metrics;
pub mod openai;
mod service;
mod slot;
pub mod sse;
pub mod workers;

pub use core::Core;
pub use daemon::{Config, Listening, Running, StartError, start};
pub use inbox::Inbox;
pub use journal::open_log;
pub use service::Service;
pub use slot::Slot;
