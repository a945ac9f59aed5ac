//! Who may touch which memory until when: cancel, deadlines, epochs, revoke, leases, peers that go.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Rig;
use super::rig::*;
use crate::id::ErrorKind;
use crate::transport::{
    Access, CancelOutcome, Completion, Path, Refusal, Revoked, Scope, TransportError,
};

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
    let mut outcome = |c: Completion| match c.outcome {
        Ok(()) => whole += 1,
        Err(TransportError::Refused(Refusal::StaleEpoch)) => stopped += 1,
        Err(e) => panic!("{e}"),
    };
    for round in 0..40u64 {
        let mut left: Vec<_> = (0..4)
            .map(|b| {
                link.submit(get(&near.pool, &[b], grant, &[near.span(b, b)]))
                    .unwrap()
            })
            .collect();
        if round % 2 == 0 {
            // After a first look, which never brings all 16 MiB.
            let mut out = [Completion::empty()];
            if link.poll(&mut out) == 1 {
                left.pop();
                let [c] = out;
                outcome(c);
            }
            let (next, ended) = owner.renew(grant.key, in_10s()).unwrap();
            assert_eq!(ended, Revoked::Done);
            grant = next;
            left.drain(..).for_each(|_| outcome(one(link.as_mut())));
        } else {
            // Whenever it happens.
            std::thread::scope(|scope| {
                let owner = &owner;
                let renewed = scope.spawn(move || {
                    std::thread::sleep(Duration::from_micros(50 * round));
                    owner.renew(grant.key, in_10s()).unwrap()
                });
                left.drain(..).for_each(|_| outcome(one(link.as_mut())));
                let (next, ended) = renewed.join().unwrap();
                assert_eq!(ended, Revoked::Done);
                grant = next;
            });
        }
    }
    assert!(
        stopped >= 20,
        "{stopped} stopped, {whole} whole: no epoch ended mid-flight"
    );
    assert!(whole + stopped == 160);
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
