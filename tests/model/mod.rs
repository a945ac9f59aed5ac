//! An exhaustive search over the real machines and a miniature of everything else.

pub mod destination;
pub mod exec;
pub mod gateway;
pub mod labels;
pub mod models;
pub mod net;
pub mod search;
pub mod source;
pub mod state;
