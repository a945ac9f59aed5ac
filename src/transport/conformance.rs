//! What every path must do, as checks that any [`Transport`] can be run through. Each panics where a
//! promise is broken. [`transport_conformance!`](crate::transport_conformance) makes tests of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::id::ErrorKind;
use crate::mem::{BlockId, BlockPool, Region, RegionKey, RemoteRegion};
use crate::transport::{
    Access, CancelOutcome, Completion, Direction, Link, Local, Pace, Path, Refusal, Rejected,
    Revoked, Scope, Span, Tap, TapPoint, Transfer, TransferId, Transport, TransportError,
};

/// How to get a path to be checked.
pub trait Rig: Sync {
    /// The path.
    fn path(&self) -> Path;

    /// An owner's transport and an initiator's, connected by nothing yet; the tap and pace go into
    /// both.
    fn pair(&self, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> [Box<dyn Transport>; 2];

    /// Memory of a kind that the path can serve.
    fn region(&self, len: u64) -> Region {
        match self.path() {
            Path::Shm => Region::memfd("conformance", len),
            _ => Region::anonymous(len),
        }
        .expect("memory for a test")
    }
}

/// Bytes no block holds, between blocks and at the ends, as canaries.
const GAP: u64 = 4096;

fn in_10s() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A block of `len` bytes at an odd place, in a region with canaries before, between and behind.
fn odd_pool(rig: &dyn Rig, lens: &[u64], fill: u8) -> (Arc<BlockPool>, Vec<BlockId>, Vec<u64>) {
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

fn canaries_untouched(pool: &Arc<BlockPool>, all: &[BlockId], blocks: usize, fill: u8) {
    let canaries = &all[blocks..];
    let lease = pool.read(canaries).unwrap();
    let mut seen = 0;
    for at in 0..pool.region_len() {
        // The landing zones lie outside this lease.
        if let Ok(b) = lease.try_bytes(at, 1) {
            assert_eq!(
                b[0], fill,
                "a byte outside the landing zones changed, at {at}"
            );
            seen += 1;
        }
    }
    assert!(seen >= GAP * (blocks as u64 + 1));
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
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

fn fill(pool: &Arc<BlockPool>, block: BlockId, offset: u64, bytes: &[u8]) {
    pool.write(&[block])
        .unwrap()
        .bytes_mut(offset, bytes.len())
        .copy_from_slice(bytes);
}

fn bytes_of(pool: &Arc<BlockPool>, block: BlockId, offset: u64, len: u64) -> Vec<u8> {
    pool.read(&[block])
        .unwrap()
        .bytes(offset, len as usize)
        .to_vec()
}

fn get(
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

fn put(
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
fn one(link: &mut dyn Link) -> Completion {
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

fn run(link: &mut dyn Link, t: Transfer) -> Result<(), TransportError> {
    let id = link.submit(t).map_err(|r| r.error)?;
    let c = one(link);
    assert_eq!(c.id, id);
    c.outcome
}

/// A page pool of `blocks` blocks of `block` bytes with distinct contents, all allocated.
struct Pages {
    pool: Arc<BlockPool>,
    block: u64,
}

impl Pages {
    fn new(rig: &dyn Rig, blocks: u64, block: u64, seed: u64) -> Self {
        let mut region = rig.region(blocks * block);
        region
            .as_mut_slice()
            .copy_from_slice(&noise((blocks * block) as usize, seed));
        let pool = BlockPool::contiguous(region, block).unwrap();
        pool.alloc(blocks as usize).unwrap();
        Self { pool, block }
    }

    fn span(&self, remote: u32, local: u32) -> Span {
        Span {
            remote_off: u64::from(remote) * self.block,
            local_off: u64::from(local) * self.block,
            len: self.block,
        }
    }

    fn bytes(&self, b: u32) -> Vec<u8> {
        bytes_of(&self.pool, b, u64::from(b) * self.block, self.block)
    }

    fn set(&self, b: u32, byte: u8) {
        let n = self.block as usize;
        self.pool
            .write(&[b])
            .unwrap()
            .bytes_mut(u64::from(b) * self.block, n)
            .fill(byte);
    }
}

fn link(owner: &dyn Transport, initiator: &dyn Transport) -> Box<dyn Link> {
    initiator.connect(&owner.endpoint(), in_10s()).unwrap()
}

/// Sizes 1, 511, 512, 513, 4095, 4097 and 630,784 at odd addresses, both ways, whole and in pieces,
/// with canaries around the landing zones.
pub fn odd_sizes_arrive_and_nothing_around_them_changes(rig: &dyn Rig) {
    let sizes = [1, 511, 512, 513, 4095, 4097, 630_784];
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, far_all, far_at) = odd_pool(rig, &sizes, 0xa5);
    let (near, near_all, near_at) = odd_pool(rig, &sizes, 0x5a);
    let readable = owner
        .register(&far, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let writable = owner
        .register(&far, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    for (i, &len) in sizes.iter().enumerate() {
        let whole = Span {
            remote_off: far_at[i],
            local_off: near_at[i],
            len,
        };
        // Uneven cuts, where there is something to cut.
        let cuts = [0, len / 3, len / 3 + len / 7, len];
        let mut pieces: Vec<Span> = cuts
            .windows(2)
            .map(|w| Span {
                remote_off: far_at[i] + w[0],
                local_off: near_at[i] + w[0],
                len: w[1] - w[0],
            })
            .filter(|s| s.len > 0)
            .collect();
        pieces.reverse();
        for (round, spans) in [vec![whole], pieces].into_iter().enumerate() {
            let sent = noise(len as usize, i as u64 * 2 + round as u64 + 1);
            fill(&far, far_all[i], far_at[i], &sent);
            run(
                link.as_mut(),
                get(&near, &near_all[i..=i], readable, &spans),
            )
            .unwrap();
            assert_eq!(
                bytes_of(&near, near_all[i], near_at[i], len),
                sent,
                "get of {len}"
            );
            let back: Vec<u8> = sent.iter().map(|b| !b).collect();
            fill(&near, near_all[i], near_at[i], &back);
            run(
                link.as_mut(),
                put(&near, &near_all[i..=i], writable, &spans),
            )
            .unwrap();
            assert_eq!(
                bytes_of(&far, far_all[i], far_at[i], len),
                back,
                "put of {len}"
            );
        }
    }
    canaries_untouched(&near, &near_all, sizes.len(), 0x5a);
    canaries_untouched(&far, &far_all, sizes.len(), 0xa5);
}

/// Many small spans scattered over many blocks, in an order of their own, land each in its place; the
/// completion names the path and hands lease and list back.
pub fn scattered_spans_land_each_in_its_place(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (
        Pages::new(rig, 64, 16 << 10, 1),
        Pages::new(rig, 64, 16 << 10, 2),
    );
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let all: Vec<u32> = (0..64).collect();
    // 200-byte heads out of every KiB, from block b to block 63 - b: more spans than one request takes.
    let mut spans = Vec::new();
    for b in 0..64u64 {
        for i in 0..80u64 {
            let at = i * 204;
            spans.push(Span {
                remote_off: b * far.block + at,
                local_off: (63 - b) * near.block + at,
                len: 200,
            });
        }
    }
    let id = link.submit(get(&near.pool, &all, remote, &spans)).unwrap();
    let c = one(link.as_mut());
    assert_eq!(
        (c.id, c.outcome, c.path, c.bytes),
        (id, Ok(()), rig.path(), 200 * 64 * 80)
    );
    assert_eq!(c.spans, spans);
    let Some(Local::GetInto(lease)) = c.local else {
        panic!("the lease comes back")
    };
    let before = noise(64 * (16 << 10), 2);
    let source = far.pool.read(&all).unwrap();
    for b in 0..64u64 {
        let got = lease.bytes((63 - b) * near.block, near.block as usize);
        for (at, (&g, &s)) in got
            .iter()
            .zip(source.bytes(b * far.block, far.block as usize))
            .enumerate()
        {
            let carried = at / 204 < 80 && at % 204 < 200;
            let old = before[((63 - b) * near.block) as usize + at];
            assert_eq!(g, if carried { s } else { old }, "block {b} byte {at}");
        }
    }
}

/// A transfer that contradicts itself is handed back untouched, and the link goes on.
pub fn bad_transfers_are_handed_back(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 4, 4096, 1), Pages::new(rig, 4, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let s = |remote_off, local_off, len| Span {
        remote_off,
        local_off,
        len,
    };
    let bad: [(&str, Vec<Span>); 6] = [
        ("no spans", vec![]),
        ("zero length", vec![s(0, 0, 10), s(0, 0, 0)]),
        ("past the remote end", vec![s(4 * 4096 - 1, 0, 2)]),
        ("remote overflow", vec![s(u64::MAX, 0, 2)]),
        ("a block not leased", vec![s(0, 4096, 1)]),
        ("out of the leased block", vec![s(0, 4095, 2)]),
    ];
    for (name, spans) in bad {
        let t = get(&near.pool, &[0], remote, &spans);
        let Rejected { error, transfer } = *link.submit(t).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::Caller, "{name}: {error}");
        assert_eq!(transfer.spans, spans);
    }
    assert_eq!(link.in_flight(), 0);
    run(
        link.as_mut(),
        get(&near.pool, &[0], remote, &[near.span(1, 0)]),
    )
    .unwrap();
    assert_eq!(near.bytes(0), far.bytes(1));
}

/// Wrong key, wrong direction, dead epoch, blocks outside the scope, free or quarantined: each refused
/// by type, none changes a byte, and the transfers around them succeed on the same link.
pub fn refusals_are_typed_and_the_links_other_work_survives(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 8, 4096, 1), Pages::new(rig, 8, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let staging = Pages::new(rig, 4, 4096, 3);
    let writable = owner
        .register(&staging.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    let dead = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let (alive, ended) = owner.renew(dead.key, in_10s()).unwrap();
    assert_eq!((alive.key, ended), (dead.key, Revoked::Done));
    assert!(alive.epoch > dead.epoch);
    let guessed = RemoteRegion {
        key: RegionKey::random().unwrap(),
        ..remote
    };
    let future = RemoteRegion {
        epoch: remote.epoch + 1,
        ..remote
    };
    let (before, staged) = (near.bytes(0), staging.bytes(0));
    let span = near.span(1, 0);
    type Case = (&'static str, bool, RemoteRegion, Refusal);
    let mut cases: Vec<Case> = vec![
        ("a guessed key", true, guessed, Refusal::UnknownKey),
        ("a dead epoch", true, dead, Refusal::StaleEpoch),
        (
            "an epoch that is not yet",
            true,
            future,
            Refusal::StaleEpoch,
        ),
        ("a get from staging", true, writable, Refusal::Access),
        ("a put into KV", false, remote, Refusal::Access),
        (
            "a put under a guessed key",
            false,
            guessed,
            Refusal::UnknownKey,
        ),
    ];
    // What a peer may not see of a pool is the owner's to enforce where it serves the bytes itself.
    if rig.path() != Path::Shm {
        let scoped = owner
            .register(&far.pool, Access::RemoteRead, Scope::Blocks(&[0, 2]))
            .unwrap();
        cases.push((
            "a block outside the scope",
            true,
            scoped,
            Refusal::OutOfRange,
        ));
    }
    let scoped_put = owner
        .register(&staging.pool, Access::RemoteWrite, Scope::Blocks(&[0]))
        .unwrap();
    cases.push((
        "a put outside the scope",
        false,
        scoped_put,
        Refusal::OutOfRange,
    ));
    for (name, is_get, grant, why) in cases {
        let t = |g| {
            if is_get {
                get(&near.pool, &[0], g, &[span])
            } else {
                put(&near.pool, &[0], g, &[span])
            }
        };
        assert_eq!(
            run(link.as_mut(), t(grant)),
            Err(TransportError::Refused(why)),
            "{name}"
        );
        assert_eq!(
            near.bytes(0),
            before,
            "{name} changed the initiator's memory"
        );
        run(
            link.as_mut(),
            get(&near.pool, &[7], remote, &[near.span(3, 7)]),
        )
        .expect(name);
    }
    assert_eq!(staging.bytes(0), staged);
    // Out of scope becomes in scope.
    owner.extend(scoped_put.key, &[1]).unwrap();
    run(
        link.as_mut(),
        put(&near.pool, &[0], scoped_put, &[near.span(1, 0)]),
    )
    .unwrap();
    assert_eq!(staging.bytes(1), near.bytes(0));
    if rig.path() != Path::Shm {
        far.pool.release(&[1]).unwrap();
        let t = get(&near.pool, &[0], alive, &[span]);
        assert_eq!(
            run(link.as_mut(), t),
            Err(Refusal::NotAllocated.into()),
            "a free block"
        );
        far.pool.quarantine(&[2], crate::mem::Why::Faulty).unwrap();
        let t = get(&near.pool, &[0], alive, &[near.span(2, 0)]);
        assert_eq!(
            run(link.as_mut(), t),
            Err(Refusal::NotAllocated.into()),
            "a quarantined block"
        );
    }
    run(
        link.as_mut(),
        get(&near.pool, &[0], alive, &[near.span(3, 0)]),
    )
    .unwrap();
    assert_eq!(near.bytes(0), far.bytes(3));
}

/// Five migrations at a time, each of 4 x 2,424,832 and 4 x 16,384 bytes over a link of its own, from
/// and to one pool each: every byte right at the moment of completion.
pub fn five_concurrent_migrations_bring_the_right_bytes(rig: &dyn Rig) {
    let lens = [
        2_424_832u64,
        2_424_832,
        2_424_832,
        2_424_832,
        16_384,
        16_384,
        16_384,
        16_384,
    ];
    let all_lens: Vec<u64> = (0..5).flat_map(|_| lens).collect();
    let [owner, initiator] = rig.pair(None, None);
    let (far, far_all, far_at) = odd_pool(rig, &all_lens, 1);
    let (near, near_all, near_at) = odd_pool(rig, &all_lens, 2);
    for (i, &len) in all_lens.iter().enumerate() {
        fill(
            &far,
            far_all[i],
            far_at[i],
            &noise(len as usize, i as u64 + 100),
        );
    }
    std::thread::scope(|scope| {
        for m in 0..5 {
            let range = m * 8..m * 8 + 8;
            let grant = owner
                .register(
                    &far,
                    Access::RemoteRead,
                    Scope::Blocks(&far_all[range.clone()]),
                )
                .unwrap();
            let mut link = link(owner.as_ref(), initiator.as_ref());
            let (near, near_all, near_at, far_at) = (&near, &near_all, &near_at, &far_at);
            let all_lens = &all_lens;
            scope.spawn(move || {
                let ids: Vec<(TransferId, usize)> = range
                    .map(|i| {
                        let span = Span {
                            remote_off: far_at[i],
                            local_off: near_at[i],
                            len: all_lens[i],
                        };
                        (
                            link.submit(get(near, &near_all[i..=i], grant, &[span]))
                                .unwrap(),
                            i,
                        )
                    })
                    .collect();
                for _ in 0..8 {
                    let c = one(link.as_mut());
                    c.outcome.unwrap();
                    let (_, i) = ids.iter().find(|(id, _)| *id == c.id).unwrap();
                    let Some(Local::GetInto(lease)) = &c.local else {
                        panic!()
                    };
                    let got = lease.bytes(near_at[*i], all_lens[*i] as usize);
                    assert!(
                        got == noise(got.len(), *i as u64 + 100),
                        "migration {m}, object {i}"
                    );
                }
            });
        }
    });
    canaries_untouched(&near, &near_all, all_lens.len(), 2);
}

/// Completed means visible: a get's bytes, and a put's at its target, are the right ones at the very
/// moment of completion, with contents that change every time.
pub fn completed_is_visible_to_whoever_reads_next(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 630_784;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let readable = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let writable = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    for round in 0..60u8 {
        far.set(0, round);
        link.submit(get(&near.pool, &[0], readable, &[near.span(0, 0)]))
            .unwrap();
        let c = one(link.as_mut());
        c.outcome.unwrap();
        let Some(Local::GetInto(lease)) = c.local else {
            panic!()
        };
        let landed = lease.downgrade();
        assert!(
            landed.bytes(0, size as usize).iter().all(|&b| b == round),
            "get, round {round}"
        );
        drop(landed);
        near.set(1, !round);
        run(
            link.as_mut(),
            put(&near.pool, &[1], writable, &[near.span(1, 1)]),
        )
        .unwrap();
        // At once, without waiting: the target's own lease has ended.
        let there = far.pool.read(&[1]).expect("done, and still leased");
        assert!(
            there
                .bytes(size, size as usize)
                .iter()
                .all(|&b| b == !round),
            "put, round {round}"
        );
    }
}

/// A tap that counts, and can hold back or change what passes.
#[derive(Default)]
struct Meddler {
    seen: AtomicUsize,
    hold_ms: AtomicU64,
    /// Which piece to meddle with, from 1; 0 for all of them.
    only: AtomicUsize,
    flip_source: AtomicBool,
    flip_wire: AtomicBool,
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
fn poll_until_seen(link: &mut dyn Link, tap: &Meddler, pieces: usize) {
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

/// Cancelling gives the memory back at once: the reply that comes later touches nothing, and the link
/// goes on.
pub fn cancelled_memory_is_not_touched_by_what_comes_later(rig: &dyn Rig) {
    let tap = Arc::new(Meddler::default());
    tap.hold_ms.store(150, Ordering::SeqCst);
    tap.only.store(1, Ordering::SeqCst);
    let [owner, initiator] = rig.pair(Some(tap.clone()), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 1 << 20;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let id = link
        .submit(get(&near.pool, &[0], remote, &[near.span(0, 0)]))
        .unwrap();
    poll_until_seen(link.as_mut(), &tap, 1);
    assert_eq!(link.cancel(id, in_10s()), CancelOutcome::Done);
    assert_eq!(
        link.cancel(id, in_10s()),
        CancelOutcome::NotInFlight,
        "cancelling twice is no harm"
    );
    let c = one(link.as_mut());
    assert_eq!((c.id, c.outcome), (id, Err(TransportError::Cancelled)));
    drop(c);
    near.set(0, 0x77);
    let until = Instant::now() + Duration::from_millis(250);
    while Instant::now() < until {
        link.poll(&mut [Completion::empty()]);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        near.bytes(0).iter().all(|&b| b == 0x77),
        "a late reply landed after the cancel"
    );
    run(
        link.as_mut(),
        get(&near.pool, &[1], remote, &[near.span(1, 1)]),
    )
    .unwrap();
    assert_eq!(near.bytes(1), far.bytes(1));
}

/// A put can be cancelled half-way; its lease is free, and the next one on the link is whole.
pub fn a_put_cancelled_half_way_leaves_the_link_in_order(rig: &dyn Rig) {
    let tap = Arc::new(Meddler::default());
    tap.hold_ms.store(100, Ordering::SeqCst);
    tap.only.store(1, Ordering::SeqCst);
    let [owner, initiator] = rig.pair(Some(tap.clone()), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 1 << 20;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    let id = link
        .submit(put(&near.pool, &[0], remote, &[near.span(0, 0)]))
        .unwrap();
    poll_until_seen(link.as_mut(), &tap, 1);
    assert_eq!(link.cancel(id, in_10s()), CancelOutcome::Done);
    assert_eq!(one(link.as_mut()).outcome, Err(TransportError::Cancelled));
    drop(
        near.pool
            .write(&[0])
            .expect("the lease of a cancelled put has ended"),
    );
    run(
        link.as_mut(),
        put(&near.pool, &[1], remote, &[near.span(1, 1)]),
    )
    .unwrap();
    assert_eq!(far.bytes(1), near.bytes(1));
}

/// A transfer ends at its deadline with its lease, and what arrives later touches nothing.
pub fn a_deadline_ends_a_transfer_and_its_late_reply_touches_nothing(rig: &dyn Rig) {
    let tap = Arc::new(Meddler::default());
    tap.hold_ms.store(200, Ordering::SeqCst);
    tap.only.store(1, Ordering::SeqCst);
    let [owner, initiator] = rig.pair(Some(tap), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 2, 4096, 1), Pages::new(rig, 2, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let t0 = Instant::now();
    let mut t = get(&near.pool, &[0], remote, &[near.span(0, 0)]);
    t.deadline = t0 + Duration::from_millis(50);
    link.submit(t).unwrap();
    let c = one(link.as_mut());
    assert_eq!(c.outcome, Err(TransportError::DeadlineExceeded));
    assert!(
        t0.elapsed() < Duration::from_millis(180),
        "it ended with the reply, not the deadline"
    );
    drop(c);
    near.set(0, 0x66);
    run(
        link.as_mut(),
        get(&near.pool, &[1], remote, &[near.span(1, 1)]),
    )
    .unwrap();
    std::thread::sleep(Duration::from_millis(200));
    link.poll(&mut [Completion::empty()]);
    assert!(near.bytes(0).iter().all(|&b| b == 0x66));
    assert_eq!(near.bytes(1), far.bytes(1));
}

/// Dropping a link with everything in flight leaves memory alone from then on, and the owner's blocks
/// free of leases.
pub fn a_dropped_link_touches_nothing_and_leaks_no_lease(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let size = 1 << 20;
    let (far, near) = (Pages::new(rig, 16, size, 1), Pages::new(rig, 16, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    for _ in 0..10 {
        let mut link = link(owner.as_ref(), initiator.as_ref());
        for b in 0..16 {
            link.submit(get(&near.pool, &[b], remote, &[near.span(b, b)]))
                .unwrap();
        }
        link.poll(&mut []);
        drop(link);
        (0..16).for_each(|b| near.set(b, 0x33));
        std::thread::sleep(Duration::from_millis(2));
        assert!((0..16).all(|b| near.bytes(b).iter().all(|&x| x == 0x33)));
    }
    let until = in_10s();
    while far.pool.stats().read_leases > 0 {
        assert!(
            Instant::now() < until,
            "the owner still holds a lease for a peer that is gone"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(owner.revoke(remote.key, in_10s()).unwrap(), Revoked::Done);
}

/// An epoch that ends mid-flight: the transfer is refused or was whole before; nothing lands under the
/// dead epoch afterwards, and `renew` does not return before the old epoch's work has ended.
pub fn an_epoch_that_ends_mid_flight_stops_its_transfers(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 4 << 20;
    let (far, near) = (Pages::new(rig, 4, size, 1), Pages::new(rig, 4, size, 2));
    let mut grant = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let (mut stopped, mut whole) = (0, 0);
    for round in 0..40u64 {
        let ids: Vec<_> = (0..4)
            .map(|b| {
                link.submit(get(&near.pool, &[b], grant, &[near.span(b, b)]))
                    .unwrap()
            })
            .collect();
        std::thread::scope(|scope| {
            let owner = &owner;
            let renewed = scope.spawn(move || {
                std::thread::sleep(Duration::from_micros(50 * round));
                owner.renew(grant.key, in_10s()).unwrap()
            });
            for _ in ids {
                match one(link.as_mut()).outcome {
                    Ok(()) => whole += 1,
                    Err(TransportError::Refused(Refusal::StaleEpoch)) => stopped += 1,
                    Err(e) => panic!("{e}"),
                }
            }
            let (next, ended) = renewed.join().unwrap();
            assert_eq!(ended, Revoked::Done);
            grant = next;
        });
    }
    assert!(
        stopped > 0 && whole > 0,
        "{stopped} stopped, {whole} whole: no epoch ended mid-flight"
    );
    run(
        link.as_mut(),
        get(&near.pool, &[0], grant, &[near.span(0, 0)]),
    )
    .unwrap();
    assert_eq!(near.bytes(0), far.bytes(0));
}

/// After `revoke` returns, the owner's memory is its own: blocks can be leased and freed, whatever
/// was in flight, and no put lands any more.
pub fn revoked_staging_is_not_written_by_what_was_in_flight(rig: &dyn Rig) {
    let tap = Arc::new(Meddler::default());
    tap.hold_ms.store(120, Ordering::SeqCst);
    tap.only.store(2, Ordering::SeqCst);
    let [owner, initiator] = rig.pair(Some(tap.clone()), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 1 << 20;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    link.submit(put(&near.pool, &[0], remote, &[near.span(0, 0)]))
        .unwrap();
    // The first piece may land; the second is held back beyond its epoch.
    poll_until_seen(link.as_mut(), &tap, 2);
    assert_eq!(owner.revoke(remote.key, in_10s()).unwrap(), Revoked::Done);
    far.set(0, 0x44);
    let refused = one(link.as_mut()).outcome;
    let expected =
        [Refusal::StaleEpoch, Refusal::UnknownKey].map(|r| Err(TransportError::Refused(r)));
    assert!(expected.contains(&refused), "{refused:?}");
    assert!(
        far.bytes(0).iter().all(|&b| b == 0x44),
        "a late put landed after the revoke"
    );
    assert_eq!(far.pool.release(&[0, 1]).unwrap(), 2);
    assert_eq!(
        owner.revoke(remote.key, in_10s()),
        Err(TransportError::UnknownKey)
    );
}

/// Revoking a read grant: `Done`, and its key is good for nothing from then on, while another grant on
/// the same pool goes on.
pub fn revoking_one_grant_leaves_the_others(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 4, 65536, 1), Pages::new(rig, 4, 65536, 2));
    let a = owner
        .register(&far.pool, Access::RemoteRead, Scope::Blocks(&[0, 1]))
        .unwrap();
    let b = owner
        .register(&far.pool, Access::RemoteRead, Scope::Blocks(&[2, 3]))
        .unwrap();
    run(link.as_mut(), get(&near.pool, &[0], a, &[near.span(0, 0)])).unwrap();
    run(link.as_mut(), get(&near.pool, &[2], b, &[near.span(2, 2)])).unwrap();
    assert_eq!(owner.revoke(a.key, in_10s()).unwrap(), Revoked::Done);
    let refused = run(link.as_mut(), get(&near.pool, &[0], a, &[near.span(0, 0)]));
    assert_eq!(refused, Err(Refusal::UnknownKey.into()));
    run(link.as_mut(), get(&near.pool, &[3], b, &[near.span(3, 3)])).unwrap();
    assert_eq!(near.bytes(3), far.bytes(3));
}

/// A bit that the source read wrong arrives as success: only a digest of the resident bytes can tell.
/// A bit that changed on the wire, where there is a wire, fails that one transfer by type.
pub fn a_flipped_bit_is_caught_by_the_wire_check_or_left_to_the_digest(rig: &dyn Rig) {
    let tap = Arc::new(Meddler::default());
    let [owner, initiator] = rig.pair(Some(tap.clone()), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 1 << 20;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let again = |link: &mut dyn Link| run(link, get(&near.pool, &[0], remote, &[near.span(0, 0)]));
    tap.only.store(2, Ordering::SeqCst);
    tap.flip_source.store(true, Ordering::SeqCst);
    again(link.as_mut()).unwrap();
    let (got, sent) = (near.bytes(0), far.bytes(0));
    assert_eq!(
        got.iter().zip(&sent).filter(|(a, b)| a != b).count(),
        1,
        "one byte, in the second piece"
    );
    tap.flip_source.store(false, Ordering::SeqCst);
    tap.flip_wire.store(true, Ordering::SeqCst);
    tap.only.store(0, Ordering::SeqCst);
    let outcome = again(link.as_mut());
    if rig.path() == Path::Tcp {
        let e = outcome.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Integrity, "{e}");
        let staging = owner
            .register(&far.pool, Access::RemoteWrite, Scope::Pool)
            .unwrap();
        let e = run(
            link.as_mut(),
            put(&near.pool, &[1], staging, &[near.span(1, 1)]),
        )
        .unwrap_err();
        assert_eq!(e, TransportError::Refused(Refusal::Integrity));
        assert_eq!(e.kind(), ErrorKind::Integrity);
    } else {
        outcome.unwrap();
    }
    tap.flip_wire.store(false, Ordering::SeqCst);
    again(link.as_mut()).unwrap();
    assert_eq!(
        near.bytes(0),
        far.bytes(0),
        "the link is good after a failed check"
    );
}

/// A pace bounds the rate, and can be changed while a transfer runs.
pub fn a_pace_bounds_the_rate(rig: &dyn Rig) {
    let pace = Arc::new(Pace::new(20 << 20));
    let [owner, initiator] = rig.pair(None, Some(pace.clone()));
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 4 << 20;
    let (far, near) = (Pages::new(rig, 2, size, 1), Pages::new(rig, 2, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let t0 = Instant::now();
    run(
        link.as_mut(),
        get(&near.pool, &[0], remote, &[near.span(0, 0)]),
    )
    .unwrap();
    // 4 MiB at 20 MiB/s; the last request is let through before it is paid for.
    let took = t0.elapsed();
    assert!(
        took >= Duration::from_millis(140),
        "{took:?}: faster than its pace"
    );
    pace.set(0);
    link.submit(get(&near.pool, &[1], remote, &[near.span(1, 1)]))
        .unwrap();
    let soon = Instant::now() + Duration::from_millis(60);
    assert_eq!(
        link.wait(&mut [Completion::empty()], soon),
        0,
        "a pace of zero lets nothing through"
    );
    pace.set(u64::MAX);
    one(link.as_mut()).outcome.unwrap();
    assert_eq!(near.bytes(1), far.bytes(1));
}

/// Blocks that their owner keeps leased: the transfer is refused as busy, to be retried; a short lease
/// is waited for.
pub fn blocks_in_use_are_waited_for_and_then_refused_as_busy(rig: &dyn Rig) {
    if rig.path() == Path::Shm {
        // A mapping is read without asking its owner: nothing to wait for. Puts do ask.
        return busy_puts(rig);
    }
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 2, 4096, 1), Pages::new(rig, 2, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let held = far.pool.write(&[0]).unwrap();
    let e = run(
        link.as_mut(),
        get(&near.pool, &[0], remote, &[near.span(0, 0)]),
    )
    .unwrap_err();
    assert_eq!((e, e.kind()), (Refusal::Busy.into(), ErrorKind::Retryable));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(5));
            drop(held);
        });
        run(
            link.as_mut(),
            get(&near.pool, &[0], remote, &[near.span(0, 0)]),
        )
        .unwrap();
    });
    assert_eq!(near.bytes(0), far.bytes(0));
    busy_puts(rig);
}

fn busy_puts(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 2, 4096, 1), Pages::new(rig, 2, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    let held = far.pool.read(&[0]).unwrap();
    let e = run(
        link.as_mut(),
        put(&near.pool, &[0], remote, &[near.span(0, 0)]),
    )
    .unwrap_err();
    assert_eq!((e, e.kind()), (Refusal::Busy.into(), ErrorKind::Retryable));
    drop(held);
    run(
        link.as_mut(),
        put(&near.pool, &[0], remote, &[near.span(0, 0)]),
    )
    .unwrap();
    assert_eq!(far.bytes(0), near.bytes(0));
}

/// A batch of small transfers: each completes once, in whatever portions they are polled; too many at
/// a time are handed back.
pub fn batches_complete_once_each_and_are_bounded(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (
        Pages::new(rig, 1024, 4096, 1),
        Pages::new(rig, 1024, 4096, 2),
    );
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let mut ids: Vec<TransferId> = (0..1024)
        .map(|b| {
            link.submit(get(&near.pool, &[b], remote, &[near.span(1023 - b, b)]))
                .unwrap()
        })
        .collect();
    let (p, extra) = (Pages::new(rig, 1, 4096, 3), near.span(0, 0));
    let rejected = link
        .submit(get(&p.pool, &[0], remote, &[extra]))
        .unwrap_err();
    assert_eq!(rejected.error.kind(), ErrorKind::Retryable);
    let mut out = [const { None }; 7].map(|_: Option<()>| Completion::empty());
    while !ids.is_empty() {
        let n = link.wait(&mut out, in_10s());
        assert!(n > 0);
        for c in &mut out[..n] {
            c.outcome.unwrap();
            c.local = None;
            let i = ids
                .iter()
                .position(|id| *id == c.id)
                .expect("completed once");
            ids.swap_remove(i);
        }
    }
    assert_eq!(link.in_flight(), 0);
    assert_eq!(
        link.wait(&mut out, in_10s()),
        0,
        "nothing in flight is no reason to wait"
    );
    assert!((0..1024).all(|b| near.bytes(b) == far.bytes(1023 - b)));
}

/// An owner that goes away ends what is in flight as lost or retryable; nothing hangs.
pub fn an_owner_that_goes_away_ends_what_is_in_flight(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 2, 4096, 1), Pages::new(rig, 2, 4096, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    run(
        link.as_mut(),
        put(&near.pool, &[0], remote, &[near.span(0, 0)]),
    )
    .unwrap();
    let endpoint = owner.endpoint();
    drop(owner);
    match link.submit(put(&near.pool, &[1], remote, &[near.span(1, 1)])) {
        Ok(_) => assert_eq!(
            one(link.as_mut()).outcome.unwrap_err().kind(),
            ErrorKind::PeerLost
        ),
        Err(r) => assert_eq!(r.error.kind(), ErrorKind::PeerLost),
    }
    let r = link
        .submit(put(&near.pool, &[1], remote, &[near.span(1, 1)]))
        .unwrap_err();
    assert_eq!(r.error.kind(), ErrorKind::PeerLost);
    assert_eq!(link.in_flight(), 0);
    let t0 = Instant::now();
    let Err(e) = initiator.connect(&endpoint, in_10s()) else {
        panic!("connected to nobody")
    };
    assert!(
        matches!(e.kind(), ErrorKind::PeerLost | ErrorKind::Retryable),
        "{e}"
    );
    assert!(t0.elapsed() < Duration::from_secs(5));
}

/// An engine that writes a block is not kept waiting by a peer that asked for it and does not read.
pub fn a_peer_that_does_not_read_keeps_no_writer_waiting(rig: &dyn Rig) {
    let [owner, initiator] = rig.pair(None, None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let size = 16 << 20;
    let (far, near) = (Pages::new(rig, 1, size, 1), Pages::new(rig, 1, size, 2));
    let remote = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    link.submit(get(&near.pool, &[0], remote, &[near.span(0, 0)]))
        .unwrap();
    // Asks, and then reads no more than this one look brings.
    link.poll(&mut []);
    for _ in 0..20 {
        let t0 = Instant::now();
        let writer = far.pool.write_until(&[0], t0 + Duration::from_secs(5));
        assert!(
            writer.is_ok(),
            "the block was held for a peer that does not read"
        );
        assert!(
            t0.elapsed() < Duration::from_millis(500),
            "{:?}",
            t0.elapsed()
        );
        drop(writer);
        std::thread::sleep(Duration::from_millis(3));
    }
    let c = one(link.as_mut());
    c.outcome.unwrap();
    drop(c);
    assert_eq!(near.bytes(0), far.bytes(0));
}

/// What the fault hook sees is what travels: direction, epoch and range of each piece.
pub fn a_tap_sees_what_travels(rig: &dyn Rig) {
    #[derive(Default)]
    struct Log(parking_lot::Mutex<Vec<TapPoint>>);
    impl Tap for Log {
        fn source_read(&self, at: TapPoint, bytes: &mut [u8]) {
            assert_eq!(bytes.len(), at.len);
            self.0.lock().push(at);
        }
    }
    let log = Arc::new(Log::default());
    let [owner, initiator] = rig.pair(Some(log.clone()), None);
    let mut link = link(owner.as_ref(), initiator.as_ref());
    let (far, near) = (Pages::new(rig, 2, 4096, 1), Pages::new(rig, 2, 4096, 2));
    let readable = owner
        .register(&far.pool, Access::RemoteRead, Scope::Pool)
        .unwrap();
    let writable = owner
        .register(&far.pool, Access::RemoteWrite, Scope::Pool)
        .unwrap();
    run(
        link.as_mut(),
        get(&near.pool, &[1], readable, &[near.span(0, 1)]),
    )
    .unwrap();
    run(
        link.as_mut(),
        put(&near.pool, &[1], writable, &[near.span(0, 1)]),
    )
    .unwrap();
    let seen = log.0.lock();
    assert_eq!(
        seen[0],
        TapPoint {
            direction: Direction::Get,
            epoch: readable.epoch,
            offset: 0,
            len: 4096
        }
    );
    assert_eq!(
        seen[1],
        TapPoint {
            direction: Direction::Put,
            epoch: writable.epoch,
            offset: 4096,
            len: 4096
        }
    );
}

/// A test for each check, over the rig that `$rig` evaluates to.
#[macro_export]
macro_rules! transport_conformance {
    ($name:ident, $rig:expr) => {
        mod $name {
            use super::*;
            $crate::transport_conformance! { @each $rig;
                odd_sizes_arrive_and_nothing_around_them_changes
                scattered_spans_land_each_in_its_place
                bad_transfers_are_handed_back
                refusals_are_typed_and_the_links_other_work_survives
                five_concurrent_migrations_bring_the_right_bytes
                completed_is_visible_to_whoever_reads_next
                cancelled_memory_is_not_touched_by_what_comes_later
                a_put_cancelled_half_way_leaves_the_link_in_order
                a_deadline_ends_a_transfer_and_its_late_reply_touches_nothing
                a_dropped_link_touches_nothing_and_leaks_no_lease
                an_epoch_that_ends_mid_flight_stops_its_transfers
                revoked_staging_is_not_written_by_what_was_in_flight
                revoking_one_grant_leaves_the_others
                a_flipped_bit_is_caught_by_the_wire_check_or_left_to_the_digest
                a_pace_bounds_the_rate
                blocks_in_use_are_waited_for_and_then_refused_as_busy
                batches_complete_once_each_and_are_bounded
                an_owner_that_goes_away_ends_what_is_in_flight
                a_peer_that_does_not_read_keeps_no_writer_waiting
                a_tap_sees_what_travels
            }
        }
    };
    (@each $rig:expr; $($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                $crate::transport::conformance::$check(&$rig);
            }
        )*
    };
}
