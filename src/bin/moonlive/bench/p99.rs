//! `bench p99`: what a migration costs the requests that stay.
//!
//! Neighbours decode on both workers as fast as their arithmetic goes, with no pacing; the request
//! that moves decodes among them. A *gap* is the time between two tokens of one neighbour as its
//! client sees them. Gaps are counted where they end, in windows of equal length: two without a
//! migration, which are held against each other as the control, and one from the moment a migration
//! is asked for until its source has let go (at the destination: until the request joins in). The
//! request that moves is on the same worker in all of them.
//!
//! STREAM is shaped to a share of the rate that it reaches unshaped, in the same run and beside the
//! same neighbours.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use moonlivekv::drive::{now_ns, ns_of};
use serde_json::json;

use super::plot::{self, Ink};
use super::progress::Progress;
use super::quiet::Quiet;
use super::rig::{Client, Migrated, Move, Rig, Store, WORKERS, Want};
use super::row::{Row, Rows, round};
use super::stats::{Summary, interval, median};
use super::{Output, table};
use crate::admin::block_on;
use crate::cli::{EngineArgs, TransportKind, VerifyKind};
use crate::exit::{Code, coded};

/// Tokens of a block.
const BLOCK: u32 = 16;
/// A request is replaced once it decoded this much, so that no window differs by its length.
const RENEW: u64 = 1024;
/// Output tokens that a request may have.
const OUTPUT: u32 = 6_000;
/// What follows a move or a new request before the next window: batches settle.
const SETTLE: Duration = Duration::from_millis(60);
/// Unshaped moves behind the unshaped rate.
const UNSHAPED: usize = 5;
/// Moves that may fail before the bench does.
const FAILURES: u32 = 5;

#[derive(Debug, Clone, Args)]
pub struct P99Args {
    /// How bulk KV travels.
    #[arg(long, value_enum, default_value = "tcp")]
    transport: TransportKind,
    /// Size of the model that everybody decodes with: tiny, small or medium.
    #[arg(long, default_value = "medium", value_parser = ["tiny", "small", "medium"], value_name = "SIZE")]
    size: String,
    /// Neighbours on the source worker.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    neighbours: u32,
    /// Neighbours on the destination worker.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=16))]
    at_destination: u32,
    /// Context of the request that moves.
    #[arg(long, default_value_t = 8192, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(256..=10_000))]
    context: u32,
    /// Context of a neighbour.
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..=8_192))]
    neighbour_context: u32,
    /// STREAM is shaped to this share of its unshaped rate.
    #[arg(long, default_value_t = 0.3, value_name = "SHARE", value_parser = share)]
    share: f64,
    /// Migrations, each beside two windows without one.
    #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    migrations: u32,
    #[command(flatten)]
    out: Output,
}

/// Parses a share of the unshaped rate.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (0.01..=1.0).contains(&x) => Ok(x),
        _ => Err(format!("{text:?} is not a share from 0.01 to 1")),
    }
}

/// What goes on in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Nothing; half of the control.
    Still,
    /// Nothing; the other half.
    StillToo,
    /// A migration.
    Moving,
}

/// A span of time of one kind.
#[derive(Debug, Clone, Copy)]
struct Window {
    kind: Kind,
    from_ns: u64,
    to_ns: u64,
}

/// Gaps by the kind of the window in which they end, ascending, nanoseconds.
#[derive(Debug, Default)]
struct Gaps {
    still: Vec<u64>,
    still_too: Vec<u64>,
    moving: Vec<u64>,
}

impl Gaps {
    fn add(&mut self, arrivals: &[u64], windows: &[Window]) {
        for pair in arrivals.windows(2) {
            // Nothing is measured in the pause between two windows.
            let ends_in = |w: &&Window| w.from_ns < pair[1] && pair[1] <= w.to_ns;
            let Some(w) = windows.iter().find(ends_in) else {
                continue;
            };
            let gap = pair[1] - pair[0];
            match w.kind {
                Kind::Still => self.still.push(gap),
                Kind::StillToo => self.still_too.push(gap),
                Kind::Moving => self.moving.push(gap),
            }
        }
    }

    fn sort(&mut self) {
        for all in [&mut self.still, &mut self.still_too, &mut self.moving] {
            all.sort_unstable();
        }
    }

    fn without(&self) -> Vec<u64> {
        let mut all = [self.still.as_slice(), &self.still_too].concat();
        all.sort_unstable();
        all
    }
}

