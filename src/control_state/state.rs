//! The fields, one struct per numbered field that has more than one item.
//!
//! Numbers of fields and order of items are the wire's: the lists at the end of this file *are* the
//! format. Local things (block, slot and rank ids) have no place here; text offsets are UTF-8 bytes.

use super::codec::{Blob, Item, Name, Reader, Utf8Head, Writer, items};
use super::error::CodecError;
use super::kinds::{OutputKind, PenaltySemantics, RngKind};
use super::profile::Fingerprint;
use super::tokens::TokenLogHash;
use crate::id::RequestId;
use std::collections::{BTreeMap, BTreeSet};

/// Field 1.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    /// The request.
    pub request_id: RequestId,
    /// Counts the boundaries at which this request was frozen for export, so that engine part and
    /// front-end part of one export share a number. Unchanged from FENCED to ARM.
    pub state_seq: u64,
}

/// Field 2: the *source's* engine; copied by the destination, judged by its policy.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EngineIdentity {
    /// Which engine.
    pub engine_kind: u16,
    /// Hash of its build.
    pub engine_build: [u8; 32],
}

/// Field 3.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelIdentity {
    /// Hash of architecture and configuration.
    pub model: [u8; 32],
    /// Version of the weights.
    pub weights_version: u64,
    /// Hash of the tokenizer.
    pub tokenizer: [u8; 32],
}

/// Field 5: a low-rank adapter on top of the weights.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lora {
    /// Its name at the worker.
    pub name: Name,
    /// Hash of its weights.
    pub digest: [u8; 32],
    /// Its scale.
    pub scale: f32,
}

/// Field 6: the token log, by count and hash.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tokens {
    /// Prompt.
    pub prompt: TokenLogHash,
    /// Output, `pending_token` included.
    pub output: TokenLogHash,
    /// The last output token, which has no KV yet: the next step feeds it.
    pub pending_token: u32,
}

/// Field 7.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Position {
    /// Tokens with KV: prompt + output - 1.
    pub kv_len: u64,
    /// Position that the pending token gets.
    pub next_pos: i64,
}

/// Field 8: when to end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Most output tokens.
    pub max_output: u32,
    /// No end of sequence before so many.
    pub min_output: u32,
    /// Longest sequence.
    pub max_context: u32,
    /// End-of-sequence tokens do not end it.
    pub ignore_eos: bool,
    /// End-of-sequence tokens.
    pub eos_ids: BTreeSet<u32>,
    /// Other tokens that end it.
    pub stop_ids: BTreeSet<u32>,
}

/// Field 9.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sampler {
    /// Temperature.
    pub temperature: f32,
    /// Keep the k most likely; 0 is off.
    pub top_k: u32,
    /// Keep the smallest set of that probability.
    pub top_p: f32,
    /// Drop tokens below that share of the most likely one.
    pub min_p: f32,
    /// Locally typical sampling.
    pub typical_p: f32,
    /// Order of the steps, by the engine's own numbers.
    pub sampler_order: Vec<u16>,
}

/// Field 10.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Penalties {
    /// Multiplicative, on any occurrence.
    pub repetition: f32,
    /// Per occurrence.
    pub frequency: f32,
    /// On any occurrence.
    pub presence: f32,
    /// Tokens looked back at, where the semantics say so; negative is all.
    pub penalty_window: i32,
    /// Which tokens count.
    pub penalty_semantics: PenaltySemantics,
}

/// Field 11.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rng {
    /// Which generator.
    pub rng_kind: RngKind,
    /// Its seed, resolved when the request was admitted.
    pub seed: u64,
    /// Draws made.
    pub draws: u64,
    /// State of a generator that is not a function of (seed, draws).
    pub rng_state: Blob,
}

/// Field 12.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Constraints {
    /// Added to the logits of these tokens.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Only these tokens, if given.
    pub allowed: Option<BTreeSet<u32>>,
    /// Sequences never to produce.
    pub bad_words: Vec<Vec<u32>>,
}

