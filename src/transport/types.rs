use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use crate::mem::{BlockId, ReadLease, RemoteRegion, WriteLease};
use crate::transport::TransportError;

/// Which way bytes went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// One process, one copy.
    Local,
    /// Two processes of one machine, one copy out of a read-only mapping.
    Shm,
    /// Framed TCP.
    Tcp,
}

impl Path {
    /// The name used in flags, metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a transport listens. Text form: `local:NAME`, `shm:/path`, `tcp:127.0.0.1:4791`,
/// `tcp:[::1]:4791`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A name within this process.
    Local(String),
    /// A unix socket.
    Shm(PathBuf),
    /// An address and port; names are not resolved here.
    Tcp(SocketAddr),
}

/// Text that is no [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// It does not start with a path's name.
    #[error("`{0}` names no path: expected local:NAME, shm:/SOCKET or tcp:ADDRESS:PORT")]
    Path(String),
    /// An empty or relative rest.
    #[error("`{0}` needs an absolute socket path, or a name")]
    Empty(String),
    /// Not an address with a port. An IPv6 address stands in brackets: without them its last group
    /// would be read as a port.
    #[error("`{0}` is not ADDRESS:PORT (IPv6 in brackets, as in tcp:[::1]:4791)")]
    Address(String),
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(s: &str) -> Result<Self, EndpointError> {
        let (path, rest) = s
            .split_once(':')
            .ok_or_else(|| EndpointError::Path(s.into()))?;
        match path {
            "local" if !rest.is_empty() => Ok(Self::Local(rest.into())),
            "shm" if rest.starts_with('/') => Ok(Self::Shm(rest.into())),
            "local" | "shm" => Err(EndpointError::Empty(s.into())),
            // `SocketAddr` wants brackets around IPv6 and refuses everything that needs guessing.
            "tcp" => rest
                .parse()
                .map(Self::Tcp)
                .map_err(|_| EndpointError::Address(s.into())),
            _ => Err(EndpointError::Path(s.into())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(name) => write!(f, "local:{name}"),
            Self::Shm(path) => write!(f, "shm:{}", path.display()),
            Self::Tcp(addr) => write!(f, "tcp:{addr}"),
        }
    }
}

/// What peers may do with a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Get from it. The only access for pools that hold KV.
    RemoteRead,
    /// Put into it: staging that no block table, prefix cache or reader reaches before its writers
    /// are gone.
    RemoteWrite,
}

/// Which part of a pool a registration covers.
#[derive(Debug, Clone, Copy)]
pub enum Scope<'a> {
    /// Every block, allocated now or later. If revoking it fails, every allocated block is quarantined.
    Pool,
    /// These blocks; more can be added.
    Blocks(&'a [BlockId]),
}

/// How revoking a grant ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Revoked {
    /// Nobody reads or writes under it any more.
    Done,
    /// Somebody may: the blocks in its scope are out of service for ever.
    Quarantined {
        /// Bytes newly taken out of service.
        bytes: u64,
    },
}

/// How cancelling a transfer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelOutcome {
    /// Its local memory is no longer touched.
    Done,
    /// A peer may still read it: its blocks are out of service for ever.
    Quarantined {
        /// Bytes newly taken out of service.
        bytes: u64,
    },
    /// It had ended before; its completion says how.
    NotInFlight,
}

/// One contiguous run of a transfer. Offsets count from the start of each side's region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Offset in the remote region, bytes.
    pub remote_off: u64,
    /// Offset in the local region, bytes.
    pub local_off: u64,
    /// Length, bytes; not zero.
    pub len: u64,
}

/// The local side of a transfer, which also says its direction.
#[derive(Debug)]
pub enum Local {
    /// Get: remote bytes land in these blocks.
    GetInto(WriteLease),
    /// Put: these blocks' bytes go out. The lease lives until the put completes, so a writer of these
    /// blocks waits for the peer; send from blocks that nobody writes.
    PutFrom(ReadLease),
}

/// A request to move bytes.
#[derive(Debug)]
pub struct Transfer {
    /// Local memory; owned by the transfer until it completes.
    pub local: Local,
    /// The peer's grant.
    pub remote: RemoteRegion,
    /// What goes where; at least one span. Handed back with the completion for reuse. Local ranges
    /// that overlap leave unspecified bytes in the overlap.
    pub spans: Vec<Span>,
    /// When to give up.
    pub deadline: Instant,
}

/// Names a transfer on its link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct TransferId(pub u64);

/// How a transfer ended. Also the place where it is reported: see [`Completion::empty`].
#[derive(Debug)]
pub struct Completion {
    /// Which one.
    pub id: TransferId,
    /// `Ok`: applied and visible. `Err`: the bytes of the destination range are unspecified.
    pub outcome: Result<(), TransportError>,
    /// Bytes that arrived: all of them for `Ok`.
    pub bytes: u64,
    /// The path they took.
    pub path: Path,
    /// The transfer's lease, back in the caller's hands.
    pub local: Option<Local>,
    /// The transfer's span list, for reuse.
    pub spans: Vec<Span>,
}

impl Completion {
    /// A slot for `poll` to fill: `[Completion::empty(), ..]` or `array::from_fn`.
    pub fn empty() -> Self {
        Self {
            id: TransferId(0),
            outcome: Err(TransportError::Cancelled),
            bytes: 0,
            path: Path::Local,
            local: None,
            spans: Vec::new(),
        }
    }
}

/// A transfer that was not accepted, and why.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Rejected {
    /// Why.
    pub error: TransportError,
    /// The transfer, untouched.
    pub transfer: Transfer,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_text() {
        for text in [
            "local:a",
            "shm:/tmp/x.sock",
            "tcp:127.0.0.1:80",
            "tcp:[2605:340:cd51::1]:15001",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_ipv6_address_without_brackets_is_refused_and_never_split_at_a_colon() {
        for text in [
            "tcp:2605:340:cd51::1",
            "tcp:::1:80",
            "tcp:[::1]",
            "tcp:1.2.3.4",
            "tcp:host:80",
            "tcp:[::1]:99999",
        ] {
            assert_eq!(
                text.parse::<Endpoint>(),
                Err(EndpointError::Address(text.into()))
            );
        }
        for text in ["shm:x", "shm:", "local:"] {
            assert_eq!(
                text.parse::<Endpoint>(),
                Err(EndpointError::Empty(text.into()))
            );
        }
        for text in ["", "udp:1", "tcp"] {
            assert_eq!(
                text.parse::<Endpoint>(),
                Err(EndpointError::Path(text.into()))
            );
        }
    }
}
