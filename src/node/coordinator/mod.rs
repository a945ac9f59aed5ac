//! The coordinator: executes migrate's coordinator machines, one for each migration under way.

mod core;
mod daemon;
mod drain;
mod lead;
mod report;
mod service;

pub use core::{Core, Job, Parties, StartError};
pub use daemon::{Config, Running, StartError as DaemonError, start};
pub use service::Service;
