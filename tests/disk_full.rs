//! Logs on a real file system that takes no more: the process' file size limit stands for the full
//! disk. A test with a `main` of its own, for that limit is the whole process'.

use moonlivekv::id::{ErrorKind, Incarnation, OwnerEpoch, RequestId, WorkerId, WorkerRef};
use moonlivekv::journal::{Journal, JournalError, JournalOptions, TokenRef};
use moonlivekv::metastore::{
    Cas, CasOutcome, EmbeddedOptions, EmbeddedStore, MetaStore, StoreError,
};
use moonlivekv::wal::{Dir, DiskDir, WalError};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::time::{Duration, Instant};

/// Files may have so many bytes while it lives.
struct Limit(Rlimit);

impl Limit {
    fn bytes(n: u64) -> Self {
        let before = getrlimit(Resource::Fsize);
        let current = Some(n);
        setrlimit(Resource::Fsize, Rlimit { current, ..before }).unwrap();
        Self(before)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        setrlimit(Resource::Fsize, self.0).unwrap();
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn length(dir: &Path, prefix: &str) -> u64 {
    let files = std::fs::read_dir(dir).unwrap().map(|f| f.unwrap());
    let of = files.filter(|f| f.file_name().to_string_lossy().starts_with(prefix));
    of.map(|f| f.metadata().unwrap().len()).max().unwrap()
}

// ---- the log's directory ----

fn a_file_that_does_not_fit_is_refused_and_leaves_nothing_behind() {
    let temp = tempfile::tempdir().unwrap();
    let dir = DiskDir::open(temp.path()).unwrap();
    let limit = Limit::bytes(8192);
    let refused = dir.create("log", 1 << 20).err().unwrap();
    assert!(refused.no_space(), "{refused}");
    assert!(!dir.list().unwrap().contains(&"log".to_owned()));
    drop(limit);
    let file = dir.create("log", 1 << 20).unwrap();
    file.write_at(0, b"goes on").unwrap();
    file.sync().unwrap();
    assert_eq!(&file.read().unwrap()[..7], b"goes on");
}

// ---- the store ----

fn options() -> EmbeddedOptions {
    EmbeddedOptions {
        segment_bytes: 128 << 10,
        ..EmbeddedOptions::default()
    }
}

fn put(store: &EmbeddedStore, n: u64) -> Result<(), StoreError> {
    let value = [n as u8; 1000];
    let done = store.cas(&Cas::put(&format!("k/{n}"), None, &value), soon())?;
    assert!(matches!(done, CasOutcome::Applied { .. }), "{done:?}");
    Ok(())
}

fn holds(store: &EmbeddedStore, n: u64) -> bool {
    let found = store.get(&format!("k/{n}"), soon()).unwrap();
    found.is_some_and(|r| r.value == [n as u8; 1000])
}

/// The next segment, which begins with all records, does not fit any more.
fn a_store_without_room_for_its_next_segment_refuses_and_goes_on_when_there_is_room() {
    let temp = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(temp.path(), options()).unwrap();
    let limit = Limit::bytes(length(temp.path(), "meta"));
    let mut done = 0;
    let refused = loop {
        match put(&store, done + 1) {
            Ok(()) => done += 1,
            Err(e) => break e,
        }
        assert!(done < 10_000, "the limit was never met");
    };
    assert!(
        matches!(refused, StoreError::Unavailable { .. }),
        "{refused}"
    );
    assert_eq!(refused.kind(), ErrorKind::Retryable);
    // It still answers, still says no, and has lost nothing.
    assert!((1..=done).all(|n| holds(&store, n)) && !holds(&store, done + 1));
    assert!(matches!(
        put(&store, done + 1),
        Err(StoreError::Unavailable { .. })
    ));
    drop(limit);
    for n in done + 1..=done + 300 {
        put(&store, n).unwrap();
    }
    drop(store);
    let store = EmbeddedStore::open(temp.path(), options()).unwrap();
    assert!((1..=done + 300).all(|n| holds(&store, n)));
}

/// A write in the middle of a segment fails: what is on disk is unknown, and the store says so.
fn a_store_that_cannot_write_says_so_and_has_everything_acknowledged_after_a_restart() {
    let temp = tempfile::tempdir().unwrap();
    let store = EmbeddedStore::open(temp.path(), options()).unwrap();
    let limit = Limit::bytes(64 << 10);
    let mut done = 0;
    let failed = loop {
        match put(&store, done + 1) {
            Ok(()) => done += 1,
            Err(e) => break e,
        }
        assert!(done < 10_000, "the limit was never met");
    };
    assert!(failed.in_doubt(), "{failed}");
    assert!(matches!(
        put(&store, done + 2),
        Err(StoreError::Poisoned { .. })
    ));
    drop(limit);
    // Room alone does not make it sound again: its process restarts.
    assert!(matches!(
        put(&store, done + 2),
        Err(StoreError::Poisoned { .. })
    ));
    drop(store);
    let store = EmbeddedStore::open(temp.path(), options()).unwrap();
    assert!(
        (1..=done).all(|n| holds(&store, n)),
        "an acknowledged record is gone"
    );
    assert!(!holds(&store, done + 2), "a refused change was made");
    put(&store, done + 3).unwrap();
}

fn a_store_that_cannot_begin_says_so_and_begins_later() {
    let temp = tempfile::tempdir().unwrap();
    let limit = Limit::bytes(4096);
    let refused = EmbeddedStore::open(temp.path(), options()).err().unwrap();
    let of_space = matches!(&refused, StoreError::Log(WalError::Io(e)) if e.no_space());
    assert!(of_space, "{refused}");
    drop(limit);
    put(&EmbeddedStore::open(temp.path(), options()).unwrap(), 1).unwrap();
}

// ---- the journal ----

const REQUEST: RequestId = RequestId([7; 16]);
const EPOCH: OwnerEpoch = OwnerEpoch(1);

fn journal(dir: &Path) -> Result<Journal, JournalError> {
    Journal::open(
        dir,
        JournalOptions {
            window: Duration::ZERO,
            max_append: 4 << 10,
            segment_bytes: 128 << 10,
            ..JournalOptions::default()
        },
    )
}

fn append(journal: &Journal, seq: u64) -> Result<(), JournalError> {
    let text = [seq as u8; 200];
    let token = TokenRef {
        token: seq as u32,
        text: &text,
        finish: None,
    };
    journal.append(REQUEST, EPOCH, seq, &[token]).map(|_| ())
}

fn owner() -> WorkerRef {
    WorkerRef {
        id: WorkerId::new("w").unwrap(),
        incarnation: Incarnation(1),
    }
}

fn a_journal_that_cannot_write_says_so_and_has_every_token_after_a_restart() {
    let temp = tempfile::tempdir().unwrap();
    let log = journal(temp.path()).unwrap();
    log.raise_floor(REQUEST, EPOCH, &owner()).unwrap();
    let limit = Limit::bytes(64 << 10);
    let mut done = 0;
    let failed = loop {
        match append(&log, done + 1) {
            Ok(()) => done += 1,
            Err(e) => break e,
        }
        assert!(done < 10_000, "the limit was never met");
    };
    assert!(matches!(failed, JournalError::Poisoned { .. }), "{failed}");
    assert!(matches!(
        append(&log, done + 1),
        Err(JournalError::Poisoned { .. })
    ));
    drop(log);
    drop(limit);
    let log = journal(temp.path()).unwrap();
    let tail = log.read(REQUEST, 1, u64::MAX).unwrap();
    assert!(
        tail.len() as u64 >= done,
        "a token that was returned for is gone"
    );
    assert!(tail.len() as u64 <= done + 1);
    for (entry, seq) in tail.iter().zip(1..) {
        assert_eq!((entry.seq, entry.token), (seq, seq as u32));
        assert_eq!(entry.text, [seq as u8; 200]);
    }
    for seq in tail.len() as u64 + 1..tail.len() as u64 + 600 {
        append(&log, seq).unwrap();
    }
}

fn a_journal_that_cannot_begin_says_so_and_begins_later() {
    let temp = tempfile::tempdir().unwrap();
    let limit = Limit::bytes(4096);
    let refused = journal(temp.path()).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Retryable, "{refused}");
    drop(limit);
    let log = journal(temp.path()).unwrap();
    log.raise_floor(REQUEST, EPOCH, &owner()).unwrap();
    append(&log, 1).unwrap();
}

fn main() {
    // SAFETY: ignoring a signal installs no handler; nothing else in this program touches this one.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let tests: [(&str, fn()); 6] = [
        (
            "a_file_that_does_not_fit_is_refused_and_leaves_nothing_behind",
            a_file_that_does_not_fit_is_refused_and_leaves_nothing_behind,
        ),
        (
            "a_store_without_room_for_its_next_segment_refuses_and_goes_on_when_there_is_room",
            a_store_without_room_for_its_next_segment_refuses_and_goes_on_when_there_is_room,
        ),
        (
            "a_store_that_cannot_write_says_so_and_has_everything_acknowledged_after_a_restart",
            a_store_that_cannot_write_says_so_and_has_everything_acknowledged_after_a_restart,
        ),
        (
            "a_store_that_cannot_begin_says_so_and_begins_later",
            a_store_that_cannot_begin_says_so_and_begins_later,
        ),
        (
            "a_journal_that_cannot_write_says_so_and_has_every_token_after_a_restart",
            a_journal_that_cannot_write_says_so_and_has_every_token_after_a_restart,
        ),
        (
            "a_journal_that_cannot_begin_says_so_and_begins_later",
            a_journal_that_cannot_begin_says_so_and_begins_later,
        ),
    ];
    // As the usual harness: words are filters, --list lists; the first panic ends the run.
    let args: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    for (name, test) in tests {
        if !filters.is_empty() && !filters.iter().any(|f| name.contains(f.as_str())) {
            continue;
        }
        if args.iter().any(|a| a == "--list") {
            println!("{name}: test");
            continue;
        }
        test();
        println!("test {name} ... ok");
    }
}
