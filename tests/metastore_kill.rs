//! Stores and clients as real processes, killed and stopped around every step of a change.
//!
//! The child processes are this very test program, started with a role in its environment.

use moonlivekv::metastore::{
    Cas, CasOutcome, EmbeddedOptions, EmbeddedStore, MetaStore, RemoteOptions, RemoteStore,
    Revision, ServerOptions, Step, StoreError, StoreServer, Versioned,
};
use moonlivekv::wire::Endpoint;
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const ROLE: &str = "MOONLIVE_TEST_ROLE";
const DIR: &str = "MOONLIVE_TEST_DIR";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn within(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

/// Where a child store's process dies or stops.
const STEPS: &[(&str, Option<Step>)] = &[
    ("taken", Some(Step::Taken)),
    ("written", Some(Step::Written)),
    ("flushed", Some(Step::Flushed)),
    ("published", Some(Step::Published)),
    ("snapshot-prepared", Some(Step::SnapshotPrepared)),
    ("snapshot-published", Some(Step::SnapshotPublished)),
    ("before-reply", None),
];

/// Runs what the environment asks of this process; does nothing in a plain test run.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let dir = std::env::var(DIR).unwrap();
    let dir = Path::new(&dir);
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["store", signal, step, count] => serve(dir, signal, step, count.parse().unwrap()),
        ["client"] => client(dir),
        _ => panic!("{role}"),
    }
}

fn endpoint(dir: &Path) -> Endpoint {
    Endpoint::unix(dir.join("s")).unwrap()
}

