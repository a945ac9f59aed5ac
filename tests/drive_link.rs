//! Links between daemons: a handler that waits for a frame with everything warm is called while it
//! waits, as often as it asked for and no longer.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use moonlivekv::drive::{Directory, Expect, Handler, Hello, Mesh, MeshOptions};
use moonlivekv::id::{Incarnation, WorkerId, WorkerRef};
use moonlivekv::migrate::io::Peer;
use moonlivekv::wire::Endpoint;

const WARM: u16 = 700;
const PLAIN: u16 = 701;
const TIMES: u32 = 3;

#[derive(Default)]
struct Counts {
    frames: AtomicU32,
    idle: AtomicU32,
}

impl Handler for Counts {
    fn joined(&self, _: &Hello) {}
    fn frame(&self, _: &Peer, _: u16, _: u64, _: &[u8]) {
        self.frames.fetch_add(1, Ordering::SeqCst);
    }
    fn expects(&self, kind: u16) -> Expect {
        match kind {
            WARM => Expect::Warm {
                every: Duration::from_millis(1),
                times: TIMES,
            },
            _ => Expect::Anything,
        }
    }
    fn idle(&self, _: &Peer) {
        self.idle.fetch_add(1, Ordering::SeqCst);
    }
    fn left(&self, _: &Peer) {}
}

struct At(Option<Endpoint>);

impl Directory for At {
    fn endpoint(&self, _: &Peer) -> Option<Endpoint> {
        self.0.clone()
    }
}

fn worker(name: &str) -> Peer {
    Peer::Worker(WorkerRef {
        id: WorkerId::new(name).unwrap(),
        incarnation: Incarnation(1),
    })
}

fn mesh(me: &str, dir: &std::path::Path, handler: Arc<Counts>, to: Option<Endpoint>) -> Mesh {
    let options = MeshOptions {
        listen: vec![Endpoint::unix(dir.join(format!("{me}.sock"))).unwrap()],
        allow_remote: false,
        endpoints: Vec::new(),
        spin_ns: 0,
        urgent: true,
    };
    Mesh::start(worker(me), options, handler, Arc::new(At(to))).unwrap()
}

#[test]
fn a_handler_is_kept_warm_as_often_as_it_asked_and_until_a_frame_comes() {
    let dir = tempfile::tempdir().unwrap();
    let (here, there) = (Arc::<Counts>::default(), Arc::<Counts>::default());
    let b = mesh("b", dir.path(), Arc::clone(&there), None);
    let a = mesh("a", dir.path(), here, b.endpoints().first().cloned());
    let soon = || Instant::now() + Duration::from_secs(20);
    let send = |kind| a.send(&worker("b"), kind, 0, &[IoSlice::new(b"x")], soon());
    let until = |count: &AtomicU32, n| {
        let end = soon();
        while count.load(Ordering::SeqCst) < n {
            assert!(Instant::now() < end, "not {n} in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    send(WARM).unwrap();
    until(&there.idle, TIMES);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(there.idle.load(Ordering::SeqCst), TIMES, "and no longer");
    // A frame that asks for nothing ends it, however many times were left.
    send(WARM).unwrap();
    send(PLAIN).unwrap();
    until(&there.frames, 3);
    let so_far = there.idle.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(there.idle.load(Ordering::SeqCst), so_far);
    a.stop();
    b.stop();
}
