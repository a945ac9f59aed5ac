//! The append log under the metadata store and the journal: preallocated, zero-filled, checksummed.
//!
//! One *segment* is one file. It is created whole (allocated, zero-filled, flushed), so that
//! appending changes no metadata and a flush is one `fdatasync`. Records are chained by checksum,
//! and each says how much of the log was known to be durable when it was written. That is what lets
//! recovery tell a *torn tail* (a write that nobody was told about, cut by a crash: dropped) from
//! *damage* (a record that had been acknowledged: refused, with the offset and the remedy).
//!
//! A damaged *last* record is dropped as torn only where it looks torn: zeros stand where a lost
//! sector or a cut write would leave them. Bytes that changed in place are damage there too.
//!
//! This room knows neither what the records mean nor when to flush. [`record`] is the codec,
//! [`scan()`] recovery's reading (both pure), [`Segment`] the writer, [`Dir`] the file system below
//! it, and [`sim`] a disk that fails and forgets as a test asks.

#![deny(unsafe_code)]

mod dir;
mod direct;
mod disk;
mod error;
pub mod record;
mod scan;
mod segment;
pub mod sim;

pub use dir::{Dir, File};
pub use disk::DiskDir;
pub use error::{IoError, WalError};
pub use record::{Record, SegmentHeader};
pub use scan::{Scan, ScanError, scan};
pub use segment::{Batch, Blank, Segment, Series};

#[cfg(test)]
mod tests;
