//! A worker as a daemon: everything started in the order that needs nothing before it is there, and
//! ended in the order that loses nothing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::brace;
use super::core::Core;
use super::dump;
use super::service::{Listening, Service};
use super::sink::Sink;
use crate::digest::Digester;
use crate::drive::{
    Expect, Handler, Hello, Listen, Mesh, MeshOptions, Port, Routes, Timers, bind_kind, envelope,
    kind, name, now_ns,
};
use crate::engine::adapter::EngineAdapter;
use crate::engine::reference::{CloseReason, Engine, EngineConfig};
use crate::id::{ErrorKind, MigrationEpoch, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use crate::metastore::{MetaStore, RemoteOptions, RemoteStore};
use crate::migrate::io::Peer;
use crate::migrate::limits::Limits;
use crate::migrate::msg::{Body, Emission, Msg};
use crate::node::bulk::Bulk;
use crate::node::emit::{Emitter, Outlet, Sending};
use crate::node::faults::{self, Faults};
use crate::node::jobs::Jobs;
use crate::node::paths;
use crate::node::registry::{Card, Registry};
use crate::page::ObjectSetHeader;
use crate::rpc::v1::worker_server::WorkerServer;
use crate::rpc::{Page, Server};
use crate::wire::Endpoint;

/// Threads of each lane for hashing and copying.
const JOBS: usize = 2;
/// KV in one offer. Both ends hash and copy at the same time only where several offers are under
/// way, and what was just copied is hashed from the cache; smaller ones cost more messages.
const OFFER_BYTES: u64 = 4 << 20;
/// Offers under way at once: with fewer, CPUs wait for an answer to the one before; with more, what
/// was copied has left the cache when its turn to be hashed comes.
const WINDOW: u16 = 6;
/// Threads that run due timers.
const TIMERS: usize = 2;
/// Tokens that the gateway did not acknowledge for this long are sent again.
const UNACKNOWLEDGED: Duration = Duration::from_secs(1);
/// How often links are looked after.
const TEND: Duration = Duration::from_millis(100);
/// How often what is left of ended requests is forgotten, in looks.
const SWEEP: u32 = 50;
/// How often idle bulk links are closed, in looks.
const TIDY: u32 = 10;

/// What a worker is started with.
pub struct Config {
    /// Its name.
    pub id: WorkerId,
    /// Where its sockets go.
    pub dir: PathBuf,
    /// Unix sockets there, or TCP.
    pub listen: Listen,
    /// Where its counters can be read over HTTP.
    pub metrics: SocketAddr,
    /// The gateway's mesh listener.
    pub gateway: Endpoint,
    /// The metadata store.
    pub store: Endpoint,
    /// The engine.
    pub engine: EngineConfig,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// Injected faults.
    pub fault: Option<faults::Plan>,
    /// Take further faults over the control RPC (testing).
    pub open_to_faults: bool,
    /// Write KV and control state at this output token.
    pub dump_at: Option<u64>,
    /// Flip the last bit of this output token on its way out (testing).
    pub flip_token: Option<u64>,
    /// Take part in null handoffs (benches).
    pub null_handoffs: bool,
}

/// A worker that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("worker {id}: {what}: {why}")]
pub struct StartError {
    /// Which.
    pub id: String,
    /// What failed.
    pub what: &'static str,
    /// Why.
    pub why: String,
    /// What a caller can do about it.
    pub kind: ErrorKind,
}

/// A worker that serves.
pub struct Running {
    core: Arc<Core>,
    engine: Engine,
    mesh: Mesh,
    registry: Registry,
    stop: Arc<Notify>,
    ended: Arc<AtomicBool>,
    sending: Mutex<Option<Sending>>,
    tending: Mutex<Option<std::thread::JoinHandle<()>>>,
    serving: Mutex<Vec<tokio::task::JoinHandle<()>>>,
    card: Card,
    data: Vec<String>,
    metrics_at: SocketAddr,
    dir: PathBuf,
}

/// Tokens as the protocol's `Emit`.
struct ToGateway {
    mesh: OnceLock<Mesh>,
    core: OnceLock<std::sync::Weak<Core>>,
    flip: Option<u64>,
}

impl Outlet for ToGateway {
    fn emit(&self, request: RequestId, owner_epoch: OwnerEpoch, tokens: &[Emission]) -> bool {
        let Some(mesh) = self.mesh.get() else {
            return false;
        };
        let mut tokens = tokens.to_vec();
        if let Some(t) = self
            .flip
            .and_then(|seq| tokens.iter_mut().find(|t| t.seq == seq))
        {
            t.token ^= 1;
        }
        let sent = tokens.len() as u64;
        let body = Body::Emit {
            owner_epoch,
            tokens,
        };
        let msg = Msg {
            request,
            epoch: MigrationEpoch(0),
            body,
        };
        let head = envelope::encode(&msg);
        let parts = [std::io::IoSlice::new(&head)];
        let deadline = Instant::now() + Duration::from_secs(2);
        match mesh.send(&Peer::Gateway, kind::PROTOCOL, 0, &parts, deadline) {
            Ok(()) => {
                if let Some(core) = self.core.get().and_then(|c| c.upgrade()) {
                    core.metrics.tokens_sent.inc_by(sent);
                }
                true
            }
            Err(error) => {
                tracing::debug!(%request, %error, "tokens wait for the gateway");
                false
            }
        }
    }

    fn closed(&self, request: RequestId, epoch: OwnerEpoch, reason: CloseReason) {
        if let (CloseReason::Failed, Some(core)) =
            (reason, self.core.get().and_then(|c| c.upgrade()))
        {
            core.send_closed(request, epoch);
        }
    }
}

/// The worker's end of its links.
struct Inbox {
    core: OnceLock<Arc<Core>>,
    registry: Registry,
}

impl Handler for Inbox {
    fn joined(&self, hello: &Hello) {
        if let Some(at) = hello.endpoint("mesh") {
            self.registry.learn(&hello.from, at);
        }
        // Whoever dialled: what went into the link before this one may never have arrived.
        if let (Peer::Gateway, Some(core)) = (&hello.from, self.core.get()) {
            core.emitter.resend();
        }
    }

    fn frame(&self, from: &Peer, frame: u16, _: u64, payload: &[u8]) {
        let Some(core) = self.core.get() else { return };
        match frame {
            kind::PROTOCOL => match envelope::decode(payload) {
                Ok((msg, bytes)) => core.receive(from, msg, bytes),
                Err(error) => tracing::warn!(from = name(from), %error, "a message cannot be read"),
            },
            kind::BRACE => core.braced(from, payload),
            kind::EARLY => core.early(from, payload),
            _ => {}
        }
    }

    fn expects(&self, frame: u16) -> Expect {
        match frame {
            kind::BRACE => brace::EXPECT,
            kind::EARLY => Expect::Soon,
            _ => Expect::Anything,
        }
    }

    fn idle(&self, from: &Peer) {
        if let Some(core) = self.core.get() {
            core.keep_braced(from);
        }
    }

    fn left(&self, peer: &Peer) {
        tracing::debug!(peer = name(peer), "link down");
        if let Some(core) = self.core.get() {
            core.peer_lost(peer);
        }
    }
}

/// Tokens of [`OFFER_BYTES`], whole pages, at most what the limits say.
fn offer_tokens(limits: &Limits, header: &ObjectSetHeader) -> u32 {
    let page = u64::from(header.page_tokens.max(1));
    let pages = (OFFER_BYTES / (header.token_bytes().max(1) * page)).max(1);
    let tokens = u32::try_from(pages.saturating_mul(page)).unwrap_or(u32::MAX);
    tokens.min(limits.offer_tokens)
}

/// Starts a worker; its RPC is served on the runtime of the caller.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let id = config.id.to_string();
    let fail = |what: &'static str| {
        let id = id.clone();
        move |kind: ErrorKind, why: &dyn std::fmt::Display| StartError {
            id,
            what,
            why: why.to_string(),
            kind,
        }
    };
    let emitter = Emitter::default();
    let dump_at = config.dump_at.map(|seq| dump::At {
        seq,
        dir: config.dir.clone(),
    });
    let sink = Arc::new(Sink::new(emitter.clone(), dump_at));
    let engine_config = config.engine.clone();
    let engine_sink = Arc::clone(&sink);
    let engine = tokio::task::spawn_blocking(move || Engine::start(engine_config, engine_sink))
        .await
        .map_err(|e| fail("engine")(ErrorKind::Bug, &e))?
        .map_err(|e| fail("engine")(e.kind(), &e))?;
    let adapter: Arc<dyn EngineAdapter> = Arc::new(engine.clone());
    let capabilities = adapter.capabilities();
    let digester = Arc::new(
        Digester::new(capabilities.header.clone())
            .map_err(|e| fail("digests")(ErrorKind::Bug, &e))?,
    );
    let limits = Limits {
        offer_tokens: offer_tokens(&config.limits, &capabilities.header),
        window: config.limits.window.max(WINDOW),
        ..config.limits.clone()
    };
    let me = WorkerRef {
        id: config.id.clone(),
        incarnation: capabilities.incarnation,
    };
    let store: Arc<dyn MetaStore> = Arc::new(RemoteStore::new(
        config.store.clone(),
        RemoteOptions::default(),
    ));
    let (registry, tidied) = (Registry::new(Arc::clone(&store)), Arc::clone(&store));
    registry.learn(&Peer::Gateway, &config.gateway);
    let faults = Arc::new(Faults::new(
        config.fault,
        config.open_to_faults,
        id.clone(),
        &config.dir,
    ));
    let opened = paths::open(&config.id, &config.dir, &config.listen, &faults)
        .map_err(|e| fail("bulk paths")(bind_kind(e.kind()), &e))?;
    let data: Vec<String> = opened.iter().map(|t| t.endpoint().to_string()).collect();
    let core = Core::new(
        me.clone(),
        Arc::new(engine.clone()),
        adapter,
        capabilities,
        digester,
        emitter.clone(),
        Arc::new(Routes::new(store)),
        Arc::new(Bulk::new(opened)),
        limits,
        faults,
        Jobs::start("bulk", JOBS).map_err(|e| fail("threads")(ErrorKind::Retryable, &e))?,
    );
    let core = Arc::new(core.with_null_handoffs(config.null_handoffs));
    sink.attach(&core);
    let fired = Arc::downgrade(&core);
    let fire = move |key| {
        if let Some(core) = fired.upgrade() {
            core.fire(key);
        }
    };
    let timers = Timers::start(TIMERS, Arc::new(fire))
        .map_err(|e| fail("timers")(ErrorKind::Retryable, &e))?;
    let socket = |what: Port| config.listen.endpoint(&config.dir, &id, what);
    let rpc_at = socket(Port::Rpc).map_err(|e| fail("address")(e.kind(), &e))?;
    let server = Server::bind(&rpc_at, config.listen.exposed())
        .await
        .map_err(|e| fail("control RPC")(e.kind(), &e))?;
    let page = Page::bind(config.metrics, config.listen.exposed())
        .await
        .map_err(|e| fail("metrics")(e.kind(), &e))?;
    let metrics_at = page.at();
    let inbox = Arc::new(Inbox {
        core: OnceLock::new(),
        registry: registry.clone(),
    });
    let _ = inbox.core.set(Arc::clone(&core));
    let options = MeshOptions {
        listen: vec![socket(Port::Mesh).map_err(|e| fail("address")(e.kind(), &e))?],
        allow_remote: config.listen.exposed(),
        endpoints: vec![("rpc".into(), server.endpoint().clone())],
        spin_ns: 0,
        urgent: true,
    };
    let directory = Arc::new(registry.clone());
    let mesh = Mesh::start(Peer::Worker(me.clone()), options, inbox, directory)
        .map_err(|e| fail("mesh")(bind_kind(e.kind()), &e))?;
    core.wire(mesh.clone(), timers);
    let mesh_at = mesh
        .endpoints()
        .first()
        .map(Endpoint::to_string)
        .unwrap_or_default();
    let card = Card {
        id: id.clone(),
        incarnation: me.incarnation.0,
        mesh: mesh_at.clone(),
        rpc: server.endpoint().to_string(),
        pid: std::process::id(),
        model: core.engine.model(),
        paths: core.bulk.names().into_iter().map(str::to_owned).collect(),
        draining: false,
    };
    let stop = Arc::new(Notify::new());
    let listening = Listening {
        mesh: mesh_at,
        data: data.join(","),
    };
    let service = Service::new(Arc::clone(&core), listening, Arc::clone(&stop));
    let routes = tonic::service::Routes::new(
        WorkerServer::new(service)
            .max_decoding_message_size(crate::rpc::MAX_MESSAGE)
            .max_encoding_message_size(crate::rpc::MAX_MESSAGE),
    );
    let serve_stop = Arc::new(Notify::new());
    let rpc = tokio::spawn(async move {
        // Ends with its runtime; a call under way is the caller's to retry.
        if let Err(error) = server
            .serve(routes, async move { serve_stop.notified().await })
            .await
        {
            tracing::error!(%error, "the control RPC ended");
        }
    });
    let counted = Arc::clone(&core);
    let page = tokio::spawn(page.serve(Arc::new(move || {
        let pending = counted.emitter.pending();
        counted.metrics.page(&counted.engine.load(), pending)
    })));
    let outlet = Arc::new(ToGateway {
        mesh: OnceLock::new(),
        core: OnceLock::new(),
        flip: config.flip_token,
    });
    let _ = outlet.mesh.set(mesh.clone());
    let _ = outlet.core.set(Arc::downgrade(&core));
    let sending = emitter
        .start(outlet)
        .map_err(|e| fail("threads")(ErrorKind::Retryable, &e))?;
    let (publish, cards) = (card.clone(), registry.clone());
    tokio::task::spawn_blocking(move || cards.publish_worker(&publish))
        .await
        .map_err(|e| fail("registry")(ErrorKind::Bug, &e))?
        .map_err(|e| fail("registry")(e.kind(), &e))?;
    late_put_when_due(&core);
    let ended = Arc::new(AtomicBool::new(false));
    let tending = tend(&core, &mesh, tidied, Arc::clone(&ended))
        .map_err(|e| fail("threads")(ErrorKind::Retryable, &e))?;
    Ok(Running {
        core,
        engine,
        mesh,
        registry,
        stop,
        ended,
        sending: Mutex::new(Some(sending)),
        tending: Mutex::new(Some(tending)),
        serving: Mutex::new(vec![rpc, page]),
        card,
        data,
        metrics_at,
        dir: config.dir,
    })
}

