//! The gateway as a daemon: store, journal, links, HTTP and administration in one process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::core::Core;
use super::http;
use super::inbox::Inbox;
use super::listen;
use super::log::TokenLog;
use super::service::Service;
use crate::drive::{Directory, Listen, Mesh, MeshOptions, Port, Routes, Timers, bind_kind};
use crate::id::ErrorKind;
use crate::metastore::{EmbeddedOptions, EmbeddedStore, MetaStore, ServerOptions, StoreServer};
use crate::migrate::io::Peer;
use crate::migrate::limits::Limits;
use crate::rpc::Server;
use crate::rpc::v1::gateway_server::GatewayServer;
use crate::wire::Endpoint;

/// Threads that run due timers.
const TIMERS: usize = 2;
/// How long the stream of an ended request can still be read again.
const KEEP: Duration = Duration::from_secs(300);
/// How often what is over is forgotten.
const TEND: Duration = Duration::from_secs(5);
/// How often requests that nobody serves are looked for.
const HEAL: Duration = Duration::from_millis(100);
/// How long streams may take to end after a stop was asked for.
const GRACE: Duration = Duration::from_secs(2);

/// What a gateway is started with.
pub struct Config {
    /// Store, journal and sockets go here.
    pub dir: PathBuf,
    /// Unix sockets there, or TCP, for everything but HTTP.
    pub listen: Listen,
    /// The HTTP API's address.
    pub http: SocketAddr,
    /// Allow an address that other machines can reach.
    pub beyond_loopback: bool,
    /// Bounds of the protocol.
    pub limits: Limits,
}

/// A gateway that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("gateway: {what}: {why}")]
pub struct StartError {
    /// What failed.
    pub what: &'static str,
    /// Why.
    pub why: String,
    /// What a caller can do about it.
    pub kind: ErrorKind,
}

fn fail(what: &'static str) -> impl Fn(ErrorKind, &dyn std::fmt::Display) -> StartError {
    move |kind, why| StartError {
        what,
        why: why.to_string(),
        kind,
    }
}

/// Where a gateway listens.
#[derive(Debug, Clone)]
pub struct Listening {
    /// HTTP.
    pub http: SocketAddr,
    /// The mesh.
    pub mesh: Endpoint,
    /// The store.
    pub store: Endpoint,
    /// Administration.
    pub rpc: Endpoint,
}

