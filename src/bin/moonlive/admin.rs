//! `moonlive migrate`, `drain`, `status`, `watch`: an operator talks to a deployment.

use std::time::Duration;

use anyhow::Context;
use moonlivekv::rpc::v1::coordinator_client::CoordinatorClient;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use moonlivekv::rpc::v1::worker_client::WorkerClient;
use moonlivekv::rpc::{self, v1};
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::cli::{DrainArgs, MigrateArgs, Where};
use crate::cluster::{self, CALL};
use crate::exit::{Code, coded};

pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(work)
}

async fn dial(at: &str) -> anyhow::Result<Channel> {
    Ok(rpc::connect(&at.parse()?, CALL).await?)
}

fn rpc_of<'a>(deployment: &'a Value, who: &str) -> anyhow::Result<&'a str> {
    deployment[who]["rpc"]
        .as_str()
        .with_context(|| format!("the deployment's file does not say where its {who} is"))
}

fn within<T>(message: T, time: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(time);
    request
}

/// The report of a migration as JSON.
fn report_json(r: &v1::MigrationReport) -> Value {
    let phases: serde_json::Map<String, Value> = r
        .phases
        .iter()
        .map(|p| (p.phase.clone(), json!(p.took_ns / 1000)))
        .collect();
    json!({
        "request": r.request, "migrated": r.migrated, "cause": r.cause,
        "migration_epoch": r.migration_epoch,
        "from": r.source.as_ref().map(|w| &w.id), "to": r.destination.as_ref().map(|w| &w.id),
        "fence_pause_us": r.fence_pause_ns / 1000, "phases_us": phases, "pages": r.pages,
        "pages_verified": r.pages_verified, "bytes": r.bytes, "fence_bytes": r.fence_bytes,
        "transport": r.transport, "verify": r.verify,
    })
}

fn event_line(event: &v1::MigrationEvent, json: bool) -> String {
    if json {
        return match &event.report {
            Some(report) => report_json(report).to_string(),
            None => json!({
                "request": event.request, "migration_epoch": event.migration_epoch,
                "phase": event.phase, "at_ns": event.at_ns, "detail": event.detail,
            })
            .to_string(),
        };
    }
    let short = event.request.get(..8).unwrap_or(&event.request);
    let mut line = format!("{short} {:<10} {}", event.phase, event.detail);
    if let Some(r) = &event.report {
        for p in &r.phases {
            line.push_str(&format!(
                "\n  {:<12} {:>10.2} ms",
                p.phase,
                p.took_ns as f64 / 1e6
            ));
        }
        if r.migrated {
            line.push_str(&format!(
                "\n  fence pause {:.2} ms; {} pages verified, {} bytes over {}",
                r.fence_pause_ns as f64 / 1e6,
                r.pages_verified,
                r.bytes,
                r.transport
            ));
        }
    }
    line
}

/// The cause of a migration that came too late.
const ENDED: &str = "request-ended";

/// What to do about a migration that did not happen.
fn remedy(cause: &str) -> &'static str {
    match cause {
        ENDED => "there is nothing to move any more; `moonlive status` lists what still runs",

        "no-such-request" => "`moonlive status` lists the requests under way",
        "nothing-to-do" => "it runs there already, or has ended",
        "being-recovered" => "its worker died: try again when it decodes on another one",
        "no-space" => "the destination's pool is full: name another worker, or wait",
        "profile-mismatch" => "the destination serves another model or computes otherwise",
        "timeout" => "the request stays where it is: try again with a longer --deadline",
        _ => "the request stays where it is: try again, or name another worker",
    }
}

/// `moonlive migrate`
pub fn migrate(args: MigrateArgs, json: bool) -> anyhow::Result<()> {
    let deployment = cluster::read(&args.place.dir)?;
    block_on(async {
        let channel = dial(rpc_of(&deployment, "coordinator")?).await?;
        let ask = v1::MigrateRequest {
            request: args.request.clone(),
            to: args.to.clone(),
            transport: args
                .transport
                .map(|t| t.name().to_owned())
                .unwrap_or_default(),
            verify: args.verify.name().to_owned(),
            deadline_ms: u64::try_from(args.deadline.as_millis()).unwrap_or(u64::MAX),
            max_bytes_per_s: args.max_bytes_per_s,
            null_handoff: false,
        };
        let mut events = CoordinatorClient::new(channel)
            .migrate(ask)
            .await?
            .into_inner();
        while let Some(event) = events.message().await? {
            println!("{}", event_line(&event, json));
            if let Some(report) = event.report {
                if report.migrated {
                    return Ok(());
                }
                let text = match report.cause.as_str() {
                    ENDED => format!("request {} has ended: {}", args.request, remedy(ENDED)),
                    cause => format!("not migrated: {cause}; {}", remedy(cause)),
                };
                let code = match report.cause.as_str() {
                    "no-such-request" | ENDED => Code::Caller,
                    cause if cause.starts_with("refused") => Code::Caller,
                    "page-mismatch" | "set-mismatch" | "control-mismatch" => Code::Integrity,
                    "timeout" => Code::Deadline,
                    "profile-mismatch" => Code::Unsupported,
                    _ => Code::Retryable,
                };
                return Err(coded(code, text));
            }
        }
        Err(coded(
            Code::PeerLost,
            "the coordinator ended before the migration did; `moonlive status` says how it stands",
        ))
    })
}