/// A request that stays, and where.
struct Neighbour {
    client: Client,
    at_source: bool,
}

struct Bench<'a> {
    rig: Rig,
    args: &'a P99Args,
    neighbours: Vec<Neighbour>,
    mover: Option<Client>,
    /// As the neighbours at the source see them: a migration ends when the source has let go.
    at_source: Vec<Window>,
    /// As those at the destination do: it ends when the request has joined them.
    at_destination: Vec<Window>,
    source: Gaps,
    destination: Gaps,
    streamed: Vec<f64>,
    /// Bytes of KV of the moving request's context.
    bytes: f64,
}

impl Bench<'_> {
    fn how(&self, max_bytes_per_s: u64) -> Move {
        Move {
            transport: self.args.transport,
            verify: VerifyKind::Resident,
            max_bytes_per_s,
            null: false,
        }
    }

    /// Starts a request and sees to it that it runs on `worker`.
    async fn start_on(&mut self, worker: &str, context: u32) -> anyhow::Result<Client> {
        let mut client = self.rig.seeded(context, OUTPUT)?;
        client.until(2).await?;
        let at = self.rig.owner(client.request).await?;
        if at != worker {
            let m = self.rig.migrate(client.request, &at, self.how(0)).await?;
            if !m.report.migrated {
                bail!("a request could not be put on {worker}: {}", m.report.cause);
            }
            client.until(m.report.seal + 1).await?;
        }
        Ok(client)
    }

    /// Replaces what is missing or has decoded too much.
    async fn refresh(&mut self) -> anyhow::Result<()> {
        let (mut kept, mut worn) = (Vec::new(), Vec::new());
        for n in std::mem::take(&mut self.neighbours) {
            match n.client.seen() < RENEW {
                true => kept.push(n),
                false => worn.push(n),
            }
        }
        self.neighbours = kept;
        for n in worn {
            self.count(&n);
        }
        for (at_source, wanted) in [
            (true, self.args.neighbours),
            (false, self.args.at_destination),
        ] {
            let have = self.neighbours.iter().filter(|n| n.at_source == at_source);
            for _ in have.count()..wanted as usize {
                let worker = WORKERS[usize::from(!at_source)];
                let context = self.args.neighbour_context;
                let client = self.start_on(worker, context).await?;
                self.neighbours.push(Neighbour { client, at_source });
            }
        }
        if self.mover.as_ref().is_none_or(|m| m.seen() >= RENEW) {
            self.mover = None;
            self.mover = Some(self.start_on(WORKERS[0], self.args.context).await?);
        }
        Ok(())
    }

    fn count(&mut self, n: &Neighbour) {
        let arrivals: Vec<u64> = n.client.arrivals().into_iter().map(ns_of).collect();
        match n.at_source {
            true => self.source.add(&arrivals, &self.at_source),
            false => self.destination.add(&arrivals, &self.at_destination),
        }
    }

    /// Moves the request; the error is the cause of a move that did not come about.
    async fn migrate(
        &mut self,
        from: &str,
        max_bytes_per_s: u64,
    ) -> anyhow::Result<Result<Migrated, String>> {
        let how = self.how(max_bytes_per_s);
        let mover = self.mover.as_mut().context("nothing to move")?;
        let m = self.rig.migrate(mover.request, from, how).await?;
        if !m.report.migrated {
            self.mover = None;
            return Ok(Err(m.report.cause));
        }
        mover.until(m.report.seal + 1).await?;
        Ok(Ok(m))
    }

    /// GB/s of STREAM.
    fn rate(&self, m: &Migrated) -> anyhow::Result<f64> {
        let ns = m.between("destination.reserved", "destination.streamed");
        let ns = ns.context("the destination did not note when it had the context")?;
        Ok(self.bytes / ns.max(1) as f64)
    }

    async fn unshaped(&mut self) -> anyhow::Result<f64> {
        let mut rates = Vec::new();
        // The first one each way dials links and touches memory for the first time.
        for i in 0..UNSHAPED + 1 {
            for from in WORKERS {
                match self.migrate(from, 0).await? {
                    Ok(m) if i > 0 && from == WORKERS[0] => rates.push(self.rate(&m)?),
                    Ok(_) => {}
                    Err(cause) => bail!("an unshaped move failed: {cause}"),
                }
                tokio::time::sleep(SETTLE).await;
            }
        }
        Ok(median(rates))
    }

    async fn still(&mut self, kind: Kind, length: Duration) {
        tokio::time::sleep(SETTLE).await;
        let from_ns = now_ns();
        tokio::time::sleep(length).await;
        self.window(kind, from_ns, now_ns(), now_ns());
    }

    fn window(&mut self, kind: Kind, from_ns: u64, source_ns: u64, destination_ns: u64) {
        let window = |to_ns| Window {
            kind,
            from_ns,
            to_ns,
        };
        self.at_source.push(window(source_ns));
        self.at_destination.push(window(destination_ns));
    }

    /// One migration and its two windows without; in turns the second comes before and after it.
    async fn cycle(&mut self, nth: u32, rate: f64) -> anyhow::Result<Result<(), String>> {
        self.refresh().await?;
        let length = Duration::from_secs_f64(self.bytes / (rate * 1e9));
        let (first, second) = match nth % 2 {
            0 => (Kind::Still, Kind::StillToo),
            _ => (Kind::StillToo, Kind::Still),
        };
        self.still(first, length).await;
        if nth.is_multiple_of(2) {
            self.still(second, length).await;
        }
        tokio::time::sleep(SETTLE).await;
        let from_ns = now_ns();
        let m = match self.migrate(WORKERS[0], (rate * 1e9) as u64).await? {
            Ok(m) => m,
            Err(cause) => return Ok(Err(cause)),
        };
        let launch = m.at("destination.launch").context("no launch was noted")?;
        let let_go = m.at("source.released").unwrap_or(launch);
        self.window(Kind::Moving, from_ns, let_go.max(launch), launch);
        self.streamed.push(self.rate(&m)?);
        tokio::time::sleep(SETTLE).await;
        if let Err(cause) = self.migrate(WORKERS[1], 0).await? {
            return Ok(Err(cause));
        }
        if !nth.is_multiple_of(2) {
            self.still(second, length).await;
        }
        Ok(Ok(()))
    }
}

