//! What a coordinator is made of: one machine for each migration under way.

use std::collections::HashMap;
use std::io::IoSlice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::{broadcast, watch};

use crate::drive::envelope;
use crate::drive::{
    Handler, Hands, Hello, Mesh, Payloads, Phase, RouteStore, Routes, Timers, cause_word, kind,
    name, now_ns, run,
};
use crate::id::{MigrationEpoch, RequestId, WorkerRef};
use crate::migrate::coordinator::{Coordinator, Do, Done, Ended, Event};
use crate::migrate::io::{self, Payload, Peer, Report, Step, Timer};
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Msg};
use crate::node::faults::{Fault, Faults, step_name};
use crate::node::jobs::Jobs;
use crate::node::metrics::CoordinatorMetrics;
use crate::node::options::Options;
use crate::node::registry::Registry;
use crate::rpc::v1;

/// How long handing a message to a peer's socket may take.
const SEND: Duration = Duration::from_secs(2);
/// How long after GO the store is kept awake for the commit: some of the longest decode steps.
const AWAKE: Duration = Duration::from_millis(100);
/// Events kept for a watcher that is slow.
const EVENTS: usize = 4096;

/// One coordinator.
pub struct Core {
    /// Its name.
    pub id: String,
    /// Nonce of this life, the intents' `driver`.
    pub nonce: u64,
    /// The route records.
    pub routes: Routes,
    /// Who is where.
    pub registry: Registry,
    /// Bounds of the machines.
    pub limits: Limits,
    /// Injected faults.
    pub faults: Faults,
    /// Whether this one leads.
    pub leader: AtomicBool,
    /// The term it leads in.
    pub term: AtomicU64,
    /// What happened, for watchers.
    pub events: broadcast::Sender<v1::MigrationEvent>,
    /// What is counted for operators.
    pub metrics: CoordinatorMetrics,
    /// Migrations that ended committed.
    pub committed: AtomicU64,
    /// Migrations that ended otherwise.
    pub aborted: AtomicU64,
    mesh: OnceLock<Mesh>,
    timers: OnceLock<Timers<(RequestId, Timer)>>,
    jobs: Mutex<HashMap<RequestId, Arc<Job>>>,
    leader_id: Mutex<String>,
    /// Waits with the store while a decision is about to fall.
    awake: OnceLock<Option<Jobs>>,
}

/// One migration under way.
pub struct Job {
    /// Which request.
    pub request: RequestId,
    /// When it was asked for.
    pub started_ns: u64,
    state: Mutex<JobState>,
    ended: watch::Sender<Option<Ended>>,
}

struct JobState {
    machine: Coordinator,
    payloads: Payloads,
    options: Options,
    epoch: MigrationEpoch,
    source: Option<WorkerRef>,
    destination: Option<WorkerRef>,
    phase: Phase,
}

/// Who took part in a migration.
#[derive(Debug, Clone, Default)]
pub struct Parties {
    /// The attempt.
    pub epoch: MigrationEpoch,
    /// The owner.
    pub source: Option<WorkerRef>,
    /// Who was to become it.
    pub destination: Option<WorkerRef>,
}

/// A migration that could not be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The request is being migrated already.
    #[error("request {0} is being migrated already: wait for that to end")]
    Busy(RequestId),
}

impl Core {
    /// A coordinator that does nothing yet.
    pub fn new(
        id: String,
        nonce: u64,
        routes: Routes,
        registry: Registry,
        limits: Limits,
        faults: Faults,
    ) -> Self {
        Self {
            id,
            nonce,
            routes,
            registry,
            limits,
            faults,
            leader: AtomicBool::new(false),
            term: AtomicU64::new(0),
            events: broadcast::Sender::new(EVENTS),
            metrics: CoordinatorMetrics::default(),
            committed: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            mesh: OnceLock::new(),
            timers: OnceLock::new(),
            jobs: Mutex::default(),
            leader_id: Mutex::default(),
            awake: OnceLock::new(),
        }
    }

    /// Gives it its links and timers.
    pub fn wire(&self, mesh: Mesh, timers: Timers<(RequestId, Timer)>) {
        let _ = self.mesh.set(mesh);
        let _ = self.timers.set(timers);
    }

    /// A request is being fenced: its record is about to change, and the destination waits for
    /// that. Off the fence's path; the outcome does not matter.
    fn keep_awake(self: &Arc<Self>, request: RequestId) {
        let started = self.awake.get_or_init(|| match Jobs::start("awake", 1) {
            Ok(jobs) => Some(jobs),
            Err(error) => {
                tracing::warn!(%error, "the store is not kept awake for commits");
                None
            }
        });
        if let Some(jobs) = started {
            let core = Arc::clone(self);
            // From GO on, not from the job's turn: behind others in the queue this decision may
            // have fallen, and nobody would wait for what keeps the disk busy then.
            let until = Instant::now() + AWAKE;
            jobs.run(move || {
                if Instant::now() >= until {
                    return;
                }
                let (store, key) = (core.routes.meta(), crate::route::key(request));
                if let Err(error) = store.keep_awake(&key, until) {
                    tracing::debug!(%error, "the store was not kept awake");
                }
            });
        }
    }

