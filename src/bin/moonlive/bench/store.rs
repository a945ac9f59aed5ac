//! `bench store`: what a compare-and-swap of a route record costs: in memory, on disk, through
//! sockets, beside what the disk and the socket cost alone; how long the log's turn to a new segment
//! holds it up; and what the flushes of the token journal on the same disk do to it.
//!
//! Calls come one after the other, some hundred microseconds apart: back to back a disk shows its
//! throughput. The cases are measured in turns, and each is held against its ceiling of the same turn.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use moonlivekv::id::{OwnerEpoch, RequestId, WorkerId, WorkerRef};
use moonlivekv::journal::{Journal, JournalOptions, TokenRef};
use moonlivekv::metastore::measure::{Latency, store_latencies};
use moonlivekv::metastore::{Cas, CasOutcome, EmbeddedOptions, EmbeddedStore, MetaStore, Step};
use serde_json::json;

use super::Output;
use super::plot::{self, Ink};
use super::progress::Progress;
use super::quiet::Quiet;
use super::row::{Row, Rows, round};
use super::stats::{Summary, median};
use crate::cluster::TempDir;

/// Bytes of a route record.
const RECORD: usize = 300;
/// Time between two calls on disk.
const PAUSE: Duration = Duration::from_micros(300);
/// How long one call may take.
const CALL: Duration = Duration::from_secs(30);
/// A segment that is full after some hundred changes, to see many turns.
const SMALL_SEGMENT: u64 = 64 << 10;
/// Calls in a turn of the bench, so that the log turns at least twice.
const TURNS: u32 = 400;
/// Tokens journaled at a time, and how often: some thousand tokens a second.
const TOKENS: usize = 4;
const EVERY: Duration = Duration::from_millis(4);

#[derive(Debug, Clone, Args)]
pub struct StoreArgs {
    /// Where the logs are written; default: a temporary directory.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Calls of each case, over all turns.
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    calls: u32,
    /// Turns.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    #[command(flatten)]
    out: Output,
}

/// What a case is held against.
fn ceiling_of(case: &str) -> Option<(&'static str, &'static str)> {
    Some(match case {
        "cas/memory/unix" => ("wire/unix", "frame and back"),
        "cas/memory/tcp" => ("wire/tcp", "frame and back"),
        "cas/disk" | "cas/disk/unix" | "cas/disk/tcp" => ("raw/300B", "write + fdatasync"),
        _ => return None,
    })
}

fn at<'a>(round: &'a [Latency], case: &str) -> Option<&'a Latency> {
    round.iter().find(|l| l.case == case)
}

/// A row of a case over all turns.
fn row_of(rounds: &[Vec<Latency>], case: &str) -> Row {
    let of = |pick: fn(&Latency) -> f64| {
        let all = rounds.iter().filter_map(|r| at(r, case)).map(pick);
        round(median(all.collect()))
    };
    let calls = rounds.iter().filter_map(|r| at(r, case)).map(|l| l.calls);
    let mut row = Row {
        bench: "store",
        case: case.to_owned(),
        value: of(|l| l.p50_us),
        unit: "us",
        p50_us: Some(of(|l| l.p50_us)),
        p99_us: Some(of(|l| l.p99_us)),
        n: calls.sum::<usize>() as u64,
        ..Row::default()
    };
    if let Some((ceiling, what)) = ceiling_of(case) {
        let pairs = rounds
            .iter()
            .filter_map(|r| Some((at(r, case)?, at(r, ceiling)?)));
        let ratios = |pick: fn(&Latency) -> f64| {
            median(
                pairs
                    .clone()
                    .map(|(a, b)| pick(a) / pick(b).max(0.01))
                    .collect(),
            )
        };
        let value = median(pairs.clone().map(|(_, b)| b.p50_us).collect());
        row = row
            .against(what, value, ratios(|l| l.p50_us))
            .with("p99_ratio", round(ratios(|l| l.p99_us)));
    }
    row
}