/// `moonlive drain`
pub fn drain(args: DrainArgs, json: bool) -> anyhow::Result<()> {
    let deployment = cluster::read(&args.place.dir)?;
    block_on(async {
        let channel = dial(rpc_of(&deployment, "coordinator")?).await?;
        let ask = v1::DrainRequest {
            worker: args.worker.clone(),
            deadline_ms: u64::try_from(args.deadline.as_millis()).unwrap_or(u64::MAX),
            transport: String::new(),
        };
        let mut events = CoordinatorClient::new(channel)
            .drain(ask)
            .await?
            .into_inner();
        while let Some(event) = events.message().await? {
            if json {
                let report = event.report.as_ref().map(report_json);
                println!(
                    "{}",
                    json!({
                        "detail": event.detail, "remaining": event.remaining, "done": event.done,
                        "drained": event.drained, "report": report,
                    })
                );
            } else {
                println!("{} ({} left)", event.detail, event.remaining);
            }
            if event.done {
                return match event.drained {
                    true => Ok(()),
                    false => Err(coded(
                        Code::Deadline,
                        format!("{}: {}", args.worker, event.detail),
                    )),
                };
            }
        }
        Err(coded(
            Code::PeerLost,
            "the coordinator ended before the drain did",
        ))
    })
}

/// `moonlive status`
pub fn status(place: &Where, json: bool) -> anyhow::Result<()> {
    let deployment = cluster::read(&place.dir)?;
    block_on(async {
        let mut gateway = GatewayClient::new(dial(rpc_of(&deployment, "gateway")?).await?);
        let g = gateway
            .status(within(v1::GatewayStatusRequest {}, CALL))
            .await?
            .into_inner();
        let list = within(v1::RequestsRequest { limit: 100 }, CALL);
        let requests = gateway.requests(list).await?.into_inner().requests;
        let coordinator = match dial(rpc_of(&deployment, "coordinator")?).await {
            Ok(channel) => {
                let ask = within(v1::CoordinatorStatusRequest {}, CALL);
                CoordinatorClient::new(channel)
                    .status(ask)
                    .await
                    .ok()
                    .map(|r| r.into_inner())
            }
            Err(_) => None,
        };
        let mut workers = Vec::new();
        for entry in &g.workers {
            let status = match dial(&entry.rpc_endpoint).await {
                Ok(channel) => {
                    let ask = within(v1::WorkerStatusRequest {}, CALL);
                    WorkerClient::new(channel)
                        .status(ask)
                        .await
                        .ok()
                        .map(|r| r.into_inner())
                }
                Err(_) => None,
            };
            workers.push((entry, status));
        }
        if json {
            let mut all = status_json(&g, coordinator.as_ref(), &workers, &requests);
            all["metrics"] = metrics_of(&deployment);
            println!("{all}");
        } else {
            status_text(&g, coordinator.as_ref(), &workers, &requests);
            for (who, at) in metrics_of(&deployment).as_object().into_iter().flatten() {
                println!("metrics      {who}: {}", at.as_str().unwrap_or_default());
            }
        }
        Ok(())
    })
}

type WorkerLine<'a> = (&'a v1::WorkerEntry, Option<v1::WorkerStatus>);

