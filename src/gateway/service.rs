//! The gateway's administration RPC.

use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use super::core::Core;
use super::hub::End;
use crate::drive::{RouteStore, outcome_words};
use crate::migrate::io::StoreReply;
use crate::rpc::v1::{self, gateway_server};

/// Most requests listed at once.
const MAX_LIST: usize = 1000;

/// The service over a gateway.
#[derive(Clone)]
pub struct Service {
    core: Arc<Core>,
    http: String,
    store: String,
}

impl Service {
    /// Over this gateway; `http` and `store` are told in its status.
    pub fn new(core: Arc<Core>, http: String, store: String) -> Self {
        Self { core, http, store }
    }
}

#[tonic::async_trait]
impl gateway_server::Gateway for Service {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::GatewayEvent, Status>> + Send>>;

    async fn status(
        &self,
        _: Request<v1::GatewayStatusRequest>,
    ) -> Result<Response<v1::GatewayStatus>, Status> {
        let (core, m) = (&self.core, &self.core.metrics);
        Ok(Response::new(v1::GatewayStatus {
            http: self.http.clone(),
            store: self.store.clone(),
            workers: core
                .workers
                .all()
                .into_iter()
                .map(v1::WorkerEntry::from)
                .collect(),
            requests_active: u32::try_from(core.hub.active()).unwrap_or(u32::MAX),
            requests_finished: m.finished.get(),
            tokens_accepted: m.accepted.get(),
            tokens_refused: m.refused_total(),
            tokens_duplicate: m.duplicates.get(),
            integrity_alarms: m.alarms.get(),
        }))
    }

    async fn requests(
        &self,
        request: Request<v1::RequestsRequest>,
    ) -> Result<Response<v1::RequestsReply>, Status> {
        let limit = match request.into_inner().limit {
            0 => 100,
            n => usize::try_from(n).unwrap_or(MAX_LIST).min(MAX_LIST),
        };
        let core = Arc::clone(&self.core);
        // Each entry takes its request's lock, which a journal write may hold.
        let requests = tokio::task::spawn_blocking(move || core.list(limit))
            .await
            .map_err(|e| Status::internal(e.to_string()))?;
        Ok(Response::new(v1::RequestsReply { requests }))
    }

    async fn watch(
        &self,
        _: Request<v1::GatewayWatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let events = tokio_stream::wrappers::BroadcastStream::new(self.core.events.subscribe());
        // A watcher that fell behind misses events; it is not cut off for it.
        Ok(Response::new(Box::pin(
            events.filter_map(|e| e.ok().map(Ok)),
        )))
    }
}

impl Core {
    /// The requests it knows, those under way first.
    fn list(&self, limit: usize) -> Vec<v1::RequestEntry> {
        let mut slots = self.all_slots();
        slots.sort_by_key(|s| (s.live.ended().is_some(), s.request));
        slots.truncate(limit);
        let entry = |slot: Arc<super::slot::Slot>| {
            let (floor, journaled) = {
                let state = slot.state.lock();
                (state.acceptor.floor(), state.acceptor.journaled())
            };
            let owner = self.workers.owner(slot.request);
            let end = slot.live.ended();
            let record = match self.routes().read(slot.request) {
                StoreReply::Value(v) => Some(v.record),
                _ => None,
            };
            let last = record.as_ref().and_then(|r| r.last.as_ref());
            let (last_outcome, last_cause) = last.map_or(("", ""), |d| outcome_words(&d.outcome));
            v1::RequestEntry {
                request: slot.request.to_string(),
                owner: owner.map(|w| v1::WorkerRef {
                    id: w.id.as_str().to_owned(),
                    incarnation: w.incarnation.0,
                }),
                owner_epoch: floor.0,
                route_generation: record.as_ref().map_or(0, |r| r.generation.0),
                journaled,
                delivered: slot.live.delivered(),
                finished: end.is_some(),
                finish_reason: end.map_or("", End::as_str).to_owned(),
                last_epoch: last.map_or(0, |d| d.migration_epoch.0),
                last_outcome: last_outcome.to_owned(),
                last_cause: last_cause.to_owned(),
                migrating: record.as_ref().is_some_and(|r| r.intent.is_some()),
            }
        };
        slots.into_iter().map(entry).collect()
    }
}
