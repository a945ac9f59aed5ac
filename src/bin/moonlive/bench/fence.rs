//! `bench fence`: how long a request stands still when it moves, beside a null handoff.
//!
//! Two workers, a gateway with the store, and a coordinator, each a process of its own. A request
//! with the KV geometry of Qwen2.5-7B decodes, a step every few milliseconds, and moves to and fro;
//! after each of its moves another, short-lived request makes a *null handoff*: the same machines,
//! messages, threads and compare-and-swap with nothing to move and nothing to hash. The pause runs
//! from the end of the source's last step to the moment the destination may launch, on one clock.
//!
//! A move counts as a sample if the tail page was partly filled and at least one slot came after
//! what had been verified ahead; the others are counted and left out. Each stages into blocks of
//! its own, allocated for it.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde_json::{Map, Value, json};

use super::plot::{self, FenceSamples};
use super::progress::Progress;
use super::quiet::Quiet;
use super::rig::{Client, Migrated, Move, Rig, Store, Want, other};
use super::row::{Row, Rows, round};
use super::stats::{Summary, interval, median};
use super::{Output, table};
use crate::admin::block_on;
use crate::cli::{EngineArgs, TransportKind, VerifyKind};
use crate::exit::{Code, coded};

/// Tokens of a page.
const PAGE: u64 = 16;
/// Leaves of a page: 28 layers of 4 heads.
const LEAVES: u64 = 28 * 4;
/// Bytes of KV of a token.
const TOKEN_BYTES: u64 = 56 << 10;
/// A request is replaced once it decoded this many tokens, or an eighth of its context: the context
/// must stay what the row says.
const RENEW: u32 = 128;
/// Tokens that it may decode beyond that, while its last move is under way.
const SLACK: u32 = 2048;
/// Context of a request that makes a null handoff.
const NULL_CONTEXT: u32 = 24;
/// Moves in a row that may fail before the bench does.
const FAILURES: u32 = 5;

#[derive(Debug, Clone, Args)]
pub struct FenceArgs {
    /// How bulk KV travels.
    #[arg(long, value_enum, default_value = "tcp")]
    transport: TransportKind,
    /// Context lengths.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1024,16384",
        value_name = "TOKENS,..."
    )]
    context: Vec<u32>,
    /// Samples for each context.
    #[arg(long, default_value_t = 100, value_name = "N")]
    migrations: u32,
    /// Where the store's log lies.
    #[arg(long, value_enum, default_value = "embedded")]
    store: Store,
    /// What is re-hashed inside the fence.
    #[arg(long, value_enum, default_value = "resident")]
    verify: VerifyKind,
    /// Least time of a decode step.
    #[arg(long, default_value = "8ms", value_parser = super::duration, value_name = "TIME")]
    step_time: Duration,
    /// Fail if a fence took more messages, store calls, leaves or bytes than it needs.
    #[arg(long)]
    check_structure: bool,
    #[command(flatten)]
    out: Output,
}

/// The fence's steps: name, from, to.
const STEPS: [(&str, &str, &str); 9] = [
    ("hold", "source.last-step", "source.held"),
    ("export", "source.held", "source.exported"),
    ("push", "source.exported", "destination.arrived"),
    ("land", "destination.arrived", "destination.landed"),
    ("hash", "destination.landed", "destination.verified"),
    ("control", "destination.verified", "destination.control"),
    ("arm", "destination.control", "destination.armed"),
    ("commit", "destination.armed", "destination.committed"),
    ("launch", "destination.committed", "destination.launch"),
];

/// What one fence cost, whatever the clock says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Structure {
    messages: u64,
    store_calls: u64,
    bytes: u64,
    leaves: u64,
    slots: u64,
}

impl Structure {
    fn of(m: &Migrated) -> Self {
        Self {
            // GO, and what the two workers sent until the launch.
            messages: 1 + m.count("source.fence-messages") + m.count("destination.fence-messages"),
            store_calls: m.count("destination.fence-store-calls"),
            bytes: m.count("source.fence-bytes"),
            leaves: m.count("source.leaves-hashed-in-fence-source")
                + m.count("destination.leaves-hashed-in-fence"),
            slots: m.count("source.tail-slots"),
        }
    }

