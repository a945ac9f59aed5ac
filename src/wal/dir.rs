//! The file system as a log needs it.

use super::error::IoError;
use std::fmt::Debug;
use std::sync::Arc;

/// One directory, held by one log.
pub trait Dir: Send + Sync + Debug {
    /// Creates a file of `len` zero bytes, allocated and durable in itself; its *name* is durable
    /// only after [`sync`](Self::sync). Fails if the name exists; leaves nothing behind on failure.
    fn create(&self, name: &str, len: u64) -> Result<Arc<dyn File>, IoError>;
    /// Opens a file for reading and writing.
    fn open(&self, name: &str) -> Result<Arc<dyn File>, IoError>;
    /// All names, in order.
    fn list(&self) -> Result<Vec<String>, IoError>;
    /// Renames, replacing what has the new name.
    fn rename(&self, from: &str, to: &str) -> Result<(), IoError>;
    /// Removes a file.
    fn remove(&self, name: &str) -> Result<(), IoError>;
    /// Makes names durable.
    fn sync(&self) -> Result<(), IoError>;
    /// Lets the device under the directory do a little of what a flush makes it do, so that it is
    /// not asleep when one that matters comes. Changes nothing of what is kept here.
    fn wake(&self) -> Result<(), IoError> {
        Ok(())
    }
    /// For messages.
    fn name(&self) -> String;
}

/// One open file. Calls may come from several threads.
pub trait File: Send + Sync + Debug {
    /// Writes all of `bytes` at an offset: visible to readers and to a later process of this
    /// machine, durable only after [`sync`](Self::sync).
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), IoError>;
    /// Makes everything written before the call durable. After a failure nothing is known about
    /// what was written since the last success, and trying again proves nothing.
    fn sync(&self) -> Result<(), IoError>;
    /// The whole content.
    fn read(&self) -> Result<Vec<u8>, IoError>;
    /// For messages.
    fn name(&self) -> String;
}
