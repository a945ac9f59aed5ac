//! Binding a service and serving it until told to stop.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};
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

/// Binds a socket file that only this user may connect to.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    let listener = match UnixListener::bind(path) {
        Err(taken) if taken.kind() == io::ErrorKind::AddrInUse => {
            // Connecting to what is no socket is refused too, and that is not ours to remove.
            let socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
            match std::os::unix::net::UnixStream::connect(path) {
                Err(e) if socket && e.kind() == io::ErrorKind::ConnectionRefused => {}
                _ => return Err(taken),
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// A bound listener: its address is known before anything is served on it.
pub struct Server {
    listener: Listener,
    endpoint: Endpoint,
    file: Option<SocketFile>,
}

/// A socket's file, removed with it; one that another process has put in its place stays.
struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            inode: inode(path)?,
        })
    }
}

fn inode(path: &Path) -> io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|m| (m.dev(), m.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|now| now == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Server {
    /// Binds. A TCP address must be a loopback one unless `beyond_loopback`; the socket file of a
    /// process that died is replaced, a living one's is not.
    pub async fn bind(endpoint: &Endpoint, beyond_loopback: bool) -> Result<Self, ServeError> {
        let bind = |source| ServeError::Bind {
            endpoint: endpoint.clone(),
            source,
        };
        match endpoint {
            Endpoint::Unix(path) => {
                let listener = bind_unix(path).map_err(bind)?;
                Ok(Self {
                    listener: Listener::Unix(listener),
                    endpoint: endpoint.clone(),
                    file: Some(SocketFile::of(path).map_err(bind)?),
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
                    file: None,
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
        // Removed when this ends, or is aborted.
        let _file = self.file;
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
    async fn a_dead_process_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let endpoint = Endpoint::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let living = Server::bind(&endpoint, false).await.unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "others may not connect");
        let refused = Server::bind(&endpoint, false).await.err().unwrap();
        assert!(matches!(refused, ServeError::Bind { .. }), "{refused}");
        drop(living);
        assert!(!path.exists(), "its file outlives the listener");
        std::fs::write(&path, b"").unwrap();
        // Something that is no socket is nobody's to remove.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, b"mine").unwrap();
        assert!(Server::bind(&endpoint, false).await.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
