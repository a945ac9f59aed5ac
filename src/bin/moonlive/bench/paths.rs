//! The paths of a transfer bench: what the other process serves, and how this one drives a link.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use moonlivekv::mem::{BlockPool, Region, RemoteRegion};
use moonlivekv::transport::{
    Access, Completion, Endpoint, Link, Local, Path, Scope, Span, Transfer, TransferId, Transport,
};
use serde::{Deserialize, Serialize};

use super::ceiling::{Loop, WORKING_SET, fill};

/// A transfer that takes longer than this is broken.
const STUCK: Duration = Duration::from_secs(20);

/// Which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read the peer's memory.
    Get,
    /// Write into the peer's staging.
    Put,
}

impl Op {
    /// `get`, `put`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
        }
    }
}

/// What a peer must know to reach a working set.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Grants {
    endpoint: String,
    get: Vec<u8>,
    put: Vec<u8>,
}

impl Grants {
    /// The region to get from or to put into.
    pub fn region(&self, op: Op) -> anyhow::Result<RemoteRegion> {
        Ok(RemoteRegion::decode(match op {
            Op::Get => &self.get,
            Op::Put => &self.put,
        })?)
    }

    /// Where to connect to.
    pub fn endpoint(&self) -> anyhow::Result<Endpoint> {
        self.endpoint.parse().context("the peer's endpoint")
    }
}

/// A pool over a whole working set, all of it allocated.
pub fn pool(path: Path, block: u64, seed: u64) -> anyhow::Result<Arc<BlockPool>> {
    let len = WORKING_SET as u64;
    let mut region = match path {
        // What another process maps is a memfd; all else gets huge pages where the kernel has them.
        Path::Shm => Region::memfd("moonlive-bench", len)?,
        _ => Region::anonymous(len)?,
    };
    fill(region.as_mut_slice(), seed);
    let pool = BlockPool::contiguous(region, block)?;
    pool.alloc(pool.blocks() as usize)?;
    Ok(pool)
}

/// Opens a path's transport.
pub fn open(path: Path) -> anyhow::Result<Box<dyn Transport>> {
    use moonlivekv::transport::{local, shm, tcp};
    Ok(match path {
        Path::Tcp => Box::new(tcp::TcpTransport::bind(tcp::TcpOptions::default())?),
        Path::Shm => Box::new(shm::ShmTransport::bind(shm::ShmOptions::default())?),
        Path::Local => Box::new(local::LocalTransport::new()?),
    })
}

/// A working set to read from and one to write into, served until dropped.
pub struct Served {
    transport: Box<dyn Transport>,
    get: RemoteRegion,
    put: RemoteRegion,
}

impl Served {
    /// Serves fresh memory cut into blocks of `block` bytes.
    pub fn start(path: Path, block: u64) -> anyhow::Result<Self> {
        let transport = open(path)?;
        let (from, into) = (pool(path, block, 11)?, pool(path, block, 12)?);
        Ok(Self {
            get: transport.register(&from, Access::RemoteRead, Scope::Pool)?,
            put: transport.register(&into, Access::RemoteWrite, Scope::Pool)?,
            transport,
        })
    }

    /// What a peer needs.
    pub fn grants(&self) -> Grants {
        Grants {
            endpoint: self.transport.endpoint().to_string(),
            get: self.get.encode().to_vec(),
            put: self.put.encode().to_vec(),
        }
    }
}

/// The shape of a loop of transfers.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Which way.
    pub op: Op,
    /// Bytes of one span.
    pub size: usize,
    /// Spans of one transfer, scattered over the working set.
    pub spans: usize,
    /// Transfers in flight.
    pub depth: usize,
}

impl Shape {
    /// Bytes of one transfer.
    pub fn bytes(&self) -> usize {
        self.size * self.spans
    }

    /// The block size that lets each span be leased by itself.
    pub fn block(&self) -> u64 {
        (self.size as u64).min(1 << 20)
    }
}

/// One connection and the memory at this end of it.
pub struct Driver {
    link: Box<dyn Link>,
    pool: Arc<BlockPool>,
    grants: Grants,
    path: Path,
    _transport: Box<dyn Transport>,
}

struct Flying {
    id: TransferId,
    since: Instant,
}