/// Field 13. The matcher's state is rebuilt by replay and checked by the mask's digest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Grammar {
    /// Kind of source, by the engine's own numbers (JSON schema, regular expression ...).
    pub kind: u16,
    /// Which matcher.
    pub backend: Name,
    /// Its version.
    pub backend_version: Name,
    /// The grammar.
    pub source: Blob,
    /// Output token (from 0) at which it started.
    pub start_index: u32,
    /// Tokens it has accepted.
    pub accepted: u32,
    /// It has ended.
    pub terminated: bool,
    /// [`mask_digest`](super::mask_digest) of what it allows next.
    pub next_mask_digest: [u8; 32],
}

/// Part of field 14.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reasoning {
    /// Parser.
    pub parser: Name,
    /// Reasoning has ended.
    pub ended: bool,
    /// Output token at which it ended.
    pub end_index: Option<u32>,
    /// Tokens it may still take.
    pub budget: Option<u32>,
}

/// Part of field 14.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolParser {
    /// Parser.
    pub name: Name,
    /// Bytes of text it has handed on.
    pub emitted_bytes: u64,
    /// Its state.
    pub state: Blob,
}

/// Field 14.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parsers {
    /// Reasoning parser.
    pub reasoning: Option<Reasoning>,
    /// Tool-call parser.
    pub tool_parser: Option<ToolParser>,
}

/// Field 15.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stops {
    /// Texts that end the output.
    pub stop_strings: Vec<Blob>,
    /// The stop string is part of the output.
    pub include_stop: bool,
    /// Special tokens give no text.
    pub skip_special: bool,
    /// Spaces between special tokens.
    pub spaces_between: bool,
}

/// Field 16.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Detokenizer {
    /// Kind, by the engine's own numbers.
    pub detok_kind: u16,
    /// Output token from which the detokenizer re-reads.
    pub prefix_offset: u32,
    /// Output token up to which text was produced.
    pub read_offset: u32,
    /// The last token was a special one.
    pub last_special: bool,
    /// Text produced but held back, since it may begin a stop string.
    pub held_text: Blob,
    /// First bytes of a character that is not complete.
    pub pending_utf8: Utf8Head,
}

/// Field 17: what the worker has emitted; what was delivered is the gateway's to know.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stream {
    /// Bytes of text.
    pub sent_bytes: u64,
    /// Tokens.
    pub sent_tokens: u64,
    /// Messages.
    pub stream_seq: u64,
    /// What each message holds.
    pub output_kind: OutputKind,
    /// Tokens per message.
    pub stream_interval: u32,
}

/// Field 18.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Logprobs {
    /// How many of the most likely; negative is all.
    pub top: i32,
    /// And these tokens.
    pub ids: BTreeSet<u32>,
    /// Bits of the f64 sum so far.
    pub cumulative_bits: u64,
    /// Computed, not yet sent.
    pub unsent: Blob,
}

/// Field 19.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt tokens to report.
    pub usage_prompt: u32,
    /// Completion tokens to report.
    pub usage_completion: u32,
    /// Of the prompt, found in a cache.
    pub usage_cached: u32,
    /// Report it in the stream.
    pub include_usage: bool,
}

/// Field 20.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scheduling {
    /// Priority.
    pub priority: i32,
    /// Time left, in nanoseconds. A duration: clocks of two machines are never compared.
    pub remaining_ns: Option<u64>,
    /// Keeps prefix caches of tenants apart.
    pub cache_salt: Option<Blob>,
}

/// One of field 21.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KvGroup {
    /// Group.
    pub group: u16,
    /// Kind, as the object set's header tags it.
    pub kind: u16,
    /// Canonical page size.
    pub tokens_per_page: u32,
    /// First token still held.
    pub first_live_pos: u64,
    /// Tokens with KV.
    pub committed: u64,
    /// Digest of the set.
    pub set_digest: [u8; 32],
}

/// One of field 22.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MutableBlob {
    /// Group.
    pub group: u16,
    /// Position it belongs to.
    pub at_pos: u64,
    /// SHA-256 of the blob, which travels apart.
    pub digest: [u8; 32],
    /// Its length.
    pub len: u64,
}

