//! What the paths reach, against ceilings measured beside them: two processes, rounds interleaved.
//!
//! The ceilings are what plain code reaches here: for `tcp` a loop that sends a block and waits for an
//! 8-byte acknowledgement, over sockets of the standard library, unframed and unchecked; for `shm`
//! a `memcpy` of each block out of a mapping of the other process's memory. Each round runs the
//! ceiling and the path one after the other, so that a neighbour's load hits both; a row reports the
//! median round and the median of the rounds' ratios.

mod peer;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

pub use peer::serve_if_asked;

use crate::mem::{BlockId, BlockPool, MemError, Region, RegionView, RemoteRegion};
use crate::transport::{
    Completion, Endpoint, Link, Local, Path, ShmOptions, ShmTransport, Span, TcpOptions,
    TcpTransport, Transfer, Transport, TransportError,
};
use peer::{Peer, cpu_seconds, filled, machine_cpu_seconds, pattern};

/// Set in the environment of the serving process; its value is the working set, bytes.
const CHILD_ENV: &str = "MOONLIVE_TRANSFER_PEER";
/// Blocks of the pools: a transfer of 1 MiB leases 16 of them.
const BLOCK: u64 = 64 << 10;
/// Long enough for anything that works.
const PATIENCE: Duration = Duration::from_secs(30);

/// What to measure.
pub struct Options {
    /// Bytes per transfer.
    pub sizes: Vec<u64>,
    /// Bytes walked through at each end, a multiple of 16 MiB.
    pub working_set: u64,
    /// Interleaved rounds per case.
    pub rounds: usize,
    /// Length of one half of a round.
    pub round: Duration,
    /// Transfers in flight at a time.
    pub depth: usize,
    /// Only cases whose name contains this.
    pub filter: String,
    /// Starts the peer: a program whose `main` begins with [`serve_if_asked`].
    pub peer: Box<dyn Fn() -> std::io::Result<Command>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sizes: vec![4 << 10, 64 << 10, 1 << 20, 16 << 20],
            working_set: 256 << 20,
            rounds: 7,
            round: Duration::from_millis(300),
            depth: 1,
            filter: String::new(),
            peer: Box::new(|| Ok(Command::new(std::env::current_exe()?))),
        }
    }
}

/// One result.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Always `transfer`.
    pub bench: &'static str,
    /// `path/operation/size`.
    pub case: String,
    /// Median throughput, GB/s (1e9 bytes).
    pub value: f64,
    /// Always `GB/s`.
    pub unit: &'static str,
    /// Median time of one transfer from submit to completion, microseconds.
    pub p50_us: f64,
    /// Its 99th percentile.
    pub p99_us: f64,
    /// As `value`.
    pub gbps: f64,
    /// Transfers in flight at a time.
    pub depth: usize,
    /// CPU seconds of both processes per GB, during this case's rounds of the path.
    pub cpu_s_per_gb: f64,
    /// Share of the machine's CPU time that other processes took meanwhile; above some 0.05 the row
    /// says little.
    pub other_cpu: f64,
    /// The ceiling.
    pub against: String,
    /// Its median throughput, GB/s.
    pub against_gbps: f64,
    /// CPU seconds of both processes per GB, during the ceiling's rounds.
    pub against_cpu_s_per_gb: f64,
    /// Its median time per block, microseconds.
    pub against_p50_us: f64,
    /// Median over the rounds of path / ceiling.
    pub ratio: f64,
}

/// A measurement that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The peer process could not be started or talked to.
    #[error("peer process: {0}")]
    Peer(#[from] std::io::Error),
    /// The peer said something unexpected.
    #[error("peer process answered `{0}`")]
    Answer(String),
    /// A transfer or registration failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// Memory for it could not be had.
    #[error(transparent)]
    Mem(#[from] MemError),
    /// A transfer reported success and brought other bytes than the peer has.
    #[error("{0} brought wrong bytes")]
    WrongBytes(String),
}

/// Rounds of one contender: throughput of each round, and the time of each block.
#[derive(Default)]
struct Tally {
    gbps: Vec<f64>,
    times_us: Vec<f64>,
}

impl Tally {
    fn percentile(&mut self, p: f64) -> f64 {
        self.times_us.sort_by(f64::total_cmp);
        self.times_us
            .get(
                ((self.times_us.len() as f64 * p) as usize)
                    .min(self.times_us.len().saturating_sub(1)),
            )
            .copied()
            .unwrap_or(0.0)
    }
}

fn median(values: &[f64]) -> f64 {
    let mut v = values.to_vec();
    v.sort_by(f64::total_cmp);
    v.get(v.len() / 2).copied().unwrap_or(0.0)
}

/// A contender: moves blocks until the time is up, and tells of each how long it took.
type Contender<'a> =
    Box<dyn FnMut(Instant, &mut dyn FnMut(Duration)) -> Result<u64, MeasureError> + 'a>;

fn half(c: &mut Contender<'_>, o: &Options, tally: &mut Tally) -> Result<f64, MeasureError> {
    let t0 = Instant::now();
    let times = &mut tally.times_us;
    let bytes = c(t0 + o.round, &mut |t| times.push(t.as_secs_f64() * 1e6))?;
    let gbps = bytes as f64 / t0.elapsed().as_secs_f64() / 1e9;
    tally.gbps.push(gbps);
    Ok(gbps)
}

fn raw_loop<'a>(
    to: SocketAddr,
    size: u64,
    memory: &'a [u8],
) -> Result<Contender<'a>, MeasureError> {
    let mut s = TcpStream::connect(to)?;
    s.set_nodelay(true)?;
    s.write_all(&size.to_le_bytes())?;
    let (size, mut at) = (size as usize, 0);
    Ok(Box::new(move |until, tell| {
        let mut bytes = 0;
        loop {
            let t0 = Instant::now();
            if t0 >= until {
                return Ok(bytes);
            }
            s.write_all(&memory[at..at + size])?;
            s.read_exact(&mut [0u8; 8])?;
            tell(t0.elapsed());
            bytes += size as u64;
            at = if at + 2 * size > memory.len() {
                0
            } else {
                at + size
            };
        }
    }))
}

