//! How a client reaches a control RPC service.

use std::time::Duration;

use tonic::transport::Channel;

use crate::id::ErrorKind;
use crate::wire::{Endpoint, EndpointError};

/// A service that could not be named or reached.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No endpoint.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
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
            Self::Endpoint(e) => e.kind(),
            Self::Connect { .. } => ErrorKind::PeerLost,
        }
    }
}

/// Opens a channel; connecting ends within `deadline`. Each call then names its own.
pub async fn connect(endpoint: &Endpoint, deadline: Duration) -> Result<Channel, DialError> {
    let uri = match endpoint {
        Endpoint::Unix(path) => format!("unix:{}", path.display()),
        Endpoint::Tcp(addr) => format!("http://{addr}"),
    };
    let unreachable = |source| DialError::Connect {
        endpoint: endpoint.clone(),
        source,
    };
    tonic::transport::Endpoint::from_shared(uri)
        .map_err(unreachable)?
        .connect_timeout(deadline)
        .tcp_nodelay(true)
        .connect()
        .await
        .map_err(unreachable)
}
