//! The coordinator's control RPC: migrate, drain, status, watch.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{broadcast, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use super::core::{Core, Job};
use super::drain;
use super::report::report;
use crate::drive::now_ns;
use crate::id::RequestId;
use crate::migrate::coordinator::Done;
use crate::migrate::io::Event;
use crate::node::convert;
use crate::node::options::{Options, path_from};
use crate::route::Cause;
use crate::rpc::v1::{self, coordinator_server};
use crate::transport::Path;

/// The default deadline of a migration.
const DEADLINE: Duration = Duration::from_secs(30);

/// The service over a coordinator.
#[derive(Clone)]
pub struct Service(pub Arc<Core>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Reads the options of a migration.
fn options(transport: &str, verify: &str, max_bytes_per_s: u64) -> Result<Options, Status> {
    let path = match transport {
        "" => Path::Shm,
        name => path_from(name).ok_or_else(|| {
            Status::invalid_argument(format!("{name:?} is no transport: local, shm or tcp"))
        })?,
    };
    let verify_full = match verify {
        "" | "resident" => false,
        "full" => true,
        other => {
            return Err(Status::invalid_argument(format!(
                "{other:?} is no way to verify: resident or full"
            )));
        }
    };
    Ok(Options {
        path,
        verify_full,
        max_bytes_per_s,
        null_handoff: false,
    })
}

impl Service {
    fn lead(&self) -> Result<(), Status> {
        if self.0.leader.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(Status::failed_precondition(
            "this coordinator does not lead: ask the leader",
        ))
    }

    /// Starts a migration; refuses what could never begin.
    pub(super) async fn begin(
        &self,
        request: RequestId,
        to: &str,
        options: Options,
    ) -> Result<Arc<Job>, Status> {
        let (registry, id) = (self.0.registry.clone(), to.to_owned());
        let card = tokio::task::spawn_blocking(move || registry.worker(&id))
            .await
            .map_err(|e| Status::internal(e.to_string()))?
            .map_err(|e| Status::unavailable(e.to_string()))?;
        let dst = card.and_then(|c| c.worker()).ok_or_else(|| {
            Status::not_found(format!(
                "there is no worker {to:?}: `moonlive status` lists them"
            ))
        })?;
        let core = Arc::clone(&self.0);
        // The machine talks to the store and to sockets: not on the runtime's threads.
        tokio::task::spawn_blocking(move || core.start(request, options, Done::Start { dst }))
            .await
            .map_err(|e| Status::internal(e.to_string()))?
            .map_err(|e| Status::already_exists(e.to_string()))
    }

    /// Waits for a migration's end; at the deadline asks for its abort, and goes on waiting for the
    /// decision.
    pub(super) async fn finish(&self, job: &Arc<Job>, deadline: Duration) -> v1::MigrationReport {
        let ended = match tokio::time::timeout(deadline, job.ended()).await {
            Ok(ended) => ended,
            Err(_) => {
                let (core, job_) = (Arc::clone(&self.0), Arc::clone(job));
                let cancel = move || {
                    core.post(
                        &job_,
                        Event::Local(Done::Cancel {
                            cause: Cause::Timeout,
                        }),
                    );
                };
                // Whether the cancel ran is seen in the end it brings about.
                let _ = tokio::task::spawn_blocking(cancel).await;
                job.ended().await
            }
        };
        match ended {
            Some(ended) => report(&self.0, job, &ended).await,
            None => v1::MigrationReport {
                cause: "coordinator-stopped".into(),
                ..Default::default()
            },
        }
    }
}

#[tonic::async_trait]
impl coordinator_server::Coordinator for Service {
    type MigrateStream = Events<v1::MigrationEvent>;
    type DrainStream = Events<v1::DrainEvent>;
    type WatchStream = Events<v1::MigrationEvent>;

    async fn migrate(
        &self,
        request: Request<v1::MigrateRequest>,
    ) -> Result<Response<Self::MigrateStream>, Status> {
        self.lead()?;
        let ask = request.into_inner();
        let id = convert::request_id(&ask.request)
            .map_err(|e| Status::invalid_argument(e.to_string()))?;
        let mut options = options(&ask.transport, &ask.verify, ask.max_bytes_per_s)?;
        options.null_handoff = ask.null_handoff;
        let deadline = match ask.deadline_ms {
            0 => DEADLINE,
            ms => Duration::from_millis(ms),
        };
        let mut watch = self.0.events.subscribe();
        let job = self.begin(id, &ask.to, options).await?;
        let (tx, rx) = mpsc::channel(64);
        let service = self.clone();
        tokio::spawn(async move {
            let name = id.to_string();
            let finish = service.finish(&job, deadline);
            tokio::pin!(finish);
            let mut report = loop {
                tokio::select! {
                    event = watch.recv() => match event {
                        Ok(event) if event.request == name => {
                            // A caller that has gone away does not stop a migration.
                            let _ = tx.send(Ok(event)).await;
                        }
                        Err(broadcast::error::RecvError::Closed) => break finish.await,
                        _ => {}
                    },
                    report = &mut finish => break report,
                }
            };
            report.verify = if options.verify_full {
                "full"
            } else {
                "resident"
            }
            .to_owned();
            let phase = if report.migrated { "DONE" } else { "ABORTED" };
            let event = v1::MigrationEvent {
                request: name,
                migration_epoch: report.migration_epoch,
                phase: phase.to_owned(),
                at_ns: now_ns(),
                detail: report.cause.clone(),
                report: Some(report),
            };
            let _ = service.0.events.send(event.clone());
            let _ = tx.send(Ok(event)).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        self.lead()?;
        let ask = request.into_inner();
        let options = options(&ask.transport, "", 0)?;
        let deadline = match ask.deadline_ms {
            0 => DEADLINE,
            ms => Duration::from_millis(ms),
        };
        let (tx, rx) = mpsc::channel(64);
        let service = self.clone();
        tokio::spawn(async move {
            let done = drain::drain(&service, &ask.worker, options, deadline, &tx).await;
            if let Err(status) = done {
                let _ = tx.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn status(
        &self,
        _: Request<v1::CoordinatorStatusRequest>,
    ) -> Result<Response<v1::CoordinatorStatus>, Status> {
        let core = &self.0;
        let running = core.running().into_iter().map(|job| v1::MigrationEvent {
            request: job.request.to_string(),
            migration_epoch: job.parties().epoch.0,
            at_ns: now_ns(),
            ..Default::default()
        });
        Ok(Response::new(v1::CoordinatorStatus {
            id: core.id.clone(),
            leader: core.leader.load(Ordering::SeqCst),
            leader_id: core.leader_id(),
            term: core.term.load(Ordering::SeqCst),
            running: running.collect(),
            migrations_committed: core.committed.load(Ordering::Relaxed),
            migrations_aborted: core.aborted.load(Ordering::Relaxed),
        }))
    }

    async fn watch(
        &self,
        _: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let events = tokio_stream::wrappers::BroadcastStream::new(self.0.events.subscribe());
        // A watcher that fell behind misses events; it is not cut off for it.
        let events = events.filter_map(|e| e.ok().map(Ok));
        Ok(Response::new(Box::pin(events)))
    }

    async fn inject(
        &self,
        request: Request<v1::InjectRequest>,
    ) -> Result<Response<v1::InjectReply>, Status> {
        convert::arm(&self.0.faults, &request.into_inner())?;
        Ok(Response::new(v1::InjectReply {}))
    }
}
