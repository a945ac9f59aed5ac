//! The workers that can be given requests: who is linked, what each serves, how loaded it is.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tonic::transport::Channel;

use crate::id::{RequestId, WorkerRef};
use crate::rpc::v1::worker_client::WorkerClient;
use crate::rpc::{self, DialError, MAX_MESSAGE, v1};
use crate::wire::Endpoint;

/// How long connecting to a worker's RPC may take.
const DIAL: Duration = Duration::from_secs(2);

/// One linked worker.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Which life of it.
    pub worker: WorkerRef,
    /// Its control RPC.
    pub rpc: Endpoint,
    /// The model it serves; empty until it was asked.
    pub model: String,
    /// It takes no new requests.
    pub draining: bool,
    /// Requests placed here or moved here that have not ended.
    pub requests: u32,
    channel: Option<Channel>,
}

/// The table of linked workers.
#[derive(Debug, Default)]
pub struct Workers {
    table: Mutex<HashMap<WorkerRef, Entry>>,
    owners: Mutex<HashMap<RequestId, WorkerRef>>,
}

impl Workers {
    /// A worker's link came up.
    pub fn joined(&self, worker: WorkerRef, rpc: Endpoint) {
        let requests = self
            .owners
            .lock()
            .values()
            .filter(|w| **w == worker)
            .count();
        self.table.lock().entry(worker.clone()).or_insert(Entry {
            worker,
            rpc,
            model: String::new(),
            draining: false,
            requests: u32::try_from(requests).unwrap_or(u32::MAX),
            channel: None,
        });
    }

    /// Its last link is down. Returns the requests it owned.
    pub fn left(&self, worker: &WorkerRef) -> Vec<RequestId> {
        self.table.lock().remove(worker);
        self.owned_by(worker)
    }

    /// Whether that life of it is linked.
    pub fn is_linked(&self, worker: &WorkerRef) -> bool {
        self.table.lock().contains_key(worker)
    }

    /// Requests owned by a worker.
    pub fn owned_by(&self, worker: &WorkerRef) -> Vec<RequestId> {
        let owners = self.owners.lock();
        owners
            .iter()
            .filter(|(_, w)| *w == worker)
            .map(|(r, _)| *r)
            .collect()
    }

    /// Notes who owns a request; returns who did.
    pub fn own(&self, request: RequestId, worker: &WorkerRef) -> Option<WorkerRef> {
        let before = self.owners.lock().insert(request, worker.clone());
        if before.as_ref() == Some(worker) {
            return before;
        }
        let mut table = self.table.lock();
        if let Some(e) = before.as_ref().and_then(|w| table.get_mut(w)) {
            e.requests = e.requests.saturating_sub(1);
        }
        if let Some(e) = table.get_mut(worker) {
            e.requests += 1;
        }
        before
    }

    /// The request is over.
    pub fn disown(&self, request: RequestId) {
        if let Some(worker) = self.owners.lock().remove(&request)
            && let Some(e) = self.table.lock().get_mut(&worker)
        {
            e.requests = e.requests.saturating_sub(1);
        }
    }

    /// Who owns a request.
    pub fn owner(&self, request: RequestId) -> Option<WorkerRef> {
        self.owners.lock().get(&request).cloned()
    }

    /// The least loaded worker that serves `model` and takes requests, `not` excepted.
    pub fn place(&self, model: Option<&str>, not: &[WorkerRef]) -> Option<WorkerRef> {
        let table = self.table.lock();
        let fits = |e: &&Entry| {
            !e.draining
                && !not.contains(&e.worker)
                && !e.model.is_empty()
                && model.is_none_or(|m| m == e.model)
        };
        // By name among equals, so that placement does not depend on a hash map's order.
        let best = table
            .values()
            .filter(fits)
            .min_by_key(|e| (e.requests, &e.worker.id));
        best.map(|e| e.worker.clone())
    }

