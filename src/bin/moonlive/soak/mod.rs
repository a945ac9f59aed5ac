//! `moonlive soak`: many migrations of mixed requests on real processes under random faults, beside
//! an oracle in processes of its own, and everything accounted for at the end.

mod account;
mod live;
mod plan;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use moonlivekv::node::faults::FIRED_FILE;
use moonlivekv::rpc;
use moonlivekv::rpc::v1::gateway_client::GatewayClient;
use parking_lot::Mutex;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::live::{Tally, World};
use crate::bench::progress::Progress;
use crate::cli::{EngineArgs, SoakArgs};
use crate::cluster::{self, Always, CALL, Cluster, TempDir};
use crate::exit::{Code, coded};

/// How often casualties are looked for.
const LOOK: Duration = Duration::from_millis(10);
/// How long a stopped coordinator stays so.
const PAUSE: Duration = Duration::from_millis(400);
/// A run in which nothing begins for this long is stuck.
const STUCK: Duration = Duration::from_secs(120);
/// Runs with fewer migrations say nothing about ratios.
const RATIOS_FROM: u64 = 200;

/// Runs; an error with exit code 1 where something is not as it should be.
pub fn run(args: SoakArgs, json: bool) -> anyhow::Result<()> {
    check(&args)?;
    let temp = TempDir::new()?;
    let began = Instant::now();
    let (live_dir, oracle_dir) = (subdir(temp.path(), "live")?, subdir(temp.path(), "oracle")?);
    let workers = (0..args.workers).map(|n| format!("w{n}")).collect();
    let always = Always {
        daemons: vec!["--open-to-faults".into()],
        workers: vec!["--pace".into(), format!("{}us", args.pace.as_micros())],
    };
    let mut live = start(&args, &live_dir, workers, always)?;
    let oracle = start(&args, &oracle_dir, vec!["w0".into()], Always::default())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let soaked = runtime.block_on(soak(&args, &mut live, &oracle));
    if let Some(out) = &args.out {
        keep(out, &live_dir)?;
    }
    let (tally, rest) = soaked?;
    let unclean: Vec<String> = live.stop().into_iter().chain(oracle.stop()).collect();
    let summary = Summary {
        args: &args,
        tally: &tally,
        rest: &rest,
        fired: fired(&live_dir),
        unclean,
        seconds: began.elapsed().as_secs(),
    };
    let (pass, value) = summary.json();
    if json {
        println!("{value}");
    } else {
        summary.print(pass);
    }
    if pass {
        Ok(())
    } else {
        Err(coded(Code::Fail, ""))
    }
}

fn check(args: &SoakArgs) -> anyhow::Result<()> {
    let wrong = |text: String| Err(coded(Code::Caller, text));
    if args.migrations == 0 {
        return wrong("--migrations must be at least 1".into());
    }
    if !(2..=8).contains(&args.workers) {
        return wrong(format!("--workers {}: 2 to 8", args.workers));
    }
    if !(1..=16).contains(&args.clients) {
        return wrong(format!("--clients {}: 1 to 16", args.clients));
    }
    if args.transport == Some(crate::cli::TransportKind::Local) {
        return wrong("--transport local is one process: tcp or shm".into());
    }
    Ok(())
}

fn subdir(dir: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = dir.join(name);
    std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
    Ok(path)
}

fn start(
    args: &SoakArgs,
    dir: &Path,
    workers: Vec<String>,
    always: Always,
) -> anyhow::Result<Cluster> {
    // Every request may be on two workers at once, at its longest, all of them on the same ones.
    let longest = (plan::CONTEXT.1 + plan::ROUND).div_ceil(16) as u32;
    let plan = cluster::Plan {
        dir: dir.to_owned(),
        http: ([127, 0, 0, 1], 0).into(),
        workers,
        one_process: false,
        engine: EngineArgs {
            model: None,
            size: args.size.clone(),
            block_tokens: 16,
            blocks: longest * (u32::from(args.clients) * 2 + 2),
            threads: 1,
            step_time: Duration::from_millis(8),
        },
        always,
        extra: Vec::new(),
    };
    // Children are started from this very thread: they end when it does.
    plan.start()
}

/// What is held at the end.
struct Rest {
    pools: Vec<account::Pool>,
    fds_back: bool,
    fds: Value,
    restarts: BTreeMap<String, u64>,
}

