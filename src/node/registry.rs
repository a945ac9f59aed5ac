//! Who is where: each daemon's card in the metadata store. It grants nothing; a stale card costs a
//! failed dial, for a hello names the incarnation.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::drive::Directory;
use crate::id::{Incarnation, WorkerId, WorkerRef};
use crate::metastore::{Cas, CasOutcome, MetaStore, StoreError};
use crate::migrate::io::Peer;
use crate::wire::Endpoint;

const WORKERS: &str = "worker/";
const COORDINATORS: &str = "coordinator/";
const ANSWER: Duration = Duration::from_secs(2);

/// A daemon's card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its name.
    pub id: String,
    /// Which life of it.
    pub incarnation: u64,
    /// Its mesh listener.
    pub mesh: String,
    /// Its control RPC.
    pub rpc: String,
    /// Its process.
    pub pid: u32,
    /// The model it serves; empty for a coordinator.
    #[serde(default)]
    pub model: String,
    /// Bulk paths it offers.
    #[serde(default)]
    pub paths: Vec<String>,
    /// It gives its requests away and takes none.
    #[serde(default)]
    pub draining: bool,
}

impl Card {
    /// The worker it is of, if its name is one.
    pub fn worker(&self) -> Option<WorkerRef> {
        let id = WorkerId::new(self.id.clone()).ok()?;
        Some(WorkerRef {
            id,
            incarnation: Incarnation(self.incarnation),
        })
    }
}

/// The cards.
#[derive(Clone)]
pub struct Registry {
    store: Arc<dyn MetaStore>,
    known: Arc<Mutex<HashMap<Peer, Endpoint>>>,
}

impl Registry {
    /// In this store.
    pub fn new(store: Arc<dyn MetaStore>) -> Self {
        Self {
            store,
            known: Arc::default(),
        }
    }

    fn put(&self, key: &str, card: Option<&Card>) -> Result<(), StoreError> {
        let bytes = card.map(|c| serde_json::to_vec(c).unwrap_or_default());
        let deadline = Instant::now() + ANSWER;
        loop {
            let at = self.store.get(key, deadline)?.map(|v| v.revision);
            let cas = match (&bytes, at) {
                (Some(bytes), at) => Cas::put(key, at, bytes),
                (None, Some(at)) => Cas::delete(key, at),
                (None, None) => return Ok(()),
            };
            match self.store.cas(&cas, deadline) {
                Ok(CasOutcome::Applied { .. }) => return Ok(()),
                Ok(CasOutcome::Conflict { .. }) | Err(StoreError::InDoubt { .. })
                    if Instant::now() < deadline => {}
                Ok(CasOutcome::Conflict { .. }) => {
                    return Err(StoreError::Unavailable {
                        cause: format!("{key} is contended"),
                    });
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Publishes a worker's card, replacing that of an earlier life.
    pub fn publish_worker(&self, card: &Card) -> Result<(), StoreError> {
        self.put(&format!("{WORKERS}{}", card.id), Some(card))
    }

    /// Publishes a coordinator's card under its nonce.
    pub fn publish_coordinator(&self, card: &Card) -> Result<(), StoreError> {
        self.put(
            &format!("{COORDINATORS}{:016x}", card.incarnation),
            Some(card),
        )
    }

    /// Removes a coordinator's card.
    pub fn remove_coordinator(&self, nonce: u64) -> Result<(), StoreError> {
        self.put(&format!("{COORDINATORS}{nonce:016x}"), None)
    }

    /// Removes a worker's card, if it is still of this life.
    pub fn remove_worker(&self, worker: &WorkerRef) -> Result<(), StoreError> {
        match self.worker(worker.id.as_str())? {
            Some(card) if card.incarnation == worker.incarnation.0 => {
                self.put(&format!("{WORKERS}{}", worker.id), None)
            }
            _ => Ok(()),
        }
    }

    fn get(&self, key: &str) -> Result<Option<Card>, StoreError> {
        let found = self.store.get(key, Instant::now() + ANSWER)?;
        Ok(found.and_then(|v| serde_json::from_slice(&v.value).ok()))
    }

    /// A worker's card by name.
    pub fn worker(&self, id: &str) -> Result<Option<Card>, StoreError> {
        self.get(&format!("{WORKERS}{id}"))
    }

    /// Every coordinator's card, those of ended lives included where nobody removed them.
    pub fn coordinators(&self) -> Result<Vec<Card>, StoreError> {
        self.cards(COORDINATORS)
    }

    /// Every worker's card.
    pub fn workers(&self) -> Result<Vec<Card>, StoreError> {
        self.cards(WORKERS)
    }

    fn cards(&self, prefix: &str) -> Result<Vec<Card>, StoreError> {
        let listing = self.store.list(prefix, Instant::now() + ANSWER)?;
        let cards = listing.entries.iter();
        Ok(cards
            .filter_map(|(_, v)| serde_json::from_slice(&v.value).ok())
            .collect())
    }

    /// Notes where a peer said it listens.
    pub fn learn(&self, peer: &Peer, at: &Endpoint) {
        self.known.lock().insert(peer.clone(), at.clone());
    }
}

impl Directory for Registry {
    fn endpoint(&self, peer: &Peer) -> Option<Endpoint> {
        if let Some(at) = self.known.lock().get(peer) {
            return Some(at.clone());
        }
        let card = match peer {
            Peer::Worker(w) => self
                .worker(w.id.as_str())
                .ok()?
                .filter(|c| c.incarnation == w.incarnation.0),
            Peer::Coordinator(nonce) => self.get(&format!("{COORDINATORS}{nonce:016x}")).ok()?,
            Peer::Gateway => None,
        }?;
        let at: Endpoint = card.mesh.parse().ok()?;
        self.known.lock().insert(peer.clone(), at.clone());
        Some(at)
    }
}
