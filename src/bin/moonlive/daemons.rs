//! `moonlive worker`, `coordinator`, `gateway`: one daemon in the foreground until a signal.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use moonlivekv::drive::{Listen, ListenError};
use moonlivekv::engine::reference::{EngineConfig, ModelSource, SeededSize, SyntheticGeometry};
use moonlivekv::gateway;
use moonlivekv::id::WorkerId;
use moonlivekv::migrate::limits::Limits;
use moonlivekv::node::{coordinator, worker};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::children::{die_with, say_ready};
use crate::cli::{ChildArgs, CoordinatorArgs, EngineArgs, GatewayArgs, ListenArgs, WorkerArgs};
use crate::exit::{Code, coded};

/// How long a worker may take to hand its tokens over after a signal.
const FLUSH: Duration = Duration::from_secs(5);

/// What every daemon does first: logs to standard error, ties its life to its parent's.
fn begin(child: &ChildArgs, listening: &ListenArgs) -> anyhow::Result<tokio::runtime::Runtime> {
    die_with(child.die_with)?;
    logs(&listening.log)?;
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Logs to standard error. A span says its time when it closes.
fn logs(level: &str) -> anyhow::Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(level).map_err(|e| {
        let text =
            format!("--log {level:?}: {e}; write error, warn, info, debug, trace or phase=debug");
        coded(Code::Caller, text)
    })?;
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_span_events(FmtSpan::CLOSE)
        .with_writer(|| Lossy(std::io::stderr()))
        .log_internal_errors(false)
        .with_ansi(false)
        .with_target(false);
    // A second one in this process is refused; the first one serves.
    let _ = subscriber.try_init();
    Ok(())
}

/// Drops what it cannot write: a full disk under the log must not end what is being logged.
struct Lossy(std::io::Stderr);

impl std::io::Write for Lossy {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let _ = self.0.write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// How a daemon was told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    /// SIGINT.
    Now,
    /// SIGTERM.
    InOrder,
}

/// The signals that end a daemon.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn told(&mut self) -> Told {
        tokio::select! {
            _ = self.interrupt.recv() => Told::Now,
            _ = self.terminate.recv() => Told::InOrder,
        }
    }
}

fn listen(args: &ListenArgs) -> anyhow::Result<Listen> {
    let wrong = |e: ListenError| coded(Code::Caller, format!("--listen: {e}"));
    match args.listen {
        Some(at) => Listen::tcp(at, args.listen_beyond_loopback).map_err(wrong),
        None => Ok(Listen::default()),
    }
}

/// The protocol's bounds for daemons on one machine or one rack: a step before the fence is a matter
/// of milliseconds there.
pub fn limits() -> Limits {
    Limits {
        step_ns: 2_000_000_000,
        ..Limits::default()
    }
}

/// The gateway's: a recovery may take as long as a long prefill.
fn recovery_limits() -> Limits {
    Limits {
        step_ns: 120_000_000_000,
        ..Limits::default()
    }
}

/// The directory of `--dir`, there and whole.
pub fn directory(dir: &Path) -> anyhow::Result<std::path::PathBuf> {
    let made = std::fs::create_dir_all(dir).and_then(|()| dir.canonicalize());
    made.with_context(|| {
        let remedy = "name a directory, there or not, in which files can be created";
        format!("--dir {}: {remedy}", dir.display())
    })
}

/// The engine's configuration from the command line.
pub fn engine_config(args: &EngineArgs) -> anyhow::Result<EngineConfig> {
    let model = match &args.model {
        Some(path) => ModelSource::Gguf { path: path.clone() },
        None if args.size == "qwen2.5-7b" => ModelSource::Synthetic {
            geometry: SyntheticGeometry::QWEN2_5_7B,
            seed: 1,
            step_time: args.step_time,
        },
        None => ModelSource::Seeded {
            size: match args.size.as_str() {
                "tiny" => SeededSize::Tiny,
                "small" => SeededSize::Small,
                "medium" => SeededSize::Medium,
                other => {
                    return Err(coded(
                        Code::Caller,
                        format!("--size {other}: there are tiny, small, medium and qwen2.5-7b"),
                    ));
                }
            },
            seed: 1,
        },
    };
    let mut config = EngineConfig::new(model);
    config.block_tokens = args.block_tokens;
    if args.blocks > 0 {
        config.blocks = args.blocks;
    }
    config.threads = usize::from(args.threads);
    config.shared_memory = true;
    config.prefault = true;
    Ok(config)
}

fn fault(child: &ChildArgs) -> anyhow::Result<Option<moonlivekv::node::faults::Plan>> {
    let parse = |s: &String| s.parse().map_err(|e| coded(Code::Caller, e));
    child.inject.as_ref().map(parse).transpose()
}

