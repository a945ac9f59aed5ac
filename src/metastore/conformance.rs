//! The one suite that every [`MetaStore`] passes: embedded, remote, or somebody else's. Each case
//! panics where a promise is broken, naming it. Cases use keys of their own, so all may run against
//! one store, again and again.

use super::{
    Cas, CasOutcome, Change, Event, LeaseOutcome, MAX_KEY, MAX_VALUE, MetaStore, OpId, Revision,
    StoreError, Versioned, WatchBatch,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A store under test.
pub struct Subject<'a> {
    /// Another handle on the same store: a client of its own, where the store has clients.
    pub open: &'a (dyn Fn() -> Arc<dyn MetaStore> + Sync),
    /// Changes that a watcher may lag behind; more must lead to a resync. 0: not checked.
    pub history: usize,
    /// Increments in the contended cases.
    pub rounds: u64,
}

impl std::fmt::Debug for Subject<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subject")
            .field("history", &self.history)
            .finish_non_exhaustive()
    }
}

/// One case.
pub type Case = fn(&Subject<'_>);

/// All cases, by the promise each checks.
pub const CASES: &[(&str, Case)] = &[
    (
        "a record comes back as it was put, at the revision told",
        round_trip,
    ),
    (
        "only the expected revision lets a change through",
        compare_and_swap,
    ),
    (
        "a revision is never given twice, removal and re-creation included",
        revisions_rise,
    ),
    ("what is refused leaves nothing behind", refusals),
    (
        "a retry of the same operation returns the first outcome",
        retries,
    ),
    (
        "a listing holds exactly its prefix, in order, however large",
        listings,
    ),
    (
        "a watcher sees every change of its prefix once, in order",
        watching,
    ),
    ("a watcher that lags too far is told to list again", resync),
    (
        "of contending changes exactly one wins each revision",
        contention,
    ),
    ("reads and changes fit one order in real time", linearizable),
    ("a lease has one holder, and its terms rise", leases),
];

/// Runs all cases.
pub fn run(subject: &Subject<'_>) {
    for (promise, case) in CASES {
        tracing::debug!(promise, "conformance");
        case(subject);
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn unique(prefix: &str) -> String {
    let id: String = OpId::fresh().0.iter().map(|b| format!("{b:02x}")).collect();
    format!("{prefix}/{id}")
}

fn put(store: &dyn MetaStore, key: &str, expected: Option<Revision>, value: &[u8]) -> Revision {
    match store.cas(&Cas::put(key, expected, value), soon()) {
        Ok(CasOutcome::Applied { revision }) => revision,
        other => panic!("put {key}: {other:?}"),
    }
}

fn conflict(store: &dyn MetaStore, cas: &Cas<'_>) -> Option<Versioned> {
    match store.cas(cas, soon()) {
        Ok(CasOutcome::Conflict { current }) => current,
        other => panic!("a conflict was due on {}: {other:?}", cas.key),
    }
}

fn round_trip(subject: &Subject<'_>) {
    let (a, b) = ((subject.open)(), (subject.open)());
    let key = unique("rt");
    assert_eq!(a.get(&key, soon()).unwrap(), None);
    let mut expected = None;
    for value in [vec![], vec![0], vec![0xff; MAX_VALUE], b"plain".to_vec()] {
        let revision = put(&*a, &key, expected, &value);
        expected = Some(revision);
        assert_eq!(
            b.get(&key, soon()).unwrap(),
            Some(Versioned { revision, value })
        );
    }
    let long = format!("{}é", "k".repeat(MAX_KEY - 2));
    let before = a.get(&long, soon()).unwrap().map(|r| r.revision);
    let revision = put(&*a, &long, before, b"x");
    assert_eq!(b.get(&long, soon()).unwrap().unwrap().revision, revision);
}

fn compare_and_swap(subject: &Subject<'_>) {
    let store = (subject.open)();
    let key = unique("cas");
    assert_eq!(
        conflict(&*store, &Cas::put(&key, Some(Revision(1)), b"x")),
        None
    );
    assert_eq!(conflict(&*store, &Cas::delete(&key, Revision(1))), None);
    let absent = Cas {
        key: &key,
        expected: None,
        change: Change::Delete,
        op: OpId::fresh(),
    };
    assert_eq!(conflict(&*store, &absent), None);
    let first = put(&*store, &key, None, b"1");
    let there = Some(Versioned {
        revision: first,
        value: b"1".to_vec(),
    });
    assert_eq!(conflict(&*store, &Cas::put(&key, None, b"x")), there);
    let second = put(&*store, &key, Some(first), b"2");
    let there = Some(Versioned {
        revision: second,
        value: b"2".to_vec(),
    });
    for stale in [
        first,
        Revision(0),
        Revision(second.0 + 1),
        Revision(u64::MAX),
    ] {
        assert_eq!(conflict(&*store, &Cas::put(&key, Some(stale), b"x")), there);
        assert_eq!(conflict(&*store, &Cas::delete(&key, stale)), there);
    }
    assert_eq!(store.get(&key, soon()).unwrap(), there);
}

fn revisions_rise(subject: &Subject<'_>) {
    let store = (subject.open)();
    let (one, two) = (unique("rev"), unique("rev"));
    let a = put(&*store, &one, None, b"a");
    let b = put(&*store, &two, None, b"b");
    assert!(b > a, "revisions are global");
    let removed = match store.cas(&Cas::delete(&one, a), soon()) {
        Ok(CasOutcome::Applied { revision }) => revision,
        other => panic!("delete: {other:?}"),
    };
    assert!(removed > b);
    assert_eq!(store.get(&one, soon()).unwrap(), None);
    let again = put(&*store, &one, None, b"a");
    assert!(again > removed);
    // Same value, same key, another revision: what saw the first life cannot touch the second.
    let now = conflict(&*store, &Cas::put(&one, Some(a), b"x")).unwrap();
    assert_eq!((now.revision, &now.value[..]), (again, &b"a"[..]));
}

fn refusals(subject: &Subject<'_>) {
    let store = (subject.open)();
    let long = "k".repeat(MAX_KEY + 1);
    for key in ["", &long] {
        let want = StoreError::Key { len: key.len() };
        assert_eq!(store.get(key, soon()), Err(want.clone()));
        assert_eq!(store.cas(&Cas::put(key, None, b""), soon()), Err(want));
    }
    assert_eq!(
        store.list(&long, soon()),
        Err(StoreError::Key { len: long.len() })
    );
    let watched = store.watch(&long, Revision(0), soon());
    assert_eq!(watched, Err(StoreError::Key { len: long.len() }));
    let key = unique("no");
    let big = vec![0; MAX_VALUE + 1];
    let want = StoreError::Value { len: big.len() };
    assert_eq!(store.cas(&Cas::put(&key, None, &big), soon()), Err(want));
    assert_eq!(store.get(&key, soon()).unwrap(), None);
}

fn retries(subject: &Subject<'_>) {
    let (a, b) = ((subject.open)(), (subject.open)());
    let key = unique("retry");
    let first = Cas::put(&key, None, b"1");
    let CasOutcome::Applied { revision } = a.cas(&first, soon()).unwrap() else {
        panic!("the key is new");
    };
    for _ in 0..3 {
        assert_eq!(
            b.cas(&first, soon()).unwrap(),
            CasOutcome::Applied { revision }
        );
    }
    // Others went on: the retry still learns what became of it, and changes nothing.
    let second = put(&*b, &key, Some(revision), b"2");
    assert_eq!(
        a.cas(&first, soon()).unwrap(),
        CasOutcome::Applied { revision }
    );
    assert_eq!(a.get(&key, soon()).unwrap().unwrap().revision, second);
    let removal = Cas::delete(&key, second);
    let gone = a.cas(&removal, soon()).unwrap();
    assert_eq!(b.cas(&removal, soon()).unwrap(), gone);
    assert_eq!(b.get(&key, soon()).unwrap(), None);
    // Many at once with one operation: one change.
    let key = unique("retry");
    let cas = Cas::put(&key, None, b"once");
    let seen: BTreeSet<Revision> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| match (subject.open)().cas(&cas, soon()) {
                    Ok(CasOutcome::Applied { revision }) => revision,
                    other => panic!("retry: {other:?}"),
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(
        seen.len(),
        1,
        "one operation had several outcomes: {seen:?}"
    );
}

fn listings(subject: &Subject<'_>) {
    let store = (subject.open)();
    let base = unique("list");
    let inside = format!("{base}/");
    let mut want = BTreeMap::new();
    let mut newest = Revision(0);
    // More than fits one message of a remote store.
    for i in 0..40 {
        let key = format!("{inside}{:02}", (i * 7) % 40);
        let value = vec![i as u8; MAX_VALUE];
        newest = put(&*store, &key, None, &value);
        want.insert(key, value);
    }
    for outside in [&base, &format!("{base}."), &format!("{base}0")] {
        put(&*store, outside, None, b"outside");
    }
    let listing = store.list(&inside, soon()).unwrap();
    assert!(listing.revision >= newest);
    let keys: Vec<&str> = listing
        .entries
        .iter()
        .map(|(key, _)| key.as_str())
        .collect();
    assert_eq!(keys, want.keys().collect::<Vec<_>>());
    for (key, record) in &listing.entries {
        assert_eq!(record.value, want[key]);
        match store.cas(&Cas::delete(key, record.revision), soon()) {
            Ok(CasOutcome::Applied { .. }) => {}
            other => panic!("delete {key}: {other:?}"),
        }
    }
    assert!(store.list(&inside, soon()).unwrap().entries.is_empty());
}

fn watching(subject: &Subject<'_>) {
    let (store, watcher) = ((subject.open)(), (subject.open)());
    let prefix = unique("watch");
    let from = store.list(&prefix, soon()).unwrap().revision;
    let begun = Instant::now();
    let quiet = watcher
        .watch(&prefix, from, begun + Duration::from_millis(30))
        .unwrap();
    let WatchBatch::Events { events, .. } = quiet else {
        panic!("{quiet:?}")
    };
    assert!(events.is_empty() && begun.elapsed() >= Duration::from_millis(30));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut sent = Vec::new();
            for i in 0..subject.rounds {
                let key = format!("{prefix}/{}", i % 3);
                put(&*store, &unique("elsewhere"), None, b"");
                let now = store.get(&key, soon()).unwrap();
                let value = i.to_le_bytes().to_vec();
                let (revision, value) = match now {
                    Some(record) if i % 5 == 4 => {
                        match store
                            .cas(&Cas::delete(&key, record.revision), soon())
                            .unwrap()
                        {
                            CasOutcome::Applied { revision } => (revision, None),
                            other => panic!("{other:?}"),
                        }
                    }
                    now => (
                        put(&*store, &key, now.map(|r| r.revision), &value),
                        Some(value),
                    ),
                };
                sent.push(Event {
                    key,
                    revision,
                    value,
                });
            }
            done.store(true, Ordering::Release);
            sent
        });
        let mut seen = Vec::new();
        let mut after = from;
        loop {
            let last = done.load(Ordering::Acquire);
            let until = Instant::now() + Duration::from_millis(if last { 0 } else { 200 });
            match watcher.watch(&prefix, after, until).unwrap() {
                WatchBatch::Events { events, upto } => {
                    assert!(upto >= after);
                    let quiet = events.is_empty();
                    seen.extend(events);
                    after = upto;
                    if last && quiet {
                        break;
                    }
                }
                WatchBatch::Resync => panic!("this watcher did not lag"),
            }
        }
        assert_eq!(seen, writer.join().unwrap());
    });
}