/// One of field 23.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Extension {
    /// Whose it is.
    pub namespace: Name,
    /// Its version.
    pub version: u16,
    /// A reader that does not know it must refuse the whole state.
    pub critical: bool,
    /// Its bytes, preserved as they are.
    pub payload: Blob,
}

/// Everything that decides the next token and the next byte of text, frozen at FENCED.
///
/// `Default` is a blank form to fill in, not a valid state: it has no output token, so it does not
/// encode. Members are the numbered fields in their order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ControlState {
    /// 1.
    pub identity: Identity,
    /// 2.
    pub engine: EngineIdentity,
    /// 3.
    pub model: ModelIdentity,
    /// 4: attention backend, KV dtype and scales, rotation, TP/PP shape, RoPE, sampler version,
    /// batch invariance, as one hash.
    pub numerics_profile: [u8; 32],
    /// 5.
    pub lora: Option<Lora>,
    /// 6.
    pub tokens: Tokens,
    /// 7.
    pub position: Position,
    /// 8.
    pub limits: Limits,
    /// 9.
    pub sampler: Sampler,
    /// 10.
    pub penalties: Penalties,
    /// 11.
    pub rng: Rng,
    /// 12.
    pub constraints: Constraints,
    /// 13.
    pub grammar: Option<Grammar>,
    /// 14.
    pub parsers: Parsers,
    /// 15.
    pub stops: Stops,
    /// 16.
    pub detokenizer: Detokenizer,
    /// 17.
    pub stream: Stream,
    /// 18.
    pub logprobs: Option<Logprobs>,
    /// 19.
    pub usage: Usage,
    /// 20.
    pub scheduling: Scheduling,
    /// 21, strictly ascending by group.
    pub kv_groups: Vec<KvGroup>,
    /// 22, strictly ascending by group.
    pub mutable_state: Vec<MutableBlob>,
    /// 23, strictly ascending by (namespace, version).
    pub extensions: Vec<Extension>,
}

impl ControlState {
    /// Output tokens numbered: the seal, and the digest's offset.
    pub fn seal(&self) -> u64 {
        self.tokens.output.count
    }

    /// The source's build and numerics profile.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint {
            engine_build: self.engine.engine_build,
            numerics_profile: self.numerics_profile,
        }
    }
}

impl Item for RequestId {
    fn put(&self, w: &mut Writer) -> Result<(), CodecError> {
        self.0.put(w)
    }
    fn take(r: &mut Reader<'_>) -> Result<Self, CodecError> {
        Item::take(r).map(Self)
    }
}

items! {
    TokenLogHash { count, hash }
    Identity { request_id, state_seq }
    EngineIdentity { engine_kind, engine_build }
    ModelIdentity { model, weights_version, tokenizer }
    Lora { name, digest, scale }
    Tokens { prompt, output, pending_token }
    Position { kv_len, next_pos }
    Limits { max_output, min_output, max_context, ignore_eos, eos_ids, stop_ids }
    Sampler { temperature, top_k, top_p, min_p, typical_p, sampler_order }
    Penalties { repetition, frequency, presence, penalty_window, penalty_semantics }
    Rng { rng_kind, seed, draws, rng_state }
    Constraints { logit_bias, allowed, bad_words }
    Grammar {
        kind, backend, backend_version, source, start_index, accepted, terminated,
        next_mask_digest,
    }
    Reasoning { parser, ended, end_index, budget }
    ToolParser { name, emitted_bytes, state }
    Parsers { reasoning, tool_parser }
    Stops { stop_strings, include_stop, skip_special, spaces_between }
    Detokenizer { detok_kind, prefix_offset, read_offset, last_special, held_text, pending_utf8 }
    Stream { sent_bytes, sent_tokens, stream_seq, output_kind, stream_interval }
    Logprobs { top, ids, cumulative_bits, unsent }
    Usage { usage_prompt, usage_completion, usage_cached, include_usage }
    Scheduling { priority, remaining_ns, cache_salt }
    KvGroup { group, kind, tokens_per_page, first_live_pos, committed, set_digest }
    MutableBlob { group, at_pos, digest, len }
    Extension { namespace, version, critical, payload }
}
