//! One gateway, one coordinator and some workers as child processes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use crate::children::{Children, Daemon, STOP_DEADLINE};
use crate::cli::EngineArgs;
use crate::exit::{Code, coded};

/// The file in a deployment's directory that says where its daemons are.
pub const FILE: &str = "deployment.json";

/// What to start.
pub struct Plan {
    /// Sockets, logs, store and journal go here; must exist.
    pub dir: PathBuf,
    /// The HTTP API's address.
    pub http: SocketAddr,
    /// Names of the workers.
    pub workers: Vec<String>,
    /// All workers in one process, for the `local` transport.
    pub one_process: bool,
    /// The model.
    pub engine: EngineArgs,
    /// Flags that daemons get again when they are started again.
    pub always: Always,
    /// Further flags by daemon name.
    pub extra: Vec<(String, String)>,
}

/// Flags that are not for one start only.
#[derive(Debug, Clone, Default)]
pub struct Always {
    /// Every daemon's.
    pub daemons: Vec<String>,
    /// Every worker's, beside those.
    pub workers: Vec<String>,
}

impl Always {
    fn worker(&self) -> Vec<String> {
        self.daemons.iter().chain(&self.workers).cloned().collect()
    }
}

/// The daemons, running.
pub struct Cluster {
    /// Hosts store and journal; ends last.
    pub gateway: Daemon,
    /// Drives migrations.
    pub coordinator: Daemon,
    /// Worker processes, in the order of their names.
    pub workers: Vec<Daemon>,
    names: Vec<String>,
    dir: PathBuf,
    children: Children,
    engine: EngineArgs,
    always: Always,
}

/// Where the daemons find each other.
struct Where {
    dir: String,
    mesh: String,
    store: String,
}

fn engine_flags(engine: &EngineArgs) -> Vec<String> {
    let mut flags = vec![
        "--size".into(),
        engine.size.clone(),
        "--block-tokens".into(),
        engine.block_tokens.to_string(),
        "--blocks".into(),
        engine.blocks.to_string(),
        "--threads".into(),
        engine.threads.to_string(),
        "--step-time".into(),
        format!("{}ms", engine.step_time.as_millis()),
    ];
    if let Some(model) = &engine.model {
        flags.extend(["--model".into(), model.display().to_string()]);
    }
    flags
}

impl Plan {
    /// The flags of one start of `name`.
    fn extra_for(&self, name: &str) -> Vec<String> {
        let own = self.extra.iter().filter(|(daemon, _)| daemon == name);
        own.map(|(_, flag)| flag.clone()).collect()
    }

    /// Of a daemon that is no worker.
    fn flags_of(&self, name: &str) -> Vec<String> {
        [self.always.daemons.clone(), self.extra_for(name)].concat()
    }

    /// Starts everything and waits until all of it serves.
    pub fn start(self) -> anyhow::Result<Cluster> {
        let children = Children::new(&self.dir);
        let dir = self.dir.display().to_string();
        let mut args = vec!["gateway".into(), "--dir".into(), dir.clone()];
        args.extend(["--http".into(), self.http.to_string()]);
        args.extend(self.flags_of("gateway"));
        let gateway = children.start("gateway", &args)?.ready()?;
        let at = Where {
            dir,
            mesh: gateway.field("mesh")?.into(),
            store: gateway.field("store")?.into(),
        };
        let coordinator = start_coordinator(&children, &at, &self.flags_of("c0"))?;
        let mut starting = Vec::new();
        if self.one_process {
            let (all, name) = (&self.workers, self.workers.join("+"));
            let own = all.iter().flat_map(|w| self.extra_for(w));
            let extra: Vec<String> = self.always.worker().into_iter().chain(own).collect();
            starting.push(start_worker(
                &children,
                &name,
                all,
                &at,
                &self.engine,
                &extra,
            )?);
        } else {
            for w in &self.workers {
                let extra = [self.always.worker(), self.extra_for(w)].concat();
                let one = std::slice::from_ref(w);
                starting.push(start_worker(&children, w, one, &at, &self.engine, &extra)?);
            }
        }
        let workers = starting
            .into_iter()
            .map(|s| s.ready())
            .collect::<anyhow::Result<Vec<_>>>()?;
        let coordinator = coordinator.ready()?;
        let cluster = Cluster {
            gateway,
            coordinator,
            workers,
            names: self.workers,
            dir: self.dir,
            children,
            engine: self.engine,
            always: self.always,
        };
        cluster.describe()?;
        Ok(cluster)
    }
}

fn start_coordinator(
    children: &Children,
    at: &Where,
    extra: &[String],
) -> anyhow::Result<crate::children::Starting> {
    let mut args: Vec<String> = [
        "coordinator",
        "--id",
        "c0",
        "--dir",
        &at.dir,
        "--store",
        &at.store,
    ]
    .map(String::from)
    .to_vec();
    args.extend_from_slice(extra);
    children.start("coordinator", &args)
}

fn start_worker(
    children: &Children,
    name: &str,
    ids: &[String],
    at: &Where,
    engine: &EngineArgs,
    extra: &[String],
) -> anyhow::Result<crate::children::Starting> {
    let mut args: Vec<String> = [
        "worker",
        "--dir",
        &at.dir,
        "--gateway",
        &at.mesh,
        "--store",
        &at.store,
    ]
    .map(String::from)
    .to_vec();
    args.extend(ids.iter().flat_map(|id| ["--id".to_owned(), id.clone()]));
    args.extend(engine_flags(engine));
    args.extend_from_slice(extra);
    children.start(name, &args)
}

