//! `bench stream`: the rate at which a request's KV moves while it goes on decoding, hashed where it
//! lies at both ends, beside what two cores could do at best.
//!
//! The product's own daemons move the request: two workers, a gateway with the store and a
//! coordinator, each a process of its own, with the KV geometry of Qwen2.5-7B. A sample runs from
//! the moment the destination has reserved room until it has verified, in its own memory, the whole
//! context that was there at the start. The request goes to and fro; between two moves the ceilings
//! walk through memory of their own, so both ends are cold.
//!
//! The ceiling is the lower of two: all CPUs over the CPU seconds that a byte takes in *both*
//! processes, of the transport alone (the cheaper of 1 and 16 MiB blocks) plus the digest alone,
//! once at each end; and a plain copy by all CPUs. All of it is measured in each round.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use moonlivekv::transport::measure;

use super::ceiling::Memcpy;
use super::digest::Alone;
use super::progress::Progress;
use super::quiet::{Quiet, cpus, process_cpu_seconds};
use super::rig::{Client, Move, Rig, Store, Want, other};
use super::row::{Row, Rows, round};
use super::stats::{Paired, Summary, median};
use super::{Output, plot, table};
use crate::admin::block_on;
use crate::cli::{EngineArgs, TransportKind, VerifyKind};
use crate::exit::{Code, coded};

/// Tokens of a page and of a block.
const PAGE: u32 = 16;
/// Bytes of KV of a token.
const TOKEN_BYTES: u64 = 56 << 10;
/// Tokens that may be decoded while it moves to and fro.
const SLACK: u32 = 4096;
/// Blocks that transport and copy are measured with.
const BLOCKS: [u64; 2] = [1 << 20, 16 << 20];
/// Moves in a row that may fail before the bench does.
const FAILURES: u32 = 3;

#[derive(Debug, Clone, Args)]
pub struct StreamArgs {
    /// How bulk KV travels.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "tcp,shm",
        value_name = "PATH,..."
    )]
    transport: Vec<TransportKind>,
    /// Context of the request; 4688 tokens of 56 KiB are 256 MiB.
    #[arg(long, default_value_t = 4688, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(64..=131_072))]
    context: u32,
    /// Rounds of the ceilings and one move each.
    #[arg(long, default_value_t = 7, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Length of each ceiling in a round.
    #[arg(long, default_value = "200ms", value_parser = super::duration, value_name = "TIME")]
    round: Duration,
    /// Least time of a decode step of the request that moves.
    #[arg(long, default_value = "20ms", value_parser = super::duration, value_name = "TIME")]
    step_time: Duration,
    #[command(flatten)]
    out: Output,
}

/// The ceilings of one round, and what they were made of.
#[derive(Debug, Clone, Copy)]
struct Ceiling {
    /// CPU seconds a GB, both processes.
    transport: f64,
    /// CPU seconds a GB at one end.
    digest: f64,
    /// GB/s.
    memcpy: f64,
}

impl Ceiling {
    /// GB/s.
    fn gbps(&self, cores: usize) -> f64 {
        (cores as f64 / (self.transport + 2.0 * self.digest)).min(self.memcpy)
    }
}

/// What ceilings are measured with.
struct Ceilings {
    digest: Alone,
    memcpy: Memcpy,
    round: Duration,
}

impl Ceilings {
    fn new(round: Duration) -> anyhow::Result<Self> {
        Ok(Self {
            digest: Alone::new(PAGE as u16)?,
            memcpy: Memcpy::new()?,
            round,
        })
    }

    fn measure(&mut self, path: TransportKind) -> anyhow::Result<Ceiling> {
        let mut transport = f64::INFINITY;
        let options = measure::Options {
            sizes: BLOCKS.to_vec(),
            rounds: 1,
            round: self.round,
            filter: format!("{}/get/", path.name()),
            ..measure::Options::default()
        };
        measure::run(&options, |row| transport = transport.min(row.cpu_s_per_gb))?;
        if !transport.is_finite() {
            bail!("the transport alone was not measured");
        }
        Ok(Ceiling {
            transport,
            digest: 1.0 / self.digest.run()?.cpu,
            memcpy: self
                .memcpy
                .run_threads(cpus(), BLOCKS[0] as usize, self.round)?,
        })
    }
}

/// The request that moves to and fro.
struct Mover {
    client: Client,
    at: String,
}

impl Mover {
    async fn start(rig: &mut Rig, context: u32) -> anyhow::Result<Self> {
        let mut client = rig.seeded(context, SLACK)?;
        client.until(2).await?;
        Ok(Self {
            at: rig.owner(client.request).await?,
            client,
        })
    }
}

/// Samples of one path.
#[derive(Default)]
struct Samples {
    rounds: Paired,
    ceilings: Vec<Ceiling>,
    ns: Vec<u64>,
    cpu: Vec<f64>,
    failed: u32,
    cause: String,
}

/// One move: GB/s, nanoseconds, CPU seconds a GB of both workers over the whole migration.
async fn one(
    rig: &Rig,
    mover: &mut Mover,
    path: TransportKind,
    bytes: f64,
) -> anyhow::Result<Result<(f64, u64, f64), String>> {
    let how = Move {
        transport: path,
        verify: VerifyKind::Resident,
        max_bytes_per_s: 0,
        null: false,
    };
    let workers: Vec<u32> = rig.pids().into_iter().take(2).collect();
    let used = || -> f64 { workers.iter().filter_map(|p| process_cpu_seconds(*p)).sum() };
    let before = used();
    let m = rig.migrate(mover.client.request, &mover.at, how).await?;
    let cpu = used() - before;
    if !m.report.migrated {
        return Ok(Err(m.report.cause));
    }
    mover.at = other(&mover.at).to_owned();
    mover.client.until(m.report.seal + 1).await?;
    let Some(ns) = m.between("destination.reserved", "destination.streamed") else {
        bail!("the destination did not note when it had verified the context");
    };
    if m.report.transport != path.name() {
        bail!(
            "{} was asked for, {} was taken",
            path.name(),
            m.report.transport
        );
    }
    Ok(Ok((bytes / ns.max(1) as f64, ns, cpu / bytes * 1e9)))
}

