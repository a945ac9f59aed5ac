//! The worker's control RPC.

use std::sync::Arc;

use tokio::sync::Notify;
use tonic::{Request, Response, Status};

use super::core::Core;
use crate::engine::reference::EngineError;
use crate::id::{ErrorKind, MigrationEpoch, OwnerEpoch};
use crate::node::convert::{self, worker_msg};
use crate::rpc::v1::worker_server;
use crate::rpc::{PROTOCOL, v1};

/// What `Describe` answers beside what the core knows.
#[derive(Debug, Clone, Default)]
pub struct Listening {
    /// The mesh listener.
    pub mesh: String,
    /// Bulk listeners.
    pub data: String,
}

/// The service over a worker.
#[derive(Clone)]
pub struct Service {
    core: Arc<Core>,
    listening: Arc<Listening>,
    stop: Arc<Notify>,
}

/// An engine's error as the RPC's.
fn status(error: &EngineError) -> Status {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::Caller => Status::invalid_argument(text),
        ErrorKind::Retryable => Status::resource_exhausted(text),
        ErrorKind::Unsupported => Status::failed_precondition(text),
        ErrorKind::PeerLost | ErrorKind::DeviceLost { .. } => Status::unavailable(text),
        ErrorKind::Integrity => Status::data_loss(text),
        ErrorKind::Bug => Status::internal(text),
    }
}

/// Runs what may block away from the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Status::internal(e.to_string()))
}

impl Service {
    /// Over this worker; `stop` is notified by `Shutdown`.
    pub fn new(core: Arc<Core>, listening: Listening, stop: Arc<Notify>) -> Self {
        Self {
            core,
            listening: Arc::new(listening),
            stop,
        }
    }
}

/// Descriptors that this process has open.
pub fn open_fds() -> u32 {
    let count = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    // One of them reads the directory.
    u32::try_from(count.saturating_sub(1)).unwrap_or(u32::MAX)
}

#[tonic::async_trait]
impl worker_server::Worker for Service {
    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        let (core, caps) = (&self.core, &self.core.capabilities);
        let hex = |b: &[u8]| b.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let block_tokens = caps
            .header
            .groups
            .first()
            .and_then(|g| core.adapter.pool(g.group).ok());
        Ok(Response::new(v1::WorkerDescription {
            worker: Some(worker_msg(&core.me)),
            protocol: PROTOCOL,
            model: core.engine.model(),
            model_digest: caps.model.to_vec(),
            numerics_profile: hex(&caps.fingerprint.numerics_profile),
            block_tokens: block_tokens.map_or(0, |p| p.layout.block_tokens()),
            page_tokens: caps.header.page_tokens.into(),
            transports: core.bulk.names().into_iter().map(str::to_owned).collect(),
            fence_endpoint: self.listening.mesh.clone(),
            data_endpoint: self.listening.data.clone(),
            pid: std::process::id(),
        }))
    }

    async fn submit(
        &self,
        request: Request<v1::SubmitRequest>,
    ) -> Result<Response<v1::SubmitReply>, Status> {
        if self.core.is_draining() {
            return Err(Status::unavailable(
                "this worker is being emptied: try another",
            ));
        }
        let spec = convert::generate_spec(request.into_inner())
            .map_err(|e| Status::invalid_argument(e.to_string()))?;
        let core = Arc::clone(&self.core);
        let prompt_tokens = blocking(move || core.admit(spec))
            .await?
            .map_err(|e| status(&e))?;
        Ok(Response::new(v1::SubmitReply {
            prompt_tokens,
            admitted: true,
        }))
    }

    async fn abort(
        &self,
        request: Request<v1::AbortRequest>,
    ) -> Result<Response<v1::AbortReply>, Status> {
        let id = convert::request_id(&request.into_inner().request)
            .map_err(|e| Status::invalid_argument(e.to_string()))?;
        let core = Arc::clone(&self.core);
        let found = blocking(move || core.abort(id))
            .await?
            .map_err(|e| status(&e))?;
        Ok(Response::new(v1::AbortReply { found }))
    }

    async fn status(
        &self,
        _: Request<v1::WorkerStatusRequest>,
    ) -> Result<Response<v1::WorkerStatus>, Status> {
        let core = Arc::clone(&self.core);
        let load = blocking(move || core.engine.load()).await?;
        let requests =
            load.requests
                .into_iter()
                .map(|(request, kv_tokens, output_tokens, state)| {
                    let epoch = self.core.owner_epoch(request).unwrap_or(OwnerEpoch(0));
                    v1::RunningRequest {
                        request: request.to_string(),
                        owner_epoch: epoch.0,
                        kv_tokens,
                        output_tokens,
                        state,
                    }
                });
        Ok(Response::new(v1::WorkerStatus {
            worker: Some(worker_msg(&self.core.me)),
            draining: self.core.is_draining(),
            running: load.running,
            waiting: load.waiting,
            blocks_total: load.blocks_total,
            blocks_free: load.blocks_free,
            quarantined_bytes: load.quarantined_bytes,
            requests: requests.collect(),
            open_fds: open_fds(),
            pins: load.pins,
            stages: load.stages,
            blocks_cached: load.blocks_cached,
        }))
    }

    async fn measured(
        &self,
        request: Request<v1::MeasuredRequest>,
    ) -> Result<Response<v1::MeasuredReply>, Status> {
        let ask = request.into_inner();
        let id = convert::request_id(&ask.request)
            .map_err(|e| Status::invalid_argument(e.to_string()))?;
        let reply = self
            .core
            .measures
            .reply(id, MigrationEpoch(ask.migration_epoch));
        Ok(Response::new(reply))
    }

    async fn drain(
        &self,
        request: Request<v1::DrainingRequest>,
    ) -> Result<Response<v1::DrainingReply>, Status> {
        let (core, draining) = (Arc::clone(&self.core), request.into_inner().draining);
        blocking(move || core.set_draining(draining)).await?;
        Ok(Response::new(v1::DrainingReply {}))
    }

    async fn shutdown(
        &self,
        _: Request<v1::ShutdownRequest>,
    ) -> Result<Response<v1::ShutdownReply>, Status> {
        self.stop.notify_one();
        Ok(Response::new(v1::ShutdownReply {}))
    }

    async fn inject(
        &self,
        request: Request<v1::InjectRequest>,
    ) -> Result<Response<v1::InjectReply>, Status> {
        convert::arm(&self.core.faults, &request.into_inner())?;
        Ok(Response::new(v1::InjectReply {}))
    }
}
