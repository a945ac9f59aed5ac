//! Clients that stream, each beside its oracle, while their requests are moved about under faults.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use moonlivekv::id::RequestId;
use moonlivekv::node::faults::{Fault, Plan};
use moonlivekv::rpc::v1::coordinator_client::CoordinatorClient;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use moonlivekv::rpc::v1::worker_client::WorkerClient;
use moonlivekv::rpc::{self, v1};
use moonlivekv::wire::Endpoint;
use parking_lot::Mutex;
use tokio::sync::{RwLock, watch};
use tonic::transport::Channel;

use super::plan::{self, Ask, Move, Victim, kills};
use crate::bench::progress::Progress;
use crate::cli::SoakArgs;
use crate::client::{self, Transcript};
use crate::cluster::CALL;

const PATH: &str = "/v1/completions";
/// How long one stream may take.
const STREAM: Duration = Duration::from_secs(300);
/// How long a migration may take.
const MOVE: Duration = Duration::from_secs(20);
/// How long one whose coordinator is gone may take to be decided.
const DECIDED: Duration = Duration::from_secs(30);
/// Pause before what could not begin is tried again.
const AGAIN: Duration = Duration::from_millis(30);

/// What was counted.
#[derive(Debug, Default)]
pub struct Tally {
    /// Migrations that began and committed.
    pub committed: u64,
    /// Migrations that began and did not.
    pub aborted: u64,
    /// Calls that began nothing: no leader yet, no such worker any more.
    pub not_begun: u64,
    /// Ends by cause.
    pub causes: BTreeMap<String, u64>,
    /// Planned faults by name.
    pub planned: BTreeMap<&'static str, u64>,
    /// Of those, how many were to kill a process.
    pub kills: u64,
    /// Requests whose streams were compared.
    pub requests: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Streams that differ from the oracle's, in words.
    pub mismatches: Vec<String>,
    /// Fence pauses in microseconds, where both sides told.
    pub pauses: Vec<u64>,
}

impl Tally {
    /// Migrations that began.
    pub fn begun(&self) -> u64 {
        self.committed + self.aborted
    }
}

/// What all clients share.
pub struct World {
    pub args: SoakArgs,
    pub http: SocketAddr,
    pub oracle: SocketAddr,
    pub gateway: GatewayClient<Channel>,
    /// The present coordinator's RPC.
    pub coordinator: Mutex<Endpoint>,
    pub tally: Mutex<Tally>,
    pub progress: Progress,
    pub requests: AtomicU64,
    pub moves: AtomicU64,
    /// One planned fault at a time, so that each is that migration's.
    pub faulting: tokio::sync::Mutex<()>,
    /// Held alone by a migration whose fault only `--verify full` catches.
    pub alone: RwLock<()>,
}

/// How a call to move a request ended.
enum Moved {
    /// The record was touched: committed or not, and why.
    Ended {
        committed: bool,
        cause: String,
        pause_us: u64,
    },
    /// Nothing began.
    NotBegun,
}

impl World {
    fn enough(&self) -> bool {
        self.tally.lock().begun() >= self.args.migrations
    }

    async fn entry(&self, request: RequestId) -> Option<v1::RequestEntry> {
        let mut ask = tonic::Request::new(v1::RequestsRequest { limit: 64 });
        ask.set_timeout(CALL);
        let list = self.gateway.clone().requests(ask).await.ok()?;
        let name = request.to_string();
        let mut all = list.into_inner().requests.into_iter();
        all.find(|r| r.request == name)
    }

    /// Workers that take requests: name and RPC.
    async fn workers(&self) -> Vec<(String, String)> {
        let mut ask = tonic::Request::new(v1::GatewayStatusRequest {});
        ask.set_timeout(CALL);
        let Ok(status) = self.gateway.clone().status(ask).await else {
            return Vec::new();
        };
        let all = status.into_inner().workers.into_iter();
        all.filter(|w| w.ready && !w.draining)
            .filter_map(|w| Some((w.worker?.id, w.rpc_endpoint)))
            .collect()
    }