/// A store process that signals itself at the `count`-th time it reaches `step`.
fn serve(dir: &Path, signal: &str, step: &str, count: u32) {
    let signal = if signal == "stop" {
        Signal::STOP
    } else {
        Signal::KILL
    };
    let left = Arc::new(AtomicU32::new(count));
    let hit = move || {
        if left.fetch_sub(1, Ordering::SeqCst) == 1 {
            kill_process(getpid(), signal).unwrap();
            // The signal is on its way to this very process.
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let at = STEPS
        .iter()
        .find(|(name, _)| *name == step)
        .map(|(_, at)| *at);
    let mut options = EmbeddedOptions {
        segment_bytes: 0,
        ..Default::default()
    };
    let mut server = ServerOptions::default();
    match at {
        Some(Some(at)) => {
            options.hook = Some(Arc::new(move |now| {
                if now == at {
                    hit()
                }
            }))
        }
        Some(None) => {
            server.reply_filter = Some(Arc::new(move |kind| {
                if kind == 2 {
                    hit();
                }
                true
            }));
        }
        None => {}
    }
    let store = EmbeddedStore::open(dir.join("store"), options).unwrap();
    let _server = StoreServer::start(Arc::new(store), &endpoint(dir), server).unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

/// A client process: one change, its outcome on standard output; then another on what it knows.
fn client(dir: &Path) {
    let store = RemoteStore::new(endpoint(dir), RemoteOptions::default());
    let first = store
        .cas(&Cas::put("client", None, b"mine"), within(500))
        .unwrap();
    let CasOutcome::Applied { revision } = first else {
        panic!("{first:?}")
    };
    println!("\nfirst {}", revision.0);
    let second = store
        .cas(&Cas::put("client", Some(revision), b"again"), soon())
        .unwrap();
    let CasOutcome::Conflict { current: Some(now) } = second else {
        panic!("{second:?}")
    };
    println!("\nsecond {}", String::from_utf8(now.value).unwrap());
}

struct Process(Child);

impl Process {
    fn start(dir: &Path, role: &str) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "child_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    fn wait_stopped(&self) {
        let begun = Instant::now();
        loop {
            let seen = waitpid(
                Some(self.pid()),
                WaitOptions::UNTRACED | WaitOptions::NOHANG,
            );
            if seen.unwrap().is_some_and(|(_, status)| status.stopped()) {
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "never stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a client knows of one record, through kills.
struct Knowledge {
    revision: Option<Revision>,
    value: Vec<u8>,
    highest: u64,
}

impl Knowledge {
    /// One change; a doubt is settled by retrying the same operation on a store started anew.
    /// Returns whether there was one.
    fn change(&mut self, store: &RemoteStore, i: u32, mut restart: impl FnMut()) -> bool {
        let mut value = vec![1; 9000];
        value[..4].copy_from_slice(&i.to_le_bytes());
        let cas = Cas::put("key", self.revision, &value);
        let mut doubt = false;
        loop {
            match store.cas(&cas, soon()) {
                Ok(CasOutcome::Applied { revision }) => {
                    assert!(revision.0 > self.highest, "a revision was given twice");
                    self.revision = Some(revision);
                    self.value = value;
                    break;
                }
                Err(StoreError::InDoubt { .. }) => {
                    doubt = true;
                    restart();
                    // All or nothing: the record is the old one or the new one.
                    let found = store.get("key", soon()).unwrap();
                    let now = found.as_ref().map(|r| r.revision);
                    if now != self.revision {
                        let found = found.unwrap();
                        assert!(found.value == value && found.revision.0 > self.highest);
                    } else if let Some(found) = found {
                        assert_eq!(found.value, self.value);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        self.highest = self.revision.unwrap().0;
        let now = Versioned {
            revision: self.revision.unwrap(),
            value: self.value.clone(),
        };
        assert_eq!(store.get("key", soon()).unwrap(), Some(now));
        doubt
    }
}

#[test]
fn a_store_killed_at_any_step_keeps_what_it_acknowledged_and_nothing_by_halves() {
    for (step, _) in STEPS {
        for count in [1, 2, 5] {
            let temp = tempfile::tempdir().unwrap();
            let dir = temp.path();
            let mut process = Process::start(dir, &format!("store kill {step} {count}"));
            let store = RemoteStore::new(endpoint(dir), RemoteOptions::default());
            let mut known = Knowledge {
                revision: None,
                value: Vec::new(),
                highest: 0,
            };
            let mut doubts = 0;
            let enough = if step.starts_with("snapshot") {
                9 * count + 3
            } else {
                count + 3
            };
            for i in 0..enough {
                let doubt = known.change(&store, i, || {
                    process = Process::start(dir, "store kill never 0");
                });
                doubts += u32::from(doubt);
            }
            assert_eq!(doubts, 1, "the store did not die once at {step} {count}");
        }
    }
}

#[test]
fn a_store_killed_at_any_time_under_load_loses_no_acknowledged_change() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let stop = AtomicBool::new(false);
    let totals: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|thread| {
                let stop = &stop;
                scope.spawn(move || {
                    let store = RemoteStore::new(endpoint(dir), RemoteOptions::default());
                    let key = format!("t{thread}");
                    let (mut n, mut doubts) = (0u64, 0);
                    let mut expected = None;
                    while !stop.load(Ordering::SeqCst) {
                        let next = (n + 1).to_le_bytes();
                        match store.cas(&Cas::put(&key, expected, &next), soon()) {
                            Ok(CasOutcome::Applied { revision }) => {
                                expected = Some(revision);
                                n += 1;
                            }
                            Err(StoreError::InDoubt { .. }) => {
                                doubts += 1;
                                let found = store.get(&key, soon()).unwrap();
                                let count = found.as_ref().map_or(0, |r| {
                                    u64::from_le_bytes(r.value[..].try_into().unwrap())
                                });
                                assert!(count == n || count == n + 1, "{count} of {n}");
                                expected = found.map(|r| r.revision);
                                n = count;
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                    (n, doubts)
                })
            })
            .collect();
        let watch = RemoteStore::new(endpoint(dir), RemoteOptions::default());
        for round in 0..8u64 {
            let process = Process::start(dir, "store kill never 0");
            watch.list("", soon()).unwrap();
            std::thread::sleep(Duration::from_millis(20 + round * 7));
            process.signal(Signal::KILL);
            drop(process);
        }
        let _last = Process::start(dir, "store kill never 0");
        stop.store(true, Ordering::SeqCst);
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(totals.iter().all(|&(n, _)| n > 0), "{totals:?}");
    assert!(
        totals.iter().map(|&(_, doubts)| doubts).sum::<u64>() > 0,
        "{totals:?}"
    );
}

#[test]
fn a_store_stopped_in_mid_change_leaves_doubt_that_a_read_settles() {
    for (step, _) in STEPS
        .iter()
        .filter(|(step, _)| !step.starts_with("snapshot"))
    {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let process = Process::start(dir, &format!("store stop {step} 2"));
        let store = RemoteStore::new(endpoint(dir), RemoteOptions::default());
        let Ok(CasOutcome::Applied { revision }) = store.cas(&Cas::put("k", None, b"1"), soon())
        else {
            panic!()
        };
        let doubted = Cas::put("k", Some(revision), b"2");
        let got = store.cas(&doubted, within(300));
        assert!(
            matches!(got, Err(StoreError::InDoubt { .. })),
            "{step}: {got:?}"
        );
        process.wait_stopped();
        process.signal(Signal::CONT);
        // It goes on as if nothing had been: the change is made once, and its retry says so.
        let again = store.cas(&doubted, soon()).unwrap();
        let found = store.get("k", soon()).unwrap().unwrap();
        assert_eq!(
            again,
            CasOutcome::Applied {
                revision: found.revision
            },
            "{step}"
        );
        assert_eq!(
            (found.revision.0, &found.value[..]),
            (revision.0 + 1, &b"2"[..]),
            "{step}"
        );
    }
}

/// Every thread of a process is stopped.
fn all_stopped(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.into_iter().all(|task| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('T')
    })
}

#[test]
fn a_client_stopped_in_mid_change_holds_nobody_up_and_cannot_act_on_what_passed() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let store = Arc::new(EmbeddedStore::in_memory(EmbeddedOptions::default()));
    let stopped = Arc::new(AtomicU32::new(0));
    // Between the change and its answer, the client is stopped.
    let filter = {
        let stopped = Arc::clone(&stopped);
        Arc::new(move |kind: u16| {
            // Held until its number is known: nobody could be stopped before.
            while stopped.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let pid = stopped.load(Ordering::SeqCst);
            if kind == 2 && pid > 1 {
                kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::STOP).unwrap();
                // A stop reaches one thread after the other.
                while !all_stopped(pid) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                stopped.store(1, Ordering::SeqCst);
            }
            true
        })
    };
    let options = ServerOptions {
        reply_filter: Some(filter),
        ..Default::default()
    };
    let _server = StoreServer::start(Arc::clone(&store) as _, &endpoint(dir), options).unwrap();
    let mut client = Process::start(dir, "client");
    stopped.store(client.0.id(), Ordering::SeqCst);
    client.wait_stopped();
    let found = store.get("client", soon()).unwrap().unwrap();
    assert_eq!(found.value, b"mine");
    // Its own deadline passes, and another goes on with the record.
    std::thread::sleep(Duration::from_millis(700));
    let other = RemoteStore::new(endpoint(dir), RemoteOptions::default());
    let won = other
        .cas(&Cas::put("client", Some(found.revision), b"others"), soon())
        .unwrap();
    assert!(matches!(won, CasOutcome::Applied { .. }));
    client.signal(Signal::CONT);
    let mut out = String::new();
    use std::io::Read;
    client
        .0
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut out)
        .unwrap();
    // The answer had been given while it slept: no doubt. And what it knew is stale.
    let first = format!("first {}", found.revision.0);
    assert!(
        out.lines().any(|l| l == first) && out.lines().any(|l| l == "second others"),
        "{out}"
    );
}
