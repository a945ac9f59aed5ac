//! ControlStateV1: the explicit binary codec of a request's decode-control state, and its digest.
//!
//! KV that arrived intact is half of a live migration. The other half is everything that decides
//! the *next* token and the next byte of text: RNG position, sampler, penalties, grammar, position,
//! stop strings, detokenizer. [`ControlState`] is all of it, written in one canonical form: one
//! state has exactly one encoding, and the decoder refuses every other spelling. So two digests
//! are equal exactly when the states are, and a destination proves its state by exporting it again.

#![deny(unsafe_code)]

mod digest;
mod error;
mod kinds;
mod profile;

pub use digest::ControlDigest;
pub use error::{DecodeError, Field, Refusal};
pub use kinds::RngKind;
pub use profile::{Claim, Fingerprint, ProfilePolicy};
