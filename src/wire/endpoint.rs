//! Where to connect: text form and its typed errors. Names are never guessed at: an IPv6 address
//! without brackets is refused instead of being read as host and port.

use crate::id::ErrorKind;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// An address that a framed socket can listen on or connect to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Endpoint {
    /// `tcp://127.0.0.1:4711` or `tcp://[::1]:4711`; port 0 lets the kernel choose, on listening.
    Tcp(SocketAddr),
    /// `unix:///absolute/path`, at most [`Endpoint::MAX_PATH`] bytes.
    Unix(PathBuf),
}

/// Why a text is no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// Neither `tcp://` nor `unix://`.
    #[error("{text:?} has no known scheme: use tcp://ADDRESS:PORT or unix:///PATH")]
    Scheme {
        /// As given.
        text: String,
    },
    /// IPv6 needs brackets, or its tail reads as a port.
    #[error("{text:?} looks like IPv6 without brackets: write tcp://[{text}]:PORT")]
    Ipv6Brackets {
        /// The part after the scheme.
        text: String,
    },
    /// No `:PORT`.
    #[error("{text:?} has no port: use ADDRESS:PORT")]
    PortMissing {
        /// The part after the scheme.
        text: String,
    },
    /// Not 0 to 65535 in plain digits.
    #[error("{text:?} is not a port: use 0 to 65535")]
    Port {
        /// The part read as a port.
        text: String,
    },
    /// Not a numeric address; names are resolved only where a caller asks for it.
    #[error("{text:?} is not a numeric IP address: resolve names first")]
    Address {
        /// The part read as an address.
        text: String,
    },
    /// Socket paths are absolute.
    #[error("{text:?} is not an absolute path: use unix:///PATH")]
    PathNotAbsolute {
        /// The part read as a path.
        text: String,
    },
    /// Longer than the kernel's `sun_path`, or holding a zero byte.
    #[error("socket path has {len} bytes or a zero byte; the kernel takes up to {max} without one", max = Endpoint::MAX_PATH)]
    Path {
        /// Bytes given.
        len: usize,
    },
    /// The resolver knows no address for that name.
    #[error("cannot resolve {name:?}: {cause}")]
    Resolve {
        /// As given.
        name: String,
        /// As the resolver put it.
        cause: String,
    },
}

impl EndpointError {
    /// What a caller can do about it.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Resolve { .. } => ErrorKind::Retryable,
            _ => ErrorKind::Caller,
        }
    }
}

impl Endpoint {
    /// Longest socket path, in bytes (`sun_path` less its terminating zero).
    pub const MAX_PATH: usize = 107;

    /// A TCP endpoint on IPv4 loopback; port 0 lets the kernel choose.
    pub fn loopback(port: u16) -> Self {
        Self::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
    }

    /// Checks and wraps a socket path.
    pub fn unix(path: impl AsRef<Path>) -> Result<Self, EndpointError> {
        let path = path.as_ref();
        let bytes = path.as_os_str().as_encoded_bytes();
        if !path.is_absolute() {
            return Err(EndpointError::PathNotAbsolute {
                text: path.display().to_string(),
            });
        }
        if bytes.len() > Self::MAX_PATH || bytes.contains(&0) {
            return Err(EndpointError::Path { len: bytes.len() });
        }
        Ok(Self::Unix(path.to_owned()))
    }

    /// Reads an endpoint whose host may be a name, asking the system's resolver (which blocks and
    /// knows no deadline: for start-up, not for a path that waits).
    pub fn resolve(text: &str) -> Result<Vec<Self>, EndpointError> {
        match text.parse::<Self>() {
            Ok(endpoint) => Ok(vec![endpoint]),
            Err(EndpointError::Address { text: host }) => {
                let rest = text.strip_prefix("tcp://").unwrap_or(text);
                let found = rest.to_socket_addrs().map_err(|e| EndpointError::Resolve {
                    name: host.clone(),
                    cause: e.to_string(),
                })?;
                let found: Vec<Self> = found.map(Self::Tcp).collect();
                if found.is_empty() {
                    let cause = "no address".to_owned();
                    return Err(EndpointError::Resolve { name: host, cause });
                }
                Ok(found)
            }
            Err(other) => Err(other),
        }
    }

    /// True for unix sockets and loopback addresses (IPv4-mapped ones included).
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp(addr) => addr.ip().to_canonical().is_loopback(),
        }
    }
}

