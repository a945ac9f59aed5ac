//! An engine behind the border must keep every promise that it keeps without it.

use super::*;
use crate::engine::adapter::{AdapterError, EngineAdapter, PinId, View};
use crate::engine::conformance::toy::{ToyConfig, ToyDriver};
use crate::engine::conformance::{self, Driver, Emitted, Pair, Plan};
use crate::id::{ErrorKind, Incarnation, MigrationEpoch, RequestId};
use crate::rpc::{Server, connect};
use crate::wire::Endpoint;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tonic::service::Routes;

const LIMIT: Duration = Duration::from_secs(20);

/// A toy engine behind a unix socket.
struct Behind {
    inner: ToyDriver,
    remote: Arc<RemoteEngine>,
    stop: Option<oneshot::Sender<()>>,
    _dir: tempfile::TempDir,
    _runtime: Runtime,
}

impl Behind {
    fn new(config: ToyConfig, limit: Duration) -> Self {
        let inner = ToyDriver::new(config);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let endpoint = Endpoint::Unix(dir.path().join("engine.sock"));
        let routes = Routes::new(EngineService::new(inner.adapter()));
        let (stop, stopped) = oneshot::channel::<()>();
        let channel = runtime.block_on(async {
            let server = Server::bind(&endpoint, false).await.unwrap();
            tokio::spawn(server.serve(routes, async {
                let _ = stopped.await;
            }));
            connect(&endpoint, LIMIT).await.unwrap()
        });
        let remote = RemoteEngine::attach(channel, runtime.handle().clone(), limit).unwrap();
        Self {
            inner,
            remote: Arc::new(remote),
            stop: Some(stop),
            _dir: dir,
            _runtime: runtime,
        }
    }
}

impl Driver for Behind {
    fn adapter(&self) -> Arc<dyn EngineAdapter> {
        self.remote.clone()
    }
    fn resident(&self) -> Arc<dyn EngineAdapter> {
        self.inner.adapter()
    }
    fn start(&mut self, request: RequestId, plan: &Plan) -> Result<(), String> {
        self.inner.start(request, plan)
    }
    fn step(&mut self) {
        self.inner.step();
    }
    fn emitted(&self, request: RequestId) -> Vec<Emitted> {
        self.inner.emitted(request)
    }
    fn abort(&mut self, request: RequestId) {
        self.inner.abort(request);
    }
    fn rewrite_sealed_slot(&mut self, request: RequestId, token: u64) -> bool {
        self.inner.rewrite_sealed_slot(request, token)
    }
}

#[test]
fn an_engine_in_another_process_holds_every_clause() {
    let report = conformance::run(|| Pair {
        source: Box::new(Behind::new(ToyConfig::small(1), LIMIT)),
        destination: Box::new(Behind::new(ToyConfig::wide(2), LIMIT)),
    });
    assert!(report.holds(), "{report}");
    assert_eq!(report.not_applicable().count(), 0, "{report}");
}

#[test]
fn describing_loses_nothing() {
    let behind = Behind::new(ToyConfig::wide(7), LIMIT);
    let (near, far) = (
        behind.inner.adapter().capabilities(),
        behind.remote.capabilities(),
    );
    assert_eq!(format!("{near:?}"), format!("{far:?}"));
}

#[test]
fn another_life_of_the_engine_is_refused() {
    let behind = Behind::new(ToyConfig::small(1), LIMIT);
    let other = behind.remote.another(Incarnation(99));
    let (asked, own) = (Incarnation(99), Incarnation(1));
    let wrong = AdapterError::WrongIncarnation { asked, own };
    let (request, epoch) = (RequestId([1; 16]), MigrationEpoch(1));
    assert_eq!(other.pin(request, epoch).unwrap_err(), wrong);
    assert_eq!(other.unpin(PinId(1)).unwrap_err(), wrong);
    assert_eq!(other.token_log(View::Pin(PinId(1)), 0).unwrap_err(), wrong);
    let soon = Instant::now() + LIMIT;
    assert_eq!(other.hold(request, epoch, soon).unwrap_err(), wrong);
    assert_eq!(other.journal_checkpoint(request, soon).unwrap_err(), wrong);
}

#[test]
fn an_engine_that_is_gone_is_lost_by_the_time_limit() {
    let mut behind = Behind::new(ToyConfig::small(1), Duration::from_millis(300));
    behind.stop.take();
    std::fs::remove_dir_all(behind._dir.path()).unwrap();
    let began = Instant::now();
    let error = loop {
        // Calls under way when the server stops may still be answered.
        match behind.remote.pin(RequestId([1; 16]), MigrationEpoch(1)) {
            Err(e @ AdapterError::EngineLost(_)) => break e,
            _ => assert!(
                began.elapsed() < LIMIT,
                "a stopped engine goes on answering"
            ),
        }
    };
    assert_eq!(error.kind(), ErrorKind::PeerLost);
}

#[test]
fn an_engine_that_never_ends_a_log_is_not_believed() {
    let endless = |_| Ok(vec![7; MAX_TOKENS]);
    let error = client::whole_log(3 * MAX_TOKENS, 0, endless).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Bug);
    let parts = |from: u64| Ok(vec![7; MAX_TOKENS.min(3 * MAX_TOKENS - 1 - from as usize)]);
    let whole = client::whole_log(3 * MAX_TOKENS, 0, parts).unwrap();
    assert_eq!(whole.len(), 3 * MAX_TOKENS - 1);
}
