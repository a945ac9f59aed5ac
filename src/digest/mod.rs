//! Leaf, page and set digests over canonical KV bytes.

#![deny(unsafe_code)]

mod batch;
mod error;
mod gather;
mod keys;
mod lanes;
mod leaves;
pub mod measure;
mod set;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(not(target_arch = "x86_64"))]
#[path = "simd_absent.rs"]
mod simd;
mod tail;
mod tail_lanes;
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
