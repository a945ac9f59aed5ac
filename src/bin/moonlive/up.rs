//! `moonlive up`: a whole deployment on this machine, kept running until a signal.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::bail;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use moonlivekv::rpc::{self, v1};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::admin::block_on;
use crate::children::START_DEADLINE;
use crate::cli::{ListenArgs, UpArgs};
use crate::cluster::{Always, CALL, Cluster, FILE, Plan, TempDir};
use crate::daemons::directory;
use crate::exit::{Code, coded};

/// The flags that all daemons are given. Each has ports of its own: the kernel chooses them.
fn everywhere(listening: &ListenArgs) -> Vec<String> {
    let mut all = vec!["--log".to_owned(), listening.log.clone()];
    if let Some(at) = listening.listen {
        all.extend([
            "--listen".to_owned(),
            format!("{}", SocketAddr::new(at.ip(), 0)),
        ]);
    }
    if listening.listen_beyond_loopback {
        all.push("--listen-beyond-loopback".to_owned());
    }
    all
}

/// Runs until SIGINT or SIGTERM.
pub fn run(args: UpArgs, json: bool) -> anyhow::Result<()> {
    let temp = if args.dir.is_none() {
        Some(TempDir::new()?)
    } else {
        None
    };
    let dir: PathBuf = match (&args.dir, &temp) {
        (Some(dir), _) => directory(dir)?,
        (None, Some(temp)) => temp.path().to_owned(),
        (None, None) => bail!("no directory"),
    };
    let plan = Plan {
        dir: dir.clone(),
        http: args.http,
        workers: (0..args.workers).map(|n| format!("w{n}")).collect(),
        one_process: false,
        engine: args.engine,
        always: Always {
            daemons: everywhere(&args.listening),
            workers: match args.pace {
                Some(pace) => vec!["--pace".into(), format!("{}us", pace.as_micros())],
                None => Vec::new(),
            },
        },
        extra: Vec::new(),
    };
    let mut cluster = plan.start()?;
    let http = cluster.http()?;
    block_on(joined(&cluster, usize::from(args.workers)))?;
    if json {
        println!(
            "{}",
            json!({ "http": format!("http://{http}"), "dir": dir })
        );
    } else {
        println!("HTTP API     http://{http}/v1/completions");
        println!(
            "directory    {} ({FILE}, logs, store, journal)",
            dir.display()
        );
        println!(
            "try          curl -N http://{http}/v1/completions -d '{{\"prompt\":\"Once upon a time\",\"stream\":true,\"max_tokens\":400}}'"
        );
        println!("             moonlive status --dir {}", dir.display());
        println!("Ctrl-C ends it; requests under way are in the journal.");
    }
    let outcome = block_on(watch(&mut cluster));
    if !json {
        println!("stopping");
    }
    let unclean = cluster.stop();
    outcome?;
    if !unclean.is_empty() {
        bail!(
            "{} had to be killed; see the logs in {}",
            unclean.join(", "),
            dir.display()
        );
    }
    Ok(())
}

/// Waits until the gateway can place requests on every worker: an address that is told before is
/// answered with 503.
async fn joined(cluster: &Cluster, workers: usize) -> anyhow::Result<()> {
    let at = cluster.gateway.field("rpc")?.parse()?;
    let mut gateway = GatewayClient::new(rpc::connect(&at, CALL).await?);
    let end = Instant::now() + START_DEADLINE;
    loop {
        let mut ask = tonic::Request::new(v1::GatewayStatusRequest {});
        ask.set_timeout(CALL);
        let status = gateway.status(ask).await?.into_inner();
        let ready = status.workers.iter().filter(|w| w.ready).count();
        if ready >= workers {
            return Ok(());
        }
        if Instant::now() >= end {
            let text = format!(
                "{ready} of {workers} workers take requests after {START_DEADLINE:?}: see the logs \
                 in the directory, or start fewer"
            );
            return Err(coded(Code::Deadline, text));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns at a signal. A worker or coordinator that ends is started again; without the gateway
/// nothing can be served.
async fn watch(cluster: &mut Cluster) -> anyhow::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            () = tokio::time::sleep(Duration::from_millis(250)) => {}
        }
        cluster.replace_casualties(|what| eprintln!("moonlive: {what}"))?;
    }
}
