//! What a client asks for: prompt, sampling, constraints and stop conditions of one request.

use crate::id::{OwnerEpoch, RequestId};
use std::collections::{BTreeMap, BTreeSet};

/// One request to generate tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateSpec {
    /// Name of the request, unique in the engine.
    pub request: RequestId,
    /// The right under which tokens are emitted; stamped on each [`super::TokenEvent`].
    pub owner_epoch: OwnerEpoch,
    /// What to continue.
    pub prompt: Prompt,
    /// How the next token is drawn.
    pub sampling: SamplingParams,
    /// When to stop.
    pub stop: StopParams,
    /// Output must match this, from its first byte.
    pub grammar: Option<GrammarSpec>,
    /// Larger runs first among waiting requests; first come, first served among equals.
    pub priority: i32,
    /// Requests with different salts never share prefix blocks.
    pub cache_salt: Option<Vec<u8>>,
    /// Report usage at the end of the stream.
    pub include_usage: bool,
}

impl GenerateSpec {
    /// Greedy, 16 output tokens, nothing else set.
    pub fn new(request: RequestId, prompt: Prompt) -> Self {
        Self {
            request,
            owner_epoch: OwnerEpoch(1),
            prompt,
            sampling: SamplingParams::default(),
            stop: StopParams::default(),
            grammar: None,
            priority: 0,
            cache_salt: None,
            include_usage: false,
        }
    }
}

/// What to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompt {
    /// Token ids, at least one.
    Tokens(Vec<u32>),
    /// Text, tokenized with no template; the model's BOS token is prepended where it has one.
    Text(String),
    /// Chat messages, through the model's own template (ChatML where it names none).
    Chat(Vec<ChatMessage>),
    /// `tokens` ids drawn from `seed`, whose KV is *filled with seeded bytes instead of computed*
    /// (all but the last, which is a real step): long contexts for benchmarks in no time.
    SeededKv {
        /// Context length in tokens, at least one.
        tokens: u32,
        /// Equal seeds give equal ids and bytes.
        seed: u64,
    },
}

/// One message of a chat.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// How the next token is drawn. The defaults draw greedily and alter nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy.
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 = off.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches this; 1 = off.
    pub top_p: f32,
    /// Drop tokens below this fraction of the most likely one's probability; 0 = off.
    pub min_p: f32,
    /// Locally typical sampling; 1 = off.
    pub typical_p: f32,
    /// Divides (or multiplies, below zero) the logits of seen tokens; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted per occurrence in the output; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted once for tokens in the output; 0 = off.
    pub presence_penalty: f32,
    /// With [`PenaltyScope::Window`]: how many last tokens; negative = all.
    pub penalty_window: i32,
    /// Which tokens penalties look at.
    pub penalty_scope: PenaltyScope,
    /// Added to logits before anything else.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Only these may be drawn.
    pub allowed_tokens: Option<BTreeSet<u32>>,
    /// These sequences never appear in the output; each at least one token.
    pub bad_words: Vec<Vec<u32>>,
    /// Resolved at admission where unset, so that a migrated request draws on unchanged.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            penalty_window: -1,
            penalty_scope: PenaltyScope::PromptAndOutput,
            logit_bias: BTreeMap::new(),
            allowed_tokens: None,
            bad_words: Vec::new(),
            seed: None,
        }
    }
}

/// Which tokens the penalties look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PenaltyScope {
    /// Repetition: prompt and output; frequency and presence: output.
    #[default]
    PromptAndOutput,
    /// Output only.
    OutputOnly,
    /// All three look at the last `penalty_window` tokens of prompt and output.
    Window,
}

/// When to stop.
#[derive(Debug, Clone, PartialEq)]
pub struct StopParams {
    /// Most output tokens, at least 1.
    pub max_output: u32,
    /// No end-of-sequence, stop id or stop string before this many tokens.
    pub min_output: u32,
    /// Go on after end-of-sequence.
    pub ignore_eos: bool,
    /// Further token ids that end the output.
    pub stop_ids: BTreeSet<u32>,
    /// Texts that end the output; text that may still become one is held back.
    pub stop_strings: Vec<String>,
    /// Emit the stop string too.
    pub include_stop: bool,
    /// Leave special tokens out of the text.
    pub skip_special: bool,
}

impl Default for StopParams {
    fn default() -> Self {
        Self {
            max_output: 16,
            min_output: 0,
            ignore_eos: false,
            stop_ids: BTreeSet::new(),
            stop_strings: Vec::new(),
            include_stop: false,
            skip_special: true,
        }
    }
}

/// A constraint on the bytes of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GrammarSpec {
    /// The whole output matches this regular expression (no look-around, no back-references).
    Regex(String),
    /// The whole output is one JSON value, an object at the top.
    JsonObject,
}
