use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::id::ErrorKind;

fn pool(blocks: u64) -> Arc<BlockPool> {
    BlockPool::contiguous(Region::anonymous(blocks * 4096).unwrap(), 4096).unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(20)
}

#[test]
fn readers_share_writers_exclude_and_leases_end_on_drop() {
    let p = pool(4);
    let b = p.alloc(2).unwrap();
    let (r1, r2) = (p.read(&b).unwrap(), p.read(&b[..1]).unwrap());
    assert_eq!(
        p.write(&b).unwrap_err(),
        MemError::Busy {
            block: b[0],
            by: "reader"
        }
    );
    drop((r1, r2));
    let w = p.write(&b).unwrap();
    assert_eq!(p.read(&b).unwrap_err().kind(), ErrorKind::Retryable);
    assert_eq!(
        p.write(&b[1..]).unwrap_err(),
        MemError::Busy {
            block: b[1],
            by: "writer"
        }
    );
    drop(w);
    assert_eq!(p.read_until(&b, soon()).unwrap().blocks(), b);
    assert_eq!((p.stats().read_leases, p.stats().write_leases), (0, 0));
}

#[test]
fn a_refused_batch_grants_nothing() {
    let p = pool(4);
    let b = p.alloc(3).unwrap();
    let held = p.read(&b[2..]).unwrap();
    assert!(p.write(&b).is_err());
    assert!(p.write(&[b[0], 99]).is_err());
    drop(p.write(&b[..2]).unwrap());
    drop(held);
    assert_eq!((p.stats().read_leases, p.stats().write_leases), (0, 0));
}

#[test]
fn a_block_named_twice_is_leased_and_freed_once() {
    let p = pool(2);
    let b = p.alloc(1).unwrap()[0];
    let w = p.write(&[b, b]).unwrap();
    assert_eq!(w.blocks(), [b]);
    drop(w);
    drop(p.read(&[b, b]).unwrap());
    drop(p.write(&[b]).unwrap());
    assert_eq!(
        p.release(&[b, b]).unwrap_err(),
        MemError::NotAllocated { block: b }
    );
    assert_eq!(p.refs(b).unwrap(), 1, "a refused release changes nothing");
    p.retain(&[b]).unwrap();
    assert_eq!(p.release(&[b, b]).unwrap(), 1);
    assert_eq!(p.stats().free, 2);
    let all = p.alloc(2).unwrap();
    assert_ne!(all[0], all[1]);
}

#[test]
fn a_leased_block_cannot_be_freed_and_a_free_one_cannot_be_leased() {
    let p = pool(2);
    let b = p.alloc(1).unwrap();
    let r = p.read(&b).unwrap();
    assert_eq!(
        p.release(&b).unwrap_err(),
        MemError::Busy {
            block: b[0],
            by: "reader"
        }
    );
    drop(r);
    let w = p.write(&b).unwrap();
    assert_eq!(
        p.release(&b).unwrap_err(),
        MemError::Busy {
            block: b[0],
            by: "writer"
        }
    );
    drop(w);
    p.release(&b).unwrap();
    assert_eq!(
        p.read(&b).unwrap_err(),
        MemError::NotAllocated { block: b[0] }
    );
    assert_eq!(
        p.write(&b).unwrap_err(),
        MemError::NotAllocated { block: b[0] }
    );
}

#[test]
fn a_generation_tells_a_reused_block_from_its_former_self() {
    let p = pool(1);
    let b = p.alloc(1).unwrap();
    let first = p.generation(b[0]).unwrap();
    p.release(&b).unwrap();
    assert_eq!(p.alloc(1).unwrap(), b);
    assert_eq!(p.generation(b[0]).unwrap(), first + 1);
}

#[test]
fn quarantined_blocks_are_counted_and_never_reused() {
    let p = pool(4);
    let b = p.alloc(2).unwrap();
    let lease = p.read(&b).unwrap();
    assert_eq!(p.quarantine(&b, Why::ReaderNotDrained).unwrap(), 8192);
    assert_eq!(
        p.quarantine(&b, Why::Faulty).unwrap(),
        0,
        "counted once, first reason kept"
    );
    drop(lease);
    assert_eq!(
        p.read(&b).unwrap_err(),
        MemError::Quarantined {
            block: b[0],
            why: Why::ReaderNotDrained
        }
    );
    assert_eq!(p.release(&b).unwrap(), 0);
    let s = p.stats();
    assert_eq!(
        (s.free, s.used, s.quarantined, s.quarantined_bytes),
        (2, 0, 2, 8192)
    );
    let rest = p.alloc(2).unwrap();
    assert!(rest.iter().all(|r| !b.contains(r)));
    assert_eq!(
        p.alloc(1).unwrap_err(),
        MemError::Exhausted { wanted: 1, free: 0 }
    );
    p.release(&rest).unwrap();
    p.quarantine(&rest[..1], Why::Faulty).unwrap();
    assert_eq!(p.alloc(1).unwrap(), rest[1..]);
}

