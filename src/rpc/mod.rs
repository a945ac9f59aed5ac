//! The control RPC: gRPC over loopback TCP or unix sockets, with bounded messages and a deadline
//! on every call. Nothing on the fence's critical path goes through here.

pub mod adapter;
mod dial;
mod page;
mod serve;

pub use dial::{DialError, connect};
pub use page::Page;
pub use serve::{ServeError, Server};

/// Version of the messages below; a peer that speaks another one is refused in `Describe`.
pub const PROTOCOL: u32 = 1;

/// Largest message that either side accepts, in bytes.
pub const MAX_MESSAGE: usize = 4 << 20;

/// The generated messages, clients and servers of `proto/moonlive/v1`.
#[allow(missing_docs, clippy::all)]
pub mod v1 {
    tonic::include_proto!("moonlive.v1");
}
