//! What a worker is made of, and how events reach a request's machines.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::brace::Braced;
use super::destination::DestinationHands;
use super::late::Past;
use super::null::Claim;
use super::rebuild::RebuildHands;
use super::slot::{Role, Slot, State};
use super::source::SourceHands;
use crate::digest::Digester;
use crate::drive::envelope;
use crate::drive::{Mesh, MeshError, RouteStore, Timers, kind, name, run};
use crate::engine::adapter::{Capabilities, EngineAdapter};
use crate::engine::reference::{EngineError, GenerateSpec};
use crate::gateway::image::Checkpoint;
use crate::id::{OwnerEpoch, RequestId, WorkerRef};
use crate::migrate::io::{Event, Payload, Peer, Timer};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg};
use crate::migrate::{destination, recovery, source};
use crate::node::bulk::Bulk;
use crate::node::emit::Emitter;
use crate::node::faults::Faults;
use crate::node::jobs::Jobs;
use crate::node::measure::{Measures, at};
use crate::node::metrics::WorkerMetrics;
use crate::node::options::Options;
use crate::node::serving::Serving;
use crate::node::spec::SourceSpec;
use crate::route::Cause;

/// How long handing a message to a peer's socket may take.
pub(super) const SEND: Duration = Duration::from_secs(2);

/// Whose timer: request and machine.
pub type TimerKey = (RequestId, Role, Timer);

/// One worker: an engine, its requests' machines, and the ways to the others.
pub struct Core {
    /// This life of this worker.
    pub me: WorkerRef,
    /// The serving side of the engine.
    pub engine: Arc<dyn Serving>,
    /// Its migrating side.
    pub adapter: Arc<dyn EngineAdapter>,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Keys of every digest of its object sets.
    pub digester: Arc<Digester>,
    /// Tokens on their way to the gateway.
    pub emitter: Emitter,
    /// The route records.
    pub store: Arc<dyn RouteStore>,
    /// Bulk paths.
    pub bulk: Arc<Bulk>,
    /// Bounds of the machines.
    pub limits: Limits,
    /// What was measured.
    pub measures: Measures,
    /// What is counted for operators.
    pub metrics: WorkerMetrics,
    /// Injected faults; none in a product's run.
    pub faults: Arc<Faults>,
    /// Threads for hashing and copying.
    pub jobs: Jobs,
    /// Takes part in null handoffs.
    pub(super) null_handoffs: bool,
    draining: AtomicBool,
    past: Past,
    /// The fence that is near at this destination, if one is. Taken before any slot's lock.
    pub(super) braced: Mutex<Option<Braced>>,
    mesh: OnceLock<Mesh>,
    timers: OnceLock<Timers<TimerKey>>,
    slots: Mutex<HashMap<RequestId, Arc<Slot>>>,
}

impl Core {
    /// A worker without links and timers.
    #[allow(clippy::too_many_arguments)] // One call site, each part named there.
    pub fn new(
        me: WorkerRef,
        engine: Arc<dyn Serving>,
        adapter: Arc<dyn EngineAdapter>,
        capabilities: Capabilities,
        digester: Arc<Digester>,
        emitter: Emitter,
        store: Arc<dyn RouteStore>,
        bulk: Arc<Bulk>,
        limits: Limits,
        faults: Arc<Faults>,
        jobs: Jobs,
    ) -> Self {
        Self {
            me,
            engine,
            adapter,
            capabilities,
            digester,
            emitter,
            store,
            bulk,
            limits,
            measures: Measures::default(),
            metrics: WorkerMetrics::default(),
            faults,
            jobs,
            null_handoffs: false,
            draining: AtomicBool::new(false),
            past: Past::default(),
            mesh: OnceLock::new(),
            timers: OnceLock::new(),
            slots: Mutex::default(),
            braced: Mutex::default(),
        }
    }

    /// Lets it take part in null handoffs, for benches; see [`super::null`].
    pub fn with_null_handoffs(mut self, on: bool) -> Self {
        self.null_handoffs = on;
        self
    }

    /// Gives it its links and timers.
    pub fn wire(&self, mesh: Mesh, timers: Timers<TimerKey>) {
        let _ = self.mesh.set(mesh);
        let _ = self.timers.set(timers);
    }

    /// Ends timers and jobs.
    pub fn stop(&self) {
        if let Some(timers) = self.timers.get() {
            timers.stop();
        }
        self.jobs.stop();
    }

    /// The slot of a request, if it has one.
    pub fn slot(&self, request: RequestId) -> Option<Arc<Slot>> {
        self.slots.lock().get(&request).cloned()
    }