fn status_json(
    g: &v1::GatewayStatus,
    c: Option<&v1::CoordinatorStatus>,
    workers: &[WorkerLine<'_>],
    requests: &[v1::RequestEntry],
) -> Value {
    let workers: Vec<Value> = workers
        .iter()
        .map(|(e, s)| {
            json!({
                "id": e.worker.as_ref().map(|w| &w.id), "model": e.model, "ready": e.ready,
                "requests": e.requests, "reachable": s.is_some(),
                "blocks_free": s.as_ref().map(|s| s.blocks_free),
                "blocks_cached": s.as_ref().map(|s| s.blocks_cached),
                "blocks_total": s.as_ref().map(|s| s.blocks_total),
                "quarantined_bytes": s.as_ref().map(|s| s.quarantined_bytes),
                "draining": e.draining || s.as_ref().is_some_and(|s| s.draining),
                "open_fds": s.as_ref().map(|s| s.open_fds),
            })
        })
        .collect();
    let requests: Vec<Value> = requests
        .iter()
        .map(|r| {
            json!({
                "request": r.request, "owner": r.owner.as_ref().map(|w| &w.id),
                "owner_epoch": r.owner_epoch, "journaled": r.journaled, "delivered": r.delivered,
                "finished": r.finished, "finish_reason": r.finish_reason, "migrating": r.migrating,
                "last_outcome": r.last_outcome, "last_cause": r.last_cause,
            })
        })
        .collect();
    json!({
        "http": g.http, "tokens_accepted": g.tokens_accepted, "tokens_refused": g.tokens_refused,
        "integrity_alarms": g.integrity_alarms, "requests_active": g.requests_active,
        "coordinator": c.map(|c| json!({
            "id": c.id, "leader": c.leader, "leader_id": c.leader_id, "term": c.term,
            "committed": c.migrations_committed, "aborted": c.migrations_aborted,
        })),
        "workers": workers, "requests": requests,
    })
}

/// Where the daemons' counters are read, by daemon.
fn metrics_of(deployment: &Value) -> Value {
    let mut all = serde_json::Map::new();
    if let Some(http) = deployment["gateway"]["http"].as_str() {
        all.insert("gateway".into(), json!(format!("http://{http}/metrics")));
    }
    if let Some(at) = deployment["coordinator"]["metrics"].as_str() {
        all.insert("coordinator".into(), json!(at));
    }
    for worker in deployment["workers"].as_array().into_iter().flatten() {
        let names = worker["rpcs"].as_object().into_iter().flatten();
        let pages = worker["metrics"].as_array().into_iter().flatten();
        all.extend(
            names
                .zip(pages)
                .map(|((id, _), at)| (id.clone(), at.clone())),
        );
    }
    Value::Object(all)
}

fn status_text(
    g: &v1::GatewayStatus,
    c: Option<&v1::CoordinatorStatus>,
    workers: &[WorkerLine<'_>],
    requests: &[v1::RequestEntry],
) {
    println!(
        "gateway      {}  {} tokens accepted, {} refused, {} alarms",
        g.http, g.tokens_accepted, g.tokens_refused, g.integrity_alarms
    );
    match c {
        Some(c) => println!(
            "coordinator  {}{}  {} migrations committed, {} not",
            c.id,
            if c.leader { ", leads" } else { "" },
            c.migrations_committed,
            c.migrations_aborted
        ),
        None => println!("coordinator  does not answer"),
    }
    for (e, s) in workers {
        let id = e.worker.as_ref().map_or("?", |w| w.id.as_str());
        match s {
            Some(s) => println!(
                "worker       {id}  {}{}  {} running, {} waiting, {} of {} blocks free, {} bytes in quarantine",
                e.model,
                if s.draining || e.draining {
                    ", draining"
                } else {
                    ""
                },
                s.running,
                s.waiting,
                s.blocks_free + s.blocks_cached,
                s.blocks_total,
                s.quarantined_bytes
            ),
            None => println!("worker       {id}  does not answer"),
        }
    }
    for r in requests {
        let owner = r.owner.as_ref().map_or("-", |w| w.id.as_str());
        let state = match (r.finished, r.migrating) {
            (true, _) => r.finish_reason.as_str(),
            (_, true) => "migrating",
            _ => "decoding",
        };
        println!(
            "request      {}  on {owner}, epoch {}, {} tokens journaled, {} delivered, {state}",
            r.request, r.owner_epoch, r.journaled, r.delivered
        );
    }
}

/// `moonlive watch`
pub fn watch(place: &Where, json: bool) -> anyhow::Result<()> {
    let deployment = cluster::read(&place.dir)?;
    block_on(async {
        let gateway = dial(rpc_of(&deployment, "gateway")?).await?;
        let mut flips = GatewayClient::new(gateway)
            .watch(v1::GatewayWatchRequest {})
            .await?
            .into_inner();
        let coordinator = dial(rpc_of(&deployment, "coordinator")?).await?;
        let mut moves = CoordinatorClient::new(coordinator)
            .watch(v1::WatchRequest {})
            .await?
            .into_inner();
        if json {
            println!("{}", json!({ "watching": place.dir }));
        } else {
            println!("watching {}; Ctrl-C ends it", place.dir.display());
        }
        loop {
            tokio::select! {
                event = moves.message() => match event? {
                    Some(event) => println!("{}", event_line(&event, json)),
                    None => return Err(coded(Code::PeerLost, "the coordinator has ended")),
                },
                event = flips.message() => match event? {
                    Some(e) if json => println!("{}", json!({
                        "request": e.request, "kind": e.kind, "detail": e.detail, "at_ns": e.at_ns,
                    })),
                    Some(e) => println!("{} {:<10} {}", e.request.get(..8).unwrap_or(""), e.kind, e.detail),
                    None => return Err(coded(Code::PeerLost, "the gateway has ended")),
                },
                _ = tokio::signal::ctrl_c() => return Ok(()),
            }
        }
    })
}
