//! Within one process: one copy, out of a read lease into a write lease.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use crate::mem::{BlockId, BlockPool, MemError, ReadLease, RegionKey, RemoteRegion};
use crate::transport::copier::{Copier, Reach, Reached, Sink};
use crate::transport::registry::{Guard, Registry, lease_refusal, settle};
use crate::transport::tap::{Pace, Tap};
use crate::transport::{
    Access, Endpoint, Link, PIECE_MAX, Path, Revoked, Scope, Span, Transport, TransportError,
};

/// Endpoints of this process.
static NAMES: LazyLock<Mutex<HashMap<String, Weak<Registry>>>> = LazyLock::new(Mutex::default);

/// The `local` transport: peers are other parts of the same process.
pub struct LocalTransport {
    name: String,
    registry: Arc<Registry>,
    tap: Option<Arc<dyn Tap>>,
    pace: Option<Arc<Pace>>,
}

impl LocalTransport {
    /// Takes a name in this process; refused if it is taken.
    pub fn bind(
        name: &str,
        tap: Option<Arc<dyn Tap>>,
        pace: Option<Arc<Pace>>,
    ) -> Result<Self, TransportError> {
        let registry = Arc::new(Registry::default());
        let mut names = NAMES.lock();
        if names.get(name).is_some_and(|r| r.strong_count() > 0) {
            return Err(TransportError::BadEndpoint {
                what: "this local name is taken",
            });
        }
        names.insert(name.into(), Arc::downgrade(&registry));
        Ok(Self {
            name: name.into(),
            registry,
            tap,
            pace,
        })
    }
}

impl Drop for LocalTransport {
    fn drop(&mut self) {
        NAMES.lock().remove(&self.name);
    }
}

impl Transport for LocalTransport {
    fn path(&self) -> Path {
        Path::Local
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::Local(self.name.clone())
    }

    fn register(
        &self,
        pool: &Arc<BlockPool>,
        access: Access,
        scope: Scope<'_>,
    ) -> Result<RemoteRegion, TransportError> {
        Ok(self.registry.register(pool, access, scope)?.0)
    }

    fn extend(&self, key: RegionKey, blocks: &[BlockId]) -> Result<(), TransportError> {
        self.registry
            .find(key)
            .ok_or(TransportError::UnknownKey)?
            .extend(blocks)
    }

    fn renew(
        &self,
        key: RegionKey,
        deadline: Instant,
    ) -> Result<(RemoteRegion, Revoked), TransportError> {
        let r = self.registry.find(key).ok_or(TransportError::UnknownKey)?;
        let next = r.close_epoch(false);
        Ok((next, settle(r.wait_drained(deadline), &r)?))
    }

    fn revoke(&self, key: RegionKey, deadline: Instant) -> Result<Revoked, TransportError> {
        let r = self.registry.find(key).ok_or(TransportError::UnknownKey)?;
        r.close_epoch(true);
        let revoked = settle(r.wait_drained(deadline), &r);
        self.registry.remove(key);
        revoked
    }

    fn connect(&self, to: &Endpoint, deadline: Instant) -> Result<Box<dyn Link>, TransportError> {
        let Endpoint::Local(name) = to else {
            return Err(TransportError::BadEndpoint {
                what: "a local transport connects to local:NAME",
            });
        };
        if Instant::now() >= deadline {
            return Err(TransportError::DeadlineExceeded);
        }
        let peer = NAMES
            .lock()
            .get(name)
            .cloned()
            .filter(|r| r.strong_count() > 0);
        let peer = peer.ok_or(TransportError::PeerLost {
            errno: libc::ECONNREFUSED,
        })?;
        let reach = LocalReach {
            peer,
            blocks: Vec::new(),
        };
        Ok(Box::new(Copier::new(
            reach,
            self.tap.clone(),
            self.pace.clone(),
        )))
    }
}

struct LocalReach {
    peer: Weak<Registry>,
    blocks: Vec<BlockId>,
}

/// A lease of ours could not be had.
fn unleased(e: MemError) -> Reached {
    match e {
        MemError::Busy { .. } => Reached::Busy,
        e => Reached::Failed(lease_refusal(e).into()),
    }
}

impl LocalReach {
    fn admit(
        &mut self,
        to: &RemoteRegion,
        access: Access,
        piece: &[Span],
    ) -> Result<Guard, TransportError> {
        let peer = self
            .peer
            .upgrade()
            .ok_or(TransportError::PeerLost { errno: 0 })?;
        let guard = peer.enter(to.key, to.epoch, access)?;
        guard.registration().blocks_of(piece, &mut self.blocks)?;
        Ok(guard)
    }
}

impl Reach for LocalReach {
    const PATH: Path = Path::Local;
    const PIECE: u64 = PIECE_MAX as u64;

    fn read(&mut self, from: &RemoteRegion, piece: &[Span], to: &mut Sink<'_>) -> Reached {
        let guard = match self.admit(from, Access::RemoteRead, piece) {
            Ok(guard) => guard,
            Err(e) => return Reached::Failed(e),
        };
        let source = match guard.registration().pool.read(&self.blocks) {
            Ok(lease) => lease,
            Err(e) => return unleased(e),
        };
        for s in piece {
            let copied = to.put(s, |bytes| {
                bytes.copy_from_slice(source.bytes(s.remote_off, bytes.len()));
                Ok(())
            });
            if let Err(e) = copied {
                return Reached::Failed(e);
            }
        }
        Reached::Done
    }

    fn write(
        &mut self,
        to: &RemoteRegion,
        piece: &[Span],
        from: &ReadLease,
        aside: Option<&[u8]>,
    ) -> Reached {
        let guard = match self.admit(to, Access::RemoteWrite, piece) {
            Ok(guard) => guard,
            Err(e) => return Reached::Failed(e),
        };
        let mut target = match guard.registration().pool.write(&self.blocks) {
            Ok(lease) => lease,
            Err(e) => return unleased(e),
        };
        let mut packed = aside;
        for s in piece {
            let len = s.len as usize;
            let bytes = match &mut packed {
                Some(rest) => {
                    let (now, later) = rest.split_at(len);
                    *rest = later;
                    now
                }
                None => from.bytes(s.local_off, len),
            };
            target.bytes_mut(s.remote_off, len).copy_from_slice(bytes);
        }
        // Visible from here on: the lease on the target ends before anybody is told.
        Reached::Done
    }

    fn doze(&mut self, _until: Instant) {}

    fn abandon(&mut self, _until: Instant) -> bool {
        true
    }

    fn dead(&self) -> Option<TransportError> {
        (self.peer.strong_count() == 0).then_some(TransportError::PeerLost { errno: 0 })
    }
}
