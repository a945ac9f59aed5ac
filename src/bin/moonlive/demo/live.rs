//! The part of a run in which things happen: clients stream, requests migrate, faults take effect.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use moonlivekv::id::RequestId;
use moonlivekv::node::faults::Fault;
use moonlivekv::rpc::v1::coordinator_client::CoordinatorClient;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use moonlivekv::rpc::v1::worker_client::WorkerClient;
use moonlivekv::rpc::{self, v1};
use moonlivekv::wire::Endpoint;
use rustix::process::Signal;
use tokio::sync::watch;
use tonic::transport::Channel;

use super::ask::Ask;
use super::run::{Outcome, Setup, fired, wait_until};
use super::say::Say;
use crate::client;
use crate::cluster::{CALL, Cluster};

/// How long the streams of one run may take.
const STREAMS: Duration = Duration::from_secs(600);
/// How long a migration may take.
const DEADLINE: Duration = Duration::from_secs(20);
/// How long a migration whose coordinator is gone may take to be decided.
const DECIDED: Duration = Duration::from_secs(30);
/// How long a stopped coordinator stays so.
const PAUSE: Duration = Duration::from_secs(1);
/// How long everything may take to be given back.
const SETTLE: Duration = Duration::from_secs(10);

type Gateway = GatewayClient<Channel>;

/// What a migrating task needs.
#[derive(Clone)]
struct Ctx {
    gateway: Gateway,
    coordinator: Endpoint,
    transport: &'static str,
    verify: &'static str,
    /// The fault needs an attempt that is over: the first one is given this long.
    first: Option<Duration>,
    say: Say,
    started: Instant,
}

