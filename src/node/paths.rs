//! The bulk paths of a worker, and the faults that can be injected into them.

use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::drive::Listen;
use crate::id::WorkerId;
use crate::migrate::io::Step;
use crate::node::faults::{Fault, Faults, flip};
use crate::transport::{
    LocalTransport, ShmOptions, ShmTransport, Tap, TapPoint, TcpOptions, TcpTransport, Transport,
    TransportError,
};

/// What a slow link lets through, bytes per second.
const SLOW: u64 = 8 << 20;

/// How long a reply is held back so that it lands after its attempt is over.
const LATE: Duration = Duration::from_millis(600);

/// Faults where a payload is read and sent.
struct Faulty {
    faults: Arc<Faults>,
}

impl Tap for Faulty {
    fn source_read(&self, _: TapPoint, bytes: &mut [u8]) {
        if let Some(seed) = self.faults.due(Fault::CorruptSourceRead, Step::Stream) {
            flip(bytes, seed);
        }
    }

    fn wire(&self, _: TapPoint, bytes: &mut [u8]) {
        if let Some(seed) = self.faults.due(Fault::CorruptWire, Step::Stream) {
            flip(bytes, seed);
        }
    }

    fn hold(&self, at: TapPoint) -> Duration {
        if self.faults.due(Fault::LateWrite, Step::Stream).is_some() {
            return LATE;
        }
        // Slow from the moment it fires, for as long as nothing else is planned.
        if self.faults.due(Fault::SlowLink, Step::Stream).is_some()
            || self.faults.has_fired(Fault::SlowLink)
        {
            return Duration::from_secs_f64(at.len as f64 / SLOW as f64);
        }
        Duration::ZERO
    }
}

fn shm_socket(id: &WorkerId, dir: &FilePath) -> PathBuf {
    dir.join(format!("{id}.shm.sock"))
}

/// Removes the socket of a worker that ends. Its transport may live on in threads that are cut off
/// with the process.
pub fn remove_socket(id: &WorkerId, dir: &FilePath) {
    let _ = std::fs::remove_file(shm_socket(id, dir));
}

/// Opens every path there is. Without an injected fault there is no tap, and nothing is copied for
/// one.
pub fn open(
    id: &WorkerId,
    dir: &FilePath,
    listen: &Listen,
    faults: &Arc<Faults>,
) -> Result<Vec<Arc<dyn Transport>>, TransportError> {
    let tap = || -> Option<Arc<dyn Tap>> {
        let wanted = [
            Fault::CorruptSourceRead,
            Fault::CorruptWire,
            Fault::SlowLink,
            Fault::LateWrite,
        ];
        let any = wanted.into_iter().any(|f| faults.possible(f));
        any.then(|| -> Arc<dyn Tap> {
            Arc::new(Faulty {
                faults: Arc::clone(faults),
            })
        })
    };
    let tcp = TcpTransport::bind(TcpOptions {
        listen: listen.data(),
        expose: listen.exposed(),
        tap: tap(),
        ..TcpOptions::default()
    })?;
    let shm = ShmTransport::bind(ShmOptions {
        tap: tap(),
        ..ShmOptions::at(shm_socket(id, dir))
    })?;
    let local = LocalTransport::bind(id.as_str(), tap(), None)?;
    Ok(vec![Arc::new(local), Arc::new(shm), Arc::new(tcp)])
}
