//! The command line. Each `--help` ends with a command that works as typed.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};

/// Live-migrates LLM requests while they are being decoded, verified before the route flips.
#[derive(Debug, Parser)]
#[command(
    name = "moonlive",
    version,
    after_help = "Start here:\n  moonlive demo                 watch one request move, on this machine, in under a minute\n  moonlive up --dir /tmp/ml     two workers, a coordinator and a gateway to play with\n  moonlive status --dir /tmp/ml\n\nExit status: 0 done; 1 the check failed; 2 wrong arguments: a flag, a path, an address, a name; 3 a daemon is\ngone; 4 nothing was done and nothing was lost: try again; 5 a deadline passed; 6 bytes differed; 7 not possible\nhere: this file, machine or build; 70 our bug."
)]
pub struct Cli {
    /// Write for a machine: one JSON object a line; the last line is the summary.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show one request migrate while it decodes, every page verified, and compare with a run that did not.
    #[command(
        after_help = "Examples:\n  moonlive demo\n  moonlive demo --transport shm --requests 4 --context 2048\n  moonlive demo --inject kill-source --json\n  moonlive demo --out /tmp/d && cmp /tmp/d/baseline.stream /tmp/d/migrated.stream\n  moonlive demo --report demo.html"
    )]
    Demo(Box<DemoArgs>),
    /// Start workers, a coordinator and a gateway on this machine.
    #[command(
        after_help = "Example:\n  moonlive up --dir /tmp/ml --workers 2\n  curl -N http://127.0.0.1:PORT/v1/completions -d '{\"model\":\"reference\",\"prompt\":\"Once\",\"stream\":true,\"max_tokens\":200}'\n\nThe address is printed, and kept in DIR/deployment.json for `moonlive status --dir DIR`."
    )]
    Up(UpArgs),
    /// Migrate one request to a worker; prints each phase.
    #[command(after_help = "Example:\n  moonlive migrate 5f0c... --to w1 --dir /tmp/ml")]
    Migrate(MigrateArgs),
    /// Move every request off a worker before a deadline.
    #[command(after_help = "Example:\n  moonlive drain w0 --deadline 30s --dir /tmp/ml")]
    Drain(DrainArgs),
    /// Who runs what: gateway, coordinator, workers, requests.
    #[command(after_help = "Example:\n  moonlive status --dir /tmp/ml --json")]
    Status(Where),
    /// Follow migrations and flips as they happen.
    #[command(after_help = "Example:\n  moonlive watch --dir /tmp/ml")]
    Watch(Where),
    /// Measure this program on this machine, each figure beside its ceiling or control.
    #[command(
        after_help = "Examples:\n  moonlive bench fence --transport tcp --context 1024,65536 --migrations 200\n  moonlive bench digest --plot digest.svg\n  moonlive bench transfer --json"
    )]
    Bench(Box<crate::bench::BenchArgs>),
    /// Run many migrations of mixed requests on real processes under random faults, and account for
    /// everything.
    #[command(
        after_help = "Faults are drawn by the seed: 6 % of migrations kill the source at some step, 5 % the destination, 3 % the\ncoordinator; 25 % damage, delay, lose or repeat something. Every stream is compared to one that never moved, from\nprocesses of its own. At the end all blocks are free, nothing is in quarantine, no descriptor is left.\n\nExamples:\n  moonlive soak --migrations 200\n  moonlive soak --migrations 2000 --seed 7 --json"
    )]
    Soak(SoakArgs),
    /// Run a worker daemon.
    #[command(
        after_help = "Example:\n  moonlive worker --id w0 --gateway unix:///tmp/ml/gateway.mesh.sock --store unix:///tmp/ml/gateway.store.sock --dir /tmp/ml\n\nOn another machine than the gateway (which was started with --listen 10.0.0.1:7100 --listen-beyond-loopback):\n  moonlive worker --id w1 --listen 10.0.0.2:7200 --listen-beyond-loopback --gateway tcp://10.0.0.1:7100 --store tcp://10.0.0.1:7103 --dir /tmp/ml"
    )]
    Worker(Box<WorkerArgs>),
    /// Run a coordinator daemon.
    #[command(
        after_help = "Example:\n  moonlive coordinator --id c0 --store unix:///tmp/ml/gateway.store.sock --dir /tmp/ml"
    )]
    Coordinator(CoordinatorArgs),
    /// Run a gateway daemon, which hosts the metadata store and the journal.
    #[command(after_help = "Example:\n  moonlive gateway --dir /tmp/ml --http 127.0.0.1:8080")]
    Gateway(GatewayArgs),
}