/// Compare-and-swaps one record, `calls` times; nanoseconds of each, in order.
fn swaps(store: &dyn MetaStore, calls: u32) -> anyhow::Result<Vec<u64>> {
    let key = "bench";
    let value = [7u8; RECORD];
    let mut revision = store
        .get(key, Instant::now() + CALL)?
        .map(|record| record.revision);
    let mut out = Vec::with_capacity(calls as usize);
    for _ in 0..calls {
        std::thread::sleep(PAUSE);
        let began = Instant::now();
        let outcome = store.cas(&Cas::put(key, revision, &value), began + CALL)?;
        out.push(began.elapsed().as_nanos() as u64);
        revision = match outcome {
            CasOutcome::Applied { revision } => Some(revision),
            CasOutcome::Conflict { current } => current.map(|r| r.revision),
        };
    }
    Ok(out)
}

/// Times of the calls during which the log turned to a new segment, and of all others.
fn rotation(dir: &Path, calls: u32) -> anyhow::Result<(Vec<u64>, Vec<u64>)> {
    let turned = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&turned);
    let options = EmbeddedOptions {
        segment_bytes: SMALL_SEGMENT,
        hook: Some(Arc::new(move |step| {
            if step == Step::SnapshotPublished {
                seen.fetch_add(1, Ordering::Relaxed);
            }
        })),
        ..EmbeddedOptions::default()
    };
    let store = EmbeddedStore::open(dir, options)?;
    let (mut during, mut others) = (Vec::new(), Vec::new());
    let mut before = turned.load(Ordering::Relaxed);
    // One call at a time, so that a turn can be laid to a call.
    for _ in 0..calls {
        let took = swaps(&store, 1)?;
        let now = turned.load(Ordering::Relaxed);
        match now == before {
            true => others.extend(took),
            false => during.extend(took),
        }
        before = now;
    }
    Ok((during, others))
}

/// Appends tokens to a journal until told to stop; gives how many it appended.
fn keep_journal(dir: &Path, stop: &AtomicBool) -> anyhow::Result<u64> {
    let journal = Journal::open(dir, JournalOptions::default())?;
    let owner = WorkerRef {
        id: WorkerId::new("w0").map_err(|e| anyhow::anyhow!("{e}"))?,
        incarnation: moonlivekv::id::Incarnation(1),
    };
    let (request, epoch) = (RequestId([7; 16]), OwnerEpoch(1));
    journal.raise_floor(request, epoch, &owner)?;
    let token = TokenRef {
        token: 7,
        text: b" word",
        finish: None,
    };
    let mut next = 1;
    while !stop.load(Ordering::Relaxed) {
        journal.append(request, epoch, next, &[token; TOKENS])?;
        next += TOKENS as u64;
        std::thread::sleep(EVERY);
    }
    Ok(next - 1)
}

/// The same calls without and with a journal that is written and flushed on the same disk.
fn beside_journal(dir: &Path, calls: u32) -> anyhow::Result<(Vec<u64>, Vec<u64>, u64)> {
    let store = EmbeddedStore::open(dir.join("store"), EmbeddedOptions::default())?;
    let alone = swaps(&store, calls)?;
    let stop = AtomicBool::new(false);
    let (beside, tokens) = std::thread::scope(|s| {
        let journal = s.spawn(|| keep_journal(&dir.join("journal"), &stop));
        let beside = swaps(&store, calls);
        stop.store(true, Ordering::Relaxed);
        let tokens = journal
            .join()
            .unwrap_or_else(|_| anyhow::bail!("the journal's thread ended early"));
        anyhow::Ok((beside?, tokens?))
    })?;
    Ok((alone, beside, tokens))
}

fn against(case: &str, times: &[u64], what: &str, others: &[u64]) -> Row {
    let (a, b) = (Summary::of(times.to_vec()), Summary::of(others.to_vec()));
    Row::latency("store", case, &a)
        .against(what, b.p50 / 1e3, a.p50 / b.p50.max(1.0))
        .with("against_p99_us", round(b.p99 / 1e3))
        .with("p99_ratio", round(a.p99 / b.p99.max(1.0)))
}

