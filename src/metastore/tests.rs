use super::msg::{ANSWER, Answer, MAX_MESSAGE, Request};
use super::*;
use crate::id::ErrorKind;
use crate::route::Writer;
use crate::wire::{Endpoint, Limits, Wait, connect};
use proptest::prelude::*;
use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn within(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

fn memory() -> Arc<EmbeddedStore> {
    Arc::new(EmbeddedStore::in_memory(EmbeddedOptions::default()))
}

fn serve(store: Arc<EmbeddedStore>, at: &Endpoint, options: ServerOptions) -> StoreServer {
    StoreServer::start(store, at, options).unwrap()
}

fn client(server: &StoreServer) -> RemoteStore {
    RemoteStore::new(server.endpoint().clone(), RemoteOptions::default())
}

#[test]
fn a_lost_answer_is_doubt_for_a_change_and_asked_again_for_a_read() {
    let (lose, asked) = (
        Arc::new(AtomicBool::new(true)),
        Arc::new(AtomicUsize::new(0)),
    );
    let filter: ReplyFilter = Arc::new({
        let (lose, asked) = (Arc::clone(&lose), Arc::clone(&asked));
        move |_| {
            asked.fetch_add(1, Ordering::SeqCst);
            !lose.swap(false, Ordering::SeqCst)
        }
    });
    let options = ServerOptions {
        reply_filter: Some(filter),
        ..Default::default()
    };
    let server = serve(memory(), &Endpoint::loopback(0), options);
    let store = client(&server);
    let cas = Cas::put("k", None, b"v");
    let lost = store.cas(&cas, soon()).unwrap_err();
    assert!(
        lost.in_doubt() && lost.kind() == ErrorKind::Retryable,
        "{lost}"
    );
    // It had been made; reading tells, and so does the retry.
    let found = store.get("k", soon()).unwrap().unwrap();
    let again = store.cas(&cas, soon()).unwrap();
    assert_eq!(
        again,
        CasOutcome::Applied {
            revision: found.revision
        }
    );
    // A conflict whose answer is lost is as doubtful.
    lose.store(true, Ordering::SeqCst);
    assert!(
        store
            .cas(&Cas::put("k", None, b"w"), soon())
            .unwrap_err()
            .in_doubt()
    );
    lose.store(true, Ordering::SeqCst);
    let before = asked.load(Ordering::SeqCst);
    assert_eq!(store.get("k", soon()).unwrap(), Some(found));
    assert_eq!(asked.load(Ordering::SeqCst), before + 2);
}

#[test]
fn a_store_that_is_away_is_unavailable_and_a_restart_leaves_no_doubt() {
    let dir = tempfile::tempdir().unwrap();
    for endpoint in [
        Endpoint::loopback(0),
        Endpoint::unix(dir.path().join("s")).unwrap(),
    ] {
        let kept = memory();
        let server = serve(Arc::clone(&kept), &endpoint, ServerOptions::default());
        let (store, at) = (client(&server), server.endpoint().clone());
        let CasOutcome::Applied { mut revision } =
            store.cas(&Cas::put("k", None, b""), soon()).unwrap()
        else {
            panic!()
        };
        drop(server);
        let away = store
            .cas(&Cas::put("k", Some(revision), b""), within(60))
            .unwrap_err();
        assert!(matches!(away, StoreError::Unavailable { .. }), "{away}");
        assert!(matches!(
            store.get("k", within(60)),
            Err(StoreError::Unavailable { .. })
        ));
        for _ in 0..5 {
            // The kept connection died with the server, which must not look like a lost answer.
            let _server = serve(Arc::clone(&kept), &at, ServerOptions::default());
            match store.cas(&Cas::put("k", Some(revision), b""), soon()) {
                Ok(CasOutcome::Applied { revision: now }) => revision = now,
                other => panic!("{other:?}"),
            }
        }
        // Comes back while a caller waits.
        let waiting = std::thread::spawn(move || store.get("k", soon()));
        std::thread::sleep(Duration::from_millis(30));
        let _server = serve(kept, &at, ServerOptions::default());
        assert_eq!(waiting.join().unwrap().unwrap().unwrap().revision, revision);
    }
}

#[test]
fn a_server_that_is_dropped_lets_go_of_everybody_at_once() {
    let store = memory();
    let server = serve(
        Arc::clone(&store),
        &Endpoint::loopback(0),
        ServerOptions::default(),
    );
    let remote = client(&server);
    remote.get("k", soon()).unwrap();
    let watcher = client(&server);
    let watching = std::thread::spawn(move || watcher.watch("", Revision(0), within(2000)));
    while server.connections() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let begun = Instant::now();
    drop(server);
    assert!(
        begun.elapsed() < Duration::from_secs(1),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(
        Arc::strong_count(&store),
        1,
        "a connection's thread is left"
    );
    assert!(matches!(
        watching.join().unwrap(),
        Err(StoreError::Unavailable { .. })
    ));
}

#[test]
fn connections_beyond_the_limit_are_turned_away_and_room_comes_back() {
    let options = ServerOptions {
        max_connections: 2,
        ..Default::default()
    };
    let server = serve(memory(), &Endpoint::loopback(0), options);
    let a = client(&server);
    let b = client(&server);
    a.get("k", soon()).unwrap();
    b.get("k", soon()).unwrap();
    let c = client(&server);
    let turned_away = c.cas(&Cas::put("k", None, b""), within(100));
    assert!(turned_away.is_err() && server.refused() > 0);
    drop(a);
    c.get("k", soon()).unwrap();
}

#[test]
fn a_peer_that_talks_nonsense_gets_a_typed_answer_and_harms_nobody() {
    let server = serve(memory(), &Endpoint::loopback(0), ServerOptions::default());
    let limits = Limits {
        max_frame: MAX_MESSAGE,
        ..Default::default()
    };
    let mut raw = connect(server.endpoint(), limits, soon()).unwrap();
    let wait = Wait::within(Duration::from_secs(20));
    for (kind, payload) in [
        (99, &b""[..]),
        (1, b"\xff\xff"),
        (2, b"short"),
        (1 | ANSWER, b""),
    ] {
        raw.send(kind, 7, &[IoSlice::new(payload)], wait).unwrap();
        let frame = raw.recv(wait).unwrap();
        let answer = Answer::decode(frame.header.kind, frame.payload).unwrap();
        assert!(
            matches!(answer, Answer::Error(StoreError::Protocol { .. })),
            "{answer:?}"
        );
    }
    let (mut send, mut recv) = raw.split();
    send.send_raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", &[], wait)
        .unwrap();
    recv.recv(wait).unwrap_err();
    client(&server).get("k", soon()).unwrap();
}

#[test]
fn a_change_is_seen_by_a_watcher_as_it_happens() {
    let server = serve(memory(), &Endpoint::loopback(0), ServerOptions::default());
    let (store, watcher) = (client(&server), client(&server));
    let waiting = std::thread::spawn(move || {
        let begun = Instant::now();
        (watcher.watch("a/", Revision(0), soon()), begun.elapsed())
    });
    std::thread::sleep(Duration::from_millis(300));
    store.cas(&Cas::put("b/x", None, b""), soon()).unwrap();
    store.cas(&Cas::put("a/x", None, b"now"), soon()).unwrap();
    let (batch, took) = waiting.join().unwrap();
    let WatchBatch::Events { events, upto } = batch.unwrap() else {
        panic!()
    };
    assert_eq!(
        (events.len(), &events[0].key[..], upto),
        (1, "a/x", Revision(2))
    );
    assert!(took < Duration::from_secs(20));
}

#[test]
fn what_a_lone_change_costs_is_one_write_and_one_flush() {
    use crate::wal::sim::{SimDir, SimOp};
    let dir = SimDir::new();
    let store = EmbeddedStore::open_dir(Arc::new(dir.clone()), EmbeddedOptions::default()).unwrap();
    let before = dir.ops();
    store.cas(&Cas::put("k", None, &[1; 300]), soon()).unwrap();
    let trace = dir.trace();
    assert!(
        matches!(trace[before..], [SimOp::Write { .. }, SimOp::Sync { .. }]),
        "{:?}",
        &trace[before..]
    );
}

fn key() -> impl Strategy<Value = String> {
    proptest::string::string_regex("[a-zé/]{0,40}").unwrap()
}

fn record() -> impl Strategy<Value = Versioned> {
    (any::<u64>(), prop::collection::vec(any::<u8>(), 0..200)).prop_map(|(revision, value)| {
        Versioned {
            revision: Revision(revision),
            value,
        }
    })
}

fn error() -> impl Strategy<Value = StoreError> {
    let text = || proptest::string::string_regex(".{0,50}").unwrap();
    prop_oneof![
        text().prop_map(|cause| StoreError::InDoubt { cause }),
        text().prop_map(|cause| StoreError::Unavailable { cause }),
        text().prop_map(|cause| StoreError::Poisoned { cause }),
        text().prop_map(|what| StoreError::Protocol { what }),
        (any::<u64>(), any::<u64>()).prop_map(|(bytes, max)| StoreError::Full { bytes, max }),
        any::<u32>().prop_map(|len| StoreError::Key { len: len as usize }),
        any::<u32>().prop_map(|len| StoreError::Value { len: len as usize }),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let event = (
        key(),
        any::<u64>(),
        prop::option::of(prop::collection::vec(any::<u8>(), 0..50)),
    )
        .prop_map(|(key, revision, value)| Event {
            key,
            revision: Revision(revision),
            value,
        });
    prop_oneof![
        prop::option::of(record()).prop_map(Answer::Record),
        any::<u64>().prop_map(|r| Answer::Cas(CasOutcome::Applied {
            revision: Revision(r)
        })),
        prop::option::of(record())
            .prop_map(|current| Answer::Cas(CasOutcome::Conflict { current })),
        (
            any::<u64>(),
            any::<bool>(),
            prop::collection::vec((key(), record()), 0..6)
        )
            .prop_map(|(revision, more, entries)| Answer::Page {
                page: Listing {
                    revision: Revision(revision),
                    entries
                },
                more,
            }),
        Just(Answer::Watch(WatchBatch::Resync)),
        (any::<u64>(), prop::collection::vec(event, 0..6)).prop_map(|(upto, events)| {
            Answer::Watch(WatchBatch::Events {
                events,
                upto: Revision(upto),
            })
        }),
        any::<u64>().prop_map(|t| Answer::Lease(LeaseOutcome::Granted { term: LeaseTerm(t) })),
        (key(), any::<u32>()).prop_map(|(by, left)| {
            Answer::Lease(LeaseOutcome::Held {
                by,
                left: Duration::from_millis(left.into()),
            })
        }),
        any::<bool>().prop_map(Answer::Renewed),
        Just(Answer::Released),
        Just(Answer::KeptAwake),
        error().prop_map(Answer::Error),
    ]
}

proptest! {
    #[test]
    fn answers_survive_the_wire_and_no_cut_is_taken_for_whole(answer in answer()) {
        let mut w = Writer::default();
        answer.encode(&mut w);
        prop_assert_eq!(&Answer::decode(answer.kind(), &w.0).unwrap(), &answer);
        for cut in 0..w.0.len() {
            prop_assert!(Answer::decode(answer.kind(), &w.0[..cut]).is_err());
        }
        w.0.push(0);
        prop_assert!(Answer::decode(answer.kind(), &w.0).is_err());
    }

    #[test]
    fn requests_survive_the_wire_and_no_cut_is_taken_for_whole(
        key in key(), other in key(), n in any::<u64>(), op in any::<[u8; 16]>(),
        value in prop::option::of(prop::collection::vec(any::<u8>(), 0..100)), there in any::<bool>(),
    ) {
        let change = value.as_deref().map_or(Change::Delete, Change::Put);
        let expected = there.then_some(Revision(n));
        let requests = [
            Request::Get { key: &key },
            Request::Cas(Cas { key: &key, expected, change, op: OpId(op) }),
            Request::List { prefix: &key, after: there.then_some(&other) },
            Request::Watch { prefix: &key, after: Revision(n) },
            Request::Acquire { name: &key, holder: &other, ttl: Duration::from_millis(n) },
            Request::Renew { name: &key, holder: &other, term: LeaseTerm(n) },
            Request::Release { name: &key, holder: &other, term: LeaseTerm(n) },
            Request::KeepAwake { key: &key },
        ];
        for request in requests {
            let mut w = Writer::default();
            request.encode(&mut w);
            let back = Request::decode(request.kind(), &w.0).unwrap();
            prop_assert_eq!(format!("{back:?}"), format!("{request:?}"));
            for cut in 0..w.0.len() {
                prop_assert!(Request::decode(request.kind(), &w.0[..cut]).is_err());
            }
            w.0.push(0);
            prop_assert!(Request::decode(request.kind(), &w.0).is_err());
        }
    }

    #[test]
    fn any_bytes_are_refused_without_panic(kind in any::<u16>(), bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Request::decode(kind % 10, &bytes);
        let _ = Answer::decode(kind, &bytes);
        let _ = Answer::decode((kind % 10) | ANSWER, &bytes);
        for record in 0..7 {
            let _ = replay_records([(record, &bytes[..]), (5, &[0; 16]), (record, &bytes[..])]);
        }
    }
}
