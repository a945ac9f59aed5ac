//! Where an RPC service listens, and how a client reaches it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tonic::transport::Channel;

use crate::id::ErrorKind;

/// Where a control RPC service listens. As text: `unix:/path` or `tcp:127.0.0.1:4000`,
/// `tcp:[::1]:4000`; an IPv6 address without brackets is refused, not guessed at.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A unix socket: private to this machine and to the directory's owner.
    Unix(PathBuf),
    /// TCP; port 0 lets the kernel choose.
    Tcp(SocketAddr),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(addr) => write!(f, "tcp:{addr}"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = DialError;
    fn from_str(s: &str) -> Result<Self, DialError> {
        let bad = || DialError::Endpoint {
            text: s.chars().take(200).collect(),
        };
        if let Some(path) = s.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(bad());
            }
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        let addr = s.strip_prefix("tcp:").unwrap_or(s);
        addr.parse().map(Self::Tcp).map_err(|_| bad())
    }
}

/// A service that could not be named or reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Neither `unix:/path` nor `tcp:host:port`.
    #[error("{text:?} is not an endpoint: write unix:/path, tcp:127.0.0.1:4000 or tcp:[::1]:4000")]
    Endpoint {
        /// What was given.
        text: String,
    },
    /// Nothing answers there.
    #[error("nothing answers at {endpoint}: {source}; is the daemon running?")]
    Connect {
        /// Where.
        endpoint: Endpoint,
        /// What the socket said.
        source: tonic::transport::Error,
    },
}

impl DialError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Endpoint { .. } => ErrorKind::Caller,
            Self::Connect { .. } => ErrorKind::PeerLost,
        }
    }
}

/// Opens a channel whose connect and whose every call end within `deadline`.
pub async fn connect(endpoint: &Endpoint, deadline: Duration) -> Result<Channel, DialError> {
    let uri = match endpoint {
        Endpoint::Unix(path) => format!("unix:{}", path.display()),
        Endpoint::Tcp(addr) => format!("http://{addr}"),
    };
    let target = tonic::transport::Endpoint::from_shared(uri)
        .map_err(|_| DialError::Endpoint {
            text: endpoint.to_string(),
        })?
        .connect_timeout(deadline)
        .tcp_nodelay(true);
    target.connect().await.map_err(|source| DialError::Connect {
        endpoint: endpoint.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_text_and_an_unbracketed_ipv6_is_refused() {
        for text in [
            "unix:/tmp/a.sock",
            "tcp:127.0.0.1:40",
            "tcp:[2605:340:cd51::1]:7",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
        for bad in [
            "",
            "unix:",
            "tcp:2605:340:cd51::1",
            "2605:340:cd51::1",
            "tcp:host",
            "tcp:1.2.3.4:x",
        ] {
            assert!(
                bad.parse::<Endpoint>().is_err(),
                "{bad} was taken for an endpoint"
            );
        }
    }
}