    /// The most a fence may take: GO and push; one compare-and-swap; the leaves of the pages that
    /// the tail's slots touch, at both ends; the slots and a control state.
    fn excess(&self, verify: VerifyKind) -> Option<String> {
        let pages = self.slots / PAGE + 2;
        let limits = [
            ("messages", self.messages, 2),
            ("store calls", self.store_calls, 1),
            ("leaves hashed", self.leaves, 2 * pages * LEAVES),
            ("bytes", self.bytes, self.slots * TOKEN_BYTES + (16 << 10)),
        ];
        let full = verify == VerifyKind::Full;
        limits
            .iter()
            .filter(|l| !(full && l.0 == "leaves hashed"))
            .find(|l| l.1 > l.2)
            .map(|(what, got, most)| format!("{got} {what} where {most} suffice"))
    }
}

/// Samples of one context.
#[derive(Default)]
struct Samples {
    pause: Vec<u64>,
    null: Vec<u64>,
    gap: Vec<u64>,
    steps: Vec<Vec<u64>>,
    null_steps: Vec<Vec<u64>>,
    structure: Vec<Structure>,
    fills: [u32; PAGE as usize],
    left_out: u32,
    failed: u32,
    cause: String,
}

fn steps(m: &Migrated) -> Vec<u64> {
    STEPS
        .iter()
        .map(|(_, from, to)| m.between(from, to).unwrap_or(0))
        .collect()
}

impl Samples {
    fn take(&mut self, m: &Migrated) {
        let structure = Structure::of(m);
        let fill = m.report.kv_len % PAGE;
        if fill == 0 || structure.slots == 0 {
            self.left_out += 1;
            return;
        }
        self.fills[fill as usize] += 1;
        self.pause.push(m.report.fence_pause_ns);
        self.steps.push(steps(m));
        self.structure.push(structure);
    }

    fn take_null(&mut self, m: &Migrated) {
        self.null.push(m.report.fence_pause_ns);
        self.null_steps.push(steps(m));
    }
}

/// Medians of each step, in microseconds.
fn step_medians(all: &[Vec<u64>]) -> Value {
    let of = |i: usize| median(all.iter().map(|s| s[i] as f64 / 1e3).collect());
    let map: Map<String, Value> = STEPS
        .iter()
        .enumerate()
        .map(|(i, (name, _, _))| ((*name).to_owned(), json!(round(of(i)))))
        .collect();
    Value::Object(map)
}

/// Output tokens after which a request is replaced.
fn worn_after(context: u32) -> u32 {
    RENEW.max(context / 8)
}

/// The request that moves to and fro.
struct Mover {
    client: Client,
    at: String,
    context: u32,
    from_token: u64,
}

impl Mover {
    async fn start(rig: &mut Rig, context: u32) -> anyhow::Result<Self> {
        let mut client = rig.seeded(context, worn_after(context) + SLACK)?;
        client.until(3).await?;
        Ok(Self {
            at: rig.owner(client.request).await?,
            from_token: client.seen(),
            client,
            context,
        })
    }

    /// A new one in its place. The old one goes first: a worker has room for one of them.
    async fn renewed(self, rig: &mut Rig) -> anyhow::Result<Self> {
        let context = self.context;
        drop(self);
        Self::start(rig, context).await
    }

    /// Whether it has decoded so much that its context is no longer what the row says.
    fn is_worn(&self) -> bool {
        let grown = self.client.seen() - self.from_token;
        grown > u64::from(worn_after(self.context))
    }
}

/// One null handoff by a request of its own.
async fn null_handoff(rig: &mut Rig, how: Move) -> anyhow::Result<Migrated> {
    let mut client = rig.seeded(NULL_CONTEXT, 512)?;
    client.until(2).await?;
    let from = rig.owner(client.request).await?;
    let how = Move { null: true, ..how };
    rig.migrate(client.request, &from, how).await
}