async fn soak(
    args: &SoakArgs,
    cluster: &mut Cluster,
    oracle: &Cluster,
) -> anyhow::Result<(Tally, Rest)> {
    let gateway = rpc::connect(&cluster.gateway.field("rpc")?.parse()?, CALL).await?;
    let world = Arc::new(World {
        args: args.clone(),
        http: cluster.http()?,
        oracle: oracle.http()?,
        gateway: GatewayClient::new(gateway),
        coordinator: Mutex::new(cluster.coordinator.field("rpc")?.parse()?),
        tally: Mutex::default(),
        progress: Progress::start(args.migrations),
        requests: AtomicU64::new(0),
        moves: AtomicU64::new(0),
        faulting: tokio::sync::Mutex::new(()),
        alone: tokio::sync::RwLock::new(()),
    });
    let mut attendant = Attendant::default();
    world.progress.say("a round without faults");
    attendant.rounds(cluster, &world, 0).await?;
    let before = account::fds_at_rest(cluster, None).await;
    world.progress.say("migrating under faults");
    let mut clients = JoinSet::new();
    for _ in 0..args.clients {
        clients.spawn(Arc::clone(&world).client());
    }
    attendant.attend(cluster, &world, &mut clients).await?;
    world.progress.say("a round without faults");
    attendant.rounds(cluster, &world, 1 << 32).await?;
    let pools = account::pools_at_rest(cluster).await;
    let after = account::fds_at_rest(cluster, Some(&before)).await;
    let (fds_back, fds) = account::compare(&before, &after);
    let tally = std::mem::take(&mut *world.tally.lock());
    let rest = Rest {
        pools,
        fds_back,
        fds,
        restarts: attendant.restarts,
    };
    Ok((tally, rest))
}

/// Sees to the processes: starts again what died, lets go on what was stopped.
#[derive(Default)]
struct Attendant {
    stopped_at: Option<Instant>,
    restarts: BTreeMap<String, u64>,
}

impl Attendant {
    /// Until all tasks have ended.
    async fn attend(
        &mut self,
        cluster: &mut Cluster,
        world: &World,
        tasks: &mut JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    None => return Ok(()),
                    Some(ended) => ended.context("a client")??,
                },
                () = tokio::time::sleep(LOOK) => {}
            }
            self.look(cluster, world)?;
            let now = {
                let tally = world.tally.lock();
                tally.begun() + tally.requests
            };
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() >= STUCK {
                bail!("nothing began or ended for {STUCK:?} after {seen} migrations and requests");
            }
        }
    }

    fn look(&mut self, cluster: &mut Cluster, world: &World) -> anyhow::Result<()> {
        match self.stopped_at {
            None if is_stopped(cluster.coordinator.pid()) => self.stopped_at = Some(Instant::now()),
            Some(at) if at.elapsed() >= PAUSE => {
                self.stopped_at = None;
                cluster.coordinator.signal(Signal::CONT)?;
            }
            _ => {}
        }
        let mut ended = Vec::new();
        cluster.replace_casualties(|what| ended.push(what))?;
        for what in ended {
            let name = what.split(' ').next().unwrap_or_default().to_owned();
            *self.restarts.entry(name).or_default() += 1;
        }
        *world.coordinator.lock() = cluster.coordinator.field("rpc")?.parse()?;
        Ok(())
    }

    /// As many rounds at once as there are clients: what is kept open for each is then open.
    async fn rounds(
        &mut self,
        cluster: &mut Cluster,
        world: &Arc<World>,
        first: u64,
    ) -> anyhow::Result<()> {
        let mut rounds = JoinSet::new();
        for n in 0..u64::from(world.args.clients) {
            rounds.spawn(Arc::clone(world).round(first + n));
        }
        self.attend(cluster, world, &mut rounds).await
    }
}

/// Whether a process was stopped by a signal.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold anything.
    stat.rsplit(')')
        .next()
        .is_some_and(|rest| rest.trim_start().starts_with('T'))
}

/// Faults that fired, by name and step.
fn fired(dir: &Path) -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string(dir.join(FIRED_FILE)).unwrap_or_default();
    let mut fired = BTreeMap::new();
    for line in text.lines() {
        let Ok(v) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        if let (Some(fault), Some(step)) = (v["fault"].as_str(), v["at_step"].as_str()) {
            *fired.entry(format!("{fault}@{step}")).or_default() += 1;
        }
    }
    fired
}

