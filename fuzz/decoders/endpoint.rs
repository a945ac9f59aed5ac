//! Addresses as text: from peers, from the command line.

use super::{Target, seed};
use moonlivekv::wire::{Endpoint, EndpointError};

pub const TARGET: Target = Target {
    name: "endpoint",
    run,
    outcomes: &[
        "accept",
        "address",
        "ipv6-brackets",
        "path",
        "path-not-absolute",
        "port",
        "port-missing",
        "scheme",
        "utf-8",
    ],
    seeds,
};

fn run(data: &[u8]) -> &'static str {
    let Ok(text) = std::str::from_utf8(data) else {
        return "utf-8";
    };
    match text.parse::<Endpoint>() {
        Ok(endpoint) => {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            "accept"
        }
        Err(e) => match e {
            EndpointError::Scheme { .. } => "scheme",
            EndpointError::Ipv6Brackets { .. } => "ipv6-brackets",
            EndpointError::PortMissing { .. } => "port-missing",
            EndpointError::Port { .. } => "port",
            EndpointError::Address { .. } => "address",
            EndpointError::PathNotAbsolute { .. } => "path-not-absolute",
            EndpointError::Path { .. } => "path",
            EndpointError::Resolve { .. } => panic!("a name was looked up"),
        },
    }
}

fn seeds() -> Vec<super::Seed> {
    let text = |name: &str, text: &str| seed(name, text.as_bytes());
    vec![
        text("accept.v4", "tcp://127.0.0.1:4711"),
        text("accept.v6", "tcp://[::1]:0"),
        text("accept.v6-scope", "tcp://[fe80::1%2]:9"),
        text("accept.unix", "unix:///run/x.sock"),
        text("scheme", "http://127.0.0.1:1"),
        text("ipv6-brackets", "tcp://2605:340:cd51::1"),
        text("ipv6-brackets.open", "tcp://[::1:4711"),
        text("port-missing", "tcp://127.0.0.1"),
        text("port.sign", "tcp://127.0.0.1:+80"),
        text("port.large", "tcp://127.0.0.1:65536"),
        text("address", "tcp://localhost:1"),
        text("address.scope", "tcp://[fe80::1%eth0]:1"),
        text("path-not-absolute", "unix://run/x"),
        text("path.long", &format!("unix:///{}", "x".repeat(107))),
        seed("path.zero", *b"unix:///a\0b"),
        seed("utf-8", [0xff]),
    ]
}