fn parse_tcp(text: &str) -> Result<SocketAddr, EndpointError> {
    let owned = || text.to_owned();
    if let Some(rest) = text.strip_prefix('[') {
        let Some((host, tail)) = rest.split_once(']') else {
            return Err(EndpointError::Ipv6Brackets {
                text: rest.to_owned(),
            });
        };
        let Some(port) = tail.strip_prefix(':') else {
            return Err(EndpointError::PortMissing { text: owned() });
        };
        let port = parse_port(port)?;
        let (ip, scope) = match host.split_once('%') {
            Some((ip, scope)) => (ip, scope.parse::<u32>().ok()),
            None => (host, Some(0)),
        };
        return match (ip.parse::<Ipv6Addr>(), scope) {
            (Ok(ip), Some(scope)) => Ok(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope))),
            _ => Err(EndpointError::Address {
                text: host.to_owned(),
            }),
        };
    }
    if text.parse::<Ipv6Addr>().is_ok() || text.matches(':').count() > 1 {
        return Err(EndpointError::Ipv6Brackets { text: owned() });
    }
    let Some((host, port)) = text.rsplit_once(':') else {
        return Err(EndpointError::PortMissing { text: owned() });
    };
    let port = parse_port(port)?;
    let ip = host
        .parse::<Ipv4Addr>()
        .map_err(|_| EndpointError::Address {
            text: host.to_owned(),
        })?;
    Ok(SocketAddr::new(IpAddr::V4(ip), port))
}

fn parse_port(text: &str) -> Result<u16, EndpointError> {
    // `parse` alone would take "+80".
    let digits = !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
    text.parse::<u16>()
        .ok()
        .filter(|_| digits)
        .ok_or_else(|| EndpointError::Port {
            text: text.to_owned(),
        })
}

impl FromStr for Endpoint {
    type Err = EndpointError;
    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if let Some(rest) = text.strip_prefix("tcp://") {
            return parse_tcp(rest).map(Self::Tcp);
        }
        if let Some(rest) = text.strip_prefix("unix://") {
            return Self::unix(rest);
        }
        Err(EndpointError::Scheme {
            text: text.to_owned(),
        })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addr) => write!(f, "tcp://{addr}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(addr: SocketAddr) -> Self {
        Self::Tcp(addr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_survive_text() {
        for text in [
            "tcp://127.0.0.1:1234",
            "tcp://[::1]:1234",
            "tcp://[2605:340:cd51::1]:7000",
            "tcp://[fe80::1%3]:7000",
            "unix:///run/moonlive.sock",
        ] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn an_ipv6_address_is_never_read_as_host_and_port() {
        for bare in [
            "2605:340:cd51::1",
            "::1",
            "::1:80",
            "2605:340:cd51::1:9",
            "1:2:3:4:5:6:7:8:9000",
        ] {
            let got = format!("tcp://{bare}").parse::<Endpoint>();
            assert_eq!(
                got,
                Err(EndpointError::Ipv6Brackets {
                    text: bare.to_owned()
                }),
                "{bare}"
            );
        }
    }

    #[test]
    fn endpoint_errors_are_typed() {
        let kind = |text: &str| text.parse::<Endpoint>().unwrap_err();
        assert!(matches!(kind("http://x:1"), EndpointError::Scheme { .. }));
        assert!(matches!(kind("127.0.0.1:1"), EndpointError::Scheme { .. }));
        assert!(matches!(
            kind("tcp://127.0.0.1"),
            EndpointError::PortMissing { .. }
        ));
        assert!(matches!(
            kind("tcp://[::1]"),
            EndpointError::PortMissing { .. }
        ));
        assert!(matches!(
            kind("tcp://[::1"),
            EndpointError::Ipv6Brackets { .. }
        ));
        for port in ["65536", "+80", "", " 80", "-1", "8a"] {
            let got = kind(&format!("tcp://127.0.0.1:{port}"));
            assert!(matches!(got, EndpointError::Port { .. }), "{port}: {got:?}");
        }
        assert!(matches!(
            kind("tcp://host.example:80"),
            EndpointError::Address { .. }
        ));
        assert!(matches!(
            kind("tcp://1.2.3:80"),
            EndpointError::Address { .. }
        ));
        assert!(matches!(
            kind("tcp://[host]:80"),
            EndpointError::Address { .. }
        ));
        assert!(matches!(
            kind("unix://relative"),
            EndpointError::PathNotAbsolute { .. }
        ));
        let long = format!("unix:///{}", "x".repeat(107));
        assert_eq!(kind(&long), EndpointError::Path { len: 108 });
        assert!(matches!(kind("unix:///a\0b"), EndpointError::Path { .. }));
        assert!(Endpoint::resolve("tcp://localhost:80").unwrap()[0].is_local());
        assert!(matches!(
            Endpoint::resolve("tcp://no.such.host.invalid:80"),
            Err(EndpointError::Resolve { .. })
        ));
    }
}
