//! Bulk KV: the source opens a pinned request's blocks for reading, the destination pulls.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::id::ErrorKind;
use crate::mem::{BlockId, BlockPool, RegionKey, RemoteRegion, WriteLease};
use crate::migrate::destination::Pulled;
use crate::route::{DecodeError, Reader, Writer};
use crate::transport::{
    Access, Completion, Endpoint, Link, Local, Path, Refusal, Revoked, Scope, Span, Transfer,
    Transport, TransportError,
};

/// How long connecting to a source may take.
const DIAL: Duration = Duration::from_secs(2);
/// How often a pull looks whether it was cancelled.
const SLICE: Duration = Duration::from_millis(20);
/// Idle links kept to one endpoint.
const IDLE: usize = 4;
/// How long a link may stay idle.
const KEEP: Duration = Duration::from_secs(3);

/// The right to read some blocks of a pool, as the owner keeps it.
#[derive(Debug)]
pub struct Grant {
    /// Over which path.
    pub path: Path,
    key: RegionKey,
    bytes: Vec<u8>,
}

impl Grant {
    /// What the peer needs to use it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A grant as the peer got it.
#[derive(Debug, Clone)]
pub struct Granted {
    /// Where the owner serves.
    pub endpoint: Endpoint,
    /// What it lets us read.
    pub region: RemoteRegion,
}

impl Granted {
    /// Reads the bytes of [`Grant::bytes`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        let text = r.bytes(512, "grant.endpoint")?;
        let text = std::str::from_utf8(text).map_err(|_| DecodeError::Range("grant.endpoint"))?;
        let endpoint = text
            .parse()
            .map_err(|_| DecodeError::Range("grant.endpoint"))?;
        let region = RemoteRegion::decode(r.bytes(128, "grant.region")?)
            .map_err(|_| DecodeError::Range("grant.region"))?;
        r.end()?;
        Ok(Self { endpoint, region })
    }
}

/// How one pull went.
#[derive(Debug)]
pub struct PullReport {
    /// For the machine.
    pub outcome: Pulled,
    /// Bytes that arrived.
    pub bytes: u64,
    /// The path they took.
    pub path: Option<Path>,
    /// What failed, in words.
    pub error: Option<TransportError>,
    /// The lease, if nobody else may still write through it.
    pub lease: Option<WriteLease>,
}

/// A link that nobody uses, and since when.
type IdleLink = (Instant, Box<dyn Link>);

/// The paths of one worker.
pub struct Bulk {
    paths: Vec<Arc<dyn Transport>>,
    /// By endpoint: links with the time of their last use, the newest last.
    idle: Mutex<HashMap<String, Vec<IdleLink>>>,
}

impl Bulk {
    /// Over these paths.
    pub fn new(paths: Vec<Arc<dyn Transport>>) -> Self {
        Self {
            paths,
            idle: Mutex::default(),
        }
    }

