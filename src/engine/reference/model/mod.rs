//! Models: from tokens and past KV to new KV rows and logits.

mod attention;
mod llama;
mod past;
mod rope;
mod seeded;
mod synthetic;

pub(crate) use attention::{MAX_GROUP, MAX_HEAD_DIM};
pub(crate) use llama::{Layer, Llama, LlamaSpec, RopePairs};
pub(crate) use past::PastKv;
pub(crate) use seeded::seeded_llama;
pub(crate) use synthetic::{Synthetic, fill_kv, seeded_tokens};

use super::config::KvDtype;

/// What the rest of the engine must know of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Decoder layers.
    pub layers: usize,
    /// KV heads per layer.
    pub kv_heads: usize,
    /// Elements of a head's K row (and V row).
    pub head_dim: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest context, in tokens.
    pub max_context: usize,
}

impl Shape {
    /// Elements of one K (or V) of one token and layer.
    pub(crate) fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Bytes of all K and V rows of one token.
    pub(crate) fn token_bytes(&self, dtype: KvDtype) -> usize {
        self.layers * 2 * self.kv_dim() * dtype.bytes() as usize
    }
}

/// One request's part of a step.
pub(crate) struct SeqInput<'a> {
    /// Tokens to process, at least one.
    pub tokens: &'a [u32],
    /// Position of the first of them.
    pub start: usize,
    /// KV of positions `0..start`; `None` if `start` is 0.
    pub past: Option<PastKv<'a>>,
    /// Whether the logits after the last token are wanted.
    pub want_logits: bool,
    /// Fill KV rows from this seed instead of computing them.
    pub fill: Option<u64>,
}

/// What a step makes. Kept between steps for its memory.
#[derive(Debug, Default)]
pub(crate) struct StepOutput {
    /// New KV, encoded: `[token of the batch][layer][K, V][head][element]`.
    pub kv: Vec<u8>,
    /// `[request that wanted them][vocabulary]`.
    pub logits: Vec<f32>,
}

/// A model the engine can run. Pure: the same inputs give the same bits on every machine.
pub(crate) trait Model: Send + Sync {
    /// Its shape.
    fn shape(&self) -> Shape;
    /// Whether it looks at the past.
    fn reads_past(&self) -> bool {
        true
    }
    /// Processes a batch. KV rows of a request depend on that request alone.
    fn forward(&self, seqs: &[SeqInput<'_>], out: &mut StepOutput);
}