async fn measure_path(
    rig: &mut Rig,
    args: &StreamArgs,
    path: TransportKind,
    ceilings: &mut Ceilings,
    progress: &Progress,
) -> anyhow::Result<Samples> {
    let bytes = f64::from(args.context) * TOKEN_BYTES as f64;
    let mut samples = Samples::default();
    let mut mover = Mover::start(rig, args.context).await?;
    // Once to each worker unmeasured: links are dialled, memory is touched for the first time.
    for _ in 0..2 {
        if let Err(cause) = one(rig, &mut mover, path, bytes).await? {
            bail!("the first move over {} failed: {cause}", path.name());
        }
    }
    while samples.ns.len() < args.rounds as usize {
        let ceiling = ceilings.measure(path)?;
        match one(rig, &mut mover, path, bytes).await? {
            Ok((gbps, ns, cpu)) => {
                samples.rounds.push(gbps, ceiling.gbps(cpus()));
                samples.ceilings.push(ceiling);
                samples.ns.push(ns);
                samples.cpu.push(cpu);
                progress.step();
            }
            Err(cause) => {
                samples.failed += 1;
                if samples.failed > FAILURES {
                    bail!("{} moves failed: {cause}", samples.failed);
                }
                samples.cause = cause;
                mover = Mover::start(rig, args.context).await?;
            }
        }
    }
    Ok(samples)
}

fn row_of(args: &StreamArgs, path: TransportKind, s: &Samples, quiet: &Quiet) -> Row {
    let bytes = u64::from(args.context) * TOKEN_BYTES;
    let of = |pick: fn(&Ceiling) -> f64| round(median(s.ceilings.iter().map(pick).collect()));
    let times = Summary::of(s.ns.clone());
    let case = format!("{}/{}MiB", path.name(), bytes >> 20);
    let mut row = Row::rate("stream", case, s.rounds.ours(), s.rounds.n())
        .against("what the CPUs allow", s.rounds.ceiling(), s.rounds.ratio())
        .quiet(quiet)
        .with("transport", path.name())
        .with("context", args.context)
        .with("synthetic", true)
        .with("bytes", bytes)
        .with("transport_cpu_s_per_gb", of(|c| c.transport))
        .with("digest_cpu_s_per_gb", of(|c| c.digest))
        .with("memcpy_gbps", of(|c| c.memcpy))
        .with("cpu_s_per_gb", round(median(s.cpu.clone())))
        .with("cores", cpus())
        .with("failed", s.failed)
        .with("failed_cause", s.cause.clone());
    row.p50_us = Some(round(times.p50 / 1e3));
    row.p99_us = Some(round(times.p99 / 1e3));
    row
}

async fn all(args: &StreamArgs, rows: &mut Rows) -> anyhow::Result<Vec<plot::Rounds>> {
    let mut rig = Rig::start(Want {
        engine: EngineArgs {
            model: None,
            size: "qwen2.5-7b".into(),
            block_tokens: PAGE,
            // Twice: a request that was given up may end after the next one begins.
            blocks: (args.context + SLACK) / PAGE * 2 + 64,
            threads: 1,
            step_time: args.step_time,
        },
        store: Store::Embedded,
        null_handoffs: false,
    })
    .await?;
    let progress = Progress::start(args.transport.len() as u64 * u64::from(args.rounds));
    progress.say("filling memory at both ends");
    let mut ceilings = Ceilings::new(args.round)?;
    let mut charts = Vec::new();
    for path in &args.transport {
        progress.say(path.name());
        // The peers of the transport's ceiling come and go, so only the daemons can be told apart:
        // what the ceilings burn in processes of their own counts as others'.
        let mut quiet = Quiet::start(&rig.pids());
        let samples = measure_path(&mut rig, args, *path, &mut ceilings, &progress).await?;
        quiet.stop();
        rows.push(row_of(args, *path, &samples, &quiet))?;
        charts.push(plot::Rounds {
            name: path.name().to_owned(),
            pairs: samples.rounds.pairs().to_vec(),
        });
    }
    drop(progress);
    rig.stop()?;
    Ok(charts)
}

/// Runs the bench.
pub fn run(args: &StreamArgs, rows: &mut Rows) -> anyhow::Result<()> {
    if args.transport.contains(&TransportKind::Local) {
        let text = "bench stream measures two processes: --transport tcp or shm";
        return Err(coded(Code::Caller, text));
    }
    let charts = block_on(all(args, rows))?;
    args.out.draw(|| {
        let note = format!(
            "{} of KV, {} a token, synthetic; hashed in place at both ends",
            table::bytes(u64::from(args.context) * TOKEN_BYTES),
            table::bytes(TOKEN_BYTES)
        );
        plot::stream(
            "STREAM with verification at both ends".into(),
            plot::note(&[&note]),
            &charts,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_is_the_lower_of_cpu_time_and_copying() {
        let c = Ceiling {
            transport: 0.3,
            digest: 0.15,
            memcpy: 12.0,
        };
        assert!((c.gbps(2) - 2.0 / 0.6).abs() < 1e-9);
        assert_eq!(Ceiling { memcpy: 2.0, ..c }.gbps(2), 2.0);
    }
}
