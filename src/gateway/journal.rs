//! The token log on disk: tokens, floors and cursors in the journal; beside it, a file for what each
//! request asked for and one for its last checkpoint.
//!
//! The files are written under another name and renamed: after a crash of the process there is a
//! whole one or none. They are not flushed one by one; after a power loss a request without its file
//! cannot be recovered, and its stream is ended.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::log::{Left, LogError, TokenLog};
use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::journal::{Journal, JournalOptions, TokenRef};
use crate::migrate::msg::Emission;

/// Tokens per append: far below what the journal takes at once.
const BATCH: usize = 4096;

/// Opens the journal under `dir`.
pub fn open_log(dir: &Path) -> Result<Arc<dyn TokenLog>, LogError> {
    let requests = dir.join("requests");
    fs::create_dir_all(&requests).map_err(|e| failed(&e))?;
    let journal =
        Journal::open(dir.join("journal"), JournalOptions::default()).map_err(|e| failed(&e))?;
    let log = Disk {
        journal,
        requests,
        open: Default::default(),
    };
    log.sweep()?;
    Ok(Arc::new(log))
}

fn failed(error: &dyn std::fmt::Display) -> LogError {
    LogError {
        what: error.to_string(),
        passing: false,
    }
}

struct Disk {
    journal: Journal,
    requests: PathBuf,
    /// The requests that may have files: one that was closed gets none any more, whatever of it still
    /// comes. Held over the writing and the removing of them, a share of the requests at a time.
    open: [Mutex<HashSet<RequestId>>; SHARDS],
}

/// Shares of the requests whose files are written apart from each other.
const SHARDS: usize = 16;

impl Disk {
    fn open_of(&self, request: RequestId) -> &Mutex<HashSet<RequestId>> {
        &self.open[usize::from(request.0[15]) % SHARDS]
    }

    /// Removes files of requests that the journal does not know: their life ended between the
    /// closing and the removing, or in the middle of a write.
    fn sweep(&self) -> Result<(), LogError> {
        for (request, _) in self.journal.requests().map_err(|e| failed(&e))? {
            self.open_of(request).lock().insert(request);
        }
        for entry in fs::read_dir(&self.requests).map_err(|e| failed(&e))? {
            let path = entry.map_err(|e| failed(&e))?.path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
            let Some((Ok(request), kind)) = name.split_once('.').map(|(r, k)| (r.parse(), k))
            else {
                continue;
            };
            let known = self.open_of(request).lock().contains(&request);
            let ours = matches!(
                kind,
                "submit" | "checkpoint" | "submit.part" | "checkpoint.part"
            );
            if ours && (!known || kind.ends_with(".part")) {
                // One that stays is looked at again at the next start.
                let _ = fs::remove_file(&path);
            }
        }
        Ok(())
    }

    fn file(&self, request: RequestId, kind: &str) -> PathBuf {
        self.requests.join(format!("{request}.{kind}"))
    }

    fn write(&self, request: RequestId, kind: &str, bytes: &[u8]) -> Result<(), LogError> {
        let (path, part) = (
            self.file(request, kind),
            self.file(request, &format!("{kind}.part")),
        );
        fs::write(&part, bytes)
            .and_then(|()| fs::rename(&part, &path))
            .map_err(|e| {
                // The file of that name is whole or as it was; the disk may have room again soon.
                let _ = fs::remove_file(&part);
                LogError {
                    what: format!("cannot write {}: {e}", path.display()),
                    passing: true,
                }
            })
    }
}

