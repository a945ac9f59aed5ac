//! A deployment for a bench: gateway, coordinator and two workers as processes of their own, clients
//! that stream, and migrations with what both ends noted of them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use moonlivekv::id::RequestId;
use moonlivekv::rpc::v1::coordinator_client::CoordinatorClient;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use moonlivekv::rpc::{self, v1};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::transport::Channel;

use crate::cli::{EngineArgs, TransportKind, VerifyKind};
use crate::client;
use crate::cluster::{CALL, Cluster, Plan, TempDir};

/// How long a token may take to come.
const TOKEN: Duration = Duration::from_secs(60);
/// How long one migration may take.
const MIGRATION: Duration = Duration::from_secs(120);
/// The two workers.
pub const WORKERS: [&str; 2] = ["w0", "w1"];

/// Where the metadata store's log lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Store {
    /// On disk, each commit synced.
    Embedded,
    /// The same code on a file system in memory: what the disk's sync costs is the difference.
    Memory,
}

impl Store {
    /// As the command line spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::Memory => "memory",
        }
    }
}

/// What to start.
pub struct Want {
    /// The model.
    pub engine: EngineArgs,
    /// The store.
    pub store: Store,
    /// Workers take part in null handoffs.
    pub null_handoffs: bool,
}

/// The deployment, running.
pub struct Rig {
    cluster: Cluster,
    http: SocketAddr,
    gateway: GatewayClient<Channel>,
    coordinator: CoordinatorClient<Channel>,
    next: u64,
    _dir: Dir,
}

enum Dir {
    Temp(TempDir),
    Memory(PathBuf),
}