    /// Ends its timers.
    pub fn stop(&self) {
        if let Some(Some(jobs)) = self.awake.get() {
            jobs.stop();
        }
        if let Some(timers) = self.timers.get() {
            timers.stop();
        }
    }

    /// Who leads, as last heard.
    pub fn leader_id(&self) -> String {
        self.leader_id.lock().clone()
    }

    /// Notes who leads.
    pub fn set_leader_id(&self, id: &str) {
        id.clone_into(&mut self.leader_id.lock());
    }

    /// Begins to drive a migration of `request`: `first` is `Start` or `Adopt`.
    pub fn start(
        self: &Arc<Self>,
        request: RequestId,
        options: Options,
        first: Done,
    ) -> Result<Arc<Job>, StartError> {
        let job = {
            let mut jobs = self.jobs.lock();
            if jobs.contains_key(&request) {
                return Err(StartError::Busy(request));
            }
            let limits = options.limits(&self.limits);
            let job = Arc::new(Job {
                request,
                started_ns: now_ns(),
                state: Mutex::new(JobState {
                    machine: Coordinator::new(request, self.nonce, limits),
                    payloads: Payloads::default(),
                    options,
                    epoch: MigrationEpoch(0),
                    source: None,
                    destination: None,
                    phase: Phase::default(),
                }),
                ended: watch::Sender::new(None),
            });
            jobs.insert(request, Arc::clone(&job));
            job
        };
        self.post(&job, io::Event::Local(first));
        Ok(job)
    }

    /// Feeds an event to a migration's machine.
    pub fn post(self: &Arc<Self>, job: &Arc<Job>, event: Event) {
        let mut state = job.state.lock();
        let state = &mut *state;
        let ended = {
            let _in_phase = state.phase.span().entered();
            let mut hands = CoordinatorHands {
                core: self,
                job,
                payloads: &mut state.payloads,
                options: &state.options,
                epoch: &mut state.epoch,
                source: &mut state.source,
                destination: &mut state.destination,
                phase: &mut state.phase,
                ended: None,
            };
            run(&mut state.machine, &mut hands, event);
            hands.ended
        };
        if let Some(ended) = ended {
            self.jobs.lock().remove(&job.request);
            state.phase.end();
            let (outcome, cause) = words(&ended);
            self.metrics.ended(outcome, cause);
            match ended {
                Ended::Committed { .. } => self.committed.fetch_add(1, Ordering::Relaxed),
                _ => self.aborted.fetch_add(1, Ordering::Relaxed),
            };
            job.ended.send_replace(Some(ended));
        }
    }

    /// The migration of a request, if one is under way.
    pub fn job(&self, request: RequestId) -> Option<Arc<Job>> {
        self.jobs.lock().get(&request).cloned()
    }

    /// Migrations under way.
    pub fn running(&self) -> Vec<Arc<Job>> {
        self.jobs.lock().values().cloned().collect()
    }

    /// A timer fired.
    pub fn fire(self: &Arc<Self>, (request, timer): (RequestId, Timer)) {
        if let Some(job) = self.job(request) {
            self.post(&job, io::Event::Timer(timer));
        }
    }

    fn tell(&self, request: RequestId, epoch: MigrationEpoch, phase: &str, detail: String) {
        // Nobody may be watching.
        let _ = self.events.send(v1::MigrationEvent {
            request: request.to_string(),
            migration_epoch: epoch.0,
            phase: phase.to_owned(),
            at_ns: now_ns(),
            detail,
            report: None,
        });
    }
}

impl Job {
    /// Waits for the end.
    pub async fn ended(&self) -> Option<Ended> {
        let mut ended = self.ended.subscribe();
        let end = ended.wait_for(Option::is_some).await.ok()?;
        end.clone()
    }

    /// Who takes part, as far as known.
    pub fn parties(&self) -> Parties {
        let state = self.state.lock();
        Parties {
            epoch: state.epoch,
            source: state.source.clone(),
            destination: state.destination.clone(),
        }
    }
}

struct CoordinatorHands<'a> {
    core: &'a Arc<Core>,
    job: &'a Arc<Job>,
    payloads: &'a mut Payloads,
    options: &'a Options,
    epoch: &'a mut MigrationEpoch,
    source: &'a mut Option<WorkerRef>,
    destination: &'a mut Option<WorkerRef>,
    phase: &'a mut Phase,
    ended: Option<Ended>,
}