impl Driver {
    /// Connects.
    pub fn connect(path: Path, grants: Grants, block: u64) -> anyhow::Result<Self> {
        let transport = open(path)?;
        let link = transport.connect(&grants.endpoint()?, Instant::now() + STUCK)?;
        Ok(Self {
            link,
            pool: pool(path, block, 13)?,
            grants,
            path,
            _transport: transport,
        })
    }

    /// Runs transfers of one shape for `time`, and drains.
    pub fn run(&mut self, shape: Shape, time: Duration) -> anyhow::Result<Loop> {
        let remote = self.grants.region(shape.op)?;
        let mut walk = Walk::new(shape, self.pool.block_bytes(0));
        let mut flying: Vec<Flying> = Vec::with_capacity(shape.depth);
        let mut done: Vec<Completion> = (0..shape.depth).map(|_| Completion::empty()).collect();
        let mut spare: Vec<Vec<Span>> = Vec::new();
        let mut out = Loop::default();
        let began = Instant::now();
        loop {
            while flying.len() < shape.depth && out.wall < time {
                let mut spans = spare.pop().unwrap_or_default();
                let blocks = walk.next(&mut spans);
                let deadline = Instant::now() + STUCK;
                let since = Instant::now();
                let local = match shape.op {
                    Op::Get => Local::GetInto(self.pool.write_until(blocks, deadline)?),
                    Op::Put => Local::PutFrom(self.pool.read_until(blocks, deadline)?),
                };
                let transfer = Transfer {
                    local,
                    remote,
                    spans,
                    deadline,
                };
                let id = self.link.submit(transfer).map_err(|r| r.error)?;
                flying.push(Flying { id, since });
            }
            if flying.is_empty() {
                out.wall = began.elapsed();
                return Ok(out);
            }
            let n = self.link.wait(&mut done, Instant::now() + STUCK);
            if n == 0 {
                bail!("no transfer over {} completed in {STUCK:?}", self.path);
            }
            let now = Instant::now();
            for c in &mut done[..n] {
                c.outcome?;
                let at = flying.iter().position(|f| f.id == c.id);
                let f = flying.swap_remove(at.context("a completion of no transfer of ours")?);
                out.each.push((now - f.since).as_nanos() as u64);
                out.bytes += c.bytes;
                drop(c.local.take());
                spare.push(std::mem::take(&mut c.spans));
            }
            out.wall = now - began;
        }
    }
}

/// Hands out places in the working set: in order for single spans, scattered for batches; never one
/// that a transfer still in flight uses.
struct Walk {
    shape: Shape,
    block: u64,
    at: u64,
    slots: u64,
    blocks: Vec<u32>,
}

impl Walk {
    fn new(shape: Shape, block: u64) -> Self {
        Self {
            slots: WORKING_SET as u64 / shape.size as u64,
            shape,
            block,
            at: 0,
            blocks: Vec::new(),
        }
    }

    /// Fills the spans of the next transfer and returns the local blocks they touch.
    fn next(&mut self, spans: &mut Vec<Span>) -> &[u32] {
        spans.clear();
        self.blocks.clear();
        let size = self.shape.size as u64;
        for _ in 0..self.shape.spans {
            let slot = self.at % self.slots;
            self.at += 1;
            // An odd multiplier permutes the slots, whose number is a power of two.
            let remote = match self.shape.spans {
                1 => slot,
                _ => slot.wrapping_mul(0x9e37_79b1) % self.slots,
            };
            spans.push(Span {
                remote_off: remote * size,
                local_off: slot * size,
                len: size,
            });
            let first = slot * size / self.block;
            let n = (size / self.block).max(1);
            self.blocks.extend((first..first + n).map(|b| b as u32));
        }
        &self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_covers_the_working_set_without_repeating_a_place() {
        let shape = Shape {
            op: Op::Get,
            size: 64 << 10,
            spans: 64,
            depth: 1,
        };
        let mut walk = Walk::new(shape, shape.block());
        let (mut spans, mut local, mut remote) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..WORKING_SET / shape.bytes() {
            assert_eq!(walk.next(&mut spans).len(), 64);
            local.extend(spans.iter().map(|s| s.local_off));
            remote.extend(spans.iter().map(|s| s.remote_off));
        }
        for places in [&mut local, &mut remote] {
            places.sort_unstable();
            places.dedup();
            assert_eq!(places.len(), WORKING_SET / shape.size);
        }
    }
}
