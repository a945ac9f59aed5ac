//! The gateway's heart: requests and their acceptors, placement, and recovery of what a lost worker
//! owned.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message;
use tokio::sync::broadcast;

use super::heal::Watch;
use super::http::Backend;
use super::hub::{End, Hub, Live};
use super::log::{LogError, TokenLog};
use super::metrics::Metrics;
use super::openai::{ApiError, Ask};
use super::slot::{AcceptorHands, Came, Slot};
use super::workers::Workers;
use crate::drive::{Mesh, RouteStore, Routes, Timers, now_ns, run};
use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::acceptor::{Acceptor, Done, Event};
use crate::migrate::io::{self, StoreReply, Timer};
use crate::migrate::limits::Limits;
use crate::route::RouteRecord;
use crate::rpc::v1;

/// How long a worker may take to admit a request.
const SUBMIT: Duration = Duration::from_secs(20);

/// The gateway.
pub struct Core {
    /// What clients read.
    pub hub: Hub,
    /// What is counted.
    pub metrics: Metrics,
    /// Who can be given requests.
    pub workers: Workers,
    /// J, on disk.
    pub log: Arc<dyn TokenLog>,
    /// What happened, for watchers.
    pub events: broadcast::Sender<v1::GatewayEvent>,
    routes: Routes,
    limits: Limits,
    pub(super) runtime: tokio::runtime::Handle,
    slots: Mutex<HashMap<RequestId, Arc<Slot>>>,
    pub(super) watch: Watch,
    mesh: OnceLock<Mesh>,
    timers: OnceLock<Timers<(RequestId, Timer)>>,
    draining: AtomicBool,
    poisoned: AtomicBool,
}

impl Core {
    /// A gateway without links.
    pub fn new(
        routes: Routes,
        log: Arc<dyn TokenLog>,
        limits: Limits,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self {
            hub: Hub::default(),
            metrics: Metrics::default(),
            workers: Workers::default(),
            log,
            events: broadcast::Sender::new(4096),
            routes,
            limits,
            runtime,
            slots: Mutex::default(),
            watch: Watch::default(),
            mesh: OnceLock::new(),
            timers: OnceLock::new(),
            draining: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
        }
    }

    /// Gives it its links and timers.
    pub fn wire(&self, mesh: Mesh, timers: Timers<(RequestId, Timer)>) {
        let _ = self.mesh.set(mesh);
        let _ = self.timers.set(timers);
    }

    pub(super) fn limits(&self) -> Limits {
        self.limits.clone()
    }

    pub(super) fn mesh(&self) -> Option<&Mesh> {
        self.mesh.get()
    }

    pub(super) fn routes(&self) -> &Routes {
        &self.routes
    }

    pub(super) fn set_timer(&self, request: RequestId, timer: Timer, at_ns: u64) {
        if let Some(timers) = self.timers.get() {
            timers.set((request, timer), at_ns);
        }
    }

    pub(super) fn clear_timer(&self, request: RequestId, timer: Timer) {
        if let Some(timers) = self.timers.get() {
            timers.clear(&(request, timer));
        }
    }

    /// Tells watchers.
    pub(super) fn tell(&self, request: RequestId, kind: &str, detail: String) {
        // Nobody may be watching.
        let _ = self.events.send(v1::GatewayEvent {
            at_ns: now_ns(),
            request: request.to_string(),
            kind: kind.to_owned(),
            detail,
        });
    }

    /// Unless only one call failed, the journal cannot be trusted any more: nothing further is
    /// accepted.
    pub(super) fn journal_failed(&self, error: &LogError) {
        if error.passing {
            tracing::warn!(%error, "the journal's directory did not take a file");
        } else if !self.poisoned.swap(true, Ordering::SeqCst) {
            tracing::error!(%error, "nothing is accepted until the gateway restarts");
        }
    }

    /// Takes no new requests from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Ends links and timers.
    pub fn stop(&self) {
        if let Some(timers) = self.timers.get() {
            timers.stop();
        }
        if let Some(mesh) = self.mesh.get() {
            mesh.stop();
        }
    }

    /// A stream has ended.
    pub(super) fn finished(&self, request: RequestId, end: End) {
        self.metrics.finished.inc();
        self.workers.disown(request);
        self.tell(request, "finished", end.as_str().to_owned());
    }

    /// A request's slot.
    pub fn slot(&self, request: RequestId) -> Option<Arc<Slot>> {
        self.slots.lock().get(&request).cloned()
    }

    /// Every request's slot.
    pub(super) fn all_slots(&self) -> Vec<Arc<Slot>> {
        self.slots.lock().values().cloned().collect()
    }

    /// Puts a request's slot in place.
    pub fn insert(&self, slot: Arc<Slot>) {
        self.slots.lock().insert(slot.request, slot);
    }

    /// Forgets ended requests that nobody has read for a while.
    pub fn forget_ended_before(&self, then: std::time::Instant) {
        for request in self.hub.forget_ended_before(then) {
            self.slots.lock().remove(&request);
        }
    }

