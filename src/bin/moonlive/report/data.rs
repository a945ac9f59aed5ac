//! What a report shows. The demonstration fills it; nothing here measures.
//!
//! All times are microseconds on one clock, from one zero: the start of the recorded span.

use serde::Serialize;

/// A whole demonstration.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether it ended PASS.
    pub pass: bool,
    /// Why it ended so, in a few words: the injected fault, the first difference; may be empty.
    pub cause: String,
    /// The command line that made it.
    pub command: String,
    /// Model, as a human names it.
    pub model: String,
    /// `local`, `shm` or `tcp`.
    pub transport: String,
    /// `resident` or `full`.
    pub verify: String,
    /// CPUs.
    pub machine: String,
    /// One for each request, at least one.
    pub requests: Vec<Request>,
}

/// One request that was decoded, and where it migrated.
#[derive(Debug, Clone, Serialize)]
pub struct Request {
    /// Its id.
    pub id: String,
    /// Prompt length in tokens, where it is known: a text is tokenized elsewhere.
    pub prompt_tokens: Option<u64>,
    /// The stream, equal byte for byte to that of a run without a migration.
    pub identical: bool,
    /// Tokens as the client saw them, in order.
    pub tokens: Vec<Token>,
    /// The migration; `None` where the request stayed.
    pub migration: Option<Migration>,
}

/// One token at the client.
#[derive(Debug, Clone, Serialize)]
pub struct Token {
    /// Its number, from 1.
    pub seq: u64,
    /// Its id.
    pub token: u32,
    /// The text it adds.
    pub text: String,
    /// When the client read it.
    pub at_us: f64,
}

/// One migration.
#[derive(Debug, Clone, Serialize)]
pub struct Migration {
    /// Source worker.
    pub from: String,
    /// Destination worker.
    pub to: String,
    /// Whether the route flipped; else it was rolled back.
    pub committed: bool,
    /// Why it was rolled back; empty where it committed.
    pub cause: String,
    /// Last token of the source's; the next one is the destination's.
    pub seal: u64,
    /// KV tokens at the seal.
    pub kv_tokens: u64,
    /// Last source step done to destination may launch.
    pub fence_pause_us: Option<f64>,
    /// Phases from PREPARE to RESUME, in order of their start.
    pub phases: Vec<Phase>,
    /// Steps inside the fence, in order; shown enlarged.
    pub fence: Vec<Phase>,
    /// Pages of the request at the seal, the tail included.
    pub pages: u64,
    /// Of them, those whose digest over the destination's memory equals the source's.
    pub pages_verified: u64,
    /// Leaves hashed in the destination inside the fence.
    pub fence_leaves: u64,
    /// KV bytes moved while the source went on decoding.
    pub stream_bytes: u64,
    /// KV bytes moved inside the fence.
    pub fence_bytes: u64,
}

/// Who does something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Drives, and decides nothing.
    Coordinator,
    /// Decodes first.
    Source,
    /// Decodes afterwards.
    Destination,
    /// Holds the route record and accepts tokens.
    Gateway,
}

/// A span of work.
#[derive(Debug, Clone, Serialize)]
pub struct Phase {
    /// What: `stream`, `commit`.
    pub name: String,
    /// Who.
    pub lane: Lane,
    /// From.
    pub from_us: f64,
    /// To.
    pub to_us: f64,
}
