//! Real processes that are killed, stopped or idle in the middle of things. A test with a `main` of
//! its own: started again with a role in its environment, it is the other process.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use moonlivekv::id::ErrorKind;
use moonlivekv::mem::{BlockPool, Region, RemoteRegion};
use moonlivekv::transport::{
    Access, Completion, Endpoint, Link, Local, Revoked, Scope, ShmOptions, ShmTransport, Span,
    TcpOptions, TcpTransport, Transfer, Transport,
};

const ROLE: &str = "MOONLIVE_TEST_ROLE";
const SOCKETS: &str = "MOONLIVE_TEST_SOCKETS";
const BLOCK: u64 = 1 << 20;
const BLOCKS: u32 = 16;

/// Where all processes of a run put their sockets. The first one removes it: those that are killed
/// cannot.
static DIR: OnceLock<PathBuf> = OnceLock::new();

fn in_10s() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

fn transport(path: &str) -> Box<dyn Transport> {
    match path {
        "tcp" => Box::new(TcpTransport::bind(TcpOptions::default()).unwrap()),
        _ => {
            let name = format!("{}-{:x}.sock", std::process::id(), random());
            let socket = DIR.get().expect("set by main").join(name);
            Box::new(ShmTransport::bind(ShmOptions::at(socket)).unwrap())
        }
    }
}

fn random() -> u64 {
    let key = moonlivekv::mem::RegionKey::random().unwrap().to_bytes();
    u64::from_le_bytes(key[..8].try_into().unwrap())
}

/// Every block filled with its number plus `plus`.
fn pool(plus: u8) -> Arc<BlockPool> {
    let mut region = Region::memfd("process-test", u64::from(BLOCKS) * BLOCK).unwrap();
    for (b, block) in region
        .as_mut_slice()
        .chunks_exact_mut(BLOCK as usize)
        .enumerate()
    {
        block.fill(b as u8 + plus);
    }
    let p = BlockPool::contiguous(region, BLOCK).unwrap();
    p.alloc(BLOCKS as usize).unwrap();
    p
}