impl TokenLog for Disk {
    fn open(&self, request: RequestId, owner: &WorkerRef, submit: &[u8]) -> Result<(), LogError> {
        let mut open = self.open_of(request).lock();
        self.write(request, "submit", submit)?;
        open.insert(request);
        drop(open);
        let begun = self.journal.raise_floor(request, OwnerEpoch(1), owner);
        begun.map(drop).map_err(|e| failed(&e))
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
            let done = self.journal.append(request, epoch, batch[0].seq, &refs);
            done.map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    fn raise_floor(
        &self,
        request: RequestId,
        floor: OwnerEpoch,
        owner: &WorkerRef,
    ) -> Result<(), LogError> {
        let raised = self.journal.raise_floor(request, floor, owner);
        raised.map(drop).map_err(|e| failed(&e))
    }

    fn checkpoint(&self, request: RequestId, bytes: &[u8]) -> Result<(), LogError> {
        let open = self.open_of(request).lock();
        match open.contains(&request) {
            true => self.write(request, "checkpoint", bytes),
            // It was under way when the request ended.
            false => Ok(()),
        }
    }

    fn delivered(&self, request: RequestId, through: u64) {
        if let Err(error) = self.journal.delivered(request, through) {
            tracing::debug!(%request, %error, "the delivered cursor stays where it was");
        }
    }

    fn left_open(&self) -> Result<Vec<Left>, LogError> {
        let mut left = Vec::new();
        for (request, status) in self.journal.requests().map_err(|e| failed(&e))? {
            let Ok(submit) = fs::read(self.file(request, "submit")) else {
                tracing::warn!(%request, "what it asked for is lost: it is not taken up again");
                self.close(request)?;
                continue;
            };
            let entries = self.journal.read(request, 1, status.journaled);
            let tokens = entries.map_err(|e| failed(&e))?.into_iter();
            left.push(Left {
                request,
                floor: status.floor.epoch,
                owner: status.floor.owner,
                tokens: tokens
                    .map(|e| Emission {
                        seq: e.seq,
                        token: e.token,
                        text: e.text,
                        finish: e.finish,
                    })
                    .collect(),
                submit,
                checkpoint: fs::read(self.file(request, "checkpoint")).ok(),
            });
        }
        Ok(left)
    }

    fn close(&self, request: RequestId) -> Result<(), LogError> {
        self.journal.forget(request).map_err(|e| failed(&e))?;
        let mut open = self.open_of(request).lock();
        open.remove(&request);
        for kind in ["submit", "checkpoint"] {
            // One that is not there was never written.
            let _ = fs::remove_file(self.file(request, kind));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, WorkerId};

    #[test]
    fn a_file_beside_the_journal_that_cannot_be_written_fails_its_request_only() {
        let dir = tempfile::tempdir().unwrap();
        let owner = WorkerRef {
            id: WorkerId::new("w0").unwrap(),
            incarnation: Incarnation(1),
        };
        let log = open_log(dir.path()).unwrap();
        let (requests, away) = (dir.path().join("requests"), dir.path().join("away"));
        fs::rename(&requests, &away).unwrap();
        let error = log.open(RequestId([1; 16]), &owner, b"ask").unwrap_err();
        assert!(
            error.passing && error.to_string().contains("requests"),
            "{error}"
        );
        fs::rename(&away, &requests).unwrap();
        log.open(RequestId([2; 16]), &owner, b"ask").unwrap();
        let names = fs::read_dir(&requests).unwrap().count();
        assert_eq!(names, 1, "something of the failed write is left");
    }

    #[test]
    fn an_ended_request_leaves_no_file_whatever_comes_late_and_whenever_its_gateway_dies() {
        let dir = tempfile::tempdir().unwrap();
        let owner = WorkerRef {
            id: WorkerId::new("w0").unwrap(),
            incarnation: Incarnation(1),
        };
        let requests = dir.path().join("requests");
        let files = || {
            let mut names: Vec<String> = fs::read_dir(&requests)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let (over, live) = (RequestId([3; 16]), RequestId([4; 16]));
        let log = open_log(dir.path()).unwrap();
        for request in [over, live] {
            log.open(request, &owner, b"ask").unwrap();
            log.checkpoint(request, b"state").unwrap();
        }
        let kept = [format!("{live}.checkpoint"), format!("{live}.submit")];
        log.close(over).unwrap();
        log.checkpoint(over, b"late").unwrap();
        assert_eq!(files(), kept);
        drop(log);
        // A life that ended between the journal's word and the removing, or while it wrote.
        fs::write(requests.join(format!("{over}.checkpoint")), b"x").unwrap();
        fs::write(requests.join(format!("{live}.checkpoint.part")), b"x").unwrap();
        fs::write(requests.join("somebody's"), b"x").unwrap();
        let log = open_log(dir.path()).unwrap();
        let theirs = [&kept[..], &["somebody's".to_owned()]].concat();
        assert_eq!(files(), theirs);
        assert_eq!(log.left_open().unwrap().len(), 1);
        log.checkpoint(live, b"again").unwrap();
        assert_eq!(fs::read(requests.join(&kept[0])).unwrap(), b"again");
    }

    #[test]
    fn what_a_request_asked_for_and_made_is_on_disk_until_it_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let request = RequestId([7; 16]);
        let owner = WorkerRef {
            id: WorkerId::new("w0").unwrap(),
            incarnation: Incarnation(1),
        };
        let log = open_log(dir.path()).unwrap();
        log.open(request, &owner, b"ask").unwrap();
        let token = |seq| Emission {
            seq,
            token: 5,
            text: b"x".to_vec(),
            finish: None,
        };
        log.append(request, OwnerEpoch(1), &[token(1), token(2)])
            .unwrap();
        log.checkpoint(request, b"state").unwrap();
        log.raise_floor(request, OwnerEpoch(2), &owner).unwrap();
        assert!(
            log.append(request, OwnerEpoch(1), &[token(3)]).is_err(),
            "a token of an epoch below the floor was journaled"
        );
        let submit = dir.path().join(format!("requests/{request}.submit"));
        assert_eq!(fs::read(&submit).unwrap(), b"ask");
        drop(log);
        let log = open_log(dir.path()).unwrap();
        let left = log.left_open().unwrap();
        assert_eq!((left[0].floor, left[0].tokens.len()), (OwnerEpoch(2), 2));
        assert_eq!(left[0].checkpoint.as_deref(), Some(&b"state"[..]));
        log.close(request).unwrap();
        assert!(!submit.exists());
        drop(log);
        let journal = Journal::open(dir.path().join("journal"), JournalOptions::default()).unwrap();
        assert_eq!(journal.requests().unwrap(), []);
    }
}