    /// Notes that a worker takes no new requests, or does again.
    pub fn set_draining(&self, worker: &WorkerRef, draining: bool) {
        if let Some(e) = self.table.lock().get_mut(worker) {
            e.draining = draining;
        }
    }

    /// Notes which model a worker serves.
    pub fn set_model(&self, worker: &WorkerRef, model: String) {
        if let Some(e) = self.table.lock().get_mut(worker) {
            e.model = model;
        }
    }

    /// Which model a worker serves, if it said so.
    pub fn model_of(&self, worker: &WorkerRef) -> Option<String> {
        let table = self.table.lock();
        table
            .get(worker)
            .map(|e| e.model.clone())
            .filter(|m| !m.is_empty())
    }

    /// Names of the models served, each once.
    pub fn models(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .table
            .lock()
            .values()
            .map(|e| e.model.clone())
            .filter(|m| !m.is_empty())
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// The table, by name.
    pub fn all(&self) -> Vec<Entry> {
        let mut all: Vec<Entry> = self.table.lock().values().cloned().collect();
        all.sort_by(|a, b| a.worker.cmp(&b.worker));
        all
    }

    /// A client of a worker's RPC; `None` if that life of it is not linked.
    pub async fn client(
        &self,
        worker: &WorkerRef,
    ) -> Result<Option<WorkerClient<Channel>>, DialError> {
        let (rpc, cached) = {
            let table = self.table.lock();
            let Some(e) = table.get(worker) else {
                return Ok(None);
            };
            (e.rpc.clone(), e.channel.clone())
        };
        let channel = match cached {
            Some(channel) => channel,
            None => {
                let channel = rpc::connect(&rpc, DIAL).await?;
                if let Some(e) = self.table.lock().get_mut(worker) {
                    e.channel = Some(channel.clone());
                }
                channel
            }
        };
        let client = WorkerClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        Ok(Some(client))
    }
}

impl From<Entry> for v1::WorkerEntry {
    fn from(e: Entry) -> Self {
        Self {
            worker: Some(v1::WorkerRef {
                id: e.worker.id.as_str().to_owned(),
                incarnation: e.worker.incarnation.0,
            }),
            connected: true,
            draining: e.draining,
            rpc_endpoint: e.rpc.to_string(),
            requests: e.requests,
            ready: !e.model.is_empty(),
            model: e.model,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, WorkerId};

    fn worker(id: &str, incarnation: u64) -> WorkerRef {
        WorkerRef {
            id: WorkerId::new(id).unwrap(),
            incarnation: Incarnation(incarnation),
        }
    }

    fn table() -> Workers {
        let t = Workers::default();
        for w in [worker("w0", 1), worker("w1", 1)] {
            t.joined(w.clone(), "unix:///tmp/x".parse().unwrap());
            t.set_model(&w, "m".into());
        }
        t
    }

    #[test]
    fn the_least_loaded_worker_that_serves_the_model_is_chosen() {
        let t = table();
        assert_eq!(t.place(Some("m"), &[]), Some(worker("w0", 1)));
        t.own(RequestId([1; 16]), &worker("w0", 1));
        assert_eq!(t.place(Some("m"), &[]), Some(worker("w1", 1)));
        assert_eq!(t.place(Some("other"), &[]), None);
        t.set_draining(&worker("w1", 1), true);
        assert_eq!(t.place(Some("m"), &[worker("w0", 1)]), None);
    }

    #[test]
    fn a_flip_moves_the_load_and_a_lost_worker_names_what_it_owned() {
        let t = table();
        let r = RequestId([1; 16]);
        t.own(r, &worker("w0", 1));
        assert_eq!(t.own(r, &worker("w1", 1)), Some(worker("w0", 1)));
        let load: Vec<u32> = t.all().iter().map(|e| e.requests).collect();
        assert_eq!(load, [0, 1]);
        assert_eq!(t.left(&worker("w1", 2)), []);
        assert_eq!(t.left(&worker("w1", 1)), [r]);
        t.disown(r);
        assert_eq!(t.owner(r), None);
    }
}