impl Cli {
    /// Does what was asked for.
    pub fn run(self) -> anyhow::Result<()> {
        let json = self.json;
        match self.command {
            Command::Demo(args) => crate::demo::run(*args, json),
            Command::Soak(args) => crate::soak::run(args, json),
            Command::Bench(args) => crate::bench::run(*args, json),
            Command::Up(args) => crate::up::run(args, json),
            Command::Worker(args) => crate::daemons::worker(*args),
            Command::Coordinator(args) => crate::daemons::coordinator(args),
            Command::Gateway(args) => crate::daemons::gateway(args),
            Command::Migrate(args) => crate::admin::migrate(args, json),
            Command::Drain(args) => crate::admin::drain(args, json),
            Command::Status(place) => crate::admin::status(&place, json),
            Command::Watch(place) => crate::admin::watch(&place, json),
        }
    }
}

/// Which deployment to talk to.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// Directory that `moonlive up` was given.
    #[arg(long, env = "MOONLIVE_DIR", value_name = "DIR")]
    pub dir: PathBuf,
}

/// How bulk KV travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransportKind {
    /// Inside one process (the workers of the demonstration then share one).
    Local,
    /// Shared memory between processes of one machine.
    Shm,
    /// TCP.
    Tcp,
}

impl TransportKind {
    /// The name used on the wire and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

/// What the destination re-hashes while the request is fenced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VerifyKind {
    /// What came after the pre-verified part; everything else was verified as it landed.
    Resident,
    /// Every page again, at both ends.
    Full,
}

impl VerifyKind {
    /// The name used on the wire and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Full => "full",
        }
    }
}

/// Parses `500us`, `250ms`, `30s`, `2m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let split = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let bad = || format!("{text:?} is not a duration: write 250ms, 30s or 2m");
    let n: u64 = text[..split].parse().map_err(|_| bad())?;
    let time = match &text[split..] {
        "us" => Duration::from_micros(n),
        "ms" => Duration::from_millis(n),
        "s" | "" => Duration::from_secs(n),
        "m" => Duration::from_secs(n.checked_mul(60).ok_or_else(bad)?),
        _ => return Err(bad()),
    };
    at_most(time, LONGEST, text)
}

/// Parses the least time of a decode step: an engine notices nothing, its end included, meanwhile.
pub fn pace(text: &str) -> Result<Duration, String> {
    at_most(duration(text)?, SLOWEST, text)
}

fn at_most(time: Duration, most: Duration, text: &str) -> Result<Duration, String> {
    match time > most {
        true => Err(format!("{text:?} is too long: at most {}s", most.as_secs())),
        false => Ok(time),
    }
}

/// The longest time that any flag takes.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// The longest decode step.
const SLOWEST: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Args)]
pub struct UpArgs {
    /// Where sockets, logs, the store and the journal live; created if missing. Default: a new temporary one.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Address of the HTTP API; port 0 lets the kernel choose.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub http: std::net::SocketAddr,
    #[command(flatten)]
    pub listening: ListenArgs,
    /// A decode step begins at least this long after the one before it (testing).
    #[arg(long, hide = true, value_parser = pace, value_name = "TIME")]
    pub pace: Option<Duration>,
    /// How many workers, named w0, w1, ...
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u16).range(1..=64), value_name = "N")]
    pub workers: u16,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// Which model a worker runs.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// A Llama-family GGUF file; without it the built-in reference model with seeded weights runs.
    #[arg(long, value_name = "FILE.gguf")]
    pub model: Option<PathBuf>,
    /// Size of the built-in reference model: tiny, small or medium; or qwen2.5-7b, which has that
    /// model's KV geometry and no arithmetic (for benches).
    #[arg(long, default_value = "medium", value_name = "SIZE")]
    pub size: String,
    /// Tokens in a block of the engine's paged pool.
    #[arg(long, default_value_t = 16, value_parser = value_parser!(u32).range(1..=256), value_name = "TOKENS")]
    pub block_tokens: u32,
    /// Blocks in the pool; 0 sizes it for the model.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub blocks: u32,
    /// Threads that compute.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u16).range(1..=256), value_name = "N")]
    pub threads: u16,
    /// Least time of a decode step of a model without arithmetic.
    #[arg(long, default_value = "8ms", value_parser = pace, value_name = "TIME")]
    pub step_time: Duration,
}