#[test]
fn a_lease_reaches_its_own_blocks_and_nothing_else() {
    // Two planes; block b has one run in each.
    let p = BlockPool::new(Region::anonymous(8192).unwrap(), 4, |b| {
        [(b as u64 * 1024, 1024), (4096 + b as u64 * 1024, 1024)]
    })
    .unwrap();
    let b = p.alloc(4).unwrap();
    let mut w = p.write(&[b[0], b[1]]).unwrap();
    let at = |b: u32, plane: u64| plane * 4096 + b as u64 * 1024;
    w.bytes_mut(at(b[0], 0), 1024).fill(7);
    w.bytes_mut(at(b[1], 1) + 5, 3).fill(9);
    let low = at(b[0].min(b[1]), 0);
    assert_eq!(
        w.bytes(low, 2048).len(),
        2048,
        "blocks that adjoin and are both held"
    );
    for (offset, len) in [
        (low, 2049),
        (low, 0),
        (at(b[2], 0), 1),
        (8191, 2),
        (9000, 1),
        (u64::MAX, 2),
    ] {
        assert_eq!(
            w.try_bytes(offset, len as usize).unwrap_err(),
            MemError::OutsideLease { offset, len }
        );
    }
    let r = w.downgrade();
    assert_eq!(r.bytes(at(b[1], 1) + 4, 5), [0, 9, 9, 9, 0]);
    drop(p.read(&b).unwrap());
    assert!(p.write(&b[..1]).is_err());
    drop(r);
    drop(p.write(&b).unwrap());
}

#[test]
#[should_panic(expected = "does not lie inside the leased blocks")]
fn indexing_out_of_a_lease_panics_like_a_slice() {
    let p = pool(2);
    let b = p.alloc(1).unwrap();
    p.read(&b).unwrap().bytes(b[0] as u64 * 4096, 4097);
}

#[test]
fn extents_that_overlap_or_leave_the_region_are_refused() {
    let make = |e: Vec<Vec<(u64, u64)>>| {
        BlockPool::new(Region::anonymous(4096).unwrap(), e.len() as u32, |b| {
            e[b as usize].clone()
        })
        .map(|_| ())
        .map_err(|e| match e {
            MemError::Extent { why, .. } => why,
            other => panic!("{other}"),
        })
    };
    assert_eq!(
        make(vec![vec![(0, 100)], vec![(99, 10)]]),
        Err("overlaps another")
    );
    assert_eq!(make(vec![vec![(0, 10), (5, 10)]]), Err("overlaps another"));
    assert_eq!(make(vec![vec![(0, 0)]]), Err("is empty"));
    assert_eq!(make(vec![vec![(4000, 97)]]), Err("leaves its region"));
    assert_eq!(make(vec![vec![(u64::MAX, 2)]]), Err("overflows"));
    assert_eq!(make(vec![vec![(0, 100)], vec![(100, 10)]]), Ok(()));
}

#[test]
fn a_waiting_writer_is_not_starved_by_readers() {
    let p = pool(1);
    let b = p.alloc(1).unwrap();
    let first = p.read(&b).unwrap();
    std::thread::scope(|s| {
        let writer = s.spawn(|| {
            p.write_until(&b, Instant::now() + Duration::from_secs(20))
                .map(drop)
        });
        while p.read(&b).is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(
            p.read(&b).unwrap_err(),
            MemError::Busy {
                block: b[0],
                by: "waiting writer"
            }
        );
        drop(first);
        writer.join().unwrap().unwrap();
    });
    drop(p.read(&b).unwrap());
}

#[test]
fn a_writer_that_gives_up_lets_readers_in_again() {
    let p = pool(1);
    let b = p.alloc(1).unwrap();
    let held = p.read(&b).unwrap();
    assert_eq!(
        p.write_until(&b, soon()).unwrap_err(),
        MemError::Busy {
            block: b[0],
            by: "reader"
        }
    );
    drop(p.read(&b).unwrap());
    drop(held);
}