/// The second half of `late-write`: once the first has fired, a put under a dead grant.
fn late_put_when_due(core: &Arc<Core>) {
    if !core.faults.planned(faults::Fault::LateWrite) {
        return;
    }
    let core = Arc::clone(core);
    let jobs = Arc::clone(&core);
    jobs.jobs.run(move || {
        let end = Instant::now() + Duration::from_secs(300);
        while !core.faults.has_fired(faults::Fault::LateWrite) {
            if Instant::now() >= end {
                return;
            }
            std::thread::sleep(TEND);
        }
        for path in core.bulk.paths() {
            match super::late::late_put(path) {
                Ok(why) => tracing::info!(path = path.path().name(), why, "a late put was refused"),
                Err(what) => core
                    .faults
                    .escaped(&format!("{}: {what}", path.path().name())),
            }
        }
    });
}

/// Keeps the gateway's link up, sends again what was not journaled after it broke, and forgets what
/// is over.
fn tend(
    core: &Arc<Core>,
    mesh: &Mesh,
    store: Arc<dyn MetaStore>,
    ended: Arc<AtomicBool>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let (core, mesh) = (Arc::clone(core), mesh.clone());
    let run = move || {
        let mut looks = 0u32;
        while !ended.load(Ordering::SeqCst) {
            if !mesh.linked(&Peer::Gateway) {
                match mesh.open(&Peer::Gateway) {
                    Ok(()) => {
                        core.emitter.resend();
                        if core.is_draining() {
                            core.tell_draining();
                        }
                    }
                    Err(error) => tracing::debug!(%error, "the gateway does not answer"),
                }
            }
            core.emitter.resend_stalled(UNACKNOWLEDGED);
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(TIDY) {
                core.bulk.tend();
                store.tidy();
            }
            if looks.is_multiple_of(SWEEP) {
                core.sweep();
            }
            std::thread::sleep(TEND);
        }
    };
    std::thread::Builder::new().name("tend".into()).spawn(run)
}

