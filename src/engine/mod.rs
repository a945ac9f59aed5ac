//! The engine adapter contract, its conformance suite, and the reference engine.

pub mod adapter;
pub mod conformance;
mod lease;
pub mod reference;
