//! Emptying a worker: every request it owns is moved to the least loaded other worker.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tonic::Status;

use super::service::Service;
use crate::id::RequestId;
use crate::node::options::Options;
use crate::node::registry::Card;
use crate::route::{RoutePhase, Versioned};
use crate::rpc::v1::worker_client::WorkerClient;
use crate::rpc::{self, v1};

/// Migrations of one drain at a time.
const AT_ONCE: usize = 4;
/// How long reaching the worker may take.
const ASK: Duration = Duration::from_secs(2);
/// Pause before requests that did not move are tried again.
const AGAIN: Duration = Duration::from_millis(100);

type Tell = mpsc::Sender<Result<v1::DrainEvent, Status>>;

async fn tell(tx: &Tell, event: v1::DrainEvent) {
    // A caller that has gone away does not stop a drain.
    let _ = tx.send(Ok(event)).await;
}

async fn look(service: &Service) -> Result<(Vec<Card>, Vec<Versioned>), Status> {
    let (registry, routes) = (service.0.registry.clone(), service.0.routes.clone());
    tokio::task::spawn_blocking(move || Ok((registry.workers()?, routes.all()?)))
        .await
        .map_err(|e| Status::internal(e.to_string()))?
        .map_err(|e: crate::metastore::StoreError| Status::unavailable(e.to_string()))
}

fn owned(records: &[Versioned], worker: &str) -> Vec<RequestId> {
    let serving = records
        .iter()
        .filter(|v| v.record.phase == RoutePhase::Serving);
    serving
        .filter(|v| v.record.owner.id.as_str() == worker)
        .map(|v| v.record.request)
        .collect()
}

/// Tells the worker itself, which then admits nothing and says so to the gateway.
async fn tell_worker(card: &Card) -> Result<(), Status> {
    let unreachable = |e: &dyn std::fmt::Display| {
        Status::unavailable(format!("worker {} does not answer: {e}", card.id))
    };
    let at = card.rpc.parse().map_err(|e| unreachable(&e))?;
    let channel = rpc::connect(&at, ASK).await.map_err(|e| unreachable(&e))?;
    let mut ask = tonic::Request::new(v1::DrainingRequest { draining: true });
    ask.set_timeout(ASK);
    let told = WorkerClient::new(channel).drain(ask).await;
    told.map(drop).map_err(|s| unreachable(&s.message()))
}

/// Moves everything off `worker` before the deadline; what has not moved by then stays there.
pub async fn drain(
    service: &Service,
    worker: &str,
    options: Options,
    deadline: Duration,
    tx: &Tell,
) -> Result<(), Status> {
    let end = Instant::now() + deadline;
    let (cards, _) = look(service).await?;
    let Some(mut card) = cards.iter().find(|c| c.id == worker).cloned() else {
        return Err(Status::not_found(format!("there is no worker {worker:?}")));
    };
    card.draining = true;
    let (registry, publish) = (service.0.registry.clone(), card.clone());
    tokio::task::spawn_blocking(move || registry.publish_worker(&publish))
        .await
        .map_err(|e| Status::internal(e.to_string()))?
        .map_err(|e| Status::unavailable(e.to_string()))?;
    tell_worker(&card).await?;
    let mut hopeless: HashSet<RequestId> = HashSet::new();
    loop {
        let (cards, records) = look(service).await?;
        let left: Vec<RequestId> = owned(&records, worker);
        let remaining = u32::try_from(left.len()).unwrap_or(u32::MAX);
        let todo: Vec<RequestId> = left
            .into_iter()
            .filter(|r| !hopeless.contains(r))
            .take(AT_ONCE)
            .collect();
        let late = Instant::now() >= end;
        if todo.is_empty() || late {
            let detail = match (remaining, late) {
                (0, _) => "empty".to_owned(),
                (_, true) => "the deadline passed; what is left stays where it is".to_owned(),
                _ => "what is left cannot be moved; it stays where it is".to_owned(),
            };
            let drained = remaining == 0;
            tell(
                tx,
                v1::DrainEvent {
                    detail,
                    remaining,
                    done: true,
                    drained,
                    report: None,
                },
            )
            .await;
            return Ok(());
        }
        let load = |c: &&Card| owned(&records, &c.id).len();
        let fits = |c: &&Card| c.id != worker && !c.draining && c.model == card.model;
        let Some(target) = cards.iter().filter(fits).min_by_key(load) else {
            return Err(Status::failed_precondition(format!(
                "no other worker serves {:?} and takes requests: start one, or let {worker} finish",
                card.model
            )));
        };
        let mut moving = tokio::task::JoinSet::new();
        for request in todo {
            let (service, to) = (service.clone(), target.id.clone());
            let left = end.saturating_duration_since(Instant::now());
            moving.spawn(async move {
                let job = match service.begin(request, &to, options).await {
                    Ok(job) => job,
                    Err(status) => return (request, Err(status)),
                };
                (request, Ok(service.finish(&job, left).await))
            });
        }
        while let Some(moved) = moving.join_next().await {
            let Ok((request, outcome)) = moved else {
                continue;
            };
            let mut event = v1::DrainEvent {
                remaining,
                ..Default::default()
            };
            match outcome {
                Ok(report) => {
                    event.detail = format!("{request}: {}", report.cause);
                    if !report.migrated && report.cause == "profile-mismatch" {
                        hopeless.insert(request);
                    }
                    event.report = Some(report);
                }
                Err(status) => event.detail = format!("{request}: {}", status.message()),
            }
            tell(tx, event).await;
        }
        tokio::time::sleep(AGAIN).await;
    }
}
