//! The token log on disk: floors, tokens and cursors in the [`journal`](crate::journal).
//!
//! The floor and log J of each request survive a crash of the process, and all but the last
//! [`JournalOptions::window`] of tokens a power cut. What a request asked for and its checkpoints
//! live as long as this process.

use std::path::Path;
use std::sync::Arc;

use super::log::{LogError, TokenLog};
use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::journal::{Journal, JournalError, JournalOptions, TokenRef};
use crate::migrate::msg::Emission;

/// Tokens per append: far below what the journal takes at once.
const BATCH: usize = 4096;

struct DiskLog(Journal);

/// Opens the journal under `dir`.
pub fn open_log(dir: &Path) -> Result<Arc<dyn TokenLog>, LogError> {
    let journal = Journal::open(dir.join("journal"), JournalOptions::default()).map_err(failed)?;
    let left = journal.requests().map_err(failed)?;
    if !left.is_empty() {
        tracing::warn!(
            requests = left.len(),
            "the journal holds requests of an earlier life whose streams did not end"
        );
    }
    Ok(Arc::new(DiskLog(journal)))
}

fn failed(error: JournalError) -> LogError {
    LogError(error.to_string())
}

impl TokenLog for DiskLog {
    fn open(&self, request: RequestId, owner: &WorkerRef, _: &[u8]) -> Result<(), LogError> {
        self.raise_floor(request, OwnerEpoch(1), owner)
    }

    fn append(
        &self,
        request: RequestId,
        epoch: OwnerEpoch,
        tokens: &[Emission],
    ) -> Result<(), LogError> {
        for batch in tokens.chunks(BATCH) {
            let refs: Vec<TokenRef<'_>> = batch
                .iter()
                .map(|t| TokenRef {
                    token: t.token,
                    text: &t.text,
                    finish: t.finish,
                })
                .collect();
            let appended = self.0.append(request, epoch, batch[0].seq, &refs);
            appended.map_err(failed)?;
        }
        Ok(())
    }

    fn raise_floor(
        &self,
        request: RequestId,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<(), LogError> {
        let raised = self.0.raise_floor(request, floor, owner);
        raised.map(|_| ()).map_err(failed)
    }

    fn checkpoint(&self, _: RequestId, _: &[u8]) -> Result<(), LogError> {
        Ok(())
    }

    fn delivered(&self, request: RequestId, through: u64) {
        // A hint: one that comes too late, or for a request that is gone, is none.
        let _ = self.0.delivered(request, through);
    }

    fn close(&self, request: RequestId) -> Result<(), LogError> {
        self.0.forget(request).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, WorkerId};

    #[test]
    fn what_the_gateway_journaled_is_on_disk_until_the_stream_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let owner = WorkerRef {
            id: WorkerId::new("w").unwrap(),
            incarnation: Incarnation(1),
        };
        let (one, two) = (RequestId([1; 16]), RequestId([2; 16]));
        let token = |seq| Emission {
            seq,
            token: seq as u32,
            text: b"x".to_vec(),
            finish: None,
        };
        let tokens: Vec<Emission> = (1..=2 * BATCH as u64 + 1).map(token).collect();
        let log = open_log(dir.path()).unwrap();
        for request in [one, two] {
            log.open(request, &owner, b"").unwrap();
            log.append(request, OwnerEpoch(1), &tokens).unwrap();
        }
        log.raise_floor(one, OwnerEpoch(2), &owner).unwrap();
        assert!(log.append(one, OwnerEpoch(1), &[token(9)]).is_err());
        log.delivered(one, 5);
        log.close(two).unwrap();
        drop(log);
        let journal = Journal::open(dir.path().join("journal"), JournalOptions::default()).unwrap();
        let left = journal.requests().unwrap();
        assert_eq!((left.len(), left[0].0), (1, one));
        assert_eq!(left[0].1.floor.epoch, OwnerEpoch(2));
        assert_eq!(left[0].1.journaled, tokens.len() as u64);
    }
}
