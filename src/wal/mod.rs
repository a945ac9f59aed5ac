//! The append log under the metadata store and the journal: preallocated, zero-filled, checksummed.
//!
//! One *segment* is one file. It is created whole (allocated, zero-filled, flushed), so that
//! appending changes no metadata and a flush is one `fdatasync`. Records are chained by checksum,
//! and each says how much of the log was known to be durable when it was written. That is what lets
//! recovery tell a *torn tail* (a write that nobody was told about, cut by a crash: dropped) from
//! *damage* (a record that had been acknowledged: refused, with the offset and the remedy).
//!
//! This room knows neither what the records mean nor when to flush.

#![deny(unsafe_code)]

mod error;

pub use error::{IoError, WalError};