#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Name of this worker; twice in one process for the `local` transport.
    #[arg(long, required = true, value_name = "ID")]
    pub id: Vec<String>,
    /// The gateway's mesh listener, as it said when it was ready.
    #[arg(long, value_name = "ENDPOINT")]
    pub gateway: String,
    /// The metadata store's listener.
    #[arg(long, value_name = "ENDPOINT")]
    pub store: String,
    /// At SIGTERM: move every request to other workers, at most for this long; what is left then
    /// goes on from the journal. SIGINT, or a second SIGTERM, ends at once.
    #[arg(long, default_value = "20s", value_parser = duration, value_name = "TIME")]
    pub drain_deadline: Duration,
    #[command(flatten)]
    pub listening: ListenArgs,
    #[command(flatten)]
    pub metrics: MetricsArgs,
    #[command(flatten)]
    pub place: Where,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub child: ChildArgs,
    /// A decode step begins at least this long after the one before it (testing).
    #[arg(long, hide = true, default_value = "0s", value_parser = pace, value_name = "TIME")]
    pub pace: Duration,
    /// Write KV and control state of each request at this output token (testing).
    #[arg(long, hide = true, value_name = "SEQ")]
    pub dump_at: Option<u64>,
    /// Change this output token on its way out (testing).
    #[arg(long, hide = true, value_name = "SEQ")]
    pub flip_token: Option<u64>,
    /// Take part in null handoffs (benches).
    #[arg(long, hide = true)]
    pub null_handoffs: bool,
}

#[derive(Debug, Clone, Args)]
pub struct CoordinatorArgs {
    /// Name of this coordinator; several may run, one leads.
    #[arg(long, default_value = "c0", value_name = "ID")]
    pub id: String,
    /// The metadata store's listener, as the gateway said when it was ready.
    #[arg(long, value_name = "ENDPOINT")]
    pub store: String,
    #[command(flatten)]
    pub listening: ListenArgs,
    #[command(flatten)]
    pub metrics: MetricsArgs,
    #[command(flatten)]
    pub place: Where,
    #[command(flatten)]
    pub child: ChildArgs,
}

#[derive(Debug, Clone, Args)]
pub struct GatewayArgs {
    /// Address of the HTTP API; port 0 lets the kernel choose.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub http: std::net::SocketAddr,
    #[command(flatten)]
    pub listening: ListenArgs,
    #[command(flatten)]
    pub place: Where,
    #[command(flatten)]
    pub child: ChildArgs,
}

/// Where a daemon listens, and what it tells of itself.
#[derive(Debug, Clone, Args)]
pub struct ListenArgs {
    /// Listen on TCP here instead of unix sockets, so that daemons can live on two machines: links
    /// and fence at PORT, control RPC at PORT+1, bulk KV at PORT+2, store at PORT+3; port 0 lets the
    /// kernel choose each.
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Option<std::net::SocketAddr>,
    /// Allow addresses that other machines can reach. Links are neither encrypted nor authenticated:
    /// only on a network that is trusted.
    #[arg(long)]
    pub listen_beyond_loopback: bool,
    /// How much is logged to standard error: error, warn, info, debug, trace, or filters such as
    /// `phase=debug`, which logs each phase of each migration with its time.
    #[arg(
        long,
        env = "MOONLIVE_LOG",
        default_value = "info",
        value_name = "LEVEL"
    )]
    pub log: String,
}

/// Where a daemon's counters are read.
#[derive(Debug, Clone, Args)]
pub struct MetricsArgs {
    /// Address of `/metrics` (Prometheus); port 0 lets the kernel choose.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDR")]
    pub metrics: std::net::SocketAddr,
}

/// What a daemon needs to know when another process of ours started it.
#[derive(Debug, Clone, Default, Args)]
pub struct ChildArgs {
    /// End when the process with this id, our parent, ends.
    #[arg(long, hide = true, value_name = "PID")]
    pub die_with: Option<u32>,
    /// Take faults to inject over the control RPC (testing).
    #[arg(long, hide = true)]
    pub open_to_faults: bool,
    /// Inject one fault (testing): NAME@STEP:SEED.
    #[arg(long, hide = true, value_name = "FAULT")]
    pub inject: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct MigrateArgs {
    /// The request: 32 hexadecimal digits, as in the response's `id` and in `moonlive status`.
    pub request: String,
    /// Destination worker.
    #[arg(long, value_name = "WORKER")]
    pub to: String,
    /// How bulk KV travels; default: shm on one machine.
    #[arg(long, value_enum)]
    pub transport: Option<TransportKind>,
    /// What is re-hashed inside the fence.
    #[arg(long, value_enum, default_value = "resident")]
    pub verify: VerifyKind,
    /// Give up after this long; the request then stays where it is.
    #[arg(long, default_value = "30s", value_parser = duration, value_name = "TIME")]
    pub deadline: Duration,
    /// Let the copy take at most this much of the link and of the neighbours' time; 0 = no bound.
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub max_bytes_per_s: u64,
    #[command(flatten)]
    pub place: Where,
}

#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    /// Worker to empty.
    pub worker: String,
    /// Give up after this long; what has not moved by then stays.
    #[arg(long, default_value = "30s", value_parser = duration, value_name = "TIME")]
    pub deadline: Duration,
    #[command(flatten)]
    pub place: Where,
}

