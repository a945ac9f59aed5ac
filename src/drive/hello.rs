//! The first frame of a link.

use crate::id::ErrorKind;
use crate::migrate::io::Peer;
use crate::route::{DecodeError, Reader, Writer};
use crate::wire::Endpoint;

const MAGIC: [u8; 4] = *b"MLH1";
/// Longest endpoint text in a hello.
const MAX_ENDPOINT: usize = 256;
/// Most named endpoints in a hello.
const MAX_ENDPOINTS: usize = 8;

/// Who speaks, whom it means to speak to, and where else it can be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The sender.
    pub from: Peer,
    /// Whom the sender means; `None` from one that only knows an address.
    pub to: Option<Peer>,
    /// The sender's other listeners by name: `mesh`, `rpc`.
    pub endpoints: Vec<(String, Endpoint)>,
}

/// Why a hello was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    /// Bytes that are no hello.
    #[error("the first frame is no hello: {0}")]
    Decode(#[from] DecodeError),
    /// The link was meant for somebody else, such as an earlier life of this worker.
    #[error("the peer wants {wanted}, this is {here}: it restarted meanwhile")]
    NotMe {
        /// Whom it wants.
        wanted: String,
        /// Who this is.
        here: String,
    },
}

impl HelloError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Decode(_) => ErrorKind::Unsupported,
            Self::NotMe { .. } => ErrorKind::PeerLost,
        }
    }
}

fn put_peer(w: &mut Writer, peer: &Peer) {
    match peer {
        Peer::Worker(worker) => {
            w.u8(0);
            w.worker(worker);
        }
        Peer::Coordinator(nonce) => {
            w.u8(1);
            w.u64(*nonce);
        }
        Peer::Gateway => w.u8(2),
    }
}

fn get_peer(r: &mut Reader<'_>, what: &'static str) -> Result<Peer, DecodeError> {
    match r.u8(what)? {
        0 => r.worker(what).map(Peer::Worker),
        1 => r.u64(what).map(Peer::Coordinator),
        2 => Ok(Peer::Gateway),
        _ => Err(DecodeError::Range(what)),
    }
}

impl Hello {
    /// The bytes of the frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.raw(&MAGIC);
        put_peer(&mut w, &self.from);
        w.u8(self.to.is_some().into());
        if let Some(to) = &self.to {
            put_peer(&mut w, to);
        }
        w.u32(self.endpoints.len() as u32);
        for (name, endpoint) in &self.endpoints {
            w.bytes(name.as_bytes());
            w.bytes(endpoint.to_string().as_bytes());
        }
        w.0
    }

    /// Reads a hello; bounded.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(bytes);
        if r.array::<4>("hello.magic")? != MAGIC {
            return Err(DecodeError::Version("hello"));
        }
        let from = get_peer(&mut r, "hello.from")?;
        let to = if r.flag("hello.to")? {
            Some(get_peer(&mut r, "hello.to")?)
        } else {
            None
        };
        let n = r.count(MAX_ENDPOINTS, 8, "hello.endpoints")?;
        let mut endpoints = Vec::with_capacity(n);
        for _ in 0..n {
            let name = text(r.bytes(32, "hello.endpoint.name")?)?;
            let endpoint = text(r.bytes(MAX_ENDPOINT, "hello.endpoint")?)?;
            let endpoint = endpoint
                .parse()
                .map_err(|_| DecodeError::Range("hello.endpoint"))?;
            endpoints.push((name, endpoint));
        }
        r.end()?;
        Ok(Self {
            from,
            to,
            endpoints,
        })
    }

    /// The named listener.
    pub fn endpoint(&self, name: &str) -> Option<&Endpoint> {
        self.endpoints
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, e)| e)
    }

    /// Refuses a hello that means somebody else than `here`.
    pub fn check_for(&self, here: &Peer) -> Result<(), HelloError> {
        match &self.to {
            Some(to) if to != here => Err(HelloError::NotMe {
                wanted: name(to),
                here: name(here),
            }),
            _ => Ok(()),
        }
    }
}

fn text(bytes: &[u8]) -> Result<String, DecodeError> {
    std::str::from_utf8(bytes)
        .map(str::to_owned)
        .map_err(|_| DecodeError::Range("hello text"))
}

/// A peer in words, for messages and logs.
pub fn name(peer: &Peer) -> String {
    match peer {
        Peer::Worker(w) => format!("worker {w}"),
        Peer::Coordinator(nonce) => format!("coordinator {nonce:x}"),
        Peer::Gateway => "gateway".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Incarnation, WorkerId, WorkerRef};

    fn worker(id: &str, incarnation: u64) -> Option<Peer> {
        let id = WorkerId::new(id).ok()?;
        Some(Peer::Worker(WorkerRef {
            id,
            incarnation: Incarnation(incarnation),
        }))
    }

    #[test]
    fn a_hello_survives_its_bytes_and_every_cut_of_them_is_refused() {
        let hello = Hello {
            from: worker("w0", 7).unwrap(),
            to: Some(Peer::Coordinator(3)),
            endpoints: vec![("mesh".into(), "unix:///tmp/a".parse().unwrap())],
        };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        for cut in 0..bytes.len() {
            assert!(Hello::decode(&bytes[..cut]).is_err());
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert_eq!(Hello::decode(&longer), Err(DecodeError::Trailing(1)));
    }

    #[test]
    fn a_hello_meant_for_an_earlier_life_is_refused() {
        let to = |incarnation| Hello {
            from: Peer::Gateway,
            to: worker("w0", incarnation),
            endpoints: vec![],
        };
        let here = worker("w0", 2).unwrap();
        assert!(to(2).check_for(&here).is_ok());
        assert!(matches!(
            to(1).check_for(&here),
            Err(HelloError::NotMe { .. })
        ));
    }
}