    /// Plans a fault at a daemon; `false` where it is gone.
    async fn arm(&self, at: &str, is_coordinator: bool, plan: Option<Plan>) -> bool {
        let Ok(endpoint) = at.parse() else {
            return false;
        };
        let Ok(channel) = rpc::connect(&endpoint, CALL).await else {
            return false;
        };
        let mut ask = tonic::Request::new(v1::InjectRequest {
            plan: plan.map(|p| p.to_string()).unwrap_or_default(),
        });
        ask.set_timeout(CALL);
        if is_coordinator {
            CoordinatorClient::new(channel).inject(ask).await.is_ok()
        } else {
            WorkerClient::new(channel).inject(ask).await.is_ok()
        }
    }

    /// Moves a request once, as drawn.
    async fn move_once(&self, request: RequestId, m: &Move) -> Moved {
        // A planned fault of the kind that is caught only inside the fence must not meet another
        // migration; everything else may meet whatever it likes.
        let late = m
            .fault
            .is_some_and(|(p, _)| p.fault == Fault::CorruptResidentLate);
        let _one = match m.fault {
            Some(_) => Some(self.faulting.lock().await),
            None => None,
        };
        let (_alone, _shared) = if late {
            (Some(self.alone.write().await), None)
        } else {
            (None, Some(self.alone.read().await))
        };
        let Some(before) = self.entry(request).await.filter(|e| !e.finished) else {
            return Moved::NotBegun;
        };
        let Some(owner) = before.owner.as_ref().map(|w| w.id.clone()) else {
            return Moved::NotBegun;
        };
        let workers = self.workers().await;
        let others: Vec<&(String, String)> =
            workers.iter().filter(|(id, _)| *id != owner).collect();
        if others.is_empty() {
            return Moved::NotBegun;
        }
        let (to, to_rpc) = others[(m.pick % others.len() as u64) as usize];
        let coordinator = self.coordinator.lock().clone();
        let source = workers.iter().find(|(id, _)| *id == owner);
        let armed = match m.fault {
            None => None,
            Some((plan, victim)) => {
                let at = match victim {
                    Victim::Source => source.map(|(_, at)| at.clone()),
                    Victim::Destination => Some(to_rpc.clone()),
                    Victim::Coordinator => Some(coordinator.to_string()),
                };
                let is_coordinator = victim == Victim::Coordinator;
                match at {
                    Some(at) if self.arm(&at, is_coordinator, Some(plan)).await => {
                        Some((at, is_coordinator, plan.fault))
                    }
                    _ => None,
                }
            }
        };
        let moved = self
            .call(&coordinator, request, to, m, before.last_epoch)
            .await;
        if let Some((at, is_coordinator, fault)) = armed {
            if matches!(moved, Moved::Ended { .. }) {
                let mut tally = self.tally.lock();
                *tally.planned.entry(fault.name()).or_default() += 1;
                tally.kills += u64::from(kills(fault));
            }
            // One that has not fired must not fire on another migration.
            self.arm(&at, is_coordinator, None).await;
        }
        moved
    }

    async fn call(
        &self,
        coordinator: &Endpoint,
        request: RequestId,
        to: &str,
        m: &Move,
        last_epoch: u64,
    ) -> Moved {
        let ask = v1::MigrateRequest {
            request: request.to_string(),
            to: to.to_owned(),
            transport: m.transport.name().into(),
            verify: m.verify.name().into(),
            deadline_ms: u64::try_from(MOVE.as_millis()).unwrap_or(u64::MAX),
            max_bytes_per_s: 0,
            null_handoff: false,
        };
        match follow(coordinator, ask).await {
            Ok(r) if r.migrated => Moved::Ended {
                committed: true,
                cause: r.cause,
                pause_us: r.fence_pause_ns / 1000,
            },
            Ok(r) if r.migration_epoch == 0 => Moved::NotBegun,
            Ok(r) => Moved::Ended {
                committed: false,
                cause: r.cause,
                pause_us: 0,
            },
            Err(Lost::Refused) => Moved::NotBegun,
            Err(Lost::Gone) => self.decided(request, last_epoch).await,
        }
    }