/// A fault that the demonstration injects; what each must end as is in `docs/inject.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum InjectKind {
    /// A bit flips on the wire, below the transport's check.
    CorruptWire,
    /// A bit flips in what the source reads, above the wire check.
    CorruptSourceRead,
    /// A bit flips in destination memory after import, before that page's verify.
    CorruptResidentEarly,
    /// A bit flips in destination memory after that page's verify; only `--verify full` sees it.
    CorruptResidentLate,
    /// A bit flips in the control state on its way into the destination.
    CorruptControl,
    /// A message of an earlier migration epoch is replayed.
    StaleEpoch,
    /// A staged put and a get's reply land after their epoch died.
    LateWrite,
    /// SIGKILL the source.
    KillSource,
    /// SIGKILL the destination.
    KillDestination,
    /// SIGKILL the coordinator.
    KillCoordinator,
    /// SIGSTOP the coordinator, SIGCONT it later.
    PauseCoordinator,
    /// The store's answer to the commit is lost.
    DropCommitReply,
    /// The bulk link is slow.
    SlowLink,
    /// The slots that go ahead of the push are lost.
    LoseAhead,
    /// A bit flips in the slots that go ahead of the push.
    CorruptAhead,
    /// Slots of other attempts arrive before those that go ahead of the push.
    StaleAhead,
}

#[derive(Debug, Clone, Args)]
pub struct SoakArgs {
    /// Migrations that must begin before it ends.
    #[arg(long, default_value_t = 2000, value_parser = value_parser!(u64).range(1..=1_000_000), value_name = "N")]
    pub migrations: u64,
    /// Draws requests, migrations and faults.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Requests that stream at once.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub clients: u16,
    /// Worker processes.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub workers: u16,
    /// How bulk KV travels; default: tcp and shm by turns, drawn for each migration.
    #[arg(long, value_enum)]
    pub transport: Option<TransportKind>,
    /// Size of the built-in reference model: tiny, small or medium.
    #[arg(long, default_value = "tiny", value_name = "SIZE")]
    pub size: String,
    /// Least time of a decode step.
    #[arg(long, default_value = "2ms", value_parser = pace, value_name = "TIME")]
    pub pace: Duration,
    /// Keep the daemons' logs and what fired here.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// How bulk KV travels.
    #[arg(long, value_enum, default_value = "tcp")]
    pub transport: TransportKind,
    /// Requests that decode at once; every one migrates.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub requests: u32,
    /// Prompt length of each request.
    #[arg(long, default_value_t = 512, value_parser = value_parser!(u32).range(1..=1 << 20), value_name = "TOKENS")]
    pub context: u32,
    /// Output tokens of each request; default 200, or 800 with --inject.
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_parser = value_parser!(u32).range(0..=1 << 20),
        value_name = "TOKENS"
    )]
    pub output: u32,
    /// Draws prompts, sampling seeds and the step at which a fault fires.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Inject one fault.
    #[arg(long, value_enum, value_name = "FAULT")]
    pub inject: Option<InjectKind>,
    /// What is re-hashed inside the fence.
    #[arg(long, value_enum, default_value = "resident")]
    pub verify: VerifyKind,
    /// Greedy decoding instead of sampling.
    #[arg(long)]
    pub greedy: bool,
    /// What the user says in the chat with a real model.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Let the migrated run decode no faster than one step in this time, so that a small model's stream
    /// outlasts the making good of a fault.
    #[arg(long, value_parser = pace, value_name = "TIME")]
    pub pace: Option<Duration>,
    /// Keep transcripts, KV and control dumps, logs here.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write one self-contained page: the phases on a time line, the token stream across the flip.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Flip one output token of the migrated run, to see PASS turn into FAIL (testing).
    #[arg(long, hide = true, value_name = "SEQ")]
    pub flip_output_token: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_unit_and_bounded() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("86400"), Ok(Duration::from_secs(86_400)));
        for bad in ["", "soon", "1h", "-1s", "86401s", "18446744073709551615m"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert!(pace("1s").is_ok() && pace("1001ms").is_err());
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