async fn measure(
    rig: &mut Rig,
    args: &FenceArgs,
    context: u32,
    progress: &Progress,
) -> anyhow::Result<Samples> {
    let how = Move {
        transport: args.transport,
        verify: args.verify,
        max_bytes_per_s: 0,
        null: false,
    };
    let mut samples = Samples::default();
    let mut mover = Mover::start(rig, context).await?;
    let mut failures = 0;
    // One of each unmeasured: links are dialled and code is touched for the first time.
    for warm_up in [true, false] {
        let wanted = if warm_up { 1 } else { args.migrations as usize };
        let mut fresh = Samples::default();
        while fresh.pause.len() < wanted {
            if mover.is_worn() {
                mover = mover.renewed(rig).await?;
            }
            let before = mover.client.seen();
            mover.client.until(before + 1).await?;
            let m = rig.migrate(mover.client.request, &mover.at, how).await?;
            if m.report.migrated {
                failures = 0;
                mover.at = other(&mover.at).to_owned();
                let had = fresh.pause.len();
                fresh.take(&m);
                mover.client.until(m.report.seal + 1).await?;
                if fresh.pause.len() > had {
                    fresh.gap.extend(gap(&mover.client, m.report.seal));
                    progress.step();
                }
            } else {
                fresh.failed += 1;
                fresh.cause = m.report.cause.clone();
                failures += 1;
                if failures > FAILURES {
                    bail!("{failures} moves in a row failed: {}", m.report.cause);
                }
                mover = mover.renewed(rig).await?;
                continue;
            }
            let m = null_handoff(rig, how).await?;
            match m.report.migrated {
                true => fresh.take_null(&m),
                false => bail!("a null handoff failed: {}", m.report.cause),
            }
        }
        samples = fresh;
    }
    Ok(samples)
}

/// The client's gap across the flip, nanoseconds.
fn gap(client: &Client, seal: u64) -> Option<u64> {
    let arrivals = client.arrivals();
    let last = usize::try_from(seal).ok()?;
    let (a, b) = (arrivals.get(last.checked_sub(1)?)?, arrivals.get(last)?);
    Some(b.duration_since(*a).as_nanos() as u64)
}

fn rows_of(args: &FenceArgs, context: u32, s: &Samples, quiet: &Quiet) -> [Row; 2] {
    let (pause, null) = (Summary::of(s.pause.clone()), Summary::of(s.null.clone()));
    let gap = Summary::of(s.gap.clone());
    let mut sorted = s.pause.clone();
    sorted.sort_unstable();
    let (lo, hi) = interval(&sorted, 0.99);
    let most = |pick: fn(&Structure) -> u64| s.structure.iter().map(pick).max().unwrap_or(0);
    let mid =
        |pick: fn(&Structure) -> u64| median(s.structure.iter().map(|x| pick(x) as f64).collect());
    let case = format!("{}/{context}", args.transport.name());
    let ratio = |a: f64, b: f64| round(a / b.max(1.0));
    let row = Row::latency("fence", case.clone(), &pause)
        .against(
            "null handoff",
            null.p50 / 1e3,
            pause.p50 / null.p50.max(1.0),
        )
        .quiet(quiet)
        .with("p99_ratio", ratio(pause.p99, null.p99))
        .with("null_p50_us", round(null.p50 / 1e3))
        .with("null_p99_us", round(null.p99 / 1e3))
        .with("p99_95_us", json!([round(lo / 1e3), round(hi / 1e3)]))
        .with("client_gap_p50_us", round(gap.p50 / 1e3))
        .with("client_gap_p99_us", round(gap.p99 / 1e3))
        .with("context", context)
        .with("synthetic", true)
        .with("transport", args.transport.name())
        .with("store", args.store.name())
        .with("verify", args.verify.name())
        .with("step_ms", args.step_time.as_millis() as u64)
        .with("steps_p50_us", step_medians(&s.steps))
        .with("messages", most(|x| x.messages))
        .with("store_calls", most(|x| x.store_calls))
        .with("leaves_hashed", mid(|x| x.leaves))
        .with("leaves_hashed_max", most(|x| x.leaves))
        .with("bytes_p50", mid(|x| x.bytes))
        .with("bytes_max", most(|x| x.bytes))
        .with("slots_p50", mid(|x| x.slots))
        .with("slots_max", most(|x| x.slots))
        .with("tail_fill", json!(s.fills[1..].to_vec()))
        .with("left_out", s.left_out)
        .with("failed", s.failed)
        .with("failed_cause", s.cause.clone());
    let control = Row::latency("fence-null", format!("{case}/null"), &null)
        .with("steps_p50_us", step_medians(&s.null_steps));
    [row, control]
}