#[test]
fn waits_end_at_their_deadline() {
    let p = pool(1);
    let b = p.alloc(1).unwrap();
    let _w = p.write(&b).unwrap();
    let t0 = Instant::now();
    assert!(p.read_until(&b, soon()).is_err());
    assert!(t0.elapsed() >= Duration::from_millis(15) && t0.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_memfd_region_cannot_be_mapped_writable_or_shrunk_by_whoever_gets_it() {
    let mut r = Region::memfd("moonlive-test", 10_000).unwrap();
    r.prefault().unwrap();
    r.as_mut_slice()[9_999] = 5;
    let view = RegionView::map(r.fd().unwrap(), 10_000).unwrap();
    let mut last = [0u8; 2];
    view.copy_to(9_998, &mut last).unwrap();
    assert_eq!(last, [0, 5]);
    r.as_mut_slice()[9_998] = 6;
    view.copy_to(9_998, &mut last).unwrap();
    assert_eq!(last, [6, 5]);
    assert!(view.copy_to(9_999, &mut last).is_err());
    assert!(view.copy_to(u64::MAX, &mut last).is_err());
    assert!(RegionView::map(r.fd().unwrap(), 10_001).is_err());
    let fd = r.fd().unwrap();
    assert!(rustix::fs::ftruncate(fd, 0).is_err());
    assert!(rustix::io::pwrite(fd, b"x", 0).is_err());
    let writable = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    // SAFETY: a fresh mapping of a file; refused, and never dereferenced.
    let mapped = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            writable,
            rustix::mm::MapFlags::SHARED,
            fd,
            0,
        )
    };
    assert!(mapped.is_err());
}

#[test]
fn a_descriptor_that_could_be_truncated_under_us_is_not_mapped() {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("moonlive-test", flags).unwrap();
    rustix::fs::ftruncate(&fd, 8192).unwrap();
    let e = RegionView::map(std::os::fd::AsFd::as_fd(&fd), 4096).unwrap_err();
    assert_eq!(
        e,
        MemError::PeerRegion {
            why: "it is not sealed against shrinking"
        }
    );
}

#[test]
fn shared_words_are_seen_by_a_view() {
    let words = SharedWords::new("moonlive-test", 4).unwrap();
    let view = RegionView::map(words.fd(), words.len()).unwrap();
    words.store(3, 77);
    assert_eq!(view.load_u64(24).unwrap(), 77);
    assert!(view.load_u64(25).is_err());
    assert!(view.load_u64(32).is_err());
}

#[test]
fn steady_leasing_allocates_no_new_sets() {
    let p = pool(256);
    let b = p.alloc(256).unwrap();
    drop(p.read(&b).unwrap());
    let (w, r) = (p.write(&b[..128]).unwrap(), p.read(&b[128..]).unwrap());
    drop((w, r));
    let before = p.ledger().spare_sets();
    for _ in 0..1000 {
        let w = p.write(&b[..128]).unwrap();
        let r = p.read(&b[128..]).unwrap();
        drop((w, r));
    }
    assert_eq!(p.ledger().spare_sets(), before);
}

#[test]
fn keys_differ_and_do_not_show_themselves() {
    let (a, b) = (RegionKey::random().unwrap(), RegionKey::random().unwrap());
    assert!(a != b && a == RegionKey::from_bytes(a.to_bytes()));
    assert!(format!("{a:?}").len() < 20);
}

#[test]
fn remote_regions_decode_only_what_they_encode() {
    let r = RemoteRegion {
        key: RegionKey::from_bytes([3; 16]),
        base: 0,
        len: 1,
        epoch: 9,
    };
    let wire = r.encode();
    assert_eq!(RemoteRegion::decode(&wire), Ok(r));
    assert_eq!(
        RemoteRegion::decode(&wire[1..]),
        Err(RemoteRegionError::Length { got: 43 })
    );
    let mut bad = wire;
    bad[0] ^= 1;
    assert!(matches!(
        RemoteRegion::decode(&bad),
        Err(RemoteRegionError::Tag(_))
    ));
    for (base, len) in [(0, 0), (u64::MAX, 2)] {
        let e = RemoteRegion { base, len, ..r }.encode();
        assert_eq!(
            RemoteRegion::decode(&e),
            Err(RemoteRegionError::Range { base, len })
        );
    }
}

proptest! {
    #[test]
    fn the_extent_index_agrees_with_looking_at_every_byte(
        cuts in proptest::collection::vec((0u64..8, 1u64..8, 0u32..5), 1..20),
        unit in prop_oneof![Just(1u64), Just(64), Just(100)],
        queries in proptest::collection::vec((0u64..9000, 0u64..2000, 0u32..32), 50),
    ) {
        // Runs of (gap, length, block) laid one after another: the owner of each byte is known.
        let mut owner: Vec<Option<u32>> = Vec::new();
        let mut extents = vec![Vec::new(); 5];
        for (gap, len, block) in cuts {
            owner.extend(std::iter::repeat_n(None, (gap * unit) as usize));
            extents[block as usize].push((owner.len() as u64, len * unit));
            owner.extend(std::iter::repeat_n(Some(block), (len * unit) as usize));
        }
        let index = super::extents::ExtentIndex::new(owner.len() as u64, 5, |b| extents[b as usize].clone()).unwrap();
        for (offset, len, held) in queries {
            let holds = |b: u32| held >> b & 1 == 1;
            let truth = len > 0 && (offset..offset + len).all(|i| {
                owner.get(i as usize).copied().flatten().is_some_and(holds)
            });
            prop_assert_eq!(index.covered(offset, len, holds), truth);
        }
    }
}