    /// The slot of a request, made if missing.
    pub fn slot_or_new(&self, request: RequestId) -> Arc<Slot> {
        let mut slots = self.slots.lock();
        Arc::clone(
            slots
                .entry(request)
                .or_insert_with(|| Arc::new(Slot::new(request))),
        )
    }

    /// This worker owns the request now: it gets a source machine.
    pub fn own(&self, state: &mut State, request: RequestId, epoch: OwnerEpoch) {
        let machine = source::Source::new(request, self.me.clone(), epoch, 0, self.limits.clone());
        state.source = Some(machine);
    }

    /// Admits a request: its machine is there before its first token. The same submit again is
    /// answered as the first.
    pub fn admit(self: &Arc<Self>, spec: GenerateSpec) -> Result<u32, EngineError> {
        let (request, epoch) = (spec.request, spec.owner_epoch);
        let slot = self.slot_or_new(request);
        let mut state = slot.lock();
        if state.source.is_none() {
            self.own(&mut state, request, epoch);
        }
        match self.engine.submit(spec.clone()) {
            Err(EngineError::Duplicate(_)) if self.owner_of(&state) == Some(epoch) => {
                Ok(self.engine.tokenize(&spec.prompt)?.len() as u32)
            }
            Err(error) => {
                state.source = None;
                drop(state);
                self.slots.lock().remove(&request);
                Err(error)
            }
            admitted => admitted,
        }
    }

    fn owner_of(&self, state: &State) -> Option<OwnerEpoch> {
        state
            .source
            .as_ref()
            .filter(|s| !s.is_gone())
            .map(source::Source::owner_epoch)
    }

    /// The ownership under which a request runs here.
    pub fn owner_epoch(&self, request: RequestId) -> Option<OwnerEpoch> {
        let slot = self.slot(request)?;
        let state = slot.lock();
        self.owner_of(&state)
    }

    /// Ends a request; `false` where it is not here.
    pub fn abort(&self, request: RequestId) -> Result<bool, EngineError> {
        self.engine.abort(request)
    }

    /// The stream ended here by itself, or its engine dropped it.
    pub fn ended(self: &Arc<Self>, request: RequestId) {
        if let Some(slot) = self.slot(request) {
            let mut state = slot.lock();
            state.ended = true;
            self.source_locked(&slot, &mut state, Event::Local(source::Done::Ended));
        }
    }

    /// A peer's process is gone: what waits for it is given up. A destination that has the push in
    /// its hands needs nobody any more and goes on.
    pub fn peer_lost(self: &Arc<Self>, peer: &Peer) {
        let Peer::Worker(peer) = peer else { return };
        let cause = Cause::PeerLost;
        let all: Vec<Arc<Slot>> = self.slots.lock().values().cloned().collect();
        for slot in all {
            let mut state = slot.lock();
            let state = &mut *state;
            if state.outgoing.destination.as_ref() == Some(peer) {
                self.source_locked(&slot, state, Event::Local(source::Done::Cancel { cause }));
            }
            if state.incoming.source.as_ref() == Some(peer) && !state.incoming.fenced {
                let cancel = destination::Done::Cancel { cause };
                self.destination_locked(&slot, state, Event::Local(cancel));
            }
        }
    }

    /// Forgets requests that nothing is left of; the machines' own records suffice afterwards.
    pub fn sweep(&self) {
        let all: Vec<Arc<Slot>> = self.slots.lock().values().cloned().collect();
        for slot in all {
            let Some(state) = slot.try_lock() else {
                continue;
            };
            let source = state.source.as_ref();
            let over = source.is_none_or(|s| s.is_gone() || (state.ended && !s.is_migrating()));
            let launched = |d: &destination::Destination| d.is_idle() || d.is_launched();
            let idle = over
                && !self.emitter.holds(slot.request)
                && state.destination.as_ref().is_none_or(launched)
                && state
                    .rebuilder
                    .as_ref()
                    .is_none_or(|r| r.is_idle() || r.is_running())
                && state.outgoing.pins.is_empty()
                && state.incoming.stages.is_empty();
            if idle {
                self.slots.lock().remove(&slot.request);
            }
        }
    }

    /// Requests known here.
    pub fn known(&self) -> usize {
        self.slots.lock().len()
    }

    /// Feeds an event to the request's source machine.
    pub fn to_source(self: &Arc<Self>, slot: &Arc<Slot>, event: source::Event) {
        self.source_locked(slot, &mut slot.lock(), event);
    }

    pub(super) fn source_locked(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        state: &mut State,
        event: source::Event,
    ) {
        let Some(machine) = state.source.as_mut() else {
            return;
        };
        let (payloads, at) = (&mut state.payloads, &mut state.outgoing);
        let _in_phase = at.phase.span().entered();
        run(
            machine,
            &mut SourceHands {
                core: self,
                slot,
                payloads,
                at,
            },
            event,
        );
    }