/// Blocks that a worker needs: the longest context, what is decoded meanwhile, and null requests.
fn blocks(contexts: &[u32]) -> u32 {
    let longest = contexts.iter().copied().max().unwrap_or(0);
    (longest + worn_after(longest) + SLACK) / PAGE as u32 + 64
}

async fn all(args: &FenceArgs, rows: &mut Rows) -> anyhow::Result<Vec<FenceSamples>> {
    let mut rig = Rig::start(Want {
        engine: EngineArgs {
            model: None,
            size: "qwen2.5-7b".into(),
            block_tokens: PAGE as u32,
            blocks: blocks(&args.context),
            threads: 1,
            step_time: args.step_time,
        },
        store: args.store,
        null_handoffs: true,
    })
    .await?;
    let total = args.context.len() as u64 * (u64::from(args.migrations) + 1);
    let progress = Progress::start(total);
    let mut charts = Vec::new();
    let mut excess = None;
    for context in &args.context {
        progress.say(format!("{}, {context} tokens", args.transport.name()));
        let mut quiet = Quiet::start(&rig.pids());
        let mut s = measure(&mut rig, args, *context, &progress).await?;
        quiet.stop();
        for row in rows_of(args, *context, &s, &quiet) {
            rows.push(row)?;
        }
        excess = excess.or_else(|| s.structure.iter().find_map(|x| x.excess(args.verify)));
        s.pause.sort_unstable();
        s.null.sort_unstable();
        charts.push(FenceSamples {
            context: *context,
            pause: s.pause,
            null: s.null,
        });
    }
    drop(progress);
    rig.stop()?;
    match excess.filter(|_| args.check_structure) {
        Some(what) => Err(coded(Code::Fail, format!("a fence took {what}"))),
        None => Ok(charts),
    }
}

/// Runs the bench.
pub fn run(args: &FenceArgs, rows: &mut Rows) -> anyhow::Result<()> {
    if args.transport == TransportKind::Local || args.migrations == 0 || args.context.is_empty() {
        let text =
            "bench fence needs --transport tcp or shm, --context and --migrations of at least 1";
        return Err(coded(Code::Caller, text));
    }
    let charts = block_on(all(args, rows))?;
    args.out.draw(|| {
        let note = format!(
            "{} moves each over {}, store {}, {} a token, 16-token pages, synthetic KV",
            args.migrations,
            args.transport.name(),
            args.store.name(),
            table::bytes(TOKEN_BYTES)
        );
        plot::fence(
            "How long a request stands still".into(),
            plot::note(&[&note]),
            &charts,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_that_takes_more_than_it_needs_is_named() {
        let good = Structure {
            messages: 2,
            store_calls: 1,
            bytes: 2 * TOKEN_BYTES + 2000,
            leaves: 2 * 2 * LEAVES,
            slots: 2,
        };
        assert_eq!(good.excess(VerifyKind::Resident), None);
        for bad in [
            Structure {
                messages: 3,
                ..good
            },
            Structure {
                store_calls: 2,
                ..good
            },
            Structure {
                bytes: 16 * TOKEN_BYTES,
                ..good
            },
            Structure {
                leaves: 100 * LEAVES,
                ..good
            },
        ] {
            assert!(bad.excess(VerifyKind::Resident).is_some(), "{bad:?}");
        }
        let full = Structure {
            leaves: 100 * LEAVES,
            ..good
        };
        assert_eq!(full.excess(VerifyKind::Full), None);
    }

    #[test]
    fn a_pool_holds_the_longest_context_and_what_comes_after_it() {
        assert!(blocks(&[1024, 65536]) * PAGE as u32 > 65536 + worn_after(65536) + SLACK + 512);
    }
}