fn keep(out: &Path, dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        if path.extension().is_some_and(|e| e == "log" || e == "jsonl") {
            std::fs::copy(&path, out.join(name))
                .with_context(|| format!("cannot keep {}", path.display()))?;
        }
    }
    Ok(())
}

struct Summary<'a> {
    args: &'a SoakArgs,
    tally: &'a Tally,
    rest: &'a Rest,
    fired: BTreeMap<String, u64>,
    unclean: Vec<String>,
    seconds: u64,
}

impl Summary<'_> {
    fn ratio(&self, part: u64) -> f64 {
        let whole = self.tally.begun().max(1);
        (part as f64 / whole as f64 * 1e4).round() / 1e4
    }

    fn pauses(&self) -> Value {
        let mut all = self.tally.pauses.clone();
        all.sort_unstable();
        let at = |q: f64| {
            let last = all.len().checked_sub(1)?;
            all.get((last as f64 * q).round() as usize).copied()
        };
        json!({ "p50": at(0.5), "p99": at(0.99), "max": all.last() })
    }

    /// What is not as it should be.
    fn wrong(&self) -> Vec<String> {
        let (t, r) = (self.tally, self.rest);
        let mut wrong: Vec<String> = t.mismatches.clone();
        let broken = r.pools.iter().filter(|p| !p.is_whole());
        wrong.extend(broken.map(|p| format!("not given back: {}", p.json())));
        if !r.fds_back {
            wrong.push("descriptors are open that were not at the start".into());
        }
        wrong.extend(
            self.unclean
                .iter()
                .map(|n| format!("{n} did not end by itself")),
        );
        if self.args.migrations >= RATIOS_FROM {
            if self.ratio(t.committed) < 0.7 {
                wrong.push("fewer than 70 % of the migrations committed".into());
            }
            if self.ratio(t.kills) < 0.1 {
                wrong.push("fewer than 10 % of the migrations met a kill".into());
            }
        }
        wrong
    }

    fn json(&self) -> (bool, Value) {
        let (t, r) = (self.tally, self.rest);
        let wrong = self.wrong();
        let value = json!({
            "pass": wrong.is_empty(), "wrong": wrong, "seed": self.args.seed,
            "migrations": t.begun(), "committed": t.committed, "aborted": t.aborted,
            "committed_ratio": self.ratio(t.committed), "not_begun": t.not_begun,
            "ends": t.causes, "kills_planned": t.kills, "kills_ratio": self.ratio(t.kills),
            "faults_planned": t.planned, "faults_fired": self.fired, "restarts": r.restarts,
            "requests": t.requests, "tokens": t.tokens, "streams_differ": t.mismatches.len(),
            "fence_pause_us": self.pauses(),
            "pools": r.pools.iter().map(account::Pool::json).collect::<Vec<_>>(),
            "descriptors": r.fds, "workers": self.args.workers, "clients": self.args.clients,
            "size": self.args.size, "seconds": self.seconds,
        });
        (wrong.is_empty(), value)
    }

    fn print(&self, pass: bool) {
        let (t, r) = (self.tally, self.rest);
        println!(
            "{} migrations in {} s: {} committed ({:.1} %), {} not; {} calls began nothing",
            t.begun(),
            self.seconds,
            t.committed,
            self.ratio(t.committed) * 100.0,
            t.aborted,
            t.not_begun
        );
        for (end, n) in &t.causes {
            println!("  {n:>6}  {end}");
        }
        let fired: u64 = self.fired.values().sum();
        println!(
            "{fired} faults fired; {:.1} % of the migrations met a kill",
            self.ratio(t.kills) * 100.0
        );
        for (fault, n) in &self.fired {
            println!("  {n:>6}  {fault}");
        }
        println!(
            "{} requests, {} tokens: {} streams differ from the oracle's",
            t.requests,
            t.tokens,
            t.mismatches.len()
        );
        for p in &r.pools {
            println!(
                "{}: {} of {} blocks unused, {} bytes in quarantine",
                p.worker, p.unused, p.total, p.quarantined
            );
        }
        for row in r.fds.as_array().into_iter().flatten() {
            println!(
                "{}: {} descriptors at the start, {} at the end",
                row["daemon"].as_str().unwrap_or_default(),
                row["start"],
                row["end"]
            );
        }
        for wrong in self.wrong() {
            println!("WRONG: {wrong}");
        }
        println!("{}", if pass { "PASS" } else { "FAIL" });
    }
}