/// What the rows of a run share.
struct Run<'a> {
    args: &'a P99Args,
    unshaped: f64,
    streamed: f64,
    failed: u32,
    cause: String,
    quiet: Quiet,
}

impl Run<'_> {
    fn rows(&self, place: &str, gaps: &Gaps) -> [Row; 2] {
        let args = self.args;
        let (with, without) = (
            Summary::of(gaps.moving.clone()),
            Summary::of(gaps.without()),
        );
        let (a, b) = (
            Summary::of(gaps.still.clone()),
            Summary::of(gaps.still_too.clone()),
        );
        let ratio = |x: f64, y: f64| round(x / y.max(1.0));
        let (lo, hi) = interval(&gaps.moving, 0.99);
        let case = format!("{}/{place}", args.transport.name());
        let against = |row: Row, what: &str, s: &Summary, r: f64| {
            let mut row = row.against(what, s.p99 / 1e3, r);
            row.value = round(row.p99_us.unwrap_or(0.0));
            row
        };
        let row = Row::latency("p99", case.clone(), &with);
        let row = against(row, "without", &without, with.p99 / without.p99.max(1.0))
            .quiet(&self.quiet)
            .with("without_p50_us", round(without.p50 / 1e3))
            .with("without_p99_us", round(without.p99 / 1e3))
            .with("without_n", without.n)
            .with("p50_ratio", ratio(with.p50, without.p50))
            .with("control_ratio", ratio(b.p99, a.p99))
            .with("p99_95_us", json!([round(lo / 1e3), round(hi / 1e3)]))
            .with("stream_gbps", round(self.streamed))
            .with("unshaped_gbps", round(self.unshaped))
            .with("stream_share", round(self.streamed / self.unshaped))
            .with("transport", args.transport.name())
            .with("model", args.size.clone())
            .with("context", args.context)
            .with("neighbours_source", args.neighbours)
            .with("neighbours_destination", args.at_destination)
            .with("migrations", args.migrations)
            .with("failed", self.failed)
            .with("failed_cause", self.cause.clone());
        let control = Row::latency("p99", format!("{case}/control"), &b);
        let control = against(control, "as long, again", &a, b.p99 / a.p99.max(1.0));
        [row, control]
    }
}