    /// Feeds an event to a request's acceptor. Blocks on the journal and the store, so never call it
    /// on the runtime's threads.
    pub fn post(self: &Arc<Self>, slot: &Arc<Slot>, event: Event) {
        let mut state = slot.state.lock();
        let state = &mut *state;
        let came = Came::of(&event, state.acceptor.journaled());
        let mut hands = AcceptorHands {
            core: self,
            slot,
            payloads: &mut state.payloads,
            tokens: &mut state.tokens,
            checkpoint: &state.checkpoint,
            closed: &mut state.closed,
            recovered: &mut state.recovered,
            refused: false,
        };
        run(&mut state.acceptor, &mut hands, event);
        let refused = hands.refused;
        came.count(&self.metrics, refused, state.acceptor.journaled());
        if std::mem::take(&mut state.closed)
            && let Err(error) = self.log.close(slot.request)
        {
            self.journal_failed(&error);
        }
        if let Some(running) = state.recovered.take() {
            self.tell(slot.request, "recovered", format!("running: {running}"));
            state.failures = if running { 0 } else { state.failures + 1 };
        }
    }

    /// A timer fired.
    pub fn fire(self: &Arc<Self>, (request, timer): (RequestId, Timer)) {
        if let Some(slot) = self.slot(request) {
            self.post(&slot, io::Event::Timer(timer));
        }
    }

    pub(super) async fn describe(self: Arc<Self>, worker: WorkerRef) {
        let described = async {
            let client = self
                .workers
                .client(&worker)
                .await
                .map_err(|e| e.to_string())?;
            let mut request = tonic::Request::new(v1::DescribeRequest {});
            request.set_timeout(SUBMIT);
            let mut client = client.ok_or("not linked")?;
            client
                .describe(request)
                .await
                .map_err(|s| s.message().to_owned())
        };
        match described.await {
            Ok(d) => {
                let d = d.into_inner();
                if d.protocol != crate::rpc::PROTOCOL {
                    tracing::error!(%worker, protocol = d.protocol, "speaks another protocol: not used");
                    return;
                }
                self.workers.set_model(&worker, d.model);
                self.metrics.workers.set(self.workers.all().len() as i64);
            }
            Err(error) => tracing::warn!(%worker, error, "cannot be described"),
        }
    }

    async fn submit(
        &self,
        worker: &WorkerRef,
        submit: v1::SubmitRequest,
    ) -> Result<v1::SubmitReply, tonic::Status> {
        let client = self.workers.client(worker).await;
        let client = client.map_err(|e| tonic::Status::unavailable(e.to_string()))?;
        let mut client = client.ok_or_else(|| tonic::Status::unavailable("the worker has left"))?;
        let mut request = tonic::Request::new(submit);
        request.set_timeout(SUBMIT);
        client
            .submit(request)
            .await
            .map(tonic::Response::into_inner)
    }

    /// Writes the record and the journal's head of a new request. Blocks.
    fn admit(
        self: &Arc<Self>,
        live: &Arc<Live>,
        submit: &v1::SubmitRequest,
        worker: &WorkerRef,
    ) -> Result<Arc<Slot>, ApiError> {
        let request = live.request;
        let created = self
            .routes
            .create(&RouteRecord::admitted(request, worker.clone()));
        match created {
            Ok(true) => {}
            Ok(false) => {
                return Err(ApiError {
                    status: 409,
                    ..ApiError::invalid("request_id", "this request id was used before")
                });
            }
            Err(error) => return Err(ApiError::unavailable("store", error.to_string())),
        }
        self.log
            .open(request, worker, &submit.encode_to_vec())
            .map_err(|error| {
                self.journal_failed(&error);
                ApiError::unavailable("journal", error.to_string())
            })?;
        let acceptor = Acceptor::admitted(request, worker.clone(), self.limits.clone());
        let slot = Slot::new(Arc::clone(live), submit.clone(), acceptor, Vec::new(), None);
        let slot = Arc::new(slot.with_model(self.workers.model_of(worker)));
        self.insert(Arc::clone(&slot));
        self.workers.own(request, worker);
        Ok(slot)
    }
}

impl Backend for Core {
    fn models(&self) -> Vec<String> {
        self.workers.models()
    }

    fn health(&self) -> Result<(), String> {
        match self.poisoned.load(Ordering::SeqCst) {
            true => Err(
                "the journal failed and nothing is accepted any more: see the gateway's log, make \
                 room on its disk and start it again"
                    .to_owned(),
            ),
            false => Ok(()),
        }
    }

