//! Every path through the same checks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moonlivekv::transport::conformance::Rig;
use moonlivekv::transport::{
    LocalTransport, Pace, Path, ShmOptions, ShmTransport, Tap, TcpOptions, TcpTransport, Transport,
};
use moonlivekv::transport_conformance;

static NEXT: AtomicU64 = AtomicU64::new(0);

struct OverLocal;

impl Rig for OverLocal {
    fn path(&self) -> Path {
        Path::Local
    }

    fn pair(&self, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> [Box<dyn Transport>; 2] {
        std::array::from_fn(|_| {
            let name = format!("conformance-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            let t = LocalTransport::bind(&name, tap.clone(), pace.clone()).unwrap();
            Box::new(t) as Box<dyn Transport>
        })
    }
}

struct OverShm;

impl Rig for OverShm {
    fn path(&self) -> Path {
        Path::Shm
    }

    fn pair(&self, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> [Box<dyn Transport>; 2] {
        std::array::from_fn(|_| {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let socket =
                std::env::temp_dir().join(format!("moonlive-c-{}-{n}.sock", std::process::id()));
            let options = ShmOptions {
                tap: tap.clone(),
                pace: pace.clone(),
                ..ShmOptions::at(socket)
            };
            Box::new(ShmTransport::bind(options).unwrap()) as Box<dyn Transport>
        })
    }
}

struct OverTcp(&'static str);

impl Rig for OverTcp {
    fn path(&self) -> Path {
        Path::Tcp
    }

    fn pair(&self, tap: Option<Arc<dyn Tap>>, pace: Option<Arc<Pace>>) -> [Box<dyn Transport>; 2] {
        std::array::from_fn(|_| {
            let listen: SocketAddr = self.0.parse().unwrap();
            let options = TcpOptions {
                listen,
                tap: tap.clone(),
                pace: pace.clone(),
                ..TcpOptions::default()
            };
            Box::new(TcpTransport::bind(options).unwrap()) as Box<dyn Transport>
        })
    }
}

transport_conformance!(local, OverLocal);
transport_conformance!(shm, OverShm);
transport_conformance!(tcp_v4, OverTcp("127.0.0.1:0"));
transport_conformance!(tcp_v6, OverTcp("[::1]:0"));