/// Runs the bench.
pub fn run(args: &StoreArgs, rows: &mut Rows) -> anyhow::Result<()> {
    let temp = TempDir::new()?;
    let dir = match &args.dir {
        Some(dir) => {
            // A directory of its own inside, taken away again.
            let name = temp.path().file_name().context("a name")?;
            let inside = dir.join(name);
            std::fs::create_dir_all(&inside)
                .with_context(|| format!("--dir {}: cannot write there", dir.display()))?;
            inside
        }
        None => temp.path().to_owned(),
    };
    let outcome = measure(args, &dir, rows);
    if args.dir.is_some() {
        let _ = std::fs::remove_dir_all(&dir);
    }
    let charts = outcome?;
    args.out.draw(|| {
        let curves: Vec<(&str, Ink, Vec<u64>)> = charts
            .iter()
            .map(|(name, ink, times)| (*name, *ink, times.clone()))
            .collect();
        plot::latencies(
            "A compare-and-swap of the embedded store".into(),
            plot::note(&["one after the other, flushed to disk"]),
            "compare-and-swap (us)",
            &curves,
        )
    })
}

type Curves = Vec<(&'static str, Ink, Vec<u64>)>;

fn measure(args: &StoreArgs, dir: &Path, rows: &mut Rows) -> anyhow::Result<Curves> {
    let progress = Progress::start(u64::from(args.rounds) * 3);
    let each = (args.calls / args.rounds).max(20);
    let mut quiet = Quiet::start(&[]);
    let (mut rounds, mut turned, mut between) = (Vec::new(), Vec::new(), Vec::new());
    let (mut alone, mut beside, mut tokens) = (Vec::new(), Vec::new(), 0);
    for n in 0..args.rounds {
        let dir = dir.join(n.to_string());
        progress.say("one by one");
        std::fs::create_dir_all(&dir)?;
        rounds.push(store_latencies(&dir, each as usize)?);
        progress.step();
        progress.say("turns of the log");
        let (during, others) = rotation(&dir.join("turns"), each.max(TURNS))?;
        turned.extend(during);
        between.extend(others);
        progress.step();
        progress.say("beside a journal");
        let (a, b, t) = beside_journal(&dir, each)?;
        alone.extend(a);
        beside.extend(b);
        tokens += t;
        progress.step();
        std::fs::remove_dir_all(&dir)?;
    }
    quiet.stop();
    drop(progress);
    let cases: Vec<String> = rounds
        .first()
        .map(|r| r.iter().map(|l| l.case.clone()).collect())
        .unwrap_or_default();
    for case in &cases {
        rows.push(row_of(&rounds, case).quiet(&quiet))?;
    }
    let row = against("cas/disk/turning", &turned, "between turns", &between);
    rows.push(row.quiet(&quiet).with("segment_bytes", SMALL_SEGMENT).with(
        "default_segment_bytes",
        EmbeddedOptions::default().segment_bytes,
    ))?;
    let row = against("cas/disk/beside-journal", &beside, "no journal", &alone);
    rows.push(row.quiet(&quiet).with("tokens_journaled", json!(tokens)))?;
    for all in [&mut alone, &mut beside, &mut turned] {
        all.sort_unstable();
    }
    Ok(vec![
        ("alone", Ink::Grey, alone),
        ("beside a journal", Ink::Hue(0), beside),
        ("while the log turns", Ink::Hue(1), turned),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_of_the_log_is_laid_to_the_call_that_waited_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let (during, others) = rotation(dir.path(), 400).unwrap();
        assert!(!during.is_empty() && during.len() < 40, "{}", during.len());
        assert_eq!(during.len() + others.len(), 400);
    }

    #[test]
    fn cases_are_held_against_the_ceiling_of_their_own_turn() {
        let latency = |case: &str, us: f64| Latency {
            case: case.into(),
            calls: 10,
            p50_us: us,
            p99_us: 2.0 * us,
        };
        // The machine was three times slower in the second turn.
        let rounds: Vec<Vec<Latency>> = [1.0, 3.0]
            .map(|slow| {
                vec![
                    latency("raw/300B", 100.0 * slow),
                    latency("cas/disk", 120.0 * slow),
                ]
            })
            .to_vec();
        let row = row_of(&rounds, "cas/disk");
        assert_eq!((row.ratio, row.n, row.value), (Some(1.2), 20, 240.0));
        assert_eq!(row_of(&rounds, "raw/300B").ratio, None);
    }
}
