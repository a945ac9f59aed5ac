//! Worker and coordinator: execute the protocol's actions.

pub mod bulk;
pub mod cause;
pub mod convert;
pub mod coordinator;
pub mod emit;
pub mod faults;
pub mod jobs;
pub mod kv;
pub mod measure;
pub mod metrics;
pub mod options;
pub mod packed;
pub mod parcels;
pub mod paths;
pub mod registry;
pub mod serving;
pub mod spec;
pub mod worker;