    /// The coordinator is gone: the record says how it ended.
    async fn decided(&self, request: RequestId, last_epoch: u64) -> Moved {
        let end = Instant::now() + DECIDED;
        let began = Instant::now();
        while Instant::now() < end {
            match self.entry(request).await {
                Some(e) if e.last_epoch > last_epoch && !e.migrating => {
                    let committed = e.last_outcome == "committed";
                    let cause = match (e.last_outcome.as_str(), e.last_cause.as_str()) {
                        ("committed", _) => "none".to_owned(),
                        ("superseded", _) => "superseded".to_owned(),
                        (_, cause) => cause.to_owned(),
                    };
                    return Moved::Ended {
                        committed,
                        cause,
                        pause_us: 0,
                    };
                }
                // It died before it wrote its intent, or the request ended first.
                Some(e) if !e.migrating && (e.finished || began.elapsed() > CALL / 2) => {
                    return Moved::NotBegun;
                }
                None => return Moved::NotBegun,
                _ => tokio::time::sleep(AGAIN).await,
            }
        }
        let text = format!("request {request}: its migration was not decided in {DECIDED:?}");
        self.tally.lock().mismatches.push(text);
        Moved::NotBegun
    }

    fn note(&self, moved: Moved) {
        let mut tally = self.tally.lock();
        match moved {
            Moved::NotBegun => tally.not_begun += 1,
            Moved::Ended {
                committed,
                cause,
                pause_us,
            } => {
                let end = if committed { "committed" } else { "aborted" };
                *tally.causes.entry(format!("{end}: {cause}")).or_default() += 1;
                if committed {
                    tally.committed += 1;
                } else {
                    tally.aborted += 1;
                }
                if pause_us > 0 {
                    tally.pauses.push(pause_us);
                }
                drop(tally);
                self.progress.step();
            }
        }
    }

    /// Moves a request again and again while it decodes.
    async fn move_about(&self, request: RequestId, mut seen: watch::Receiver<u64>) {
        let mut at = 0;
        loop {
            let m = plan::migration(&self.args, self.moves.fetch_add(1, Ordering::Relaxed));
            at += m.gap;
            if seen.wait_for(|n| *n >= at).await.is_err() || self.enough() {
                return;
            }
            let moved = self.move_once(request, &m).await;
            if matches!(moved, Moved::NotBegun) {
                tokio::time::sleep(AGAIN).await;
            }
            self.note(moved);
            at = at.max(*seen.borrow());
        }
    }

    /// One client: request after request until enough migrations have begun.
    pub async fn client(self: Arc<Self>) -> anyhow::Result<()> {
        while !self.enough() {
            let n = self.requests.fetch_add(1, Ordering::Relaxed);
            let ask = plan::ask(self.args.seed, n);
            let (seen, progress) = watch::channel(0);
            let (world, request, body) = (&self, ask.request, &ask.body);
            let oracle = timed(client::stream(self.oracle, PATH, body, |_| {}));
            // The sender goes with the stream, which ends the moves.
            let stream = async move {
                let each = |t: &client::Seen| {
                    seen.send_replace(t.seq);
                };
                timed(client::stream(world.http, PATH, body, each)).await
            };
            let (oracle, live, ()) =
                tokio::join!(oracle, stream, world.move_about(request, progress));
            self.judge(n, &ask, &oracle.context("the oracle")?, live);
        }
        Ok(())
    }

    fn judge(&self, n: u64, ask: &Ask, oracle: &Transcript, live: anyhow::Result<Transcript>) {
        let mut tally = self.tally.lock();
        tally.requests += 1;
        let wrong = match live {
            Ok(live) => {
                tally.tokens += live.tokens.len() as u64;
                let same = live.bytes() == oracle.bytes() && !live.finish.is_empty();
                let first = || {
                    let pairs = live.tokens.iter().zip(&oracle.tokens);
                    let at = pairs.take_while(|(a, b)| a.token == b.token).count();
                    format!(
                        "{} tokens, finish {:?}, error {:?}; the oracle {} and {:?}; equal through {at}",
                        live.tokens.len(),
                        live.finish,
                        live.error,
                        oracle.tokens.len(),
                        oracle.finish
                    )
                };
                (!same).then(first)
            }
            Err(error) => Some(format!("{error:#}")),
        };
        if let Some(wrong) = wrong {
            let text = format!(
                "request {n} ({}, context {}): {wrong}",
                ask.request, ask.context
            );
            tally.mismatches.push(text);
        }
    }