impl Running {
    /// The worker.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Its card.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Where its counters are read.
    pub fn metrics_at(&self) -> SocketAddr {
        self.metrics_at
    }

    /// Its bulk listeners.
    pub fn data(&self) -> &[String] {
        &self.data
    }

    /// Resolves when `Shutdown` was called.
    pub async fn asked_to_stop(&self) {
        self.stop.notified().await;
    }

    /// Admits nothing from now on, and says so.
    pub async fn drain(&self) {
        let card = Card {
            draining: true,
            ..self.card.clone()
        };
        let (core, registry) = (Arc::clone(&self.core), self.registry.clone());
        let said = tokio::task::spawn_blocking(move || {
            core.set_draining(true);
            registry.publish_worker(&card).map_err(|e| e.to_string())
        });
        if let Err(error) = said.await.unwrap_or_else(|e| Err(e.to_string())) {
            tracing::warn!(error, "cannot say that this worker is being emptied");
        }
    }

    /// Whether a link to `peer` is up.
    pub fn linked(&self, peer: &Peer) -> bool {
        self.mesh.linked(peer)
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Requests that still run here.
    pub fn running(&self) -> usize {
        self.engine.requests().len()
    }

    /// Stops the engine, waits until what it made is journaled, and ends links and threads. What
    /// still ran goes on from the journal. Blocks.
    pub fn end(&self, deadline: Instant) {
        self.engine.shutdown();
        if !self.core.emitter.drained(deadline) {
            tracing::warn!(
                tokens = self.core.emitter.pending(),
                "not journaled before the deadline"
            );
        }
        if let Err(error) = self.registry.remove_worker(&self.core.me) {
            tracing::debug!(%error, "the card stays");
        }
        self.ended.store(true, Ordering::SeqCst);
        self.core.stop();
        drop(self.sending.lock().take());
        self.mesh.stop();
        if let Some(tending) = self.tending.lock().take() {
            let _ = tending.join();
        }
        self.serving.lock().drain(..).for_each(|task| task.abort());
        paths::remove_socket(&self.core.me.id, &self.dir);
        tracing::info!(at_ns = now_ns(), "ended");
    }
}