    async fn start(self: &Arc<Self>, request: RequestId, ask: Ask) -> Result<Arc<Live>, ApiError> {
        self.health()
            .map_err(|why| ApiError::unavailable("journal", why))?;
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::unavailable(
                "draining",
                "this gateway takes no new requests",
            ));
        }
        let asked = ask.fingerprint();
        let live = match self.hub.add(request) {
            Ok(live) => live,
            // The same request again: the client retries, and reads the same stream.
            Err(live) if live.is_asked_as(&asked) => return Ok(live),
            Err(_) => return Err(ApiError::taken(request)),
        };
        live.asked_as(asked);
        let started = self.place(&live, ask).await;
        if let Err(error) = &started {
            live.end(End::Failed);
            self.hub.remove(request);
            tracing::info!(%request, %error, "not admitted");
        }
        self.metrics
            .active
            .set(i64::try_from(self.hub.active()).unwrap_or(i64::MAX));
        started.map(|()| live)
    }

    fn abort(self: &Arc<Self>, request: RequestId) {
        let Some(slot) = self.slot(request).filter(|s| s.live.ended().is_none()) else {
            return;
        };
        let core = Arc::clone(self);
        self.runtime.spawn(async move {
            let owner = core.workers.owner(request);
            let (core_, slot_) = (Arc::clone(&core), Arc::clone(&slot));
            let hangup = move || {
                core_.post(&slot_, io::Event::Local(Done::Hangup));
                // Whose it is by the record, which that has closed: a flip whose first token has not
                // come yet is not known here otherwise, and its new owner would decode for nobody.
                match core_.routes().read(request) {
                    StoreReply::Value(found) => Some(found.record.owner),
                    _ => None,
                }
            };
            let by_record = tokio::task::spawn_blocking(hangup).await.ok().flatten();
            let owner = by_record.or(owner);
            if slot.live.end(End::Abort) {
                core.finished(request, End::Abort);
            }
            let Some(Ok(Some(mut client))) = (match owner {
                Some(owner) => Some(core.workers.client(&owner).await),
                None => None,
            }) else {
                return;
            };
            let mut abort = tonic::Request::new(v1::AbortRequest {
                request: request.to_string(),
            });
            abort.set_timeout(SUBMIT);
            if let Err(status) = client.abort(abort).await {
                tracing::debug!(%request, error = status.message(), "abort not delivered");
            }
        });
    }

    fn hub(&self) -> &Hub {
        &self.hub
    }

    fn metrics(&self) -> String {
        self.metrics
            .active
            .set(i64::try_from(self.hub.active()).unwrap_or(i64::MAX));
        self.metrics.page()
    }

    fn count(&self, route: &'static str, status: u16) {
        self.metrics.http(route, status);
    }
}

impl Core {
    async fn place(self: &Arc<Self>, live: &Arc<Live>, ask: Ask) -> Result<(), ApiError> {
        let mut sampling = ask.sampling;
        if sampling.seed.is_none() {
            let mut seed = [0u8; 8];
            getrandom::fill(&mut seed)
                .map_err(|e| ApiError::internal(format!("no randomness: {e}")))?;
            // Resolved here, so that a recovery without a checkpoint draws the same tokens.
            sampling.seed = Some(u64::from_le_bytes(seed));
        }
        let submit = v1::SubmitRequest {
            request: live.request.to_string(),
            owner_epoch: OwnerEpoch(1).0,
            prompt: Some(ask.prompt),
            sampling: Some(sampling),
        };
        let no_worker = || ApiError::unavailable("no_worker", "no worker takes requests right now");
        let worker = self
            .workers
            .place(ask.model.as_deref(), &[])
            .ok_or_else(no_worker)?;
        let (core, live_, submit_, worker_) = (
            Arc::clone(self),
            Arc::clone(live),
            submit.clone(),
            worker.clone(),
        );
        let slot = tokio::task::spawn_blocking(move || core.admit(&live_, &submit_, &worker_))
            .await
            .map_err(|e| ApiError::internal(e.to_string()))??;
        match self.submit(&worker, submit).await {
            Ok(reply) => {
                live.set_prompt_tokens(reply.prompt_tokens);
                Ok(())
            }
            Err(status) if lost(&status) => {
                // The worker may have taken it: another one gets it under a higher epoch.
                let target = self.workers.place(ask.model.as_deref(), &[worker]);
                let target = target.ok_or_else(no_worker)?;
                let core = Arc::clone(self);
                tokio::task::spawn_blocking(move || core.recover(&slot, target))
                    .await
                    .map_err(|e| ApiError::internal(e.to_string()))?;
                Ok(())
            }
            Err(status) => {
                let core = Arc::clone(self);
                let hangup = move || core.post(&slot, io::Event::Local(Done::Hangup));
                let _ = tokio::task::spawn_blocking(hangup).await;
                self.workers.disown(live.request);
                Err(api_error(&status))
            }
        }
    }
}

fn lost(status: &tonic::Status) -> bool {
    use tonic::Code;
    matches!(
        status.code(),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown
    )
}

fn api_error(status: &tonic::Status) -> ApiError {
    use crate::id::ErrorKind;
    use tonic::Code;
    let kind = match status.code() {
        Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists => ErrorKind::Caller,
        Code::ResourceExhausted => ErrorKind::Retryable,
        Code::Unimplemented | Code::FailedPrecondition => ErrorKind::Unsupported,
        _ => ErrorKind::Bug,
    };
    ApiError::from_kind(kind, status.message())
}
