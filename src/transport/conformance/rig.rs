//! Memory, transfers and taps that the checks share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Rig;
use crate::mem::{BlockId, BlockPool, RemoteRegion};
use crate::transport::{
    Completion, Link, Local, Span, Tap, TapPoint, Transfer, Transport, TransportError,
};

/// Bytes no block holds, between blocks and at the ends, as canaries.
const GAP: u64 = 4096;

pub(super) fn in_10s() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A block of `len` bytes at an odd place, in a region with canaries before, between and behind.
pub(super) fn odd_pool(
    rig: &dyn Rig,
    lens: &[u64],
    fill: u8,
) -> (Arc<BlockPool>, Vec<BlockId>, Vec<u64>) {
    let mut at = GAP + 1;
    let mut offsets = Vec::new();
    for &len in lens {
        offsets.push(at);
        at += len + GAP + 3;
    }
    let mut region = rig.region(at);
    region.as_mut_slice().fill(fill);
    let runs: Vec<(u64, u64)> = offsets.iter().copied().zip(lens.iter().copied()).collect();
    // The canaries are blocks too, so that they can be looked at.
    let mut extents: Vec<(u64, u64)> = runs.clone();
    let mut end = 0;
    for &(offset, len) in &runs {
        extents.push((end, offset - end));
        end = offset + len;
    }
    extents.push((end, at - end));
    let pool = BlockPool::new(region, extents.len() as u32, |b| [extents[b as usize]]).unwrap();
    let mut all = pool.alloc(extents.len()).unwrap();
    all.sort_unstable();
    (pool, all, offsets)
}

/// Everything around the blocks at `offsets` is as it was.
pub(super) fn canaries_untouched(
    pool: &Arc<BlockPool>,
    all: &[BlockId],
    (offsets, lens): (&[u64], &[u64]),
    fill: u8,
) {
    let lease = pool.read(&all[lens.len()..]).unwrap();
    let (mut at, mut seen) = (0, 0);
    let ends = offsets.iter().zip(lens).map(|(o, l)| (*o, o + l));
    for (gap_end, next) in ends.chain([(pool.region_len(), 0)]) {
        let canary = lease.bytes(at, (gap_end - at) as usize);
        let changed = canary.iter().position(|&b| b != fill);
        assert_eq!(
            changed, None,
            "bytes outside the landing zones changed, from {at} on"
        );
        seen += canary.len() as u64;
        at = next;
    }
    assert!(seen >= GAP * (lens.len() as u64 + 1));
}

pub(super) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

pub(super) fn fill(pool: &Arc<BlockPool>, block: BlockId, offset: u64, bytes: &[u8]) {
    pool.write(&[block])
        .unwrap()
        .bytes_mut(offset, bytes.len())
        .copy_from_slice(bytes);
}

pub(super) fn bytes_of(pool: &Arc<BlockPool>, block: BlockId, offset: u64, len: u64) -> Vec<u8> {
    pool.read(&[block])
        .unwrap()
        .bytes(offset, len as usize)
        .to_vec()
}

pub(super) fn get(
    pool: &Arc<BlockPool>,
    blocks: &[BlockId],
    remote: RemoteRegion,
    spans: &[Span],
) -> Transfer {
    let local = Local::GetInto(pool.write(blocks).unwrap());
    Transfer {
        local,
        remote,
        spans: spans.to_vec(),
        deadline: in_10s(),
    }
}

pub(super) fn put(
    pool: &Arc<BlockPool>,
    blocks: &[BlockId],
    remote: RemoteRegion,
    spans: &[Span],
) -> Transfer {
    let local = Local::PutFrom(pool.read(blocks).unwrap());
    Transfer {
        local,
        remote,
        spans: spans.to_vec(),
        deadline: in_10s(),
    }
}

/// Waits for one completion.
pub(super) fn one(link: &mut dyn Link) -> Completion {
    let mut out = [Completion::empty()];
    assert_eq!(
        link.wait(&mut out, Instant::now() + Duration::from_secs(30)),
        1,
        "nothing completed"
    );
    let [c] = out;
    assert!(c.local.is_some(), "a completion gives the lease back");
    c
}

pub(super) fn run(link: &mut dyn Link, t: Transfer) -> Result<(), TransportError> {
    let id = link.submit(t).map_err(|r| r.error)?;
    let c = one(link);
    assert_eq!(c.id, id);
    c.outcome
}

/// A page pool of `blocks` blocks of `block` bytes with distinct contents, all allocated.
pub(super) struct Pages {
    pub(super) pool: Arc<BlockPool>,
    pub(super) block: u64,
}

impl Pages {
    pub(super) fn new(rig: &dyn Rig, blocks: u64, block: u64, seed: u64) -> Self {
        let mut region = rig.region(blocks * block);
        region
            .as_mut_slice()
            .copy_from_slice(&noise((blocks * block) as usize, seed));
        let pool = BlockPool::contiguous(region, block).unwrap();
        pool.alloc(blocks as usize).unwrap();
        Self { pool, block }
    }

    pub(super) fn span(&self, remote: u32, local: u32) -> Span {
        Span {
            remote_off: u64::from(remote) * self.block,
            local_off: u64::from(local) * self.block,
            len: self.block,
        }
    }

    pub(super) fn bytes(&self, b: u32) -> Vec<u8> {
        bytes_of(&self.pool, b, u64::from(b) * self.block, self.block)
    }

    pub(super) fn set(&self, b: u32, byte: u8) {
        let n = self.block as usize;
        self.pool
            .write(&[b])
            .unwrap()
            .bytes_mut(u64::from(b) * self.block, n)
            .fill(byte);
    }
}

pub(super) fn link(owner: &dyn Transport, initiator: &dyn Transport) -> Box<dyn Link> {
    initiator.connect(&owner.endpoint(), in_10s()).unwrap()
}

/// A tap that counts, and can hold back or change what passes.
#[derive(Default)]
pub(super) struct Meddler {
    pub(super) seen: AtomicUsize,
    pub(super) hold_ms: AtomicU64,
    /// Which piece to meddle with, from 1; 0 for all of them.
    pub(super) only: AtomicUsize,
    pub(super) flip_source: AtomicBool,
    pub(super) flip_wire: AtomicBool,
}

impl Meddler {
    fn meant(&self) -> bool {
        let only = self.only.load(Ordering::SeqCst);
        only == 0 || only == self.seen.load(Ordering::SeqCst)
    }
}

impl Tap for Meddler {
    fn source_read(&self, _: TapPoint, bytes: &mut [u8]) {
        self.seen.fetch_add(1, Ordering::SeqCst);
        if self.flip_source.load(Ordering::SeqCst) && self.meant() {
            bytes[bytes.len() / 2] ^= 0x10;
        }
    }

    fn wire(&self, _: TapPoint, bytes: &mut [u8]) {
        if self.flip_wire.load(Ordering::SeqCst) && self.meant() {
            bytes[bytes.len() / 2] ^= 0x10;
        }
    }

    fn hold(&self, _: TapPoint) -> Duration {
        let ms = if self.meant() {
            self.hold_ms.load(Ordering::SeqCst)
        } else {
            0
        };
        Duration::from_millis(ms)
    }
}

/// Polls until a piece has passed the tap.
pub(super) fn poll_until_seen(link: &mut dyn Link, tap: &Meddler, pieces: usize) {
    let until = in_10s();
    while tap.seen.load(Ordering::SeqCst) < pieces {
        assert!(Instant::now() < until, "no piece was sent");
        assert_eq!(
            link.poll(&mut [Completion::empty()]),
            0,
            "completed while held back"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}
