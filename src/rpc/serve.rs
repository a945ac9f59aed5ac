//! Binding a service and serving it until told to stop.

use std::future::Future;
use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tonic::service::Routes;

use crate::id::ErrorKind;
use crate::wire::Endpoint;

/// A service that could not listen or ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is taken or forbidden.
    #[error("cannot listen at {endpoint}: {source}; is another daemon using it?")]
    Bind {
        /// Where.
        endpoint: Endpoint,
        /// What the socket said.
        source: io::Error,
    },
    /// A peer off this machine could reach the service, and nobody asked for that.
    #[error("{addr} is not a loopback address; pass --listen-beyond-loopback to allow it")]
    NotLoopback {
        /// The address asked for.
        addr: SocketAddr,
    },
    /// The server ended with an error.
    #[error("the RPC server at {endpoint} failed: {source}")]
    Serve {
        /// Where.
        endpoint: Endpoint,
        /// Why.
        source: tonic::transport::Error,
    },
}

impl ServeError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Bind { .. } | Self::NotLoopback { .. } => ErrorKind::Caller,
            Self::Serve { .. } => ErrorKind::Retryable,
        }
    }
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// A bound listener: its address is known before anything is served on it.
pub struct Server {
    listener: Listener,
    endpoint: Endpoint,
}

impl Server {
    /// Binds. A TCP address must be a loopback one unless `beyond_loopback`.
    pub async fn bind(endpoint: &Endpoint, beyond_loopback: bool) -> Result<Self, ServeError> {
        let bind = |source| ServeError::Bind {
            endpoint: endpoint.clone(),
            source,
        };
        match endpoint {
            Endpoint::Unix(path) => {
                let listener = match UnixListener::bind(path) {
                    // A daemon that was killed leaves its socket file behind; one that lives answers.
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                        if UnixStream::connect(path).await.is_ok() {
                            return Err(bind(e));
                        }
                        std::fs::remove_file(path).map_err(bind)?;
                        UnixListener::bind(path)
                    }
                    other => other,
                }
                .map_err(bind)?;
                Ok(Self {
                    listener: Listener::Unix(listener),
                    endpoint: endpoint.clone(),
                })
            }
            Endpoint::Tcp(addr) if !addr.ip().is_loopback() && !beyond_loopback => {
                Err(ServeError::NotLoopback { addr: *addr })
            }
            Endpoint::Tcp(addr) => {
                let listener = TcpListener::bind(addr).await.map_err(bind)?;
                let local = listener.local_addr().map_err(bind)?;
                Ok(Self {
                    listener: Listener::Tcp(listener),
                    endpoint: Endpoint::Tcp(local),
                })
            }
        }
    }

    /// Where it listens; the port is the one the kernel chose.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Serves `routes` until `stop` resolves; calls under way then may finish.
    pub async fn serve(
        self,
        routes: Routes,
        stop: impl Future<Output = ()> + Send,
    ) -> Result<(), ServeError> {
        let endpoint = self.endpoint;
        let router = tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .add_routes(routes);
        match self.listener {
            Listener::Unix(l) => {
                router
                    .serve_with_incoming_shutdown(UnixListenerStream::new(l), stop)
                    .await
            }
            Listener::Tcp(l) => {
                router
                    .serve_with_incoming_shutdown(TcpListenerStream::new(l), stop)
                    .await
            }
        }
        .map_err(|source| ServeError::Serve { endpoint, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_socket_of_a_dead_daemon_is_taken_over_and_that_of_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = Endpoint::unix(dir.path().join("x.rpc.sock")).unwrap();
        // Dropping the standard library's listener leaves the file, as a kill does.
        drop(std::os::unix::net::UnixListener::bind(dir.path().join("x.rpc.sock")).unwrap());
        let alive = Server::bind(&at, false).await.unwrap();
        assert!(matches!(
            Server::bind(&at, false).await,
            Err(ServeError::Bind { .. })
        ));
        drop(alive);
    }
}
