//! What this engine and its model are called in control states, and how alike two engines compute.

use super::config::{EngineConfig, KvDtype, ModelSource};
use super::num::LANES;
use super::{model::Shape, sample};
use crate::control_state::Fingerprint;
use sha2::{Digest, Sha256};

/// `engine_kind` of the reference engine in ControlStateV1 field 2.
pub const ENGINE_KIND: u16 = 1;
/// `detok_kind`: bytes to UTF-8, as `text.rs` does it.
pub(crate) const DETOK_KIND: u16 = 1;
/// Changes whenever the arithmetic could give other bits.
const MATH_VERSION: u32 = 1;

/// Names and sizes of the loaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// What to call it.
    pub name: String,
    /// Hash of architecture, configuration and weights.
    pub model: [u8; 32],
    /// Version of the weights.
    pub weights_version: u64,
    /// Hash of the tokenizer.
    pub tokenizer: [u8; 32],
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest context, in tokens.
    pub max_context: u32,
    /// Decoder layers.
    pub layers: u32,
    /// KV heads per layer.
    pub kv_heads: u32,
    /// Elements of one head's K (and V).
    pub head_dim: u32,
    /// Bytes of KV per token.
    pub token_bytes: u64,
    /// KV and tokens come from hashes, not from arithmetic.
    pub synthetic: bool,
    /// Tokens that end the output.
    pub eos: Vec<u32>,
}

/// Hash of the architecture and the weights; `weights` names them (a seed or a file's hash).
pub(crate) fn model_digest(shape: &Shape, heads: usize, weights: &[u8]) -> [u8; 32] {
    let mut h = Sha256::new_with_prefix(b"moonlivekv model v1");
    for n in [
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        shape.vocab,
        heads,
    ] {
        h.update((n as u64).to_le_bytes());
    }
    h.update(weights);
    h.finalize().into()
}

/// Build and numerics of an engine. Batch, chunk, block, layout and thread settings are left out:
/// no bit depends on them.
pub(crate) fn fingerprint(config: &EngineConfig) -> Fingerprint {
    let mut build = Sha256::new_with_prefix(b"moonlivekv reference engine build v1");
    build.update(env!("CARGO_PKG_VERSION"));
    let mut numerics = Sha256::new_with_prefix(b"moonlivekv reference engine numerics v1");
    let dtype = match config.kv_dtype {
        KvDtype::F32 => 0u32,
        KvDtype::F16 => 1,
        KvDtype::Bf16 => 2,
    };
    let synthetic = u32::from(matches!(config.model, ModelSource::Synthetic { .. }));
    for n in [
        MATH_VERSION,
        LANES as u32,
        dtype,
        sample::VERSION,
        synthetic,
    ] {
        numerics.update(n.to_le_bytes());
    }
    Fingerprint {
        engine_build: build.finalize().into(),
        numerics_profile: numerics.finalize().into(),
    }
}