async fn all(args: &P99Args, rows: &mut Rows) -> anyhow::Result<Gaps> {
    let everybody = args.neighbours + args.at_destination;
    let tokens = args.context + RENEW as u32 * 2;
    let beside = (args.neighbour_context + RENEW as u32 * 2) * everybody;
    let rig = Rig::start(Want {
        engine: EngineArgs {
            model: None,
            size: args.size.clone(),
            block_tokens: BLOCK,
            // A request's whole output is promised to it.
            blocks: (tokens + beside + OUTPUT * (everybody + 2)) / BLOCK + 64,
            threads: 1,
            step_time: Duration::ZERO,
        },
        store: Store::Embedded,
        null_handoffs: false,
    })
    .await?;
    let pids = rig.pids();
    let mut bench = Bench {
        rig,
        args,
        neighbours: Vec::new(),
        mover: None,
        at_source: Vec::new(),
        at_destination: Vec::new(),
        source: Gaps::default(),
        destination: Gaps::default(),
        streamed: Vec::new(),
        bytes: 0.0,
    };
    let progress = Progress::start(u64::from(args.migrations));
    progress.say("neighbours start");
    bench.refresh().await?;
    bench.bytes = f64::from(args.context) * token_bytes(&args.size);
    let mut quiet = Quiet::start(&pids);
    let unshaped = bench.unshaped().await?;
    let rate = unshaped * args.share;
    progress.say(format!("STREAM at {rate:.3} of {unshaped:.3} GB/s"));
    let (mut done, mut failed, mut cause) = (0, 0, String::new());
    while done < args.migrations {
        match bench.cycle(done, rate).await? {
            Ok(()) => {
                done += 1;
                progress.step();
            }
            Err(why) => {
                failed += 1;
                if failed > FAILURES {
                    bail!("{failed} moves failed: {why}");
                }
                bench.mover = None;
                cause = why;
            }
        }
    }
    quiet.stop();
    for n in std::mem::take(&mut bench.neighbours) {
        bench.count(&n);
    }
    bench.source.sort();
    bench.destination.sort();
    let run = Run {
        args,
        unshaped,
        streamed: median(std::mem::take(&mut bench.streamed)),
        failed,
        cause,
        quiet,
    };
    for row in run.rows("source", &bench.source) {
        rows.push(row)?;
    }
    if args.at_destination > 0 {
        for row in run.rows("destination", &bench.destination) {
            rows.push(row)?;
        }
    }
    drop(progress);
    bench.mover = None;
    bench.rig.stop()?;
    Ok(bench.source)
}

/// Bytes of KV of a token of a built-in model: layers, kv heads, head dim, K and V, bf16.
fn token_bytes(size: &str) -> f64 {
    let (layers, heads, dim) = match size {
        "tiny" => (4, 2, 32),
        "small" => (8, 4, 32),
        _ => (12, 4, 64),
    };
    f64::from(layers * heads * dim * 4)
}

/// Runs the bench.
pub fn run(args: &P99Args, rows: &mut Rows) -> anyhow::Result<()> {
    if args.transport == TransportKind::Local {
        let text = "bench p99 measures two processes: --transport tcp or shm";
        return Err(coded(Code::Caller, text));
    }
    let gaps = block_on(all(args, rows))?;
    args.out.draw(|| {
        let note = format!(
            "{} neighbours on the source worker, {} on the destination; {} moves over {}, {} each",
            args.neighbours,
            args.at_destination,
            args.migrations,
            args.transport.name(),
            table::bytes(args.context as u64 * token_bytes(&args.size) as u64),
        );
        plot::neighbours(
            "Inter-token latency of the requests that stay on the source worker".into(),
            plot::note(&[&note]),
            &[
                ("without a migration", Ink::Grey, gaps.still.clone()),
                ("without, again", Ink::Hue(1), gaps.still_too.clone()),
                ("during one", Ink::Hue(0), gaps.moving.clone()),
            ],
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_in_the_window_in_which_it_ends_and_nowhere_else() {
        let window = |kind, from_ns, to_ns| Window {
            kind,
            from_ns,
            to_ns,
        };
        let windows = [
            window(Kind::Still, 100, 200),
            window(Kind::Moving, 300, 400),
            window(Kind::StillToo, 500, 600),
        ];
        let mut gaps = Gaps::default();
        gaps.add(&[10, 90, 150, 190, 250, 310, 390, 450, 590, 700], &windows);
        gaps.sort();
        assert_eq!(gaps.still, [40, 60]);
        assert_eq!(gaps.moving, [60, 80]);
        assert_eq!(gaps.still_too, [140]);
        assert_eq!(gaps.without(), [40, 60, 140]);
    }

    #[test]
    fn a_share_is_a_part_of_one() {
        assert_eq!(share("0.25"), Ok(0.25));
        for bad in ["0", "1.5", "-1", "NaN", "x"] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }
}
