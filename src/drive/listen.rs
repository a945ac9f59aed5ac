//! Where a daemon listens: unix sockets in its directory, or TCP, so that daemons can live on two
//! machines. The frames and the RPC are the same over both.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::id::ErrorKind;
use crate::wire::{Endpoint, EndpointError};

/// Where a daemon's listeners are. Frames are neither encrypted nor authenticated: beyond loopback
/// only on a network that is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Listen {
    tcp: Option<SocketAddr>,
    expose: bool,
}

/// What listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// Links to other daemons: the fence's path. At the port given.
    Mesh,
    /// Control RPC. At the next port.
    Rpc,
    /// Bulk KV over TCP. At the port after that.
    Data,
    /// The metadata store. Last.
    Store,
}

/// An address that daemons cannot listen at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ListenError {
    /// Other machines could reach it, and nobody asked for that.
    #[error(
        "{0} can be reached from other machines: pass --listen-beyond-loopback, on a trusted network"
    )]
    NotLoopback(SocketAddr),
    /// An address that says nothing to a peer.
    #[error("{0} is no address that a peer can dial: name the one that the other machines reach")]
    Unspecified(SocketAddr),
    /// The ports after it do not fit.
    #[error("port {0} leaves no room for the three ports after it: use 0, or 1 to 65532")]
    Port(u16),
    /// No socket path.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
}

impl ListenError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::Caller
    }
}

/// What a caller can do where a listener could not be bound: the address is theirs to choose,
/// whatever the socket said.
pub fn bind_kind(kind: ErrorKind) -> ErrorKind {
    match kind {
        ErrorKind::Bug => ErrorKind::Bug,
        _ => ErrorKind::Caller,
    }
}

impl Listen {
    /// On TCP at this address and the three ports after it; port 0 lets the kernel choose each.
    pub fn tcp(at: SocketAddr, beyond_loopback: bool) -> Result<Self, ListenError> {
        if at.ip().is_unspecified() {
            return Err(ListenError::Unspecified(at));
        }
        if !at.ip().is_loopback() && !beyond_loopback {
            return Err(ListenError::NotLoopback(at));
        }
        if at.port() > u16::MAX - 3 {
            return Err(ListenError::Port(at.port()));
        }
        Ok(Self {
            tcp: Some(at),
            expose: beyond_loopback,
        })
    }

    /// Whether an address beyond loopback is meant.
    pub fn exposed(&self) -> bool {
        self.expose
    }

    fn at(&self, what: Port) -> Option<SocketAddr> {
        let base = self.tcp?;
        let port = match base.port() {
            0 => 0,
            port => port + what as u16,
        };
        Some(SocketAddr::new(base.ip(), port))
    }

    /// A listener of the daemon `name`: `DIR/NAME.KIND.sock`, or its TCP address.
    pub fn endpoint(&self, dir: &Path, name: &str, what: Port) -> Result<Endpoint, ListenError> {
        if let Some(at) = self.at(what) {
            return Ok(Endpoint::Tcp(at));
        }
        let kind = match what {
            Port::Mesh => "mesh",
            Port::Rpc => "rpc",
            Port::Data => "data",
            Port::Store => "store",
        };
        Ok(Endpoint::unix(dir.join(format!("{name}.{kind}.sock")))?)
    }

    /// Where bulk over TCP is served: on loopback unless the daemon lives on TCP.
    pub fn data(&self) -> SocketAddr {
        let loopback = SocketAddr::new(IpAddr::from([127, 0, 0, 1]), 0);
        self.at(Port::Data).unwrap_or(loopback)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_on_tcp_has_four_ports_in_a_row_and_one_without_has_sockets() {
        let listen = Listen::tcp("127.0.0.1:7000".parse().unwrap(), false).unwrap();
        let at = |what| listen.endpoint(Path::new("/tmp"), "w0", what).unwrap();
        assert_eq!(at(Port::Mesh).to_string(), "tcp://127.0.0.1:7000");
        assert_eq!(at(Port::Store).to_string(), "tcp://127.0.0.1:7003");
        assert_eq!(listen.data().port(), 7002);
        let unix = Listen::default();
        let mesh = unix.endpoint(Path::new("/tmp"), "w0", Port::Mesh).unwrap();
        assert_eq!(mesh.to_string(), "unix:///tmp/w0.mesh.sock");
        assert!(unix.data().ip().is_loopback());
    }

    #[test]
    fn an_address_that_others_reach_is_asked_for_and_one_that_nobody_can_dial_is_refused() {
        let tcp = |text: &str, expose| Listen::tcp(text.parse().unwrap(), expose);
        assert!(matches!(
            tcp("192.0.2.1:0", false),
            Err(ListenError::NotLoopback(_))
        ));
        assert!(tcp("192.0.2.1:0", true).is_ok());
        assert!(matches!(
            tcp("0.0.0.0:0", true),
            Err(ListenError::Unspecified(_))
        ));
        assert!(matches!(
            tcp("[::]:0", true),
            Err(ListenError::Unspecified(_))
        ));
        assert!(matches!(
            tcp("127.0.0.1:65533", false),
            Err(ListenError::Port(_))
        ));
    }
}
