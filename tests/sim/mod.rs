//! A seeded deterministic simulator: the real machines, a model of everything else.

pub mod coords;
pub mod cover;
pub mod data;
pub mod destination;
pub mod engine;
pub mod event;
pub mod faults;
pub mod gateway;
pub mod net;
pub mod oracle;
pub mod party;
pub mod resume;
pub mod rng;
pub mod source;
pub mod store;
pub mod truth;
pub mod world;

pub use cover::Coverage;
pub use world::{Config, run};