fn resync(subject: &Subject<'_>) {
    if subject.history == 0 {
        return;
    }
    let store = (subject.open)();
    let prefix = unique("lag");
    let from = put(&*store, &prefix, None, b"0");
    let mut revision = from;
    for _ in 0..=subject.history {
        revision = put(&*store, &prefix, Some(revision), b"x");
    }
    assert_eq!(
        store.watch(&prefix, from, soon()).unwrap(),
        WatchBatch::Resync
    );
    let listing = store.list(&prefix, soon()).unwrap();
    let late = store
        .watch(&prefix, listing.revision, Instant::now())
        .unwrap();
    assert!(matches!(late, WatchBatch::Events { .. }));
    // A revision that this store never reached is somebody else's.
    let ahead = store.watch(&prefix, Revision(u64::MAX), soon()).unwrap();
    assert_eq!(ahead, WatchBatch::Resync);
}

fn contention(subject: &Subject<'_>) {
    const THREADS: u64 = 4;
    let key = unique("count");
    let winners: Vec<(Revision, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    let store = (subject.open)();
                    let mut won = Vec::new();
                    let mut current = store.get(&key, soon()).unwrap();
                    while (won.len() as u64) < subject.rounds {
                        let n = current.as_ref().map_or(0, |r| number(&r.value));
                        let expected = current.as_ref().map(|r| r.revision);
                        let next = (n + 1).to_le_bytes();
                        match store.cas(&Cas::put(&key, expected, &next), soon()).unwrap() {
                            CasOutcome::Applied { revision } => {
                                won.push((revision, n + 1));
                                current = Some(Versioned {
                                    revision,
                                    value: next.to_vec(),
                                });
                            }
                            CasOutcome::Conflict { current: now } => current = now,
                        }
                    }
                    won
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    let by_revision: BTreeMap<Revision, u64> = winners.iter().copied().collect();
    assert_eq!(
        by_revision.len(),
        winners.len(),
        "two winners share a revision"
    );
    let counts: Vec<u64> = by_revision.into_values().collect();
    let want: Vec<u64> = (1..=THREADS * subject.rounds).collect();
    assert_eq!(counts, want, "an increment was lost or doubled");
}

fn number(value: &[u8]) -> u64 {
    u64::from_le_bytes(value.try_into().expect("eight bytes"))
}

/// One call of the history: the revision it saw or made, and when it began and ended.
#[derive(Clone, Copy)]
struct Call {
    write: bool,
    revision: u64,
    value: u64,
    begun: Instant,
    ended: Instant,
}

/// Revisions order the writes, so a history of one register is linearizable exactly if that order
/// agrees with real time: whatever ended before a call began is not newer than what the call saw,
/// and nothing is seen before its write began.
fn linearizable(subject: &Subject<'_>) {
    let key = unique("lin");
    let first = put(&*(subject.open)(), &key, None, &0u64.to_le_bytes());
    let calls: Vec<Call> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u64)
            .map(|thread| {
                let key = &key;
                scope.spawn(move || {
                    let store = (subject.open)();
                    let mut calls = Vec::new();
                    let mut seen = Versioned {
                        revision: first,
                        value: 0u64.to_le_bytes().to_vec(),
                    };
                    for i in 0..subject.rounds {
                        let begun = Instant::now();
                        if (i + thread) % 3 == 0 {
                            seen = store.get(key, soon()).unwrap().expect("never removed");
                        } else {
                            let mine = (thread + 1) << 32 | i;
                            let cas = Cas::put(key, Some(seen.revision), &[]);
                            let bytes = mine.to_le_bytes();
                            let cas = Cas {
                                change: Change::Put(&bytes),
                                ..cas
                            };
                            match store.cas(&cas, soon()).unwrap() {
                                CasOutcome::Applied { revision } => {
                                    let ended = Instant::now();
                                    let (write, revision) = (true, revision.0);
                                    calls.push(Call {
                                        write,
                                        revision,
                                        value: mine,
                                        begun,
                                        ended,
                                    });
                                    seen = Versioned {
                                        revision: Revision(revision),
                                        value: bytes.to_vec(),
                                    };
                                    continue;
                                }
                                CasOutcome::Conflict { current } => {
                                    seen = current.expect("never removed");
                                }
                            }
                        }
                        let (revision, value) = (seen.revision.0, number(&seen.value));
                        calls.push(Call {
                            write: false,
                            revision,
                            value,
                            begun,
                            ended: Instant::now(),
                        });
                    }
                    calls
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    let mut writes: BTreeMap<u64, &Call> = BTreeMap::new();
    for call in calls.iter().filter(|c| c.write) {
        assert!(
            writes.insert(call.revision, call).is_none(),
            "two writes share a revision"
        );
    }
    for call in calls.iter().filter(|c| !c.write && c.revision != first.0) {
        let write = writes
            .get(&call.revision)
            .expect("a read saw what nobody wrote");
        assert_eq!(
            write.value, call.value,
            "a read saw another value at that revision"
        );
        assert!(
            write.begun <= call.ended,
            "a read saw a write before it began"
        );
    }
    let mut by_end = calls.clone();
    by_end.sort_by_key(|c| c.ended);
    let mut by_begin = calls;
    by_begin.sort_by_key(|c| c.begun);
    let mut newest = first.0;
    let mut ended = by_end.iter().peekable();
    for call in &by_begin {
        while let Some(earlier) = ended.next_if(|e| e.ended < call.begun) {
            newest = newest.max(earlier.revision);
        }
        assert!(
            call.revision >= newest,
            "a call saw less than one that had ended before it"
        );
    }
}

fn leases(subject: &Subject<'_>) {
    let (a, b) = ((subject.open)(), (subject.open)());
    let name = unique("lead");
    let ttl = Duration::from_millis(300);
    let grant =
        |store: &dyn MetaStore, who: &str| match store.lease_acquire(&name, who, ttl, soon()) {
            Ok(LeaseOutcome::Granted { term }) => Some(term),
            Ok(LeaseOutcome::Held { by, left }) => {
                assert!(by != who && left <= ttl, "{by} {left:?}");
                None
            }
            Err(e) => panic!("acquire: {e}"),
        };
    let first = grant(&*a, "a").expect("nobody holds it");
    assert_eq!(grant(&*b, "b"), None);
    assert_eq!(grant(&*a, "a"), Some(first), "asking again is a renewal");
    assert!(!b.lease_renew(&name, "b", first, soon()).unwrap());
    // Renewals hold it for longer than one ttl.
    let begun = Instant::now();
    while begun.elapsed() < ttl * 2 {
        assert!(a.lease_renew(&name, "a", first, soon()).unwrap());
        assert_eq!(grant(&*b, "b"), None);
        std::thread::sleep(ttl / 20);
    }
    // Without them it passes on, and the old term is over.
    let begun = Instant::now();
    let second = loop {
        if let Some(term) = grant(&*b, "b") {
            break term;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "the lease never ran out"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(second > first);
    assert!(!a.lease_renew(&name, "a", first, soon()).unwrap());
    a.lease_release(&name, "a", first, soon()).unwrap();
    assert_eq!(
        grant(&*a, "a"),
        None,
        "a term that is over releases nothing"
    );
    b.lease_release(&name, "b", second, soon()).unwrap();
    assert!(grant(&*a, "a").expect("it was released") > second);
    let long = "n".repeat(MAX_KEY);
    assert!(matches!(
        a.lease_acquire(&long, "a", ttl, soon()),
        Err(StoreError::Key { .. })
    ));
    assert!(matches!(
        a.lease_acquire("", "a", ttl, soon()),
        Err(StoreError::Key { .. })
    ));
    assert!(matches!(
        a.lease_acquire(&name, &"h".repeat(MAX_KEY + 1), ttl, soon()),
        Err(StoreError::Value { .. })
    ));
}
