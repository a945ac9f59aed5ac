//! What a store finds after power losses, process deaths, failed flushes, full disks and damage, on
//! a simulated disk that forgets exactly what a real one may.

use moonlivekv::metastore::{
    Cas, CasOutcome, Change, EmbeddedOptions, EmbeddedStore, MetaStore, OpId, Revision, StoreError,
};
use moonlivekv::wal::WalError;
use moonlivekv::wal::sim::{Fault, SimDir, SimOp};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn small() -> EmbeddedOptions {
    // The least there is: one change of the longest kind, and a few of these tests'.
    EmbeddedOptions {
        segment_bytes: 0,
        history: 16,
        remembered_ops: 8,
        ..Default::default()
    }
}

fn open(dir: &SimDir) -> Result<EmbeddedStore, StoreError> {
    EmbeddedStore::open_dir(Arc::new(dir.clone()), small())
}

type Model = BTreeMap<String, (u64, Vec<u8>)>;

fn content(store: &EmbeddedStore) -> Model {
    let listing = store.list("", soon()).unwrap();
    listing
        .entries
        .into_iter()
        .map(|(k, v)| (k, (v.revision.0, v.value)))
        .collect()
}

/// Draws that are the same in each run.
struct Draw(u64);

impl Draw {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % below
    }
}