    /// Moves one request over every ordered pair of workers and every path, without faults: the
    /// links that daemons keep are then there.
    pub async fn round(self: Arc<Self>, n: u64) -> anyhow::Result<()> {
        let mut ask = plan::ask(!self.args.seed, n);
        // Long enough for the round, and small enough for every pool to hold all of them twice.
        ask.body["max_tokens"] = plan::ROUND.into();
        ask.body["prompt"] = serde_json::json!([5, 6, 7, 8]);
        let (seen, mut progress) = watch::channel(0);
        let (http, body) = (self.http, ask.body.clone());
        let stream = tokio::spawn(async move {
            client::stream(http, PATH, &body, |t| {
                seen.send_replace(t.seq);
            })
            .await
        });
        let went = async {
            progress
                .wait_for(|n| *n > 0)
                .await
                .context("no token came")?;
            for transport in ["tcp", "shm"] {
                self.all_pairs(ask.request, transport).await?;
            }
            anyhow::Ok(())
        };
        let went = tokio::time::timeout(STREAM, went).await;
        // The client goes away, which ends the request.
        stream.abort();
        went.context("a round without faults did not end")?
    }

    async fn all_pairs(&self, request: RequestId, transport: &str) -> anyhow::Result<()> {
        let names: Vec<String> = self.workers().await.into_iter().map(|(id, _)| id).collect();
        let mut left: Vec<(String, String)> = Vec::new();
        for a in &names {
            left.extend(
                names
                    .iter()
                    .filter(|b| *b != a)
                    .map(|b| (a.clone(), b.clone())),
            );
        }
        let mut tries = 0;
        while !left.is_empty() {
            let owner = self.entry(request).await.and_then(|e| e.owner);
            let from = owner.context("nobody owns the request")?.id;
            let to = left
                .iter()
                .find(|(a, _)| *a == from)
                .map(|(_, b)| b.clone());
            // No pair left from here: on to where there is one.
            let to = to.unwrap_or_else(|| left[0].0.clone());
            let coordinator = self.coordinator.lock().clone();
            let ask = v1::MigrateRequest {
                request: request.to_string(),
                to: to.clone(),
                transport: transport.into(),
                verify: String::new(),
                deadline_ms: 0,
                max_bytes_per_s: 0,
                null_handoff: false,
            };
            match follow(&coordinator, ask).await {
                Ok(r) if r.migrated => left.retain(|(a, b)| (a, b) != (&from, &to)),
                other => {
                    tries += 1;
                    if tries > 20 {
                        let why = other.map_or("the coordinator is gone".into(), |r| r.cause);
                        bail!("a migration without faults from {from} to {to}: {why}");
                    }
                    tokio::time::sleep(AGAIN).await;
                }
            }
        }
        Ok(())
    }
}

async fn timed<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let done = tokio::time::timeout(STREAM, work).await;
    done.with_context(|| format!("the stream did not end in {STREAM:?}"))?
}

/// No report.
enum Lost {
    /// The coordinator said no: nothing began.
    Refused,
    /// It is gone; whether anything began is for the record to say.
    Gone,
}

impl From<tonic::Status> for Lost {
    fn from(status: tonic::Status) -> Self {
        use tonic::Code as C;
        match status.code() {
            C::NotFound | C::AlreadyExists | C::FailedPrecondition | C::InvalidArgument => {
                Self::Refused
            }
            _ => Self::Gone,
        }
    }
}

/// Follows a migration to its report.
async fn follow(at: &Endpoint, ask: v1::MigrateRequest) -> Result<v1::MigrationReport, Lost> {
    let channel = rpc::connect(at, CALL).await.map_err(|_| Lost::Refused)?;
    let mut events = CoordinatorClient::new(channel)
        .migrate(ask)
        .await?
        .into_inner();
    while let Some(event) = events.message().await? {
        if let Some(report) = event.report {
            return Ok(report);
        }
    }
    Err(Lost::Gone)
}