/// An end as labels: outcome and cause.
fn words(ended: &Ended) -> (&'static str, String) {
    match ended {
        Ended::Committed { .. } => ("committed", "none".to_owned()),
        Ended::Aborted { cause, .. } => ("aborted", cause.map_or("aborted", cause_word).to_owned()),
        Ended::Superseded { .. } => ("aborted", "superseded".to_owned()),
        Ended::Refused(_) => ("refused", "refused".to_owned()),
        Ended::NoSuchRequest => ("refused", "no-such-request".to_owned()),
        Ended::Nothing => ("refused", "nothing-to-do".to_owned()),
    }
}

/// The step that a message of the coordinator begins, for injected faults.
fn step_of(body: &Body) -> Option<Step> {
    match body {
        Body::Prepare { .. } => Some(Step::Prepare),
        Body::Reserve { .. } => Some(Step::Reserve),
        Body::Go => Some(Step::Fence),
        _ => None,
    }
}

impl Hands<Coordinator> for CoordinatorHands<'_> {
    fn perform(&mut self, work: Do) -> Option<Done> {
        let Do::Finished(ended) = work;
        self.ended = Some(ended);
        None
    }

    fn send(&mut self, to: &Peer, msg: &Msg, payload: Payload) {
        let core = self.core;
        if let Body::Prepare { intent } | Body::Reserve { intent } = &msg.body {
            *self.epoch = intent.migration_epoch;
            *self.source = Some(intent.src.clone());
            *self.destination = Some(intent.dst.clone());
        }
        // Named by what is asked for: before that the attempt has no epoch yet.
        if let Some(step) = step_of(&msg.body) {
            self.phase
                .enter("coordinator", msg.request, msg.epoch, step);
        }
        let bytes = match &msg.body {
            Body::Prepare { .. } => self.options.encode().into(),
            _ => self.payloads.get(payload),
        };
        let Some(mesh) = core.mesh.get() else { return };
        let head = envelope::encode(msg);
        let parts = [IoSlice::new(&head), IoSlice::new(&bytes)];
        if let Err(error) = mesh.send(to, kind::PROTOCOL, 0, &parts, Instant::now() + SEND) {
            tracing::debug!(to = name(to), %error, request = %msg.request, "a message was not sent");
        }
        if let Some(step) = step_of(&msg.body) {
            if step == Step::Fence {
                core.keep_awake(msg.request);
            }
            core.faults.maybe_die(Fault::KillCoordinator, step);
            core.faults.maybe_pause(Fault::PauseCoordinator, step);
        }
    }

    fn set_timer(&mut self, timer: Timer, at_ns: u64) {
        if let Some(timers) = self.core.timers.get() {
            timers.set((self.job.request, timer), at_ns);
        }
    }

    fn clear_timer(&mut self, timer: Timer) {
        if let Some(timers) = self.core.timers.get() {
            timers.clear(&(self.job.request, timer));
        }
    }

    fn report(&mut self, report: Report) {
        let (core, request, epoch) = (self.core, self.job.request, *self.epoch);
        match &report {
            Report::Entered(step) => core.tell(request, epoch, step_name(*step), String::new()),
            Report::GivingUp(cause) => {
                core.tell(request, epoch, "ABORT", cause_word(*cause).to_owned());
            }
            _ => {}
        }
        tracing::debug!(%request, epoch = epoch.0, ?report, "coordinator");
    }

    fn store(&self) -> &dyn RouteStore {
        &self.core.routes
    }

    fn request(&self) -> RequestId {
        self.job.request
    }
}

/// The coordinator's end of its links.
pub struct Inbox(pub Arc<Core>);

impl Handler for Inbox {
    fn joined(&self, hello: &Hello) {
        if let Some(at) = hello.endpoint("mesh") {
            self.0.registry.learn(&hello.from, at);
        }
    }

    fn frame(&self, from: &Peer, frame: u16, _: u64, payload: &[u8]) {
        if frame != kind::PROTOCOL {
            return;
        }
        let (msg, bytes) = match envelope::decode(payload) {
            Ok(parts) => parts,
            Err(error) => {
                tracing::warn!(from = name(from), %error, "a message cannot be read");
                return;
            }
        };
        let core = &self.0;
        let Some(job) = core.job(msg.request) else {
            return;
        };
        if let Body::Progress {
            accepted, verified, ..
        } = &msg.body
        {
            core.faults.maybe_die(Fault::KillCoordinator, Step::Stream);
            core.faults
                .maybe_pause(Fault::PauseCoordinator, Step::Stream);
            let detail = format!("{verified} of {accepted} tokens verified");
            core.tell(msg.request, msg.epoch, "STREAM", detail);
        }
        let payload = job.state.lock().payloads.keep(msg.epoch, bytes);
        core.post(
            &job,
            io::Event::Recv {
                from: from.clone(),
                msg,
                payload,
            },
        );
    }

    fn left(&self, _: &Peer) {}
}