fn hex(r: RemoteRegion) -> String {
    r.encode().iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(s: &str) -> RemoteRegion {
    let bytes: Vec<u8> = (0..s.len() / 2)
        .map(|i| u8::from_str_radix(&s[2 * i..2 * i + 2], 16).unwrap())
        .collect();
    RemoteRegion::decode(&bytes).unwrap()
}

fn submit(
    link: &mut dyn Link,
    ours: &Arc<BlockPool>,
    block: u32,
    remote: RemoteRegion,
    get: bool,
) -> bool {
    let local = if get {
        Local::GetInto(ours.write(&[block]).unwrap())
    } else {
        Local::PutFrom(ours.read(&[block]).unwrap())
    };
    let off = u64::from(block) * BLOCK;
    let spans = vec![Span {
        remote_off: off,
        local_off: off,
        len: BLOCK,
    }];
    link.submit(Transfer {
        local,
        remote,
        spans,
        deadline: in_10s(),
    })
    .is_ok()
}

// ---- the other process ----

/// `owner PATH`: serves a pool to read and one to write until its input ends.
/// `initiator PATH ENDPOINT GRANT WHAT`: gets or puts everything once, says so, then does WHAT.
fn other_process(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let t = transport(words[1]);
    let ours = pool(100);
    if words[0] == "owner" {
        let read = t.register(&ours, Access::RemoteRead, Scope::Pool).unwrap();
        let write = t
            .register(&pool(50), Access::RemoteWrite, Scope::Pool)
            .unwrap();
        say(&format!("{} {} {}", t.endpoint(), hex(read), hex(write)));
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        return;
    }
    let endpoint: Endpoint = words[2].parse().unwrap();
    let remote = unhex(words[3]);
    let mut link = t.connect(&endpoint, in_10s()).unwrap();
    let get = words[4] != "puts";
    for b in 0..BLOCKS {
        assert!(submit(link.as_mut(), &ours, b, remote, get));
    }
    let mut done = 0;
    while done < BLOCKS as usize {
        let mut out = [Completion::empty()];
        let n = link.wait(&mut out, in_10s());
        assert!(n > 0 && out[0].outcome.is_ok(), "{:?}", out[0].outcome);
        done += n;
    }
    say("moved");
    if words[4] == "idles" {
        // Drives nothing any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        return;
    }
    // On and on, until somebody ends it or the grant.
    loop {
        for b in 0..BLOCKS {
            if !submit(link.as_mut(), &ours, b, remote, get) {
                return;
            }
        }
        for _ in 0..BLOCKS {
            let mut out = [Completion::empty()];
            if link.wait(&mut out, in_10s()) == 1 && out[0].outcome.is_err() {
                say("ended");
                let _ = std::io::stdin().read_to_end(&mut Vec::new());
                return;
            }
        }
    }
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

struct Other {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Other {
    fn start(role: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .env(ROLE, role)
            .env(SOCKETS, DIR.get().expect("set by main"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().into()
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = self.child.id() as libc::pid_t;
        // SAFETY: signals a child of ours that has not been waited for, so the number is still its.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        if signal == libc::SIGSTOP {
            // Threads stop one by one; go on when all have.
            let mut status = 0;
            // SAFETY: asks about a child of ours without reaping it, and writes to `status` alone.
            let who = unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) };
            assert!(who == pid && libc::WIFSTOPPED(status));
        }
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---- the tests ----

fn owner(path: &str) -> (Other, Endpoint, RemoteRegion, RemoteRegion) {
    let mut other = Other::start(&format!("owner {path}"));
    let line = other.line();
    let words: Vec<&str> = line.split(' ').collect();
    (
        other,
        words[0].parse().unwrap(),
        unhex(words[1]),
        unhex(words[2]),
    )
}

fn bytes_cross_between_processes(path: &str) {
    let (_other, endpoint, read, write) = owner(path);
    let (t, ours) = (transport(path), pool(0));
    let mut link = t.connect(&endpoint, in_10s()).unwrap();
    for b in 0..BLOCKS {
        for (remote, get) in [(read, true), (write, false)] {
            assert!(submit(link.as_mut(), &ours, b, remote, get));
            let mut out = [Completion::empty()];
            assert_eq!(link.wait(&mut out, in_10s()), 1);
            assert_eq!(out[0].outcome, Ok(()));
        }
        let lease = ours.read(&[b]).unwrap();
        assert!(
            lease
                .bytes(u64::from(b) * BLOCK, BLOCK as usize)
                .iter()
                .all(|&x| x == b as u8 + 100)
        );
    }
}

/// Killed in the middle: every transfer ends with its lease, lost; what is outside the landing zone
/// is as it was.
fn an_owner_killed_mid_transfer_is_lost_and_nothing_hangs(path: &str) {
    for get in [true, false] {
        let (other, endpoint, read, write) = owner(path);
        let remote = if get { read } else { write };
        let (t, ours) = (transport(path), pool(0));
        let mut link = t.connect(&endpoint, in_10s()).unwrap();
        let t0 = Instant::now();
        let (mut killed, mut lost) = (false, false);
        let mut out = [Completion::empty()];
        while !lost {
            assert!(
                t0.elapsed() < Duration::from_secs(20),
                "a dead owner was not noticed"
            );
            // The last block is never asked for: a canary.
            for b in 0..BLOCKS - 1 {
                if !submit(link.as_mut(), &ours, b, remote, get) {
                    lost = true;
                    break;
                }
            }
            for i in 0..BLOCKS - 1 {
                if i == 5 && !killed {
                    other.signal(libc::SIGKILL);
                    killed = true;
                }
                if link.wait(&mut out, in_10s()) == 1 {
                    assert!(out[0].local.take().is_some(), "its lease comes back");
                    if let Err(e) = out[0].outcome {
                        assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
                        lost = true;
                    }
                }
            }
        }
        assert_eq!(link.in_flight(), 0);
        drop(link);
        drop(out);
        let last = BLOCKS - 1;
        let lease = ours
            .write(&(0..BLOCKS).collect::<Vec<_>>())
            .expect("no lease is left behind");
        let canary = lease.bytes(u64::from(last) * BLOCK, BLOCK as usize);
        assert!(canary.iter().all(|&x| x == last as u8));
    }
}

fn initiator(path: &str, t: &dyn Transport, remote: RemoteRegion, what: &str) -> Other {
    let mut other = Other::start(&format!(
        "initiator {path} {} {} {what}",
        t.endpoint(),
        hex(remote)
    ));
    assert_eq!(other.line(), "moved");
    other
}

/// A peer that died holding a grant is no reason to quarantine: its death is seen.
fn a_killed_initiator_is_drained(path: &str) {
    for (what, access) in [("gets", Access::RemoteRead), ("puts", Access::RemoteWrite)] {
        let (t, ours) = (transport(path), pool(0));
        let remote = t.register(&ours, access, Scope::Pool).unwrap();
        let other = initiator(path, t.as_ref(), remote, what);
        std::thread::sleep(Duration::from_millis(20));
        other.signal(libc::SIGKILL);
        assert_eq!(
            t.revoke(remote.key, in_10s()),
            Ok(Revoked::Done),
            "{path} {what}"
        );
        ours.release(&(0..BLOCKS).collect::<Vec<_>>())
            .expect("no lease is left behind");
        assert_eq!(ours.stats().free, BLOCKS as usize);
    }
}

/// A peer that moves nothing any more and never calls its link still gives a grant back.
fn an_idle_initiator_gives_its_grant_back(path: &str) {
    let (t, ours) = (transport(path), pool(0));
    let remote = t.register(&ours, Access::RemoteRead, Scope::Pool).unwrap();
    let _other = initiator(path, t.as_ref(), remote, "idles");
    let t0 = Instant::now();
    assert_eq!(t.revoke(remote.key, in_10s()), Ok(Revoked::Done));
    assert!(t0.elapsed() < Duration::from_secs(2), "{:?}", t0.elapsed());
}

/// A grant taken back under a peer at work: it is stopped, and everybody agrees that it is over.
fn a_busy_initiator_is_stopped_by_a_revoke(path: &str) {
    for (what, access) in [("gets", Access::RemoteRead), ("puts", Access::RemoteWrite)] {
        let (t, ours) = (transport(path), pool(0));
        let remote = t.register(&ours, access, Scope::Pool).unwrap();
        let mut other = initiator(path, t.as_ref(), remote, what);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(
            t.revoke(remote.key, in_10s()),
            Ok(Revoked::Done),
            "{path} {what}"
        );
        // From here on the memory is ours alone: what it holds stays as it is.
        let all: Vec<u32> = (0..BLOCKS).collect();
        let mut lease = ours.write(&all).expect("no lease is left behind");
        lease
            .bytes_mut(0, (u64::from(BLOCKS) * BLOCK) as usize)
            .fill(0x77);
        assert_eq!(other.line(), "ended");
        assert!(
            lease
                .bytes(0, (u64::from(BLOCKS) * BLOCK) as usize)
                .iter()
                .all(|&b| b == 0x77)
        );
    }
}

/// A stopped process can neither acknowledge nor be known to be gone: its blocks are quarantined,
/// those in its grant and no others, and counted.
fn a_stopped_initiator_costs_its_grants_blocks() {
    let (t, ours) = (transport("shm"), pool(0));
    let remote = t
        .register(&ours, Access::RemoteRead, Scope::Blocks(&[2, 3]))
        .unwrap();
    // It maps the region under another grant that covers what it will read.
    let whole = t.register(&ours, Access::RemoteRead, Scope::Pool).unwrap();
    let mut other = Other::start(&format!(
        "initiator shm {} {} idles",
        t.endpoint(),
        hex(remote)
    ));
    assert_eq!(other.line(), "moved");
    assert_eq!(
        t.revoke(whole.key, in_10s()),
        Ok(Revoked::Done),
        "nobody holds this one"
    );
    other.signal(libc::SIGSTOP);
    let t0 = Instant::now();
    let revoked = t.revoke(remote.key, t0 + Duration::from_millis(200));
    assert_eq!(revoked, Ok(Revoked::Quarantined { bytes: 2 * BLOCK }));
    assert!(t0.elapsed() >= Duration::from_millis(199) && t0.elapsed() < Duration::from_secs(5));
    let s = ours.stats();
    assert_eq!((s.quarantined, s.quarantined_bytes), (2, 2 * BLOCK));
    other.signal(libc::SIGKILL);
    ours.release(&(0..BLOCKS).collect::<Vec<_>>()).unwrap();
    let rest = ours.alloc(BLOCKS as usize - 2).unwrap();
    assert!(
        !rest.contains(&2) && !rest.contains(&3),
        "a quarantined block came back"
    );
    assert!(ours.alloc(1).is_err());
}

/// The same for tcp: the owner serves the bytes itself, so a stopped peer holds nothing.
fn a_stopped_tcp_initiator_costs_nothing() {
    let (t, ours) = (transport("tcp"), pool(0));
    for (what, access) in [("gets", Access::RemoteRead), ("puts", Access::RemoteWrite)] {
        let remote = t.register(&ours, access, Scope::Pool).unwrap();
        let other = initiator("tcp", t.as_ref(), remote, what);
        std::thread::sleep(Duration::from_millis(10));
        other.signal(libc::SIGSTOP);
        let t0 = Instant::now();
        assert_eq!(t.revoke(remote.key, in_10s()), Ok(Revoked::Done));
        assert!(t0.elapsed() < Duration::from_secs(2), "{:?}", t0.elapsed());
        drop(
            ours.write(&(0..BLOCKS).collect::<Vec<_>>())
                .expect("no lease is left behind"),
        );
    }
}

fn main() {
    if let (Ok(role), Some(dir)) = (std::env::var(ROLE), std::env::var_os(SOCKETS)) {
        DIR.get_or_init(|| dir.into());
        return other_process(&role);
    }
    let sockets = tempfile::Builder::new().prefix("ml-process-").tempdir();
    let sockets = sockets.expect("a directory for sockets");
    DIR.get_or_init(|| sockets.path().to_owned());
    let mut tests: Vec<(String, Box<dyn Fn()>)> = Vec::new();
    for path in ["tcp", "shm"] {
        let mut add = |name: &str, f: fn(&str)| {
            tests.push((format!("{path}::{name}"), Box::new(move || f(path))));
        };
        add(
            "bytes_cross_between_processes",
            bytes_cross_between_processes,
        );
        add(
            "an_owner_killed_mid_transfer_is_lost_and_nothing_hangs",
            an_owner_killed_mid_transfer_is_lost_and_nothing_hangs,
        );
        add(
            "a_killed_initiator_is_drained",
            a_killed_initiator_is_drained,
        );
        add(
            "an_idle_initiator_gives_its_grant_back",
            an_idle_initiator_gives_its_grant_back,
        );
        add(
            "a_busy_initiator_is_stopped_by_a_revoke",
            a_busy_initiator_is_stopped_by_a_revoke,
        );
    }
    let more: [(&str, fn()); 2] = [
        (
            "shm::a_stopped_initiator_costs_its_grants_blocks",
            a_stopped_initiator_costs_its_grants_blocks,
        ),
        (
            "tcp::a_stopped_initiator_costs_nothing",
            a_stopped_tcp_initiator_costs_nothing,
        ),
    ];
    tests.extend(more.map(|(name, f)| (name.to_string(), Box::new(f) as Box<dyn Fn()>)));
    // As the usual harness: words are filters, --list lists; the first panic ends the run.
    let args: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = args.iter().filter(|a| !a.starts_with('-')).collect();
    for (name, test) in &tests {
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