impl Cluster {
    /// Writes `deployment.json`.
    fn describe(&self) -> anyhow::Result<()> {
        let workers: Vec<Value> = self.workers.iter().map(|w| w.ready.clone()).collect();
        let all = json!({
            "gateway": self.gateway.ready, "coordinator": self.coordinator.ready, "workers": workers,
        });
        let path = self.dir.join(FILE);
        std::fs::write(&path, format!("{all:#}\n"))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    fn place(&self) -> anyhow::Result<Where> {
        Ok(Where {
            dir: self.dir.display().to_string(),
            mesh: self.gateway.field("mesh")?.into(),
            store: self.gateway.field("store")?.into(),
        })
    }

    /// The HTTP API.
    pub fn http(&self) -> anyhow::Result<SocketAddr> {
        self.gateway
            .field("http")?
            .parse()
            .context("the gateway's HTTP address")
    }

    /// The process that runs the worker `id`.
    pub fn worker(&mut self, id: &str) -> anyhow::Result<&mut Daemon> {
        let at = self
            .names
            .iter()
            .position(|n| n == id)
            .context("no such worker")?;
        let at = if self.workers.len() == 1 { 0 } else { at };
        self.workers.get_mut(at).context("no such worker process")
    }

    /// Starts a coordinator in place of one that is gone.
    pub fn restart_coordinator(&mut self) -> anyhow::Result<()> {
        self.coordinator =
            start_coordinator(&self.children, &self.place()?, &self.always.daemons)?.ready()?;
        self.describe()
    }

    /// Starts a worker again under its name, as a new incarnation.
    pub fn restart_worker(&mut self, id: &str) -> anyhow::Result<()> {
        let (one, engine) = ([id.to_owned()], self.engine.clone());
        let new = start_worker(
            &self.children,
            id,
            &one,
            &self.place()?,
            &engine,
            &self.always.worker(),
        )?
        .ready()?;
        *self.worker(id)? = new;
        self.describe()
    }

    /// Ends the daemons in the order that loses nothing: workers flush to the gateway, which ends
    /// last. Names those that did not end by themselves, with success.
    pub fn stop(mut self) -> Vec<String> {
        let mut unclean = Vec::new();
        if !self.coordinator.stop(STOP_DEADLINE) {
            unclean.push("c0".to_owned());
        }
        // All of them end: there is nowhere to move requests to.
        for worker in &self.workers {
            let _ = worker.signal(rustix::process::Signal::INT);
        }
        for worker in &mut self.workers {
            if !worker.stop(STOP_DEADLINE) {
                unclean.push(worker.name.clone());
            }
        }
        if !self.gateway.stop(STOP_DEADLINE) {
            unclean.push("gateway".to_owned());
        }
        if unclean.is_empty() {
            // It would send whoever reads it to daemons that are no more.
            let _ = std::fs::remove_file(self.dir.join(FILE));
        }
        unclean
    }

    /// Starts again what has ended though nobody asked it to; an error if that is the gateway,
    /// which hosts the store.
    pub fn replace_casualties(&mut self, mut say: impl FnMut(String)) -> anyhow::Result<()> {
        let tell =
            |d: &Daemon, status| format!("{} ended ({status}); log: {}", d.name, d.log.display());
        if let Some(status) = self.gateway.ended() {
            let remedy = format!(
                "start it again: `moonlive up --dir {}` takes up the requests of its journal",
                self.dir.display()
            );
            let text = format!("{}; {remedy}", tell(&self.gateway, status));
            return Err(coded(Code::PeerLost, text));
        }
        if let Some(status) = self.coordinator.ended() {
            say(tell(&self.coordinator, status) + "; starting another");
            self.restart_coordinator()?;
        }
        for id in self.names.clone() {
            let daemon = self.worker(&id)?;
            if let Some(status) = daemon.ended() {
                say(tell(daemon, status) + "; starting another");
                self.restart_worker(&id)?;
            }
        }
        Ok(())
    }
}

/// Reads `deployment.json`.
pub fn read(dir: &Path) -> anyhow::Result<Value> {
    let path = dir.join(FILE);
    let wrong = |text: String| coded(Code::Caller, text);
    let text = std::fs::read_to_string(&path).map_err(|e| {
        let remedy = "start one with `moonlive up --dir DIR`, or name its directory";
        wrong(format!(
            "no deployment at {} ({e}): {remedy}",
            path.display()
        ))
    })?;
    serde_json::from_str(&text).map_err(|e| {
        let remedy = "`moonlive up` writes it anew when it starts";
        wrong(format!("{} is damaged ({e}): {remedy}", path.display()))
    })
}

/// A private temporary directory with a short path (socket paths are bounded to 107 bytes).
pub struct TempDir(PathBuf);

impl TempDir {
    /// Creates one.
    pub fn new() -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let mut nonce = [0u8; 6];
        getrandom::fill(&mut nonce).map_err(|e| anyhow::anyhow!("no randomness: {e}"))?;
        let name: String = nonce.iter().map(|b| format!("{b:02x}")).collect();
        let path = std::env::temp_dir().join(format!("ml-{name}"));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How long administrative calls may take.
pub const CALL: Duration = Duration::from_secs(10);
