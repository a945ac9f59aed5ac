//! Leaf, page and set digests over canonical KV bytes.

#![deny(unsafe_code)]

mod error;
mod gather;
mod keys;
mod lanes;
mod leaves;
mod set;
mod tail;
mod types;

pub use crate::page::Scheme;
pub use error::DigestError;
pub use keys::{Digester, LeafTable};
pub use leaves::Scratch;
pub use set::SetHasher;
pub use tail::TailHasher;
pub use types::{LeafDigest, PageDigest, SetDigest};

#[cfg(test)]
mod tests;