    /// Feeds an event to the request's destination machine.
    pub fn to_destination(self: &Arc<Self>, slot: &Arc<Slot>, event: destination::Event) {
        self.destination_locked(slot, &mut slot.lock(), event);
    }

    pub(super) fn destination_locked(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        state: &mut State,
        event: destination::Event,
    ) {
        let Some(machine) = state.destination.as_mut() else {
            return;
        };
        let (payloads, at) = (&mut state.payloads, &mut state.incoming);
        let _in_phase = at.phase.span().entered();
        run(
            machine,
            &mut DestinationHands {
                core: self,
                slot,
                payloads,
                at,
            },
            event,
        );
        if let Some(epoch) = state.incoming.activated.take() {
            self.own(state, slot.request, epoch);
            // Tokens that the commit handed over; the request runs already.
            self.emitter.wake();
        }
    }

    /// Feeds an event to the request's rebuilder.
    pub fn to_rebuilder(self: &Arc<Self>, slot: &Arc<Slot>, event: recovery::Event) {
        self.rebuilder_locked(slot, &mut slot.lock(), event);
    }

    pub(super) fn rebuilder_locked(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        state: &mut State,
        event: recovery::Event,
    ) {
        let Some(machine) = state.rebuilder.as_mut() else {
            return;
        };
        let (payloads, at) = (&mut state.payloads, &mut state.rebuild);
        run(
            machine,
            &mut RebuildHands {
                core: self,
                slot,
                payloads,
                at,
            },
            event,
        );
        if let Some(epoch) = state.rebuild.activated.take() {
            self.own(state, slot.request, epoch);
        }
    }

    /// A timer fired.
    pub fn fire(self: &Arc<Self>, (request, role, timer): TimerKey) {
        let Some(slot) = self.slot(request) else {
            return;
        };
        match role {
            Role::Source => self.to_source(&slot, Event::Timer(timer)),
            Role::Destination => self.to_destination(&slot, Event::Timer(timer)),
            Role::Rebuilder => self.to_rebuilder(&slot, Event::Timer(timer)),
        }
    }

    /// Arms a timer of one of the request's machines.
    pub fn set_timer(&self, request: RequestId, role: Role, timer: Timer, at_ns: u64) {
        if let Some(timers) = self.timers.get() {
            timers.set((request, role, timer), at_ns);
        }
    }

    /// Disarms it.
    pub fn clear_timer(&self, request: RequestId, role: Role, timer: Timer) {
        if let Some(timers) = self.timers.get() {
            timers.clear(&(request, role, timer));
        }
    }

    /// Hands a message to a peer's socket; a failure is a lost message.
    pub fn send(&self, to: &Peer, msg: &Msg, payload: &[u8]) {
        let Some(mesh) = self.mesh.get() else { return };
        let head = envelope::encode(msg);
        let parts = [IoSlice::new(&head), IoSlice::new(payload)];
        let sent = mesh.send(to, kind::PROTOCOL, 0, &parts, Instant::now() + SEND);
        if let Err(error) = sent {
            tracing::debug!(to = name(to), %error, request = %msg.request, "a message was not sent");
        }
    }

    /// Sends a checkpoint to the gateway.
    pub fn send_checkpoint(&self, request: RequestId, checkpoint: &Checkpoint) {
        self.tell_gateway(kind::CHECKPOINT, request, &checkpoint.encode());
    }

