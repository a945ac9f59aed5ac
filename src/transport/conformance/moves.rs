//! Bytes: the right ones, in the right place, visible when it is said.

use super::Rig;
use super::rig::*;
use crate::id::ErrorKind;
use crate::mem::{RegionKey, RemoteRegion};
use crate::transport::{
    Access, Completion, Local, Path, Refusal, Rejected, Revoked, Scope, Span, TransferId,
    TransportError,
};

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
    canaries_untouched(&near, &near_all, (&near_at, &sizes), 0x5a);
    canaries_untouched(&far, &far_all, (&far_at, &sizes), 0xa5);
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
    canaries_untouched(&near, &near_all, (&near_at, &all_lens), 2);
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