impl Drop for Dir {
    fn drop(&mut self) {
        if let Self::Memory(path) = self {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

impl Dir {
    fn new(store: Store) -> anyhow::Result<Self> {
        if store == Store::Embedded {
            return Ok(Self::Temp(TempDir::new()?));
        }
        let path = PathBuf::from(format!("/dev/shm/ml-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("--store memory needs {}", path.display()))?;
        Ok(Self::Memory(path))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Temp(t) => t.path(),
            Self::Memory(p) => p,
        }
    }
}

/// One migration to ask for.
#[derive(Debug, Clone, Copy)]
pub struct Move {
    /// How bulk travels.
    pub transport: TransportKind,
    /// What the fence re-hashes.
    pub verify: VerifyKind,
    /// Bound of STREAM, bytes a second; 0 = none.
    pub max_bytes_per_s: u64,
    /// Nothing but the hops.
    pub null: bool,
}

impl Rig {
    /// Starts everything and waits until both workers serve.
    pub async fn start(want: Want) -> anyhow::Result<Self> {
        let dir = Dir::new(want.store)?;
        let flag = |w: &str| (w.to_owned(), "--null-handoffs".to_owned());
        let plan = Plan {
            dir: dir.path().to_owned(),
            http: "127.0.0.1:0".parse()?,
            workers: WORKERS.map(str::to_owned).to_vec(),
            one_process: false,
            engine: want.engine,
            always: crate::cluster::Always::default(),
            extra: match want.null_handoffs {
                true => WORKERS.map(flag).to_vec(),
                false => Vec::new(),
            },
        };
        let cluster = plan.start()?;
        let gateway = rpc::connect(&cluster.gateway.field("rpc")?.parse()?, CALL).await?;
        let coordinator = rpc::connect(&cluster.coordinator.field("rpc")?.parse()?, CALL).await?;
        let rig = Self {
            http: cluster.http()?,
            cluster,
            gateway: GatewayClient::new(gateway),
            coordinator: CoordinatorClient::new(coordinator),
            next: 1,
            _dir: dir,
        };
        rig.wait_for_workers().await?;
        Ok(rig)
    }

    async fn wait_for_workers(&self) -> anyhow::Result<()> {
        let end = Instant::now() + CALL;
        while Instant::now() < end {
            let status = self
                .gateway
                .clone()
                .status(v1::GatewayStatusRequest {})
                .await;
            let ready = status.map(|s| s.into_inner().workers.iter().filter(|w| w.ready).count());
            if ready.is_ok_and(|n| n == WORKERS.len()) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bail!("the workers did not join the gateway in {CALL:?}")
    }

    /// Process ids of all daemons: workers first.
    pub fn pids(&self) -> Vec<u32> {
        let mut pids: Vec<u32> = self.cluster.workers.iter().map(|w| w.pid()).collect();
        pids.extend([self.cluster.gateway.pid(), self.cluster.coordinator.pid()]);
        pids
    }

    /// Starts a client that streams a completion; `body` is completed with what every bench wants.
    pub fn stream(&mut self, mut body: Value) -> anyhow::Result<Client> {
        let mut id = [0u8; 16];
        id[..8].copy_from_slice(&self.next.to_le_bytes());
        id[8..].copy_from_slice(b"a bench.");
        self.next += 1;
        let request = RequestId(id);
        for (key, value) in [
            ("stream", json!(true)),
            ("ignore_eos", json!(true)),
            ("request_id", json!(request.to_string())),
        ] {
            body[key] = value;
        }
        let (seen, progress) = watch::channel(0);
        let arrivals: Arc<Mutex<Vec<Instant>>> = Arc::default();
        let (http, log) = (self.http, Arc::clone(&arrivals));
        let task = tokio::spawn(async move {
            let each = |t: &client::Seen| {
                log.lock().push(t.at);
                seen.send_replace(t.seq);
            };
            client::stream(http, "/v1/completions", &body, each)
                .await
                .map(|t| t.error)
        });
        Ok(Client {
            request,
            progress,
            arrivals,
            task,
        })
    }

    /// A client whose context is filled from a seed.
    pub fn seeded(&mut self, tokens: u32, max_tokens: u32) -> anyhow::Result<Client> {
        let seed = self.next;
        self.stream(json!({
            "seeded_context": { "tokens": tokens, "seed": seed }, "max_tokens": max_tokens,
        }))
    }

    /// Who owns a request.
    pub async fn owner(&self, request: RequestId) -> anyhow::Result<String> {
        let name = request.to_string();
        let end = Instant::now() + CALL;
        while Instant::now() < end {
            let ask = v1::RequestsRequest { limit: 64 };
            let list = self.gateway.clone().requests(ask).await?.into_inner();
            let found = list.requests.into_iter().find(|r| r.request == name);
            if let Some(owner) = found.and_then(|r| r.owner) {
                return Ok(owner.id);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        bail!("nobody owns request {name}")
    }

    /// Moves a request to the other worker than `from`.
    pub async fn migrate(
        &self,
        request: RequestId,
        from: &str,
        how: Move,
    ) -> anyhow::Result<Migrated> {
        let ask = v1::MigrateRequest {
            request: request.to_string(),
            to: other(from).to_owned(),
            transport: how.transport.name().to_owned(),
            verify: how.verify.name().to_owned(),
            deadline_ms: MIGRATION.as_millis() as u64,
            max_bytes_per_s: how.max_bytes_per_s,
            null_handoff: how.null,
        };
        let mut events = self.coordinator.clone().migrate(ask).await?.into_inner();
        while let Some(event) = events.message().await? {
            if let Some(report) = event.report {
                return Ok(Migrated::of(report));
            }
        }
        bail!("the coordinator ended the stream of a migration without a report")
    }

    /// Ends everything; an error if a daemon had to be killed.
    pub fn stop(self) -> anyhow::Result<()> {
        match self.cluster.stop().as_slice() {
            [] => Ok(()),
            unclean => bail!("had to be killed: {}", unclean.join(", ")),
        }
    }
}

/// The worker that is not this one.
pub fn other(worker: &str) -> &'static str {
    match worker == WORKERS[0] {
        true => WORKERS[1],
        false => WORKERS[0],
    }
}

/// A client under way; dropping it hangs up, which ends its request.
pub struct Client {
    /// Its request.
    pub request: RequestId,
    progress: watch::Receiver<u64>,
    arrivals: Arc<Mutex<Vec<Instant>>>,
    task: tokio::task::JoinHandle<anyhow::Result<Option<String>>>,
}

impl Client {
    /// Waits until token `seq` was seen.
    pub async fn until(&mut self, seq: u64) -> anyhow::Result<()> {
        let seen = self.progress.wait_for(|s| *s >= seq);
        match tokio::time::timeout(TOKEN, seen).await {
            Err(_) => bail!("token {seq} did not come in {TOKEN:?}"),
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => match (&mut self.task).await? {
                Err(e) => Err(e.context("a client's stream")),
                Ok(Some(error)) => bail!("a client was told: {error}"),
                Ok(None) => bail!("a stream ended before token {seq}"),
            },
        }
    }

    /// Tokens seen so far.
    pub fn seen(&self) -> u64 {
        *self.progress.borrow()
    }

    /// When each token was seen.
    pub fn arrivals(&self) -> Vec<Instant> {
        self.arrivals.lock().clone()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A migration with what both ends noted.
#[derive(Debug, Clone)]
pub struct Migrated {
    /// The coordinator's report.
    pub report: v1::MigrationReport,
    instants: HashMap<String, u64>,
    counts: HashMap<String, u64>,
}

impl Migrated {
    fn of(report: v1::MigrationReport) -> Self {
        let instants = report.instants.iter().map(|i| (i.name.clone(), i.at_ns));
        let counts = report.counts.iter().map(|c| (c.name.clone(), c.value));
        Self {
            instants: instants.collect(),
            counts: counts.collect(),
            report,
        }
    }

    /// An instant of `source` or `destination`: `source.held`.
    pub fn at(&self, name: &str) -> Option<u64> {
        self.instants.get(name).copied()
    }

    /// Nanoseconds between two instants.
    pub fn between(&self, from: &str, to: &str) -> Option<u64> {
        self.at(to)?.checked_sub(self.at(from)?)
    }

    /// A count of `source` or `destination`; 0 where it was not noted.
    pub fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }
}
