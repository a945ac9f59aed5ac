//! A coordinator as a daemon.

use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

use super::core::{Core, Inbox};
use super::lead::lead;
use super::service::Service;
use crate::drive::{Listen, Mesh, MeshOptions, Port, Routes, Timers, bind_kind};
use crate::id::ErrorKind;
use crate::metastore::{MetaStore, RemoteOptions, RemoteStore};
use crate::migrate::io::Peer;
use crate::migrate::limits::Limits;
use crate::node::faults::{self, Faults};
use crate::node::registry::{Card, Registry};
use crate::rpc::v1::coordinator_server::CoordinatorServer;
use crate::rpc::{Page, Server};
use crate::wire::Endpoint;

/// Threads that run due timers.
const TIMERS: usize = 2;

/// What a coordinator is started with.
pub struct Config {
    /// Its name.
    pub id: String,
    /// Where its sockets go.
    pub dir: PathBuf,
    /// Unix sockets there, or TCP.
    pub listen: Listen,
    /// Where its counters can be read over HTTP.
    pub metrics: SocketAddr,
    /// The metadata store.
    pub store: Endpoint,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// Injected faults.
    pub fault: Option<faults::Plan>,
    /// Take further faults over the control RPC (testing).
    pub open_to_faults: bool,
}

/// A coordinator that could not be started.
#[derive(Debug, thiserror::Error)]
#[error("coordinator: {what}: {why}")]
pub struct StartError {
    /// What failed.
    pub what: &'static str,
    /// Why.
    pub why: String,
    /// What a caller can do about it.
    pub kind: ErrorKind,
}

/// A coordinator that serves.
pub struct Running {
    core: Arc<Core>,
    mesh: Mesh,
    registry: Registry,
    rpc_at: Endpoint,
    stop: Arc<AtomicBool>,
    leading: Mutex<Option<JoinHandle<()>>>,
    serving: Mutex<Vec<tokio::task::JoinHandle<()>>>,
    metrics_at: SocketAddr,
}

fn fail(what: &'static str) -> impl Fn(ErrorKind, &dyn std::fmt::Display) -> StartError {
    move |kind, why| StartError {
        what,
        why: why.to_string(),
        kind,
    }
}

/// Removes the sockets of earlier lives of `id` that died: nobody else ever uses their names again.
fn sweep(dir: &Path, id: &str) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of_a_life = name.to_str().and_then(|n| {
            let (life, kind) = n.strip_prefix(id)?.strip_prefix('-')?.split_once('.')?;
            let nonce = u64::from_str_radix(life, 16).is_ok();
            (nonce && matches!(kind, "mesh.sock" | "rpc.sock")).then_some(())
        });
        let path = entry.path();
        let socket = entry.file_type().is_ok_and(|t| t.is_socket());
        if of_a_life.is_some()
            && socket
            && UnixStream::connect(&path)
                .is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused)
        {
            let _ = std::fs::remove_file(&path);
        }
    }
}

/// Starts a coordinator; its RPC is served on the runtime of the caller.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let mut nonce = [0u8; 8];
    getrandom::fill(&mut nonce).map_err(|e| fail("randomness")(ErrorKind::Unsupported, &e))?;
    let nonce = u64::from_le_bytes(nonce);
    let store: Arc<dyn MetaStore> = Arc::new(RemoteStore::new(
        config.store.clone(),
        RemoteOptions::default(),
    ));
    let registry = Registry::new(Arc::clone(&store));
    let faults = Faults::new(
        config.fault,
        config.open_to_faults,
        config.id.clone(),
        &config.dir,
    );
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
    let timers = Timers::start(TIMERS, Arc::new(fire))
        .map_err(|e| fail("timers")(ErrorKind::Retryable, &e))?;
    // The nonce is in the names, so that a coordinator can start while another of its name dies.
    let name = format!("{}-{nonce:x}", config.id);
    sweep(&config.dir, &config.id);
    let socket = |what: Port| config.listen.endpoint(&config.dir, &name, what);
    let rpc_at = socket(Port::Rpc).map_err(|e| fail("address")(e.kind(), &e))?;
    let server = Server::bind(&rpc_at, config.listen.exposed())
        .await
        .map_err(|e| fail("control RPC")(e.kind(), &e))?;
    let page = Page::bind(config.metrics, config.listen.exposed())
        .await
        .map_err(|e| fail("metrics")(e.kind(), &e))?;
    let metrics_at = page.at();
    let options = MeshOptions {
        listen: vec![socket(Port::Mesh).map_err(|e| fail("address")(e.kind(), &e))?],
        allow_remote: config.listen.exposed(),
        endpoints: vec![("rpc".into(), server.endpoint().clone())],
        spin_ns: 0,
        urgent: true,
    };
    let inbox = Arc::new(Inbox(Arc::clone(&core)));
    let mesh = Mesh::start(
        Peer::Coordinator(nonce),
        options,
        inbox,
        Arc::new(registry.clone()),
    )
    .map_err(|e| fail("mesh")(bind_kind(e.kind()), &e))?;
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
        .map_err(|e| fail("registry")(ErrorKind::Bug, &e))?
        .map_err(|e| fail("registry")(e.kind(), &e))?;
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
    let counted = Arc::clone(&core);
    let page = tokio::spawn(page.serve(Arc::new(move || {
        let leads = counted.leader.load(Ordering::SeqCst);
        let term = counted.term.load(Ordering::SeqCst);
        counted.metrics.page(counted.running().len(), leads, term)
    })));
    let stop = Arc::new(AtomicBool::new(false));
    let (leading, stopping) = (Arc::clone(&core), Arc::clone(&stop));
    let leading = std::thread::Builder::new()
        .name("lead".into())
        .spawn(move || lead(&leading, &stopping))
        .map_err(|e| fail("threads")(ErrorKind::Retryable, &e))?;
    Ok(Running {
        core,
        mesh,
        registry,
        rpc_at,
        stop,
        leading: Mutex::new(Some(leading)),
        serving: Mutex::new(vec![rpc, page]),
        metrics_at,
    })
}

impl Running {
    /// The coordinator.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Where its counters are read.
    pub fn metrics_at(&self) -> SocketAddr {
        self.metrics_at
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
        self.serving.lock().drain(..).for_each(|task| task.abort());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_of_dead_lives_are_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for dead in [
            "c0-1f.mesh.sock",
            "c0-1f.rpc.sock",
            "c1-1f.rpc.sock",
            "c0.rpc.sock",
        ] {
            drop(UnixListener::bind(at(dead)).unwrap());
        }
        let _living = UnixListener::bind(at("c0-2e.rpc.sock")).unwrap();
        std::fs::write(at("c0-3d.rpc.sock"), b"no socket").unwrap();
        sweep(dir.path(), "c0");
        let mut left: Vec<String> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let kept = [
            "c0-2e.rpc.sock",
            "c0-3d.rpc.sock",
            "c0.rpc.sock",
            "c1-1f.rpc.sock",
        ];
        assert_eq!(left, kept);
    }
}
