//! Framed sockets over TCP and unix sockets, for the fence path and the store.
//!
//! One frame is a fixed 32-byte header and a payload, both under CRC-32C, sent by one vectored
//! write. Everything blocks, on dedicated threads, against a monotonic deadline; there is no
//! runtime and no background thread, because a hop between threads costs more than the message.
//!
//! * [`Endpoint`]: where to connect, `tcp://127.0.0.1:4711`, `tcp://[::1]:4711`, `unix:///path`.
//! * [`Listener`]: loopback unless told otherwise; accepts against a deadline; can be woken.
//! * [`FramedConn`]: a [`SendHalf`] and a [`RecvHalf`], usable from two threads at once.
//! * [`frame`]: the header codec, pure.
//!
//! # Locks and threads
//! A half takes no lock: `send` and `recv` need `&mut` on their own half, and the kernel lets one
//! thread write while another reads. Threads that share one send half wrap it in a
//! [`SharedSend`], whose one mutex is held for one frame. A [`Closer`] may be used from anywhere.
//!
//! # What a failure means
//! After an error of `send`, the peer has not been given a whole frame, now or later: the half is
//! either untouched (nothing had been written) or broken and shut down. A caller may rely on this
//! to tell "not asked" from "asked, answer lost".

#![deny(unsafe_code)]

mod conn;
mod connect;
mod endpoint;
mod error;
pub mod frame;
mod listen;
mod recv;
mod send;
mod slices;
mod sock;

pub use conn::{FramedConn, SharedSend};
pub use connect::connect;
pub use endpoint::{Endpoint, EndpointError};
pub use error::{Corrupt, Doing, WireError};
pub use frame::{FrameHeader, HEADER_BYTES};
pub use listen::{ListenCloser, ListenOptions, Listener};
pub use recv::{Frame, RecvHalf};
pub use send::SendHalf;
pub use slices::ask_for_short_slices;
pub use sock::{Closer, Limits, Wait};

#[cfg(test)]
mod tests;