/// A daemon's name, which is part of file names.
fn name_of(id: &str) -> anyhow::Result<WorkerId> {
    WorkerId::new(id.to_owned()).map_err(|e| coded(Code::Caller, format!("--id {id:?}: {e}")))
}

fn endpoint(flag: &str, text: &str) -> anyhow::Result<moonlivekv::wire::Endpoint> {
    let parsed: Result<_, moonlivekv::wire::EndpointError> = text.parse();
    parsed.with_context(|| flag.to_owned())
}

fn page_of(at: std::net::SocketAddr) -> String {
    format!("http://{at}/metrics")
}

/// `moonlive worker`
pub fn worker(args: WorkerArgs) -> anyhow::Result<()> {
    let runtime = begin(&args.child, &args.listening)?;
    let listen = listen(&args.listening)?;
    let dir = directory(&args.place.dir)?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let mut all = Vec::new();
        for id in &args.id {
            let mut engine = engine_config(&args.engine)?;
            engine.pace = args.pace;
            // Another order of blocks in each worker, so that no test passes by equal block ids.
            engine.block_shuffle_seed = id.bytes().fold(7, |h, b| h * 31 + u64::from(b));
            let config = worker::Config {
                id: name_of(id)?,
                dir: dir.clone(),
                listen,
                metrics: args.metrics.metrics,
                gateway: endpoint("--gateway", &args.gateway)?,
                store: endpoint("--store", &args.store)?,
                engine,
                limits: limits(),
                fault: fault(&args.child)?,
                open_to_faults: args.child.open_to_faults,
                dump_at: args.dump_at,
                flip_token: args.flip_token,
                null_handoffs: args.null_handoffs,
            };
            all.push(worker::start(config).await?);
        }
        let rpcs: serde_json::Map<String, serde_json::Value> = all
            .iter()
            .map(|w| (w.card().id.clone(), json!(w.card().rpc)))
            .collect();
        let data: Vec<&String> = all.iter().flat_map(worker::Running::data).collect();
        let pages: Vec<String> = all.iter().map(|w| page_of(w.metrics_at())).collect();
        say_ready(json!({
            "ready": "worker", "id": args.id.join("+"), "rpcs": rpcs, "data": data,
            "metrics": pages, "pid": std::process::id(), "model": all[0].card().model,
        }));
        let told = signals.told().await;
        if told == Told::InOrder && !args.drain_deadline.is_zero() {
            let deadline = Instant::now() + args.drain_deadline;
            let leaving = async {
                for worker in &all {
                    let left = worker.leave(deadline).await;
                    tracing::info!(worker = worker.card().id, ?left, "told to end");
                }
            };
            tokio::select! {
                () = leaving => {}
                _ = signals.told() => tracing::info!("told again: ends at once"),
            }
        }
        let ended = tokio::task::spawn_blocking(move || {
            for worker in &all {
                worker.end(Instant::now() + FLUSH);
            }
        });
        ended.await?;
        anyhow::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// `moonlive coordinator`
pub fn coordinator(args: CoordinatorArgs) -> anyhow::Result<()> {
    let runtime = begin(&args.child, &args.listening)?;
    let listen = listen(&args.listening)?;
    let dir = directory(&args.place.dir)?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let config = coordinator::Config {
            id: name_of(&args.id)?.to_string(),
            dir,
            listen,
            metrics: args.metrics.metrics,
            store: endpoint("--store", &args.store)?,
            limits: limits(),
            fault: fault(&args.child)?,
            open_to_faults: args.child.open_to_faults,
        };
        let running = coordinator::start(config).await?;
        say_ready(json!({
            "ready": "coordinator", "id": args.id, "rpc": running.rpc().to_string(),
            "metrics": page_of(running.metrics_at()), "pid": std::process::id(),
        }));
        signals.told().await;
        tokio::task::spawn_blocking(move || running.end()).await?;
        anyhow::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

/// `moonlive gateway`
pub fn gateway(args: GatewayArgs) -> anyhow::Result<()> {
    let runtime = begin(&args.child, &args.listening)?;
    let listen = listen(&args.listening)?;
    let dir = directory(&args.place.dir)?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let log = gateway::open_log(&dir)?;
        let config = gateway::Config {
            dir,
            listen,
            http: args.http,
            beyond_loopback: args.listening.listen_beyond_loopback,
            limits: recovery_limits(),
        };
        let running = gateway::start(config, Arc::clone(&log)).await?;
        let at = running.listening();
        say_ready(json!({
            "ready": "gateway", "http": at.http.to_string(), "mesh": at.mesh.to_string(),
            "store": at.store.to_string(), "rpc": at.rpc.to_string(), "pid": std::process::id(),
        }));
        signals.told().await;
        running.end().await;
        anyhow::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}
