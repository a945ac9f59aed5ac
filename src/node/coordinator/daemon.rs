//! A coordinator as a daemon.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::core::{Core, Inbox};
use super::lead::lead;
use super::service::Service;
use crate::drive::{Mesh, MeshOptions, Routes, Timers};
use crate::metastore::{MetaStore, RemoteOptions, RemoteStore};
use crate::migrate::io::Peer;
use crate::migrate::limits::Limits;
use crate::node::faults::{self, Faults};
use crate::node::registry::{Card, Registry};
use crate::rpc::Server;
use crate::rpc::v1::coordinator_server::CoordinatorServer;
use crate::wire::Endpoint;

/// Threads that run due timers.
const TIMERS: usize = 2;

/// What a coordinator is started with.
pub struct Config {
    /// Its name.
    pub id: String,
    /// Where its sockets go.
    pub dir: PathBuf,
    /// The metadata store.
    pub store: Endpoint,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// Injected faults.
    pub fault: Option<faults::Plan>,
}

/// A coordinator that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("coordinator: {what}: {why}")]
pub struct StartError {
    /// What failed.
    pub what: &'static str,
    /// Why.
    pub why: String,
}

/// A coordinator that serves.
pub struct Running {
    core: Arc<Core>,
    mesh: Mesh,
    registry: Registry,
    rpc_at: Endpoint,
    stop: Arc<AtomicBool>,
    leading: Mutex<Option<JoinHandle<()>>>,
    rpc: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

fn fail(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> StartError {
    move |why| StartError {
        what,
        why: why.to_string(),
    }
}

/// Starts a coordinator; its RPC is served on the runtime of the caller.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let mut nonce = [0u8; 8];
    getrandom::fill(&mut nonce).map_err(|e| fail("randomness")(&e))?;
    let nonce = u64::from_le_bytes(nonce);
    let store: Arc<dyn MetaStore> = Arc::new(RemoteStore::new(
        config.store.clone(),
        RemoteOptions::default(),
    ));
    let registry = Registry::new(Arc::clone(&store));
    let faults = Faults::new(config.fault, config.id.clone(), &config.dir);
    let core = Arc::new(Core::new(
        config.id.clone(),
        nonce,
        Routes::new(store),
        registry.clone(),
        config.limits,
        faults,
    ));
    let fired = Arc::downgrade(&core);
    let fire = move |key| {
        if let Some(core) = fired.upgrade() {
            core.fire(key);
        }
    };
    let timers = Timers::start(TIMERS, Arc::new(fire)).map_err(|e| fail("timers")(&e))?;
    // The nonce is in the names, so that a coordinator can start while another of its name dies.
    let socket = |kind: &str| {
        Endpoint::unix(
            config
                .dir
                .join(format!("{}-{nonce:x}.{kind}.sock", config.id)),
        )
    };
    let rpc_at = socket("rpc").map_err(|e| fail("socket path")(&e))?;
    let server = Server::bind(&rpc_at, false)
        .await
        .map_err(|e| fail("control RPC")(&e))?;
    let options = MeshOptions {
        listen: vec![socket("mesh").map_err(|e| fail("socket path")(&e))?],
        allow_remote: false,
        endpoints: vec![("rpc".into(), server.endpoint().clone())],
        spin_ns: 0,
    };
    let inbox = Arc::new(Inbox(Arc::clone(&core)));
    let mesh = Mesh::start(
        Peer::Coordinator(nonce),
        options,
        inbox,
        Arc::new(registry.clone()),
    )
    .map_err(|e| fail("mesh")(&e))?;
    core.wire(mesh.clone(), timers);
    let card = Card {
        id: config.id,
        incarnation: nonce,
        mesh: mesh
            .endpoints()
            .first()
            .map(Endpoint::to_string)
            .unwrap_or_default(),
        rpc: server.endpoint().to_string(),
        pid: std::process::id(),
        model: String::new(),
        paths: Vec::new(),
        draining: false,
    };
    let (publish, cards) = (card, registry.clone());
    tokio::task::spawn_blocking(move || cards.publish_coordinator(&publish))
        .await
        .map_err(|e| fail("registry")(&e))?
        .map_err(|e| fail("registry")(&e))?;
    let rpc_at = server.endpoint().clone();
    let routes = tonic::service::Routes::new(
        CoordinatorServer::new(Service(Arc::clone(&core)))
            .max_decoding_message_size(crate::rpc::MAX_MESSAGE)
            .max_encoding_message_size(crate::rpc::MAX_MESSAGE),
    );
    let rpc = tokio::spawn(async move {
        if let Err(error) = server.serve(routes, std::future::pending()).await {
            tracing::error!(%error, "the control RPC ended");
        }
    });
    let stop = Arc::new(AtomicBool::new(false));
    let (leading, stopping) = (Arc::clone(&core), Arc::clone(&stop));
    let leading = std::thread::Builder::new()
        .name("lead".into())
        .spawn(move || lead(&leading, &stopping))
        .map_err(|e| fail("threads")(&e))?;
    Ok(Running {
        core,
        mesh,
        registry,
        rpc_at,
        stop,
        leading: Mutex::new(Some(leading)),
        rpc: Mutex::new(Some(rpc)),
    })
}

impl Running {
    /// The coordinator.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Its control RPC.
    pub fn rpc(&self) -> &Endpoint {
        &self.rpc_at
    }

    /// Gives up the lease and ends links and threads. A migration under way is seen to by the next
    /// leader, or ends by the workers' own time-outs. Blocks.
    pub fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(leading) = self.leading.lock().take() {
            let _ = leading.join();
        }
        if let Err(error) = self.registry.remove_coordinator(self.core.nonce) {
            tracing::debug!(%error, "the card stays");
        }
        self.core.stop();
        self.mesh.stop();
        if let Some(rpc) = self.rpc.lock().take() {
            rpc.abort();
        }
    }
}
