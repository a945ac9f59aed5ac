//! Leaf, page and set digests over canonical KV bytes.

#![deny(unsafe_code)]

mod error;
mod types;

pub use crate::page::Scheme;
pub use error::DigestError;
pub use types::{LeafDigest, PageDigest, SetDigest};
