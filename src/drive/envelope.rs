//! A protocol message and its payload in one frame: the message, which tells its own length, then
//! the payload.

use crate::migrate::msg::Msg;
use crate::route::DecodeError;

/// The message; the payload follows it as it is.
pub fn encode(msg: &Msg) -> Vec<u8> {
    msg.encode()
}

/// Reads a frame's payload: the message, and the bytes that came with it.
pub fn decode(frame: &[u8]) -> Result<(Msg, &[u8]), DecodeError> {
    Msg::decode_prefix(frame)
}
