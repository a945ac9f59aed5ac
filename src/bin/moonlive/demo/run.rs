//! One run: daemons up, clients streaming, migrations or none, everything accounted for, down.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use moonlivekv::id::RequestId;
use moonlivekv::node::faults::FIRED_FILE;
use moonlivekv::rpc::v1;
use serde::Deserialize;

use super::ask::Plan;
use super::fault::Injected;
use super::live;
use super::say::Say;
use crate::cli::{DemoArgs, TransportKind};
use crate::client::Transcript;
use crate::cluster;

/// What to run.
pub struct Setup<'a> {
    /// Where the daemons' sockets, logs and dumps go.
    pub dir: PathBuf,
    /// The command line.
    pub args: &'a DemoArgs,
    /// The requests.
    pub plan: &'a Plan,
    /// With migrations.
    pub migrate: bool,
    /// With a fault.
    pub fault: Option<&'a Injected>,
    /// The narrator.
    pub say: &'a Say,
}

/// A fault that fired, as its victim wrote down.
#[derive(Debug, Clone, Deserialize)]
pub struct Fired {
    /// Whose.
    pub by: String,
    /// When.
    pub at_step: String,
    /// An effect that it must not have had.
    #[serde(default)]
    pub escaped: Option<String>,
}

/// One request's files of KV and control state, by output token.
pub type Dumps = BTreeMap<(RequestId, u64), (PathBuf, PathBuf)>;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What the clients saw, in the order of the plan.
    pub transcripts: Vec<Transcript>,
    /// What became of each migration, in the order of the plan.
    pub reports: Vec<v1::MigrationReport>,
    /// KV and control state at given output tokens.
    pub dumps: Dumps,
    /// Faults that fired.
    pub fired: Vec<Fired>,
    /// What is not accounted for at the end.
    pub leaks: Vec<String>,
}

impl Outcome {
    /// Output tokens that arrived per second after the first one, all clients together; `None` with
    /// fewer than two. What starts and stops the daemons is not in it, a migration is.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seen = || self.transcripts.iter().flat_map(|t| &t.tokens);
        let (first, last) = (seen().map(|t| t.at).min()?, seen().map(|t| t.at).max()?);
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        (seconds > 0.0).then(|| (seen().count() - 1) as f64 / seconds)
    }
}

/// Blocks that hold every request twice (it can be on both workers at once), and some.
fn blocks(setup: &Setup<'_>) -> u32 {
    let (args, per_block) = (setup.args, setup.args.engine.block_tokens.max(1));
    let tokens = args.context.max(1024) + args.output + per_block;
    tokens.div_ceil(per_block).saturating_mul(args.requests * 2) + 64
}

fn extra(setup: &Setup<'_>) -> Vec<(String, String)> {
    let mut extra = Vec::new();
    let mut flag = |daemon: &str, name: &str, value: String| {
        extra.push((daemon.to_owned(), name.to_owned()));
        extra.push((daemon.to_owned(), value));
    };
    let workers = if setup.args.transport == TransportKind::Local {
        &["w0"][..]
    } else {
        &["w0", "w1"]
    };
    for worker in workers {
        flag(worker, "--dump-at", setup.plan.dump_at.to_string());
    }
    if let Some(fault) = setup.fault {
        flag(fault.victim, "--inject", fault.plan.to_string());
    }
    if let (true, Some(seq)) = (setup.migrate, setup.args.flip_output_token) {
        for worker in workers {
            flag(worker, "--flip-token", seq.to_string());
        }
    }
    extra
}

/// The run without a migration need not last: nothing is to be made good in it.
fn pace(setup: &Setup<'_>) -> Vec<String> {
    match setup.args.pace {
        Some(pace) if setup.migrate => {
            vec!["--pace".into(), format!("{}us", pace.as_micros())]
        }
        _ => Vec::new(),
    }
}

/// Runs.
pub fn run(setup: &Setup<'_>) -> anyhow::Result<Outcome> {
    let mut engine = setup.args.engine.clone();
    if engine.blocks == 0 {
        engine.blocks = blocks(setup);
    }
    let plan = cluster::Plan {
        dir: setup.dir.clone(),
        http: ([127, 0, 0, 1], 0).into(),
        workers: vec!["w0".into(), "w1".into()],
        one_process: setup.args.transport == TransportKind::Local,
        engine,
        always: cluster::Always {
            daemons: Vec::new(),
            workers: pace(setup),
        },
        extra: extra(setup),
    };
    // Children are started from this very thread: they end when it does.
    let mut cluster = plan.start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let mut outcome = runtime.block_on(live::drive(&mut cluster, setup))?;
    let casualties = setup.fault.map(|f| f.victim);
    outcome
        .leaks
        .extend(runtime.block_on(live::leaks(&mut cluster, casualties)));
    outcome.fired = fired(&setup.dir);
    outcome
        .leaks
        .extend(outcome.fired.iter().filter_map(|f| f.escaped.clone()));
    for name in cluster.stop() {
        if casualties != Some(name.as_str()) {
            outcome.leaks.push(format!("{name} did not end by itself"));
        }
    }
    outcome.dumps = dumps(&setup.dir)?;
    Ok(outcome)
}

/// What the victims wrote down so far.
pub fn fired(dir: &Path) -> Vec<Fired> {
    let text = std::fs::read_to_string(dir.join(FIRED_FILE)).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Finds the files that the workers wrote.
fn dumps(dir: &Path) -> anyhow::Result<Dumps> {
    let mut found = Dumps::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let is_kv = path.extension().is_some_and(|e| e == "kv");
        let stem = path.file_stem().and_then(|s| s.to_str()).filter(|_| is_kv);
        let Some((request, seal)) = stem.and_then(|s| s.split_once('-')) else {
            continue;
        };
        let (Ok(request), Ok(seal)) = (request.parse(), seal.parse()) else {
            continue;
        };
        let control = path.with_extension("control");
        if control.exists() {
            found.insert((request, seal), (path, control));
        }
    }
    Ok(found)
}

/// Waits until `done`, at most until `deadline`.
pub async fn wait_until(deadline: Instant, mut done: impl AsyncFnMut() -> bool) -> bool {
    while !done().await {
        if Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    true
}