/// A gateway that serves.
pub struct Running {
    core: Arc<Core>,
    listening: Listening,
    stop: Arc<Notify>,
    ended: Arc<AtomicBool>,
    server: Mutex<Option<StoreServer>>,
    tending: Mutex<Option<JoinHandle<()>>>,
    http: Mutex<Option<tokio::task::JoinHandle<()>>>,
    rpc: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

/// The gateway dials nobody: workers and coordinators come to it.
struct Nowhere;

impl Directory for Nowhere {
    fn endpoint(&self, _: &Peer) -> Option<Endpoint> {
        None
    }
}

/// Starts a gateway on the runtime of the caller.
pub async fn start(config: Config, log: Arc<dyn TokenLog>) -> Result<Running, StartError> {
    if !config.http.ip().is_loopback() && !config.beyond_loopback {
        return Err(fail("HTTP")(
            ErrorKind::Caller,
            &format!(
                "{} is not a loopback address; pass --listen-beyond-loopback to allow it",
                config.http
            ),
        ));
    }
    let store_dir = config.dir.join("store");
    let store = tokio::task::spawn_blocking(move || {
        EmbeddedStore::open(store_dir, EmbeddedOptions::default())
    })
    .await
    .map_err(|e| fail("store")(ErrorKind::Bug, &e))?
    .map_err(|e| fail("store")(e.kind(), &e))?;
    let store: Arc<dyn MetaStore> = Arc::new(store);
    let socket = |what: Port| config.listen.endpoint(&config.dir, "gateway", what);
    let store_at = socket(Port::Store).map_err(|e| fail("address")(e.kind(), &e))?;
    let serve = ServerOptions {
        allow_remote: config.listen.exposed(),
        ..ServerOptions::default()
    };
    let server = StoreServer::start(Arc::clone(&store), &store_at, serve).map_err(|e| {
        let remedy = "name an address of this machine that is free";
        fail("store")(
            bind_kind(e.kind()),
            &format!("cannot listen at {store_at}: {e}; {remedy}"),
        )
    })?;
    let store_at = server.endpoint().clone();
    let runtime = tokio::runtime::Handle::current();
    let core = Arc::new(Core::new(Routes::new(store), log, config.limits, runtime));
    let taking = Arc::clone(&core);
    tokio::task::spawn_blocking(move || taking.take_up())
        .await
        .map_err(|e| fail("journal")(ErrorKind::Bug, &e))?
        .map_err(|e| fail("journal")(ErrorKind::Retryable, &e))?;
    let fired = Arc::downgrade(&core);
    let fire = move |key| {
        if let Some(core) = fired.upgrade() {
            core.fire(key);
        }
    };
    let timers = Timers::start(TIMERS, Arc::new(fire))
        .map_err(|e| fail("timers")(ErrorKind::Retryable, &e))?;
    let options = MeshOptions {
        listen: vec![socket(Port::Mesh).map_err(|e| fail("address")(e.kind(), &e))?],
        allow_remote: config.listen.exposed(),
        endpoints: vec![("store".into(), server.endpoint().clone())],
        spin_ns: 0,
        urgent: false,
    };
    let inbox = Arc::new(Inbox(Arc::clone(&core)));
    let mesh = Mesh::start(Peer::Gateway, options, inbox, Arc::new(Nowhere))
        .map_err(|e| fail("mesh")(bind_kind(e.kind()), &e))?;
    let mesh_at = mesh
        .endpoints()
        .first()
        .cloned()
        .ok_or_else(|| fail("mesh")(ErrorKind::Bug, &"no listener"))?;
    core.wire(mesh, timers);
    let cannot = |e: std::io::Error| {
        let (at, remedy) = (config.http, "name an address of this machine that is free");
        fail("HTTP")(
            ErrorKind::Caller,
            &format!("cannot listen at {at}: {e}; {remedy}"),
        )
    };
    let listener = tokio::net::TcpListener::bind(config.http)
        .await
        .map_err(cannot)?;
    let http_at = listener.local_addr().map_err(cannot)?;
    let stop = Arc::new(Notify::new());
    let (router, stopping) = (http::router(Arc::clone(&core)), Arc::clone(&stop));
    let http = tokio::spawn(async move {
        listen::serve(listener, router, listen::HEAD, async move {
            stopping.notified().await;
        })
        .await;
    });
    let rpc_at = socket(Port::Rpc).map_err(|e| fail("address")(e.kind(), &e))?;
    let admin = Server::bind(&rpc_at, config.listen.exposed())
        .await
        .map_err(|e| fail("administration")(e.kind(), &e))?;
    let rpc_at = admin.endpoint().clone();
    let service = Service::new(
        Arc::clone(&core),
        format!("http://{http_at}"),
        store_at.to_string(),
    );
    let routes = tonic::service::Routes::new(GatewayServer::new(service));
    let rpc = tokio::spawn(async move {
        if let Err(error) = admin.serve(routes, std::future::pending()).await {
            tracing::error!(%error, "the administration RPC ended");
        }
    });
    let ended = Arc::new(AtomicBool::new(false));
    let tending =
        tend(&core, Arc::clone(&ended)).map_err(|e| fail("threads")(ErrorKind::Retryable, &e))?;
    Ok(Running {
        core,
        listening: Listening {
            http: http_at,
            mesh: mesh_at,
            store: server.endpoint().clone(),
            rpc: rpc_at,
        },
        stop,
        ended,
        server: Mutex::new(Some(server)),
        tending: Mutex::new(Some(tending)),
        http: Mutex::new(Some(http)),
        rpc: Mutex::new(Some(rpc)),
    })
}

fn tend(core: &Arc<Core>, ended: Arc<AtomicBool>) -> std::io::Result<JoinHandle<()>> {
    let core = Arc::clone(core);
    let run = move || {
        let mut last = Instant::now();
        while !ended.load(Ordering::SeqCst) {
            std::thread::sleep(HEAL);
            core.heal();
            if last.elapsed() >= TEND {
                last = Instant::now();
                if let Some(then) = last.checked_sub(KEEP) {
                    core.forget_ended_before(then);
                }
            }
        }
    };
    std::thread::Builder::new().name("tend".into()).spawn(run)
}

impl Running {
    /// Where it listens.
    pub fn listening(&self) -> &Listening {
        &self.listening
    }

    /// The gateway.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Takes no new requests, lets streams end for a moment, and ends. Requests under way are in the
    /// journal.
    pub async fn end(&self) {
        self.core.drain();
        self.stop.notify_one();
        let http = self.http.lock().take();
        if let Some(http) = http
            && tokio::time::timeout(GRACE, http).await.is_err()
        {
            tracing::info!("streams were cut off; their requests are in the journal");
        }
        if let Some(rpc) = self.rpc.lock().take() {
            rpc.abort();
        }
        self.ended.store(true, Ordering::SeqCst);
        let (core, server, tending) = (
            Arc::clone(&self.core),
            self.server.lock().take(),
            self.tending.lock().take(),
        );
        let ended = tokio::task::spawn_blocking(move || {
            core.stop();
            drop(server);
            if let Some(tending) = tending {
                let _ = tending.join();
            }
        });
        if let Err(error) = ended.await {
            tracing::error!(%error, "the gateway did not end in order");
        }
    }
}