    /// Takes no requests from now on, or does again, and tells the gateway.
    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::SeqCst);
        self.tell_draining();
    }

    /// Whether it takes no requests.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Tells the gateway whether it takes requests.
    pub fn tell_draining(&self) {
        let Some(mesh) = self.mesh.get() else { return };
        let byte = [u8::from(self.is_draining())];
        let parts = [IoSlice::new(&byte)];
        let sent = mesh.send(
            &Peer::Gateway,
            kind::DRAINING,
            0,
            &parts,
            Instant::now() + SEND,
        );
        if let Err(error) = sent {
            // Told again once its link is up.
            tracing::debug!(%error, "the gateway was not told");
        }
    }

    /// Tells the gateway that the engine failed on a request.
    pub fn send_closed(&self, request: RequestId, epoch: OwnerEpoch) {
        self.tell_gateway(kind::CLOSED, request, &epoch.0.to_le_bytes());
    }

    fn tell_gateway(&self, what: u16, request: RequestId, bytes: &[u8]) {
        let Some(mesh) = self.mesh.get() else { return };
        let parts = [IoSlice::new(&request.0), IoSlice::new(bytes)];
        if let Err(error) = mesh.send(&Peer::Gateway, what, 0, &parts, Instant::now() + SEND) {
            tracing::debug!(%request, %error, "the gateway was not told");
        }
    }

    pub(super) fn mesh(&self) -> Option<&Mesh> {
        self.mesh.get()
    }

    /// Links to a peer ahead of need.
    pub fn open(&self, peer: &Peer) -> Result<(), MeshError> {
        self.mesh.get().map_or(Ok(()), |mesh| mesh.open(peer))
    }

    /// A protocol message arrived.
    pub fn receive(self: &Arc<Self>, from: &Peer, msg: Msg, bytes: &[u8]) {
        for (from, msg, bytes) in self.past.hear(&self.faults, from, &msg, bytes) {
            self.take(&from, msg, &bytes);
        }
        self.take(from, msg, bytes);
    }

    fn take(self: &Arc<Self>, from: &Peer, msg: Msg, bytes: &[u8]) {
        let request = msg.request;
        let slot = match (&msg.body, self.slot(request)) {
            (_, Some(slot)) => slot,
            // Only these may make a request known here.
            (Body::Reserve { .. } | Body::Rebuild { .. }, None) => self.slot_or_new(request),
            (_, None) => return,
        };
        let mut state = slot.lock();
        let state = &mut *state;
        match &msg.body {
            Body::Prepare { intent } => {
                // Of an earlier attempt, late: the choices of the present one stand.
                if msg.epoch >= state.outgoing.epoch {
                    state.outgoing.destination = Some(intent.dst.clone());
                    // The operator's choices ride along; the machine has no use for them.
                    state.outgoing.options = Options::decode(bytes).unwrap_or_default();
                    state.outgoing.options.null_handoff &= self.null_handoffs;
                }
                self.measures.at(request, msg.epoch, at::PREPARE);
                let event = Event::Recv {
                    from: from.clone(),
                    msg,
                    payload: Payload::NONE,
                };
                return self.source_locked(&slot, state, event);
            }
            Body::Go => self.measures.at(request, msg.epoch, at::GO),
            Body::Push(push) => {
                self.measures.at(request, msg.epoch, at::ARRIVED);
                let incoming = &mut state.incoming;
                if incoming.epoch == msg.epoch {
                    incoming.fenced = true;
                    incoming.control = Some(push.certificate.control.hash);
                    let spec = incoming.spec.as_ref();
                    if spec.is_some_and(|s| s.options.null_handoff) {
                        incoming.null = Some(Claim::of(push));
                    }
                }
            }
            Body::Accepted { through, .. } => self.emitter.acked(request, *through),
            Body::Fenced { .. } => {
                self.metrics.batches_refused.inc();
            }
            Body::Reserve { intent } if msg.epoch >= state.incoming.epoch => {
                state.incoming.source = Some(intent.src.clone());
                let options = SourceSpec::decode(bytes)
                    .map(|s| s.options)
                    .unwrap_or_default();
                let limits = options.limits(&self.limits);
                match &mut state.destination {
                    Some(machine) => machine.set_limits(limits),
                    none => {
                        let machine =
                            destination::Destination::new(request, self.me.clone(), limits);
                        *none = Some(machine);
                    }
                }
            }
            Body::Rebuild { .. } if state.rebuilder.is_none() => {
                let (me, limits) = (self.me.clone(), self.limits.clone());
                state.rebuilder = Some(recovery::Rebuilder::new(request, me, limits));
            }
            _ => {}
        }
        let (source, destination, rebuilder) = readers(&msg.body);
        let payload = state.payloads.keep(msg.epoch, bytes);
        if source {
            let event = Event::Recv {
                from: from.clone(),
                msg: msg.clone(),
                payload,
            };
            self.source_locked(&slot, state, event);
        }
        if destination {
            let event = Event::Recv {
                from: from.clone(),
                msg: msg.clone(),
                payload,
            };
            self.destination_locked(&slot, state, event);
        }
        if rebuilder {
            self.rebuilder_locked(
                &slot,
                state,
                Event::Recv {
                    from: from.clone(),
                    msg,
                    payload,
                },
            );
        }
    }
}

/// Which machines a message may concern: source, destination, rebuilder.
fn readers(body: &Body) -> (bool, bool, bool) {
    match body {
        Body::Prepare { .. } | Body::Ready { .. } | Body::Verified { .. } | Body::Go => {
            (true, false, false)
        }
        Body::Accepted { .. } => (true, false, false),
        Body::Reserve { .. } | Body::Offer(_) | Body::Push(_) => (false, true, false),
        Body::Rebuild { .. } => (false, false, true),
        Body::Fenced { .. } => (true, false, true),
        Body::Cancel { .. } | Body::Outcome | Body::Refuse { .. } => (true, true, true),
        // Meant for a coordinator or the gateway.
        Body::Prepared | Body::Progress { .. } | Body::Emit { .. } => (false, false, false),
    }
}
