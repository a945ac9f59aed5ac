//! What the gateway asks of its token log, so that it can be run over another one in tests.

use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::msg::Emission;

/// A write that did not survive; nothing may be delivered on it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the journal did not take it: {what}")]
pub struct LogError {
    /// What failed.
    pub what: String,
    /// Only this call failed and left nothing behind; the log itself goes on.
    pub passing: bool,
}

/// A request that an earlier life of the gateway left open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// Its name.
    pub request: RequestId,
    /// The lowest epoch accepted.
    pub floor: OwnerEpoch,
    /// Whose it is.
    pub owner: WorkerRef,
    /// All journaled tokens, from number 1.
    pub tokens: Vec<Emission>,
    /// What it asked for.
    pub submit: Vec<u8>,
    /// Its last checkpoint.
    pub checkpoint: Option<Vec<u8>>,
}

/// The durable side of the acceptor. Each call returns once what it wrote survives a crash of the
/// process; what a power cut may take is the log's own window.
pub trait TokenLog: Send + Sync {
    /// A request was admitted to `owner`; `submit` is what it asked for.
    fn open(&self, request: RequestId, owner: &WorkerRef, submit: &[u8]) -> Result<(), LogError>;
    /// Tokens, contiguous from J + 1.
    fn append(
        &self,
        request: RequestId,
        epoch: OwnerEpoch,
        tokens: &[Emission],
    ) -> Result<(), LogError>;
    /// No token of a lower epoch is accepted any more.
    fn raise_floor(
        &self,
        request: RequestId,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<(), LogError>;
    /// A checkpoint for recovery; the last one counts.
    fn checkpoint(&self, request: RequestId, bytes: &[u8]) -> Result<(), LogError>;
    /// The client has tokens through here. A hint: it may be lost.
    fn delivered(&self, request: RequestId, through: u64);
    /// What an earlier life left open; asked once, at start.
    fn left_open(&self) -> Result<Vec<Left>, LogError>;
    /// The stream is over and its record says so.
    fn close(&self, request: RequestId) -> Result<(), LogError>;
}

/// A log that keeps nothing beyond the process: for tests.
#[derive(Debug, Default)]
pub struct MemoryLog;

impl TokenLog for MemoryLog {
    fn open(&self, _: RequestId, _: &WorkerRef, _: &[u8]) -> Result<(), LogError> {
        Ok(())
    }
    fn append(&self, _: RequestId, _: OwnerEpoch, _: &[Emission]) -> Result<(), LogError> {
        Ok(())
    }
    fn raise_floor(&self, _: RequestId, _: OwnerEpoch, _: &WorkerRef) -> Result<(), LogError> {
        Ok(())
    }
    fn checkpoint(&self, _: RequestId, _: &[u8]) -> Result<(), LogError> {
        Ok(())
    }
    fn delivered(&self, _: RequestId, _: u64) {}
    fn left_open(&self) -> Result<Vec<Left>, LogError> {
        Ok(Vec::new())
    }
    fn close(&self, _: RequestId) -> Result<(), LogError> {
        Ok(())
    }
}