/// One random change that applies; what it makes of the model.
fn change(store: &EmbeddedStore, model: &mut Model, draw: &mut Draw) {
    let key = format!("k{}", draw.next(5));
    let expected = model.get(&key).map(|(revision, _)| Revision(*revision));
    let len = [0, 10, 600, 9000, 20_000][draw.next(5) as usize];
    let value: Vec<u8> = (0..len)
        .map(|i| 1 + (i as u64 * 7 + draw.0) as u8 % 255)
        .collect();
    let delete = expected.is_some() && draw.next(4) == 0;
    let cas = match expected {
        Some(revision) if delete => Cas::delete(&key, revision),
        expected => Cas::put(&key, expected, &value),
    };
    match store.cas(&cas, soon()).unwrap() {
        CasOutcome::Applied { revision } => {
            if delete {
                model.remove(&key);
            } else {
                model.insert(key, (revision.0, value));
            }
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_crash_point_leaves_all_that_was_acknowledged_and_nothing_by_halves() {
    let dir = SimDir::new();
    let store = open(&dir).unwrap();
    let mut draw = Draw(1);
    // models[n]: after n changes. acked[n]: disk operations when the n-th was acknowledged.
    let mut models = vec![Model::new()];
    let mut acked = vec![dir.ops()];
    for _ in 0..120 {
        let mut model = models.last().unwrap().clone();
        change(&store, &mut model, &mut draw);
        models.push(model);
        acked.push(dir.ops());
    }
    assert!(store.stats().snapshots >= 3, "{:?}", store.stats());
    let first = acked[0];
    for ops in 0..=dir.ops() {
        let known = acked.iter().rposition(|&at| at <= ops).unwrap_or(0);
        for pattern in 0..4 {
            let after = match pattern {
                0 => dir.after_process_death(ops),
                1 => dir.after_power_loss(ops, &mut || false),
                2 => dir.after_power_loss(ops, &mut || true),
                _ => dir.after_power_loss(ops, &mut || draw.next(2) == 0),
            };
            let store = open(&after).unwrap_or_else(|e| panic!("op {ops}/{pattern}: {e}"));
            let found = content(&store);
            let revision = store.stats().revision as usize;
            assert!(
                revision == known || revision == known + 1,
                "op {ops}/{pattern}: {revision}"
            );
            assert_eq!(found, models[revision], "op {ops}/{pattern}");
            assert!(ops >= first || revision == 0);
            // It goes on from there, and what it then acknowledges survives the next crash.
            let mut model = found;
            change(&store, &mut model, &mut draw);
            let again = after.after_power_loss(after.ops(), &mut || false);
            assert_eq!(content(&open(&again).unwrap()), model, "op {ops}/{pattern}");
        }
    }
}

#[test]
fn changes_that_share_a_flush_are_acknowledged_only_behind_it() {
    let dir = SimDir::new();
    let store = open(&dir).unwrap();
    dir.inject(|op| {
        if matches!(op, SimOp::Sync { .. }) {
            // Others arrive meanwhile and make the next batch.
            std::thread::sleep(Duration::from_micros(300));
        }
        Fault::None
    });
    // Per thread, what was acknowledged when.
    let acked: Vec<Vec<(usize, u64)>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let (store, dir) = (&store, &dir);
                scope.spawn(move || {
                    let key = format!("t{thread}");
                    let mut last = None;
                    let mut acked = Vec::new();
                    for i in 0..60u64 {
                        match store
                            .cas(&Cas::put(&key, last, &i.to_le_bytes()), soon())
                            .unwrap()
                        {
                            CasOutcome::Applied { revision } => last = Some(revision),
                            other => panic!("{other:?}"),
                        }
                        acked.push((dir.ops(), i));
                    }
                    acked
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let stats = store.stats();
    assert!(
        stats.flushes < stats.changes,
        "nothing was ever batched: {stats:?}"
    );
    for ops in 0..=dir.ops() {
        let after = dir.after_power_loss(ops, &mut || false);
        let store = open(&after).unwrap();
        for (thread, acked) in acked.iter().enumerate() {
            let known = acked
                .iter()
                .rev()
                .find(|(at, _)| *at <= ops)
                .map(|(_, i)| *i);
            let found = store.get(&format!("t{thread}"), soon()).unwrap();
            let found = found.map(|r| u64::from_le_bytes(r.value.try_into().unwrap()));
            assert!(
                found >= known,
                "op {ops}, thread {thread}: {found:?} of {known:?}"
            );
        }
    }
}

#[test]
fn a_failed_write_or_flush_ends_the_store_and_a_restart_settles_the_doubt() {
    type Make = fn(&SimOp) -> bool;
    let cases: [(&str, Make, Fault); 3] = [
        (
            "flush",
            |op| matches!(op, SimOp::Sync { .. }),
            Fault::Fail(EIO),
        ),
        (
            "write",
            |op| matches!(op, SimOp::Write { .. }),
            Fault::Fail(EIO),
        ),
        (
            "half a write",
            |op| matches!(op, SimOp::Write { .. }),
            Fault::Cut(40),
        ),
    ];
    for (what, hits, fault) in cases {
        let dir = SimDir::new();
        let store = open(&dir).unwrap();
        let Ok(CasOutcome::Applied { revision }) = store.cas(&Cas::put("a", None, b"1"), soon())
        else {
            panic!()
        };
        dir.inject(move |op| if hits(op) { fault } else { Fault::None });
        let doubted = Cas::put("a", Some(revision), b"2");
        let got = store.cas(&doubted, soon());
        assert!(
            matches!(got, Err(StoreError::InDoubt { .. })),
            "{what}: {got:?}"
        );
        // For good: a later flush that succeeds would prove nothing.
        dir.heal();
        let poisoned = |e: Option<StoreError>| matches!(e, Some(StoreError::Poisoned { .. }));
        assert!(
            poisoned(store.cas(&Cas::put("b", None, b""), soon()).err()),
            "{what}"
        );
        assert!(poisoned(store.cas(&doubted, soon()).err()), "{what}");
        assert!(poisoned(store.get("a", soon()).err()), "{what}");
        assert!(poisoned(store.list("", soon()).err()), "{what}");
        assert!(
            poisoned(store.watch("", Revision(0), soon()).err()),
            "{what}"
        );
        assert!(
            poisoned(
                store
                    .lease_acquire("l", "h", Duration::from_secs(1), soon())
                    .err()
            ),
            "{what}"
        );
        drop(store);
        let store = open(&dir).unwrap();
        let found = store.get("a", soon()).unwrap().unwrap();
        assert_eq!(found.value == b"2", what == "flush", "{what}");
        // The retry of the doubted change is recognised, or makes it now: one change either way.
        let retried = store.cas(&doubted, soon()).unwrap();
        assert_eq!(
            retried,
            CasOutcome::Applied {
                revision: Revision(revision.0 + 1)
            },
            "{what}"
        );
        // What the restart showed stays, even if the power goes at once.
        let after = dir.after_power_loss(dir.ops(), &mut || false);
        assert_eq!(
            open(&after)
                .unwrap()
                .get("a", soon())
                .unwrap()
                .unwrap()
                .value,
            b"2",
            "{what}"
        );
    }
}

#[test]
fn everybody_waiting_on_a_failed_flush_is_told_and_nobody_is_told_it_worked() {
    let dir = SimDir::new();
    let store = open(&dir).unwrap();
    let (slow, seen) = (
        Arc::new(AtomicBool::new(true)),
        Arc::new(AtomicUsize::new(0)),
    );
    dir.inject({
        let (slow, seen) = (Arc::clone(&slow), Arc::clone(&seen));
        move |op| match op {
            SimOp::Sync { .. } => {
                seen.fetch_add(1, Ordering::SeqCst);
                while slow.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Fault::Fail(EIO)
            }
            _ => Fault::None,
        }
    });
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| store.watch("", Revision(0), soon()));
        let threads: Vec<_> = (0..8)
            .map(|i| {
                let store = &store;
                scope.spawn(move || store.cas(&Cas::put(&format!("k{i}"), None, b""), soon()))
            })
            .collect();
        // The same key twice: the second waits for the first one's fate.
        let twice = scope.spawn(|| store.cas(&Cas::put("k0", None, b"other"), soon()));
        while seen.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A deadline that passes during the flush leaves its change in doubt, or unasked.
        let late = store.cas(
            &Cas::put("late", None, b""),
            Instant::now() + Duration::from_millis(20),
        );
        assert!(matches!(late, Err(StoreError::InDoubt { .. })), "{late:?}");
        // Reads go on meanwhile, and see nothing of it.
        assert!(store.list("", soon()).unwrap().entries.is_empty());
        slow.store(false, Ordering::SeqCst);
        let mut doubts = 0;
        for thread in threads {
            match thread.join().unwrap() {
                Err(StoreError::InDoubt { .. }) => doubts += 1,
                Err(StoreError::Poisoned { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(doubts >= 1);
        assert!(twice.join().unwrap().is_err());
        assert!(matches!(
            watcher.join().unwrap(),
            Err(StoreError::Poisoned { .. })
        ));
    });
}

fn fill(store: &EmbeddedStore, from: usize) -> (usize, StoreError) {
    for i in from.. {
        match store.cas(&Cas::put(&format!("fill{i}"), None, &[7; 3000]), soon()) {
            Ok(CasOutcome::Applied { .. }) => {}
            Ok(other) => panic!("{other:?}"),
            Err(e) => return (i, e),
        }
    }
    unreachable!()
}

#[test]
fn a_full_disk_refuses_before_anything_is_promised_and_heals() {
    let creating: fn(&SimOp) -> bool = |op| matches!(op, SimOp::Create { .. });
    let filling: fn(&SimOp) -> bool = |op| matches!(op, SimOp::Write { offset: 0, .. });
    for full in [creating, filling] {
        let dir = SimDir::new();
        let store = open(&dir).unwrap();
        dir.inject(move |op| {
            if full(op) {
                Fault::Fail(ENOSPC)
            } else {
                Fault::None
            }
        });
        let (filled, error) = fill(&store, 0);
        assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
        // Again: refused alike, while reads and conflicts are served.
        let (again, error) = fill(&store, filled);
        assert!(again == filled && matches!(error, StoreError::Unavailable { .. }));
        assert_eq!(store.list("", soon()).unwrap().entries.len(), filled);
        let conflict = store.cas(&Cas::put("fill0", None, b""), soon()).unwrap();
        assert!(matches!(conflict, CasOutcome::Conflict { .. }));
        dir.heal();
        store
            .cas(&Cas::put("after", None, &[7; 3000]), soon())
            .unwrap();
        assert_eq!(store.stats().snapshots, 1);
        drop(store);
        let store = open(&dir).unwrap();
        assert_eq!(store.list("", soon()).unwrap().entries.len(), filled + 1);
    }
}

#[test]
fn a_snapshot_whose_name_may_not_last_ends_the_store() {
    for renaming in [false, true] {
        let dir = SimDir::new();
        let store = open(&dir).unwrap();
        dir.inject(move |op| match op {
            SimOp::Rename { .. } if renaming => Fault::Fail(EIO),
            SimOp::SyncDir => Fault::Fail(EIO),
            _ => Fault::None,
        });
        let (filled, error) = fill(&store, 0);
        assert!(matches!(error, StoreError::Poisoned { .. }), "{error:?}");
        dir.heal();
        assert!(matches!(
            store.get("fill0", soon()),
            Err(StoreError::Poisoned { .. })
        ));
        drop(store);
        for keep in [false, true] {
            let after = dir.after_power_loss(dir.ops(), &mut || keep);
            assert_eq!(content(&open(&after).unwrap()).len(), filled);
        }
    }
}

#[test]
fn a_store_stays_within_the_size_it_was_allowed() {
    let options = EmbeddedOptions {
        max_bytes: 10_000,
        ..small()
    };
    let store = EmbeddedStore::open_dir(Arc::new(SimDir::new()), options).unwrap();
    let (filled, error) = fill(&store, 0);
    assert!(
        filled == 3 && matches!(error, StoreError::Full { max: 10_000, .. }),
        "{error:?}"
    );
    let first = store.get("fill0", soon()).unwrap().unwrap();
    store
        .cas(&Cas::delete("fill0", first.revision), soon())
        .unwrap();
    assert!(matches!(fill(&store, 3), (4, StoreError::Full { .. })));
}

#[test]
fn each_flipped_bit_of_a_log_is_refused_with_its_place_and_a_remedy() {
    let dir = SimDir::new();
    let store = open(&dir).unwrap();
    let mut revision = None;
    for i in 0..4u8 {
        let value = [i + 1; 70];
        if let CasOutcome::Applied { revision: r } = store
            .cas(&Cas::put("key", revision, &value), soon())
            .unwrap()
        {
            revision = Some(r);
        }
    }
    let used = store.stats().log_bytes as usize;
    drop(store);
    let name = "meta-0000000000000001.log";
    let sound = dir.content(name).unwrap();
    for bit in 0..used * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        dir.set_content(name, bytes);
        match open(&dir) {
            Err(StoreError::Log(e @ WalError::Damaged { .. })) => {
                assert!(e.to_string().contains("Restore the directory"), "{e}");
            }
            Err(StoreError::Log(WalError::Foreign { .. })) => assert!(bit < 64),
            other => panic!("bit {bit}: {:?}", other.map(|s| content(&s))),
        }
    }
    // A segment whose snapshot is missing is not an empty store.
    let mut bytes = sound.clone();
    bytes[512..].fill(0);
    dir.set_content(name, bytes);
    assert!(matches!(
        open(&dir),
        Err(StoreError::Log(WalError::Damaged { offset: 512, .. }))
    ));
    dir.set_content(name, sound);
    assert_eq!(
        open(&dir)
            .unwrap()
            .get("key", soon())
            .unwrap()
            .unwrap()
            .revision,
        revision.unwrap()
    );
}

#[test]
fn the_last_change_cut_at_any_byte_is_gone_and_its_revision_may_be_given_again() {
    for cut in (0..400).step_by(7) {
        let dir = SimDir::new();
        let store = open(&dir).unwrap();
        store.cas(&Cas::put("a", None, b"kept"), soon()).unwrap();
        dir.inject(move |_| Fault::Cut(cut));
        let got = store.cas(&Cas::put("b", None, &[9; 380]), soon());
        assert!(matches!(got, Err(StoreError::InDoubt { .. })));
        dir.heal();
        drop(store);
        let store = open(&dir).unwrap();
        let listing = store.list("", soon()).unwrap();
        assert_eq!(
            (listing.entries.len(), listing.revision),
            (1, Revision(1)),
            "cut at {cut}"
        );
        let again = store.cas(&Cas::put("b", None, b"x"), soon()).unwrap();
        assert_eq!(
            again,
            CasOutcome::Applied {
                revision: Revision(2)
            }
        );
    }
}

#[test]
fn retries_are_recognised_across_restarts_and_snapshots() {
    let dir = SimDir::new();
    let store = open(&dir).unwrap();
    let op = OpId::fresh();
    let cas = Cas {
        key: "once",
        expected: None,
        change: Change::Put(b"1"),
        op,
    };
    let first = store.cas(&cas, soon()).unwrap();
    for i in 0..6 {
        store
            .cas(&Cas::put(&format!("big{i}"), None, &[1; 30_000]), soon())
            .unwrap();
    }
    assert!(store.stats().snapshots > 0);
    assert_eq!(store.cas(&cas, soon()).unwrap(), first);
    drop(store);
    let store = open(&dir).unwrap();
    assert_eq!(store.cas(&cas, soon()).unwrap(), first);
    // Forgotten after as many changes as it was told to remember; then it reads as a conflict.
    for i in 0..8 {
        store
            .cas(&Cas::put(&format!("more{i}"), None, b""), soon())
            .unwrap();
    }
    assert!(matches!(
        store.cas(&cas, soon()).unwrap(),
        CasOutcome::Conflict { .. }
    ));
}

#[test]
fn leases_keep_their_holder_across_a_restart_and_their_terms_rise() {
    use moonlivekv::metastore::LeaseOutcome::{Granted, Held};
    let dir = SimDir::new();
    let ttl = Duration::from_millis(200);
    let store = open(&dir).unwrap();
    let Granted { term } = store.lease_acquire("l", "a", ttl, soon()).unwrap() else {
        panic!()
    };
    drop(store);
    let store = open(&dir).unwrap();
    assert!(
        matches!(store.lease_acquire("l", "b", ttl, soon()).unwrap(), Held { by, .. } if by == "a")
    );
    assert_eq!(
        store.lease_acquire("l", "a", ttl, soon()).unwrap(),
        Granted { term }
    );
    std::thread::sleep(ttl * 2);
    let Granted { term: next } = store.lease_acquire("l", "b", ttl, soon()).unwrap() else {
        panic!()
    };
    assert!(next > term);
}
