//! ControlStateV1: the explicit binary codec of a request's decode-control state, and its digest.
//!
//! KV that arrived intact is half of a live migration. The other half is everything that decides
//! the *next* token and the next byte of text: RNG position, sampler, penalties, grammar, position,
//! stop strings, detokenizer. [`ControlState`] is all of it, written in one canonical form: one
//! state has exactly one encoding, and the decoder refuses every other spelling. So two encodings
//! are equal exactly when the states are, and a destination proves its state by exporting it again.
//!
//! # Format
//!
//! 24 numbered fields in fixed order, each `<u32 length><items>`, no gaps, nothing after the last.
//! Integers are little-endian; `bytes` are a u32 length and data; vectors, sets and maps are a u32
//! count and items, sets and maps strictly ascending by key; an option is one byte 0 or 1 and the
//! value; floats are IEEE-754 bits, never NaN, never -0. Names hold at most
//! [`MAX_NAME_BYTES`], blobs [`MAX_BLOB_BYTES`], collections [`MAX_ITEMS`], all of it
//! [`MAX_ENCODING_BYTES`]. The structs list the items of each field in order.

#![deny(unsafe_code)]

mod codec;
mod digest;
mod error;
mod form;
mod kinds;
mod profile;
mod state;
#[cfg(test)]
mod tests;
mod tokens;

pub use codec::{
    Blob, Bytes, MAX_BLOB_BYTES, MAX_ENCODING_BYTES, MAX_ITEMS, MAX_NAME_BYTES, Name, TooLong,
    Utf8Head,
};
pub use digest::ControlDigest;
pub use error::{CodecError, Field, Refusal};
pub use kinds::{OutputKind, PenaltySemantics, RngKind};
pub use profile::{Claim, Fingerprint, ProfilePolicy};
pub use state::{
    Constraints, ControlState, Detokenizer, EngineIdentity, Extension, Grammar, Identity, KvGroup,
    Limits, Logprobs, Lora, ModelIdentity, MutableBlob, Parsers, Penalties, Position, Reasoning,
    Rng, Sampler, Scheduling, Stops, Stream, Tokens, ToolParser, Usage,
};
pub use tokens::{TokenHasher, TokenLogHash, mask_digest};