fn memcpy_loop<'a>(view: &'a RegionView, size: u64, memory: &'a mut [u8]) -> Contender<'a> {
    let (size, mut at) = (size as usize, 0);
    Box::new(move |until, tell| {
        let mut bytes = 0;
        loop {
            let t0 = Instant::now();
            if t0 >= until {
                return Ok(bytes);
            }
            view.copy_to(at as u64, &mut memory[at..at + size])?;
            tell(t0.elapsed());
            bytes += size as u64;
            at = if at + 2 * size > memory.len() {
                0
            } else {
                at + size
            };
        }
    })
}

/// Transfers of `size`, `depth` in flight; each takes its lease, moves, and gives the lease back.
fn path_loop<'a>(
    link: &'a mut dyn Link,
    pool: &'a Arc<BlockPool>,
    remote: RemoteRegion,
    size: u64,
    depth: usize,
    get: bool,
) -> Contender<'a> {
    let mut at = 0u64;
    let mut lists: Vec<Vec<Span>> = vec![Vec::new(); depth];
    let mut started = HashMap::with_capacity(depth);
    let mut done: Vec<Completion> = (0..depth).map(|_| Completion::empty()).collect();
    let mut blocks: Vec<BlockId> = Vec::new();
    Box::new(move |until, tell| {
        let mut bytes = 0;
        loop {
            let t0 = Instant::now();
            if t0 >= until && started.is_empty() {
                return Ok(bytes);
            }
            while let Some(mut spans) = (t0 < until).then(|| lists.pop()).flatten() {
                blocks.clear();
                pool.blocks_of(at, size, &mut blocks)?;
                let local = if get {
                    Local::GetInto(pool.write(&blocks)?)
                } else {
                    Local::PutFrom(pool.read(&blocks)?)
                };
                spans.clear();
                spans.push(Span {
                    remote_off: at,
                    local_off: at,
                    len: size,
                });
                let t0 = Instant::now();
                let id = link
                    .submit(Transfer {
                        local,
                        remote,
                        spans,
                        deadline: t0 + PATIENCE,
                    })
                    .map_err(|r| r.error)?;
                started.insert(id, t0);
                at = if at + 2 * size > pool.region_len() {
                    0
                } else {
                    at + size
                };
            }
            let n = link.wait(&mut done, t0 + PATIENCE);
            for c in done.iter_mut().take(n) {
                c.outcome?;
                drop(c.local.take());
                lists.push(std::mem::take(&mut c.spans));
                bytes += c.bytes;
                if let Some(t0) = started.remove(&c.id) {
                    tell(t0.elapsed());
                }
            }
        }
    })
}