    /// Names of the paths there are.
    pub fn names(&self) -> Vec<&'static str> {
        self.paths.iter().map(|t| t.path().name()).collect()
    }

    /// Every path.
    pub fn paths(&self) -> &[Arc<dyn Transport>] {
        &self.paths
    }

    /// The transport of a path, or why there is none. No path stands in for another.
    pub fn transport(&self, path: Path) -> Result<&Arc<dyn Transport>, TransportError> {
        let found = self.paths.iter().find(|t| t.path() == path);
        found.ok_or(TransportError::Unsupported {
            what: "this worker has no such path: see `transports` in its description",
        })
    }

    /// Opens blocks of a pool for reading.
    pub fn grant(
        &self,
        path: Path,
        pool: &Arc<BlockPool>,
        blocks: &[BlockId],
    ) -> Result<Grant, TransportError> {
        let transport = self.transport(path)?;
        let region = transport.register(pool, Access::RemoteRead, Scope::Blocks(blocks))?;
        let mut w = Writer::default();
        w.bytes(transport.endpoint().to_string().as_bytes());
        w.bytes(&region.encode());
        Ok(Grant {
            path,
            key: region.key,
            bytes: w.0,
        })
    }

    /// Opens further blocks under a grant.
    pub fn extend(&self, grant: &Grant, blocks: &[BlockId]) -> Result<(), TransportError> {
        self.transport(grant.path)?.extend(grant.key, blocks)
    }

    /// Ends a grant: bytes that a reader may still touch.
    pub fn revoke(&self, grant: &Grant, deadline: Instant) -> Result<u64, TransportError> {
        match self.transport(grant.path)?.revoke(grant.key, deadline)? {
            Revoked::Done => Ok(0),
            Revoked::Quarantined { bytes } => Ok(bytes),
        }
    }

    /// Reads `spans` of a granted region into leased blocks. Blocks until done, cancelled or late.
    pub fn pull(
        &self,
        path: Path,
        from: &Granted,
        spans: Vec<Span>,
        lease: WriteLease,
        deadline: Instant,
        cancelled: &AtomicBool,
    ) -> PullReport {
        let mut link = match self.link(path, &from.endpoint) {
            Ok(link) => link,
            Err(error) => {
                // Nobody listens there: this source will not come back under this grant.
                let outcome = Pulled::Lost;
                return PullReport {
                    outcome,
                    bytes: 0,
                    path: None,
                    error: Some(error),
                    lease: Some(lease),
                };
            }
        };
        let transfer = Transfer {
            local: Local::GetInto(lease),
            remote: from.region,
            spans,
            deadline,
        };
        let id = match link.submit(transfer) {
            Ok(id) => id,
            Err(rejected) => {
                let outcome = outcome_of(&rejected.error);
                let lease = lease_of(Some(rejected.transfer.local));
                return PullReport {
                    outcome,
                    bytes: 0,
                    path: None,
                    error: Some(rejected.error),
                    lease,
                };
            }
        };
        let mut slot = [Completion::empty()];
        loop {
            let slice = (Instant::now() + SLICE).min(deadline + SLICE);
            if link.wait(&mut slot, slice) > 0 && slot[0].id == id {
                break;
            }
            if cancelled.load(Ordering::Relaxed) || Instant::now() >= deadline + DIAL {
                // How it ended comes with the completion; a lease that is not given back is not reused.
                let _ = link.cancel(id, Instant::now() + SLICE);
            }
        }
        let [done] = slot;
        let report = PullReport {
            outcome: done
                .outcome
                .as_ref()
                .map_or_else(outcome_of, |()| Pulled::Landed),
            bytes: done.bytes,
            path: Some(done.path),
            error: done.outcome.err(),
            lease: lease_of(done.local),
        };
        if report.error.is_none() {
            self.keep(&from.endpoint, link);
        }
        report
    }

    fn link(&self, path: Path, to: &Endpoint) -> Result<Box<dyn Link>, TransportError> {
        let kept = self.idle.lock().get_mut(&to.to_string()).and_then(Vec::pop);
        if let Some((_, link)) = kept {
            return Ok(link);
        }
        self.transport(path)?.connect(to, Instant::now() + DIAL)
    }

    /// Connects to a source ahead of the first pull, so that STREAM starts warm.
    pub fn warm(&self, path: Path, to: &Endpoint) -> Result<(), TransportError> {
        let link = self.link(path, to)?;
        self.keep(to, link);
        Ok(())
    }

    fn keep(&self, to: &Endpoint, link: Box<dyn Link>) {
        let mut idle = self.idle.lock();
        let kept = idle.entry(to.to_string()).or_default();
        if kept.len() < IDLE {
            kept.push((Instant::now(), link));
        }
    }

    /// Closes links that nobody has used for a while: a peer that is gone leaves none behind.
    pub fn tend(&self) {
        self.close_unused_since(Instant::now().checked_sub(KEEP));
    }

    fn close_unused_since(&self, then: Option<Instant>) {
        let Some(then) = then else { return };
        let mut closing = Vec::new();
        self.idle.lock().retain(|_, kept| {
            closing.extend(kept.extract_if(.., |(used, _)| *used < then));
            !kept.is_empty()
        });
        // Closed without the lock: that may wait for the peer.
        drop(closing);
    }
}

fn lease_of(local: Option<Local>) -> Option<WriteLease> {
    match local {
        Some(Local::GetInto(lease)) => Some(lease),
        _ => None,
    }
}

fn outcome_of(error: &TransportError) -> Pulled {
    match error {
        TransportError::Refused(Refusal::StaleEpoch | Refusal::UnknownKey) => Pulled::Lost,
        e if matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::Caller) => Pulled::Lost,
        // A broken connection is tried again on a new one; that then says whether the peer is gone.
        _ => Pulled::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::LocalTransport;

    #[test]
    fn a_link_that_nobody_uses_is_closed_and_one_in_use_of_late_is_kept() {
        let local = LocalTransport::bind("bulk-idle", None, None).unwrap();
        let at = local.endpoint();
        let bulk = Bulk::new(vec![Arc::new(local)]);
        bulk.warm(Path::Local, &at).unwrap();
        bulk.close_unused_since(Instant::now().checked_sub(KEEP));
        assert_eq!(bulk.idle.lock().len(), 1);
        bulk.close_unused_since(Some(Instant::now() + KEEP));
        assert!(bulk.idle.lock().is_empty());
    }
}