/// Streams every request and migrates each where the setup says so.
pub async fn drive(cluster: &mut Cluster, setup: &Setup<'_>) -> anyhow::Result<Outcome> {
    let http = cluster.http()?;
    let gateway = cluster.gateway.field("rpc")?.parse()?;
    let gateway = GatewayClient::new(rpc::connect(&gateway, CALL).await?);
    wait_for_workers(&gateway).await?;
    let started = Instant::now();
    let ctx = Ctx {
        gateway,
        coordinator: cluster.coordinator.field("rpc")?.parse()?,
        transport: setup.args.transport.name(),
        verify: setup.args.verify.name(),
        first: setup.fault.and_then(|f| first_attempt(f.plan.fault)),
        say: setup.say.clone(),
        started,
    };
    let (mut clients, mut moves) = (Vec::new(), Vec::new());
    for (n, ask) in setup.plan.asks.iter().enumerate() {
        let (seen, progress) = watch::channel(0u64);
        let (ask, say, live) = (ask.clone(), setup.say.clone(), setup.migrate);
        let moving = ask.clone();
        clients.push(tokio::spawn(async move {
            client::stream(http, ask.path, &ask.body, |t| {
                say.token(n, &t.text, live);
                seen.send_replace(t.seq);
            })
            .await
        }));
        if setup.migrate {
            moves.push(tokio::spawn(migrate(ctx.clone(), moving, progress)));
        }
        // One after the other, so that the first request is on the first worker in every run.
        if n == 0 {
            wait_until(Instant::now() + CALL, async || {
                owner(&ctx.gateway, setup.plan.asks[0].request)
                    .await
                    .is_some()
            })
            .await;
        }
    }
    let mut outcome = Outcome::default();
    let work = async {
        let (mut transcripts, mut reports) = (Vec::new(), Vec::new());
        for client in clients {
            transcripts.push(client.await.context("a client")??);
        }
        for moving in moves {
            reports.push(moving.await.context("a migration")??);
        }
        anyhow::Ok((transcripts, reports))
    };
    tokio::pin!(work);
    let deadline = started + STREAMS;
    let mut attended = Attended::default();
    (outcome.transcripts, outcome.reports) = loop {
        tokio::select! {
            done = &mut work => break done?,
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
        attended.look(cluster, setup)?;
        if Instant::now() >= deadline {
            bail!("the streams and migrations did not end in {STREAMS:?}");
        }
    };
    attended.finish(cluster)?;
    Ok(outcome)
}

/// How long the attempt that a fault needs in its past is given.
fn first_attempt(fault: Fault) -> Option<Duration> {
    match fault {
        Fault::StaleEpoch => Some(Duration::from_millis(1)),
        Fault::LateWrite => Some(Duration::from_millis(150)),
        _ => None,
    }
}

async fn wait_for_workers(gateway: &Gateway) -> anyhow::Result<()> {
    let all_there = wait_until(Instant::now() + CALL, async || {
        let status = gateway.clone().status(v1::GatewayStatusRequest {}).await;
        status.is_ok_and(|s| {
            let workers = s.into_inner().workers;
            workers.len() >= 2 && workers.iter().all(|w| w.ready)
        })
    });
    if !all_there.await {
        bail!("the workers did not join the gateway in {CALL:?}");
    }
    Ok(())
}

async fn entry(gateway: &Gateway, request: RequestId) -> Option<v1::RequestEntry> {
    let list = gateway
        .clone()
        .requests(v1::RequestsRequest { limit: 1000 })
        .await
        .ok()?;
    let name = request.to_string();
    list.into_inner()
        .requests
        .into_iter()
        .find(|r| r.request == name)
}

async fn owner(gateway: &Gateway, request: RequestId) -> Option<String> {
    entry(gateway, request).await?.owner.map(|w| w.id)
}

/// Waits for the drawn token, then asks the coordinator to move the request to the other worker.
async fn migrate(
    ctx: Ctx,
    ask: Ask,
    mut progress: watch::Receiver<u64>,
) -> anyhow::Result<v1::MigrationReport> {
    if progress
        .wait_for(|seen| *seen >= ask.migrate_at)
        .await
        .is_err()
    {
        return Ok(v1::MigrationReport {
            cause: "request-ended".into(),
            ..Default::default()
        });
    }
    if let Some(limit) = ctx.first {
        ctx.say.note("a first attempt that is given up early");
        let report = attempt(&ctx, &ask, limit).await?;
        ctx.say.note(&format!("it ended: {}", report.cause));
    }
    attempt(&ctx, &ask, DEADLINE).await
}

/// One attempt to move the request to the worker that does not own it.
async fn attempt(ctx: &Ctx, ask: &Ask, limit: Duration) -> anyhow::Result<v1::MigrationReport> {
    let from = owner(&ctx.gateway, ask.request)
        .await
        .context("nobody owns the request")?;
    let to = if from == "w0" { "w1" } else { "w0" };
    ctx.say.migrating(ask, &from, to);
    let asked = v1::MigrateRequest {
        request: ask.request.to_string(),
        to: to.into(),
        transport: ctx.transport.into(),
        verify: ctx.verify.into(),
        deadline_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        max_bytes_per_s: 0,
        null_handoff: false,
    };
    let channel = rpc::connect(&ctx.coordinator, CALL).await?;
    match follow(channel, asked, &ctx.say, ctx.started).await {
        Ok(report) => Ok(report),
        Err(status) => {
            ctx.say.coordinator_lost(&status);
            decided(ctx, ask, &from).await
        }
    }
}

/// Follows a migration to its report.
async fn follow(
    channel: Channel,
    asked: v1::MigrateRequest,
    say: &Say,
    started: Instant,
) -> Result<v1::MigrationReport, tonic::Status> {
    let mut events = CoordinatorClient::new(channel)
        .migrate(asked)
        .await?
        .into_inner();
    while let Some(event) = events.message().await? {
        say.event(&event, started);
        if let Some(report) = event.report {
            return Ok(report);
        }
    }
    Err(tonic::Status::unavailable(
        "the coordinator ended the stream",
    ))
}

/// The coordinator is gone: the record says how it ended.
async fn decided(ctx: &Ctx, ask: &Ask, from: &str) -> anyhow::Result<v1::MigrationReport> {
    let deadline = Instant::now() + DECIDED;
    let e = loop {
        match entry(&ctx.gateway, ask.request).await {
            Some(e) if !e.migrating && (e.last_epoch > 0 || e.finished) => break e,
            _ if Instant::now() >= deadline => {
                bail!("request {} was not decided in {DECIDED:?}", ask.request);
            }
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let migrated = e.last_outcome == "committed";
    let cause = match e.last_outcome.as_str() {
        "committed" => "none".to_owned(),
        "aborted" => e.last_cause.clone(),
        "" => "never-begun".to_owned(),
        other => other.to_owned(),
    };
    let worker = |id: &str| v1::WorkerRef {
        id: id.into(),
        incarnation: 0,
    };
    Ok(v1::MigrationReport {
        request: e.request,
        migration_epoch: e.last_epoch,
        source: Some(worker(from)),
        destination: e.owner.filter(|_| migrated),
        migrated,
        cause,
        detail: "as the record says; the coordinator was gone".into(),
        transport: ctx.transport.into(),
        ..Default::default()
    })
}

/// What an injected fault needs from outside: a stopped daemon goes on, a dead coordinator is
/// replaced.
#[derive(Default)]
struct Attended {
    stopped_at: Option<Instant>,
    done: bool,
}

impl Attended {
    fn look(&mut self, cluster: &mut Cluster, setup: &Setup<'_>) -> anyhow::Result<()> {
        let Some(fault) = setup.fault.filter(|_| !self.done) else {
            return Ok(());
        };
        match fault.plan.fault {
            Fault::PauseCoordinator => match self.stopped_at {
                None if !fired(&setup.dir).is_empty() => self.stopped_at = Some(Instant::now()),
                Some(at) if at.elapsed() >= PAUSE => {
                    self.done = true;
                    setup.say.note("the coordinator goes on (SIGCONT)");
                    cluster.coordinator.signal(Signal::CONT)?;
                }
                _ => {}
            },
            Fault::KillCoordinator if cluster.coordinator.ended().is_some() => {
                self.done = true;
                setup
                    .say
                    .note("another coordinator is started and takes over");
                cluster.restart_coordinator()?;
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(&mut self, cluster: &mut Cluster) -> anyhow::Result<()> {
        cluster.coordinator.signal(Signal::CONT)
    }
}

/// Asks every worker that lives what it still holds. `dead` is the fault's victim, which may be
/// gone.
pub async fn leaks(cluster: &mut Cluster, dead: Option<&str>) -> Vec<String> {
    let mut leaks = Vec::new();
    let mut alive = Vec::new();
    for daemon in &mut cluster.workers {
        match daemon.ended() {
            Some(_) if dead == Some(daemon.name.as_str()) => {}
            Some(status) => leaks.push(format!("{} ended: {status}", daemon.name)),
            None => alive.extend(daemon.rpcs()),
        }
    }
    for (name, at) in alive {
        if let Err(what) = held(&at).await {
            leaks.push(format!("{name} still holds {what}"));
        }
    }
    leaks
}

async fn held(at: &str) -> Result<(), String> {
    let endpoint: Endpoint = at.parse().map_err(|e| format!("{e}"))?;
    let channel = rpc::connect(&endpoint, CALL)
        .await
        .map_err(|e| e.to_string())?;
    let client = Arc::new(WorkerClient::new(channel));
    let mut last = String::new();
    let settled = wait_until(Instant::now() + SETTLE, async || {
        let status = WorkerClient::clone(&client)
            .status(v1::WorkerStatusRequest {})
            .await;
        let Ok(s) = status.map(tonic::Response::into_inner) else {
            return false;
        };
        let unused = s.blocks_free + s.blocks_cached;
        last = format!(
            "{} blocks, {} requests, {} pins, {} stages, {} bytes in quarantine",
            s.blocks_total.saturating_sub(unused),
            s.running + s.waiting,
            s.pins,
            s.stages,
            s.quarantined_bytes,
        );
        unused == s.blocks_total && s.running + s.waiting + s.pins + s.stages == 0
    });
    if settled.await { Ok(()) } else { Err(last) }
}