/// Measures and hands over each row as it is done.
pub fn run(o: &Options, mut emit: impl FnMut(&Row)) -> Result<(), MeasureError> {
    let mut peer = Peer::start(o)?;
    // Both ends of a put over shm read from a memfd, so all our memory is one.
    let ours = BlockPool::contiguous(filled(Region::memfd("bench-ours", o.working_set)?)?, BLOCK)?;
    ours.alloc(ours.blocks() as usize)?;
    let mut plain = filled(Region::memfd("bench-plain", o.working_set)?)?;
    let tcp = TcpTransport::bind(TcpOptions::default())?;
    let socket = std::env::temp_dir().join(format!("moonlive-bench-{}.sock", std::process::id()));
    let shm = ShmTransport::bind(ShmOptions::at(socket))?;
    for (endpoint, get_from, put_to) in peer.paths.clone() {
        let (path, transport): (_, &dyn Transport) = match endpoint {
            Endpoint::Tcp(_) => (Path::Tcp, &tcp),
            _ => (Path::Shm, &shm),
        };
        let mut link = transport.connect(&endpoint, Instant::now() + PATIENCE)?;
        for &size in &o.sizes {
            for get in [true, false] {
                let name = if size >= 1 << 20 {
                    format!("{}MiB", size >> 20)
                } else {
                    format!("{}KiB", size >> 10)
                };
                let case = format!("{path}/{}/{name}", if get { "get" } else { "put" });
                if !case.contains(&o.filter) {
                    continue;
                }
                let remote = if get { get_from } else { put_to };
                let row = case_rows(
                    o,
                    &mut peer,
                    case,
                    link.as_mut(),
                    &ours,
                    &mut plain,
                    path,
                    remote,
                    size,
                    get,
                )?;
                emit(&row);
            }
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)] // one call site; a struct would only rename them
fn case_rows(
    o: &Options,
    peer: &mut Peer,
    case: String,
    link: &mut dyn Link,
    ours: &Arc<BlockPool>,
    plain: &mut Region,
    path: Path,
    remote: RemoteRegion,
    size: u64,
    get: bool,
) -> Result<Row, MeasureError> {
    // Its bytes are right before its speed counts.
    if get {
        check_get(link, ours, remote, size, &case)?;
    }
    let view;
    let (against, mut ceiling) = match path {
        Path::Tcp => (
            "raw acked send loop",
            raw_loop(peer.raw, size, plain.as_slice())?,
        ),
        _ => {
            view = RegionView::map(peer.memory.as_fd(), o.working_set)?;
            (
                "two-process shared-memory memcpy",
                memcpy_loop(&view, size, plain.as_mut_slice()),
            )
        }
    };
    let mut ours_loop = path_loop(link, ours, remote, size, o.depth, get);
    let (mut theirs, mut mine, mut ratios) = (Tally::default(), Tally::default(), Vec::new());
    let (mut cpu, mut moved, mut raw_cpu, mut raw_moved) = (0.0, 0.0, 0.0, 0.0);
    let (mut others, mut wall) = (0.0, 0.0);
    for round in 0..=o.rounds {
        let (mut unused_a, mut unused_b) = (Tally::default(), Tally::default());
        // The first round warms up.
        let (a, b) = if round == 0 {
            (&mut unused_a, &mut unused_b)
        } else {
            (&mut theirs, &mut mine)
        };
        let start = (
            peer.cpu()? + cpu_seconds(),
            machine_cpu_seconds(),
            Instant::now(),
        );
        let ceiling_gbps = half(&mut ceiling, o, a)?;
        let between = (peer.cpu()? + cpu_seconds(), Instant::now());
        let gbps = half(&mut ours_loop, o, b)?;
        let end = peer.cpu()? + cpu_seconds();
        if round > 0 {
            ratios.push(gbps / ceiling_gbps);
            raw_cpu += between.0 - start.0;
            raw_moved += ceiling_gbps * (between.1 - start.2).as_secs_f64();
            cpu += end - between.0;
            moved += gbps * between.1.elapsed().as_secs_f64();
            others += (machine_cpu_seconds() - start.1) - (end - start.0);
            wall += start.2.elapsed().as_secs_f64();
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as f64;
    let gbps = median(&mine.gbps);
    Ok(Row {
        bench: "transfer",
        case,
        value: gbps,
        unit: "GB/s",
        p50_us: mine.percentile(0.5),
        p99_us: mine.percentile(0.99),
        gbps,
        depth: o.depth,
        cpu_s_per_gb: cpu / moved,
        other_cpu: (others / wall / cores).max(0.0),
        against: against.into(),
        against_gbps: median(&theirs.gbps),
        against_cpu_s_per_gb: raw_cpu / raw_moved,
        against_p50_us: theirs.percentile(0.5),
        ratio: median(&ratios),
    })
}

fn check_get(
    link: &mut dyn Link,
    ours: &Arc<BlockPool>,
    remote: RemoteRegion,
    size: u64,
    case: &str,
) -> Result<(), MeasureError> {
    let (mut blocks, at) = (Vec::new(), remote.len - size);
    ours.blocks_of(at, size, &mut blocks)?;
    let mut lease = ours.write(&blocks)?;
    lease.bytes_mut(at, size as usize).fill(0);
    let spans = vec![Span {
        remote_off: at,
        local_off: at,
        len: size,
    }];
    let deadline = Instant::now() + PATIENCE;
    link.submit(Transfer {
        local: Local::GetInto(lease),
        remote,
        spans,
        deadline,
    })
    .map_err(|r| r.error)?;
    let mut done = [Completion::empty()];
    link.wait(&mut done, deadline);
    let [c] = done;
    c.outcome?;
    let right = match &c.local {
        Some(Local::GetInto(lease)) => lease
            .bytes(at, size as usize)
            .chunks_exact(8)
            .enumerate()
            .all(|(i, w)| *w == pattern(at + i as u64 * 8).to_le_bytes()),
        _ => false,
    };
    if right {
        Ok(())
    } else {
        Err(MeasureError::WrongBytes(case.into()))
    }
}
