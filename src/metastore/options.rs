//! How an embedded store is kept, and what it tells of itself.

use std::fmt;
use std::sync::Arc;

/// What an acknowledgement promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The change survives a power loss: it was flushed.
    Disk,
    /// The change lives as long as the process: for benches that want the store to cost nothing,
    /// and for tests.
    Memory,
}

/// Where a crash can be made to fall; see [`EmbeddedOptions::hook`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A batch was taken and not yet written.
    Taken,
    /// The batch was written and not yet flushed.
    Written,
    /// The batch was flushed and not yet published.
    Flushed,
    /// The batch was published; nobody has been told.
    Published,
    /// A new segment with a snapshot was flushed and has no name yet.
    SnapshotPrepared,
    /// The new segment has its name; the old one is still there.
    SnapshotPublished,
}

/// Called at each [`Step`].
pub type Hook = Arc<dyn Fn(Step) + Send + Sync>;

/// How an embedded store is kept.
#[derive(Clone)]
pub struct EmbeddedOptions {
    /// Bytes for changes between two snapshots; the log's file is that plus a snapshot.
    pub segment_bytes: u64,
    /// Bytes of keys and values that may be held.
    pub max_bytes: u64,
    /// Changes whose retries are recognised.
    pub remembered_ops: usize,
    /// Changes that a watcher may lag behind.
    pub history: usize,
    /// For fault injection: called at each step, on the committing thread.
    pub hook: Option<Hook>,
}

impl Default for EmbeddedOptions {
    /// 4 MiB between snapshots, 64 MiB of records, 4096 retries and changes remembered.
    fn default() -> Self {
        Self {
            segment_bytes: 4 << 20,
            max_bytes: 64 << 20,
            remembered_ops: 4096,
            history: 4096,
            hook: None,
        }
    }
}

impl fmt::Debug for EmbeddedOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedOptions")
            .field("segment_bytes", &self.segment_bytes)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

/// What a store has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// The last published change.
    pub revision: u64,
    /// Records held.
    pub records: u64,
    /// Bytes of keys and values held.
    pub bytes: u64,
    /// Batches flushed.
    pub flushes: u64,
    /// Changes published.
    pub changes: u64,
    /// Snapshots taken to bound the log.
    pub snapshots: u64,
    /// Bytes of the log's file in use.
    pub log_bytes: u64,
}
