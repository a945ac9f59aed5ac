//! Injected faults and rate limits do what they say.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Rig;
use super::rig::*;
use crate::id::ErrorKind;
use crate::transport::{
    Access, Completion, Direction, Link, Pace, Path, Refusal, Scope, Tap, TapPoint, TransportError,
};

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
